"""Collectives on numbers: the result of each member, from the inputs of all members."""

from collections.abc import Callable, Sequence
from typing import TypeVar, assert_never

import numpy as np
import numpy.typing as npt

from zsim.schedule.operation import (
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Communication,
    Receive,
    ReduceScatter,
    Reduction,
    Send,
    listed,
)
from zsim_des.values.field import Numbers, inverse, product, reduced

Scalar = TypeVar("Scalar", bound=np.generic)
Array = npt.NDArray[Scalar]


def received(
    member: Communication,
    place: int,
    sources: Sequence[Array[Scalar]],
    combine: Callable[[Reduction, Sequence[Array[Scalar]]], Array[Scalar]],
) -> Array[Scalar]:
    """Return the result of the member at `place` of a communicator.

    `combine` reduces the inputs of the members; elements lie along the first axis.

    Raises:
        TypeError: this kind of communication is not listed.
    """

    def own(source: Array[Scalar]) -> Array[Scalar]:
        size = len(source) // len(sources)
        return source[place * size : (place + 1) * size]

    match listed(member):
        case AllGather():
            return np.concatenate(sources)
        case ReduceScatter(reduction=reduction):
            return combine(reduction, [own(source) for source in sources])
        case AllReduce(reduction=reduction):
            return combine(reduction, sources)
        case Broadcast(root=root):
            return sources[root]
        case AllToAll():
            return np.concatenate([own(source) for source in sources])
        case Send() | Receive():
            return sources[0]
        case _ as unknown:
            assert_never(unknown)


def reduced_by(reduction: Reduction, parts: Sequence[Numbers]) -> Numbers:
    """Return the reduction of the ranks' inputs."""
    match reduction:
        case Reduction.SUM:
            return reduced(np.sum(parts, axis=0))
        case Reduction.AVERAGE:
            return product(reduced(np.sum(parts, axis=0)), inverse(len(parts)))
        case Reduction.MAX:
            return np.asarray(np.max(parts, axis=0))
        case _:
            assert_never(reduction)
