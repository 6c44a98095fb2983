"""Arrivals at a rendezvous: operations of ranks, and the members that meet at a key."""

from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction

from zsim.schedule.operation import Communication
from zsim_des.symmetry.classes import RankClass

Key = tuple[int | str, ...]
"""A meeting: a communicator class and the number of its collective, or a pair and its number."""


ALONE: tuple[Key, ...] = (("alone",),)
"""The place where a class meets itself: its collective waits for nobody else."""


@dataclass(slots=True)
class Arrival:
    """One operation of a communicator (or several issued together) on one rank class.

    `keys` are those that it meets others at, one per member, taken when the host issues it.
    `begins` is told when its bytes begin to flow, where somebody waits for that.
    `moves` is told how many bytes a second pass the memory of a GPU, from when they begin to on.
    Of sends and receives that are issued together `left` have not ended, and `rates` has what those
    that go move.
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
        """Tell how fast one of several messages moves; the others go on."""
        assert self.moves is not None
        self.rates[key] = per_s
        alone = len(self.rates) == 1
        self.moves(per_s if alone else sum(self.rates.values(), Fraction(0)))

    def end(self, key: Key, end_ps: int) -> None:
        """End one of several messages, and with the last of them the operation."""
        self.left -= 1
        self.end_ps = max(self.end_ps, end_ps)
        if not self.left:
            self.finish(self.end_ps)
        elif self.rates.pop(key, None):
            self.move(key, Fraction(0))


@dataclass(slots=True)
class MetRanks:
    """Members that have come to a key; complete when `needed` have."""

    needed: int
    come: list[tuple[Arrival, Communication]] = field(
        default_factory=list[tuple[Arrival, Communication]]
    )
