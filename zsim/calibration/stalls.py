"""Runs that stall: far slower than similar runs on other numbers of nodes.

Only published times are compared, no predictions. A turn is one of the slots of micro-batches in a
pipeline (the number of micro-batches plus stages minus one). Except for work done once per step,
its time is the same on any number of nodes.
"""

from collections import defaultdict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass

SLOWER = 2
"""A run stalls if its turn takes more than this multiple of the shortest on other nodes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A published turn.

    Attributes:
        alike: key that is equal for comparable runs.
        nodes: number of nodes.
        seconds: duration of the turn.
    """

    alike: Hashable
    nodes: int
    seconds: float


def stalled(turns: Iterable[tuple[int, Turn]]) -> frozenset[int]:
    """Return the line numbers of the turns that stall."""
    groups: defaultdict[Hashable, list[tuple[int, Turn]]] = defaultdict(list)
    for line, turn in turns:
        groups[turn.alike].append((line, turn))
    found: set[int] = set()
    for group in groups.values():
        for line, turn in group:
            others = [other.seconds for _, other in group if other.nodes != turn.nodes]
            if others and turn.seconds > SLOWER * min(others):
                found.add(line)
    return frozenset(found)
