"""Stage 3: parameters are gathered before they are used and freed after.

With secondary shards (hpZ, Wang et al. 2023, section 3.2) the first gather of a step leaves every
rank a shard among its inner ranks, and later gathers of the step stay among those.

Each bucket is needed for a while: from its first to its last use in a forward or backward (or from
forward to backward, where parameters are kept). Gathers are issued in the order in which they are
needed, `prefetch_units` visits ahead, while no more than `gathered_elements` are gathered at once.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from zsim.schedule.layout import Layout
from zsim.schedule.operation import AllGather, Copy, Edge, Previous, View
from zsim.schedule.schedule import Kind
from zsim.strategy.strategy import Keep, Strategy
from zsim.zero.bucket import Bucket, Buckets
from zsim.zero.state import BucketState, gather_path, update_path
from zsim.zero.visit_order import UnitVisit
from zsim.zero.writer import COMMUNICATION, DATA, INNER, Draft


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """A bucket that must be whole from visit `first` to visit `last`."""

    bucket: int
    buffer: str
    first: int
    last: int


class Gathers:
    """Issues gathers ahead of the visits that need them, and frees what is no longer needed."""

    def __init__(
        self,
        draft: Draft,
        strategy: Strategy,
        *,
        buckets: Buckets,
        states: Sequence[BucketState],
        sequence: Sequence[UnitVisit],
    ) -> None:
        self.draft = draft
        self.strategy = strategy
        self.buckets = buckets
        self.states = states
        self.needs = self._find_needs(sequence)
        self.next = 0
        self.gathered_elements = 0
        self.open: dict[int, list[tuple[Need, str]]] = {}
        self.ending: dict[int, list[Need]] = {}
        self.updated: set[int] = set()
        self.waiting = Counter(need.bucket for need in self.needs)
        self.layouts: list[Layout] = []
        if strategy.secondary is not None:
            self.layouts = [_inner_layout(bucket) for bucket in buckets.all]

    def held(self, bucket: int, visit: UnitVisit) -> str:
        """The buffer that holds the whole bucket during `visit`."""
        again = visit.backward and self.strategy.keep_after_forward is Keep.NOTHING
        return f"{self.buckets.all[bucket].name}/{'gathered_again' if again else 'gathered'}"

    def _find_needs(self, sequence: Sequence[UnitVisit]) -> list[Need]:
        """What is needed when, in order of first use."""
        keeps = self.strategy.keep_after_forward is Keep.EVERYTHING
        first: dict[tuple[int, int], int] = {}
        last: dict[tuple[int, int], int] = {}
        buffer: dict[tuple[int, int], str] = {}
        window, backward = -1, True
        for index, visit in enumerate(sequence):
            if visit.backward != backward:
                backward = visit.backward
                window += 0 if keeps and backward else 1
            for run in self.buckets.runs[visit.unit]:
                key = (window, run.bucket)
                first.setdefault(key, index)
                last[key] = index
                buffer[key] = self.held(run.bucket, visit)
        return [
            Need(bucket=key[1], buffer=buffer[key], first=start, last=last[key])
            for key, start in first.items()
        ]

    def before(self, index: int) -> tuple[Edge, ...]:
        """Gather what visit `index` needs and, ahead, what follows; what its compute waits for."""
        limit = self.strategy.gathered_elements
        while self.next < len(self.needs):
            need = self.needs[self.next]
            if need.first > index:
                size = self.buckets.all[need.bucket].padded
                if need.first > index + self.strategy.prefetch_units:
                    break
                if limit is not None and self.gathered_elements + size > limit:
                    break
                if need.buffer in self.draft.alive:
                    break
            self._gather(need)
            self.next += 1
        return tuple(name for _, name in self.open.pop(index, ()))

    def _gather(self, need: Need) -> None:
        draft, bucket = self.draft, self.buckets.all[need.bucket]
        name = draft.buffer(
            need.buffer,
            bucket.padded,
            self.strategy.precision.compute,
            Kind.COMMUNICATION,
            home=COMMUNICATION,
            layout=bucket.name,
        )
        draft.allocate(name)
        after: tuple[Edge, ...] = ()
        first = need.bucket not in self.updated
        self.updated.add(need.bucket)
        if first and not bucket.frozen:
            # The first gather of a step reads what the last step's update wrote.
            after = (Previous(update_path(bucket, self.strategy)),)
        again = not first and self.strategy.secondary is not None
        shard = _secondary(bucket) if again else self.states[need.bucket].parameter
        operation = draft.add(
            AllGather(
                id=draft.path(f"gather/{name}"),
                stream=COMMUNICATION,
                after=after,
                group=INNER if again else DATA,
                source=draft.all(shard),
                target=draft.all(name),
                wire=self.strategy.precision.compute,
            )
        )
        self.waiting[need.bucket] -= 1
        if self.strategy.secondary is not None:
            self._settle_secondary(bucket, name, first=first)
        self.gathered_elements += bucket.padded
        self.open.setdefault(need.first, []).append((need, operation))
        self.ending.setdefault(need.last, []).append(need)

    def _settle_secondary(self, bucket: Bucket, gathered: str, *, first: bool) -> None:
        """Keep the secondary shard of what was gathered first; drop it after the last gather."""
        draft, inner = self.draft, self.strategy.secondary
        assert inner is not None
        left = self.waiting[bucket.index]
        if first and left:
            shard = draft.buffer(
                _secondary(bucket),
                bucket.padded // inner,
                self.strategy.precision.compute,
                Kind.COMMUNICATION,
                home=COMMUNICATION,
                layout=_secondary(bucket),
                shard=INNER,
            )
            draft.allocate(shard)
            draft.add(
                Copy(
                    id=draft.path(f"keep/{shard}"),
                    stream=COMMUNICATION,
                    source=View(buffer=gathered, size=bucket.padded // inner, axis=INNER),
                    target=draft.all(shard),
                )
            )
        elif not first and not left:
            draft.free(_secondary(bucket))

    def after(self, index: int, used: str) -> None:
        """Free what visit `index` needed last; `used` is its last operation."""
        for need in self.ending.pop(index, ()):
            self.draft.free(need.buffer, (used,))
            self.gathered_elements -= self.buckets.all[need.bucket].padded


def _secondary(bucket: Bucket) -> str:
    return f"{bucket.name}/secondary"


def _inner_layout(bucket: Bucket) -> Layout:
    """A bucket cut over the inner ranks alone."""
    return Layout(
        name=_secondary(bucket), pieces=bucket.layout.pieces, elements=bucket.padded, axis=INNER
    )


class Replicas:
    """Stages 0 to 2: parameters are whole on every rank.

    In stages 1 and 2 the first use in a step waits for the gather that ended the step before.
    """

    layouts: tuple[Layout, ...] = ()

    def __init__(
        self,
        strategy: Strategy,
        *,
        buckets: Buckets,
        states: Sequence[BucketState],
        sequence: Sequence[UnitVisit],
    ) -> None:
        self.strategy = strategy
        self.buckets = buckets
        self.states = states
        self.sequence = sequence
        self.seen: set[int] = set()

    def held(self, bucket: int, _visit: UnitVisit) -> str:
        """The buffer that holds the whole bucket."""
        return self.states[bucket].parameter

    def before(self, index: int) -> tuple[Edge, ...]:
        """What the compute of visit `index` waits for: in a step's first reads of parameters."""
        runs = self.buckets.runs[self.sequence[index].unit]
        fresh = [run.bucket for run in runs if run.bucket not in self.seen]
        self.seen.update(fresh)
        if self.strategy.stage == 0:
            return ()
        found = (self.buckets.all[bucket] for bucket in fresh)
        return tuple(Previous(gather_path(bucket)) for bucket in found if not bucket.frozen)

    def after(self, index: int, used: str) -> None:
        """Nothing is freed."""
