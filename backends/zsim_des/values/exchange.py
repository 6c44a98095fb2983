"""Collectives on numbers: the result of each member, from the inputs of all members."""

from collections.abc import Callable, Iterator, Sequence
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
    members: Sequence[Communication],
    place: int,
    sources: Sequence[Array[Scalar]],
    combine: Callable[[Reduction, Sequence[Array[Scalar]]], Array[Scalar]],
) -> Array[Scalar]:
    """Return the result of the member at `place` of a communicator, whose operations are `members`.

    `combine` reduces the inputs of the members; elements lie along the first axis.

    Raises:
        TypeError: this kind of communication is not listed.
    """

    def own(source: Array[Scalar]) -> Array[Scalar]:
        size = len(source) // len(sources)
        return source[place * size : (place + 1) * size]

    match listed(members[place]):
        case AllGather():
            return np.concatenate(sources)
        case ReduceScatter(reduction=reduction):
            return combine(reduction, [own(source) for source in sources])
        case AllReduce(reduction=reduction):
            return combine(reduction, sources)
        case Broadcast(root=root):
            return sources[root]
        case AllToAll():
            blocks = _blocks(members, place)
            return np.concatenate([each[own] for each, own in zip(sources, blocks, strict=True)])
        case Send() | Receive():
            return sources[0]
        case _ as unknown:
            assert_never(unknown)


def _blocks(members: Sequence[Communication], place: int) -> Iterator[slice]:
    """Yield, for each member of an exchange, the part of its source that goes to `place`."""
    for member in members:
        assert isinstance(member, AllToAll)
        yield member.block(place, len(members))


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
