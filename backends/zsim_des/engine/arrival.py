"""Arrivals at a rendezvous: operations of ranks, and the members that meet at a key."""

from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction

from zsim.schedule.operation import Communication
from zsim_des.symmetry.classes import RankClass

Key = tuple[int | str, ...]
"""Where operations meet: a communicator class or pair of ranks, and the operation's number."""


ALONE: tuple[Key, ...] = (("alone",),)
"""Keys of a collective in which a class meets only itself: it can start at once."""


@dataclass(slots=True)
class Arrival:
    """One operation of a communicator (or several issued together) on one rank class.

    `keys` has one meeting key per member, assigned when the host issues the operation.
    `begins`, if given, is called with the time at which its bytes begin to flow.
    `moves`, if given, is called with the bytes per second that pass the GPU's memory, at each
    change. For sends and receives issued together, `left` counts those still in flight, and
    `rates` has the current rate of each.
    """

    rank_class: RankClass
    name: str
    step: int
    members: tuple[tuple[Communication, int], ...]
    keys: tuple[Key, ...]
    finish: Callable[[int], None]
    ready_ps: int = 0
    moves: Callable[[Fraction], None] | None = None
    begins: Callable[[int], None] | None = None
    left: int = 0
    end_ps: int = 0
    rates: dict[Key, Fraction] = field(default_factory=dict[Key, Fraction])

    def move(self, key: Key, per_s: Fraction) -> None:
        """Report the rate of one of several messages; the others keep theirs."""
        assert self.moves is not None
        self.rates[key] = per_s
        alone = len(self.rates) == 1
        self.moves(per_s if alone else sum(self.rates.values(), Fraction(0)))

    def end(self, key: Key, end_ps: int) -> None:
        """End one of several messages; the last one ends the operation."""
        self.left -= 1
        self.end_ps = max(self.end_ps, end_ps)
        if not self.left:
            self.finish(self.end_ps)
        elif self.rates.pop(key, None):
            self.move(key, Fraction(0))


@dataclass(slots=True)
class MetRanks:
    """Members that have arrived at a key; the meeting is complete when `needed` have."""

    needed: int
    come: list[tuple[Arrival, Communication]] = field(
        default_factory=list[tuple[Arrival, Communication]]
    )
