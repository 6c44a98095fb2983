"""One mesh for two rank orders: axes of both orders are axes of the mesh, single or joined.

Megatron-LM numbers the ranks of a model with experts twice (`RankGenerator` of
`megatron/core/parallel_state.py`): the ranks of dense layers by tensor, context and data axis,
the ranks of experts by expert-tensor, expert and expert-data axis. A mesh has one order, so each
axis is cut wherever an axis of the other order starts or ends.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from math import prod
from operator import mul

from zsim.schedule.mesh import Axis, Joined, Mesh, MeshError
from zsim.strategy.expert_ranks import Conflict, Degree, conflict_of


class RankOrderError(MeshError):
    """Raised if two rank orders have no mesh in common; `conflict` has their degrees."""

    def __init__(self, conflict: Conflict) -> None:
        self.conflict = conflict
        one, other = " x ".join(conflict.axes), " x ".join(conflict.other_axes)
        super().__init__(
            f"{one} = {conflict.ranks} and {other} = {conflict.other_ranks}: "
            "neither divides the other"
        )


def refined(mesh: Mesh, order: Sequence[Axis]) -> Mesh:
    """Return `mesh` with its axes cut so that the axes of `order` are joined axes as well.

    Both have equally many ranks, and their last axis varies fastest. A part of a cut axis has the
    name of the axis and a number, 0 for the slowest part; the axis itself is joined from its parts.
    An axis of one rank in `order` is a single axis, which varies fastest.

    Such a mesh exists if and only if the number of ranks after which an axis of one order repeats
    divides the next larger number, of either order.

    Raises:
        RankOrderError: there is no such mesh.
        MeshError: the orders have different numbers of ranks, or names in common.
    """
    if (ranks := prod(axis.size for axis in order)) != mesh.size:
        raise MeshError(f"rank orders of {mesh.size} and {ranks} ranks: must be equal")
    found = conflict_of(_fastest_first(mesh.axes), _fastest_first(order))
    if found is not None:
        raise RankOrderError(found)
    bounds = sorted({end for _, end in spans((*mesh.axes,))} | {end for _, end in spans(order)})
    single: list[Axis] = []
    places: list[tuple[str, int, int]] = []
    joined: list[Joined] = []
    for axis, (low, high) in zip(mesh.axes, spans(mesh.axes), strict=True):
        ends = [low, *(bound for bound in bounds if low < bound < high), high]
        parts = list(pairwise(ends))[::-1]
        names = [axis.name]
        if len(parts) > 1:
            names = [f"{axis.name}{number}" for number in range(len(parts))]
            joined.append(Joined(name=axis.name, axes=tuple(names)))
        for name, (start, end) in zip(names, parts, strict=True):
            single.append(Axis(name=name, size=end // start))
            places.append((name, start, end))
    cut = {each.name: each.axes for each in joined}
    for each in mesh.joined:
        parts_of = tuple(name for axis in each.axes for name in cut.get(axis, (axis,)))
        joined.append(Joined(name=each.name, axes=parts_of))
    for axis, (low, high) in zip(order, spans(order), strict=True):
        inside = [low <= start < end <= high for _, start, end in places]
        if axis.size == 1:
            single.append(axis)
        else:
            first, last = inside.index(True), len(inside) - 1 - inside[::-1].index(True)
            names = [name for name, _, _ in places[first : last + 1]]
            joined.append(Joined(name=axis.name, axes=tuple(names)))
    return Mesh(axes=tuple(single), joined=tuple(joined))


def spans(order: Sequence[Axis]) -> list[tuple[int, int]]:
    """Return for each axis the ranks of all faster axes, and the same with its own.

    Ranks that differ by a multiple of the first number, within the second, differ along the axis.
    """
    ends = list(accumulate((axis.size for axis in reversed(order)), mul, initial=1))
    return [(low, high) for low, high in pairwise(ends)][::-1]


def _fastest_first(order: Sequence[Axis]) -> list[Degree]:
    return [(axis.name, axis.size) for axis in reversed(order)]
