"""Tokens of experts: named counts, balanced until a run binds others.

The number of tokens that each expert gets depends on data. Kernels of experts therefore name the
counts of their rows, and have values for them. By default the values are balanced, and equal in all
kernels of a block. A binding has separate values for each micro-batch and block: `bound`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Final

from zsim.model.experts import Drops

MOST: Final = 2.0
"""Default maximum of the copies that a rank receives, in multiples of the mean."""

ROUTED = "routed"
"""The name of the counts of token copies at the experts of a block."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """Copies of tokens that each rank sends to the experts of all ranks in a block.

    Attributes:
        experts: experts of a block, over all ranks.
        sent: copies that a rank sends in a micro-batch, `capacity` x `experts` if they are padded.
        maximum: copies that a rank receives at most.
        capacity: copies from one rank to one expert at most, others are dropped; 0 for no limit.
        padded: copies to each expert are filled up to the capacity.
        drops: how copies beyond the capacity are chosen; None for no limit.
        layers: names of the units with experts, in order.
    """

    experts: int
    sent: int
    maximum: int
    capacity: int = 0
    padded: bool = False
    drops: Drops | None = None
    layers: tuple[str, ...] = ()

    def limited(self, most: float = MOST) -> "Routing":
        """Return this routing with a maximum of `most` x mean, unless a capacity limits copies."""
        if self.capacity:
            return self
        return replace(self, maximum=max(self.sent, round(most * self.sent)))


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLoads:
    """Token copies of each expert of a rank, by the name of their counts.

    `groups` are pairs: a number of consecutive experts, and the copies of each.
    """

    groups: tuple[tuple[int, int], ...]
    name: str = ROUTED

    def __post_init__(self) -> None:
        if any(experts < 1 or copies < 0 for experts, copies in self.groups):
            raise ValueError(f"loads {self.name}: needs experts, and copies of at least 0")

    @property
    def total(self) -> int:
        """Copies of all experts."""
        return sum(experts * copies for experts, copies in self.groups)

    @property
    def experts(self) -> int:
        """Number of experts, with and without tokens."""
        return sum(experts for experts, _ in self.groups)

    @property
    def busy(self) -> int:
        """Number of experts with tokens."""
        return sum(experts for experts, copies in self.groups if copies)

    @property
    def most(self) -> int:
        """Copies of the busiest expert."""
        return max(copies for _, copies in self.groups)


def balanced(copies: int, experts: int) -> TokenLoads:
    """Return equal loads; the first experts have one copy more if `copies` do not divide."""
    each, more = divmod(copies, experts)
    groups = ((more, each + 1), (experts - more, each))
    return TokenLoads(groups=tuple(group for group in groups if group[0]))


def repeated(loads: TokenLoads, times: int) -> TokenLoads:
    """Return `times` the copies of each expert."""
    groups = tuple((experts, copies * times) for experts, copies in loads.groups)
    return replace(loads, groups=groups)


def loads_of(counts: Sequence[int]) -> TokenLoads:
    """Return the loads of experts with these copies, in order."""
    return TokenLoads(groups=tuple((len([*run]), copies) for copies, run in groupby(counts)))
