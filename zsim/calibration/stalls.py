"""Runs that stall: far slower than runs like them on other numbers of nodes.

What is compared was published, and nothing that is predicted: the time of a turn, which is one of
the places that micro-batches take in a pipeline (as many as there are micro-batches and stages,
less one). It is as long on any number of nodes, but for what happens once a step.
"""

from collections import defaultdict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass

SLOWER = 2
"""A run stalls if a turn takes more than so many times the shortest one on other nodes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A published turn.

    Attributes:
        alike: what runs that are compared have in common.
        nodes: on which it was run.
        seconds: that it took.
    """

    alike: Hashable
    nodes: int
    seconds: float


def stalled(turns: Iterable[tuple[int, Turn]]) -> frozenset[int]:
    """Return the lines of the turns, given with them, that stall."""
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
