"""Bindings: numbers for named counts, by micro-batch, layer, expert group, source and expert.

Counts describe one step and are equal in all steps. Groups of experts are numbered in the order of
their first ranks. `Balanced` and `Ratio` are equal in all layers and micro-batches; in a `Ratio`
the first member is the busiest one in all of them.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from zsim.schedule.counts import NamedCount

Counts = NDArray[np.int64]
"""Rows from each source (first dimension) to each expert."""


class BindingError(ValueError):
    """A binding does not fit the counts of a schedule; the message names the field."""


@dataclass(frozen=True, slots=True)
class CountPlace:
    """A micro-batch, a layer, and the number of a group of experts with its members."""

    micro_batch: int
    layer: int
    group: int
    members: int


class Binding(Protocol):
    """Numbers for named counts."""

    def counts(self, count: NamedCount, place: CountPlace) -> Counts:
        """Return the rows of a layer in a micro-batch and a group."""
        ...

    def alike(self, member: int) -> int | None:
        """Return a number that members with equal counts share; None if each has its own."""
        ...

    @property
    def words(self) -> str:
        """The binding in a result."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Balanced:
    """Each source sends equal numbers of rows to all experts; some get one row of the remainder."""

    @property
    def words(self) -> str:
        """The binding in a result."""
        return "balanced"

    def counts(self, count: NamedCount, place: CountPlace) -> Counts:
        """Return equal numbers of rows."""
        share = np.full(place.members, count.sent / place.members)
        return _by_member(count, place, share)

    def alike(self, member: int) -> int | None:
        """Return 0: all members have equal counts."""
        del member
        return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """The busiest member receives `busiest` times the mean, the others equal shares of the rest."""

    busiest: float

    def __post_init__(self) -> None:
        if not self.busiest >= 1:
            raise ValueError(f"busiest {self.busiest:g} must be at least 1, the mean")

    @property
    def words(self) -> str:
        """The binding in a result."""
        return f"ratio {self.busiest:g}"

    def counts(self, count: NamedCount, place: CountPlace) -> Counts:
        """Return rows by source and expert; the first member receives most.

        Raises:
            BindingError: `busiest` exceeds the number of members.
        """
        share = np.full(place.members, 0.0)
        share[0] = _busiest_share(self.busiest, count, place)
        if place.members > 1:
            share[1:] = (count.sent - share[0]) / (place.members - 1)
        return _by_member(count, place, share)

    def alike(self, member: int) -> int | None:
        """Return 0 for the busiest member and 1 for all others, which have equal counts."""
        return int(member > 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Zipf:
    """Rows are drawn with `seed`; experts are as popular as words by Zipf's law.

    The exponent is such that the busiest member would receive `busiest` times the mean without the
    noise of the draw. Each layer has other popular experts.
    """

    seed: int
    busiest: float

    def __post_init__(self) -> None:
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed {self.seed} must be from 0 to 2^63 - 1")
        if not self.busiest >= 1:
            raise ValueError(f"busiest {self.busiest:g} must be at least 1, the mean")

    @property
    def words(self) -> str:
        """The binding in a result."""
        return f"Zipf {self.busiest:g}, seed {self.seed}"

    def counts(self, count: NamedCount, place: CountPlace) -> Counts:
        """Return drawn rows.

        Raises:
            BindingError: `busiest` exceeds the number of members.
        """
        _busiest_share(self.busiest, count, place)
        order = np.random.default_rng([self.seed, place.layer]).permutation(count.experts)
        popular = _popularity(order, place.members, self.busiest)
        generator = np.random.default_rng(
            [self.seed, place.layer, 1 + place.micro_batch, place.group]
        )
        return generator.multinomial(count.sent, popular, size=place.members).astype(np.int64)

    def alike(self, member: int) -> int | None:
        """Return None: members differ."""
        del member
        return None


ROWS_MAX = 2**31
"""Upper limit of the numbers of a recorded count, so that sums of rows are exact."""


@dataclass(frozen=True, kw_only=True)
class CountTrace:
    """Recorded rows: micro-batch, layer, expert group, source, expert, and how many. Others are 0.

    The source is the number of a member in its group.
    """

    rows: tuple[tuple[int, int, int, int, int, int], ...]

    def __post_init__(self) -> None:
        for number, row in enumerate(self.rows):
            if min(row) < 0:
                raise ValueError(f"rows[{number}]: {min(row)} must be at least 0")
            if max(row) > ROWS_MAX:
                raise ValueError(f"rows[{number}]: {max(row)} must be at most {ROWS_MAX:,}")

    @cached_property
    def _by_place(self) -> dict[tuple[int, int, int], list[tuple[int, int, int]]]:
        found: dict[tuple[int, int, int], list[tuple[int, int, int]]] = {}
        for *place, source, expert, rows in self.rows:
            found.setdefault((place[0], place[1], place[2]), []).append((source, expert, rows))
        return found

    @property
    def words(self) -> str:
        """The binding in a result."""
        return f"{len(self.rows)} recorded counts"

    def counts(self, count: NamedCount, place: CountPlace) -> Counts:
        """Return the recorded rows.

        Raises:
            BindingError: they do not sum to the rows that a source sends.
        """
        found = np.zeros((place.members, count.experts), np.int64)
        where = (place.micro_batch, place.layer, place.group)
        for source, expert, rows in self._by_place.get(where, ()):
            if source >= place.members or expert >= count.experts:
                limits = f"{place.members} members and {count.experts} experts of {count.name}"
                raise BindingError(
                    f"binding.rows: source {source} with expert {expert} is outside the {limits}"
                )
            found[source, expert] += rows
        sums = found.sum(axis=1)
        kept = count.drops is not None and not count.capacity  # otherwise `routed` drops rows
        if count.drops is not None and kept:
            self._need_capacity(count, count.drops.capacity, found)
        off = sums > count.sent if kept else sums != count.sent
        for source in np.flatnonzero(off).tolist():
            at = f"micro-batch {where[0]}, layer {where[1]}, group {where[2]}, source {source}"
            raise BindingError(
                f"binding.rows: {at}: counts sum to {sums[source]}, must be "
                f"{'at most ' if kept else ''}{count.sent}, "
                f"the rows that a member sends ({count.name})"
            )
        return found

    @staticmethod
    def _need_capacity(count: NamedCount, capacity: int, rows: Counts) -> None:
        """Raise BindingError unless no source sends an expert more rows than its capacity.

        Raises:
            BindingError: it sends more.
        """
        for source, expert in np.argwhere(rows > capacity).tolist():
            raise BindingError(
                f"binding.rows: source {source} with expert {expert}: {rows[source, expert]} must "
                f"be at most {capacity}, the capacity of {count.name}"
            )

    def alike(self, member: int) -> int | None:
        """Return None: members differ."""
        del member
        return None


BALANCED = Balanced()
"""The binding of jobs that name no other."""

AnyBinding = Balanced | Ratio | Zipf | CountTrace
"""All bindings that a file can name."""


def _busiest_share(busiest: float, count: NamedCount, place: CountPlace) -> float:
    """Return the rows from each source to the busiest member.

    Raises:
        BindingError: they are more than it sends.
    """
    if busiest > place.members:
        most = f"{place.members}, the members of group {count.group}"
        raise BindingError(f"binding.busiest: {busiest:g} must be at most {most}")
    return busiest * count.sent / place.members


def _by_member(count: NamedCount, place: CountPlace, share: NDArray[np.float64]) -> Counts:
    """Round `share`, the rows for each member, and spread them evenly over its experts.

    Remaining rows go to members, and to experts of a member, in turn. The first to get one differs
    from source to source.
    """
    own = count.experts // place.members
    found = np.zeros((place.members, count.experts), np.int64)
    for source in range(place.members):
        blocks = _rounded(share, count.sent, source)
        for member, block in enumerate(blocks.tolist()):
            even = np.full(own, block / own)
            found[source, member * own : (member + 1) * own] = _rounded(even, block, source)
    return found


def _rounded(share: NDArray[np.float64], total: int, first: int) -> Counts:
    """Return whole numbers close to `share` whose sum is `total`; of equal ones from `first` on."""
    found = np.floor(share + 1e-9).astype(np.int64)
    left = int(total - found.sum())
    rest = np.round(share - found, 9)
    turn = (np.arange(len(share)) - first) % len(share)
    found[np.lexsort((turn, -rest))[:left]] += 1
    return found


def _popularity(order: NDArray[np.int64], members: int, busiest: float) -> NDArray[np.float64]:
    """Return shares of experts by Zipf's law whose busiest member has `busiest` times the mean."""
    rank = np.argsort(order) + 1.0

    def shares(exponent: float) -> NDArray[np.float64]:
        weights = rank**-exponent
        found: NDArray[np.float64] = weights / weights.sum()
        return found

    def load(exponent: float) -> float:
        return float(shares(exponent).reshape(members, -1).sum(axis=1).max()) * members

    low, high = 0.0, 1.0
    while load(high) < busiest and high < 64:
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if load(middle) < busiest else (low, middle)
    return shares(high)


def routed(binding: Binding, count: NamedCount, place: CountPlace) -> Counts:
    """Return the rows of a binding without those that exceed the capacity of an expert.

    Each source drops its own, whatever others send (`topk_routing_with_score_function` of
    megatron/core/transformer/moe/moe_utils.py).

    Raises:
        BindingError: the binding does not fit the count.
    """
    found = binding.counts(count, place)
    return np.minimum(found, count.capacity) if count.capacity else found


def by_member(counts: Counts, members: int) -> Counts:
    """Return the rows from each source to each member."""
    found: Counts = counts.reshape(len(counts), members, -1).sum(axis=2)
    return found
