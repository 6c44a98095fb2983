"""Find the mesh of ranks whose rows are the communicators of one rank."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise

from zsim.schedule.mesh import Axis, Group, Joined, Mesh
from zsim_record.lift.step_events import LiftError

DATA = "data"
"""Name of the axis of a one-dimensional mesh."""


@dataclass(frozen=True, slots=True)
class CommunicatorMesh:
    """A mesh, and the group of each communicator by its name."""

    mesh: Mesh
    groups: Mapping[str, Group]

    def axis(self, communicator: str) -> str:
        """Return the axis along which the members of a communicator are numbered."""
        axes = self.groups[communicator].axes
        return axes[0] if len(axes) == 1 else _joined(axes)


def mesh_of(
    world: int, rank: int, communicators: Mapping[str, tuple[int, ...]]
) -> CommunicatorMesh:
    """Return the coarsest mesh in which each communicator of `rank` is a row.

    Groups are named by their axes, so that their names are equal on all ranks.

    Raises:
        LiftError: there is none: a communicator is not an arithmetic progression, or two do not
            nest.
    """
    rows = {
        name: _row(name, rank, ranks) for name, ranks in communicators.items() if len(ranks) > 1
    }
    ends = sorted({1, world}.union(*rows.values()))
    for low, high in pairwise(ends):
        if high % low:
            raise LiftError(f"communicators of {low} and {high} ranks do not nest in a mesh")
    spans = list(pairwise(ends))[::-1] or [(1, 1)]
    names = [DATA] if len(spans) == 1 else [f"axis{number}" for number in range(len(spans))]
    axes = [
        Axis(name=name, size=high // low) for name, (low, high) in zip(names, spans, strict=True)
    ]
    along = {
        name: tuple(axis for axis, (low, _) in zip(names, spans, strict=True) if first <= low < end)
        for name, (first, end) in rows.items()
    }
    joined = {
        axes: Joined(name=_joined(axes), axes=axes) for axes in along.values() if len(axes) > 1
    }
    seen: Counter[str] = Counter()
    groups: dict[str, Group] = {}
    for name in communicators:
        row = _joined(along.get(name, ())) or "alone"
        seen[row] += 1
        number = f" ({seen[row]})" if seen[row] > 1 else ""
        groups[name] = Group(name=row + number, axes=along.get(name, ()))
    return CommunicatorMesh(Mesh(axes=tuple(axes), joined=tuple(joined.values())), groups)


def _joined(axes: Iterable[str]) -> str:
    return " and ".join(axes)


def _row(name: str, rank: int, ranks: tuple[int, ...]) -> tuple[int, int]:
    """Return the stride between ranks, and the stride times the number of ranks."""
    step = ranks[1] - ranks[0]
    end = step * len(ranks)
    is_even = all(after - before == step for before, after in pairwise(ranks))
    if not is_even or step < 1 or rank not in ranks or ranks[0] != rank - rank % end + rank % step:
        raise LiftError(f"{name}: ranks {list(ranks[:8])} are no row of a mesh")
    return step, end
