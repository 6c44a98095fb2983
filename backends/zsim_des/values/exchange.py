"""Collectives on numbers: each member's result, from what all of them bring."""

from collections.abc import Sequence
from typing import assert_never

import numpy as np

from zsim.schedule.operation import (
    AllGather,
    AllReduce,
    Broadcast,
    Communication,
    Receive,
    ReduceScatter,
    Reduction,
    Send,
)
from zsim_des.values.field import Numbers, inverse, product, reduced


def received(member: Communication, place: int, sources: Sequence[Numbers]) -> Numbers:
    """Return what the member at `place` of a communicator gets."""
    match member:
        case AllGather():
            return np.concatenate(sources)
        case ReduceScatter(reduction=reduction):
            size = len(sources[0]) // len(sources)
            parts = [source[place * size : (place + 1) * size] for source in sources]
            return reduced_by(reduction, parts)
        case AllReduce(reduction=reduction):
            return reduced_by(reduction, sources)
        case Broadcast(root=root):
            return sources[root]
        case Send() | Receive():
            return sources[0]
        case _:
            assert_never(member)


def reduced_by(reduction: Reduction, parts: Sequence[Numbers]) -> Numbers:
    """Reduce what the ranks bring."""
    match reduction:
        case Reduction.SUM:
            return reduced(np.sum(parts, axis=0))
        case Reduction.AVERAGE:
            return product(reduced(np.sum(parts, axis=0)), inverse(len(parts)))
        case Reduction.MAX:
            return np.asarray(np.max(parts, axis=0))
        case _:
            assert_never(reduction)
