"""Stage 3: parameters are gathered before use and freed after use.

With secondary shards (hpZ, Wang et al. 2023, section 3.2), the first gather of a step leaves every
rank a shard among its inner ranks; later gathers of the step stay among the inner ranks.

Each bucket is needed from its first to its last use in a forward or backward (from forward to
backward if parameters are kept). Gathers are issued in the order of first use, `prefetch_units`
visits ahead, as long as at most `gathered_elements` elements are gathered at once.
"""

from collections import Counter
from collections.abc import Sequence

from zsim.schedule.layout import Layout
from zsim.schedule.operation import Edge, Previous, View
from zsim.schedule.operation_list import COMMUNICATION
from zsim.schedule.schedule_writer import ScheduleWriter
from zsim.strategy.offload import MemoryTier
from zsim.strategy.strategy import Strategy
from zsim.strategy.zero_knobs import Keep
from zsim.zero.bucket import Bucket, Buckets
from zsim.zero.names import INNER
from zsim.zero.offloaded_parameters import FetchedShards
from zsim.zero.state import BucketState, gather_path, own_view, update_path
from zsim.zero.visit_order import Need, UnitVisit


class AfterUpdate:
    """The edge of a step's first read of shards, from the previous step's update; used once."""

    def __init__(self, updated: str) -> None:
        self._edges: tuple[Edge, ...] = (Previous(updated),)

    def take(self) -> tuple[Edge, ...]:
        """Return the edge on the first call, then nothing: later reads are on the same stream."""
        found, self._edges = self._edges, ()
        return found


def gather_updated(
    writer: ScheduleWriter,
    bucket: Bucket,
    parameter: str,
    name: str = "gather",
    *,
    stream: str = COMMUNICATION,
    after: tuple[Edge, ...] = (),
) -> str:
    """All-gather in place the parameters of `bucket`; each rank has updated its own shard."""
    own = own_view(writer, bucket, parameter)
    return writer.all_gather(name, bucket.axis, own, parameter, stream=stream, after=after)


class GatheredParameters:
    """Issues gathers ahead of the visits that need them, and frees buckets after their last use."""

    def __init__(
        self,
        writer: ScheduleWriter,
        strategy: Strategy,
        *,
        buckets: Buckets,
        states: Sequence[BucketState],
        sequence: Sequence[UnitVisit],
    ) -> None:
        self.writer = writer
        self.strategy = strategy
        self.buckets = buckets
        self.states = states
        self.needs = self._find_needs(sequence)
        self.next = 0
        self.gathered_elements = 0
        self.open: dict[int, list[str]] = {}
        self.ending: dict[int, list[Need]] = {}
        self.updated: set[int] = set()
        self.waiting = Counter(need.bucket for need in self.needs)
        self.layouts: list[Layout] = []
        self.fetched: FetchedShards | None = None
        if strategy.offload.parameters is not MemoryTier.DEVICE:
            once: set[int] = set()
            fetched: list[Need] = []
            for need in self.needs:  # secondary shards are on the device
                if strategy.zero.secondary is None or need.bucket not in once:
                    fetched.append(need)
                once.add(need.bucket)
            self.fetched = FetchedShards(
                writer, strategy, buckets=buckets, states=states, needs=fetched
            )
        if strategy.zero.secondary is not None:
            self.layouts = [bucket.over_inner("secondary") for bucket in buckets.all]

    def held(self, bucket: int, visit: UnitVisit) -> str:
        """Return the name of the buffer that holds the whole bucket during `visit`."""
        name = "gathered"
        if visit.backward and self.strategy.zero.keep_after_forward is Keep.NOTHING:
            name = "gathered_to_recompute" if visit.only_recomputes else "gathered_again"
        return f"{self.buckets.all[bucket].name}/{name}"

    def _find_needs(self, sequence: Sequence[UnitVisit]) -> list[Need]:
        """Return the buckets needed and the visits that need them, in order of first use."""
        keeps = self.strategy.zero.keep_after_forward is Keep.EVERYTHING
        found: dict[tuple[int, str], tuple[int, int, int]] = {}
        window, backward = -1, True
        for index, visit in enumerate(sequence):
            if visit.backward != backward:
                backward = visit.backward
                window += 0 if keeps and backward else 1
            for run in self.buckets.runs[visit.unit]:
                key = (window, self.held(run.bucket, visit))
                first = found[key][0] if key in found else index
                found[key] = (first, index, run.bucket)
        return [
            Need(bucket=bucket, buffer=buffer, first=first, last=last)
            for (_, buffer), (first, last, bucket) in found.items()
        ]

    def before(self, index: int) -> tuple[Edge, ...]:
        """Issue gathers for visit `index` and ahead; return the edges that its compute needs."""
        limit = self.strategy.zero.gathered_elements
        if self.fetched is not None:
            self.fetched.advance(index)
        while self.next < len(self.needs):
            need = self.needs[self.next]
            if need.first > index:
                size = self.buckets.all[need.bucket].padded
                if need.first > index + self.strategy.zero.prefetch_units:
                    break
                if limit is not None and self.gathered_elements + size > limit:
                    break
                if need.buffer in self.writer.alive:
                    break
            self._gather(need)
            self.next += 1
        return tuple(self.open.pop(index, ()))

    def _gather(self, need: Need) -> None:
        writer, bucket = self.writer, self.buckets.all[need.bucket]
        name = need.buffer.removeprefix(f"{bucket.name}/")
        bucket.buffer(writer, name, self.strategy.train.precision.compute, home=COMMUNICATION)
        writer.allocate(need.buffer)
        first = need.bucket not in self.updated
        self.updated.add(need.bucket)
        after: tuple[Edge, ...] = ()
        if first and not bucket.frozen:
            # The first gather of a step depends on the previous step's update.
            tier = self.states[bucket.index].tier
            after = (Previous(update_path(bucket, self.strategy, tier=tier)),)
        again = not first and self.strategy.zero.secondary is not None
        shard = _secondary(bucket) if again else self.states[need.bucket].parameter
        group = INNER if again else bucket.axis
        fetched = None if again or self.fetched is None else self.fetched.take(need)
        if fetched is not None:
            shard, after = fetched[0], (fetched[1],)
        operation = writer.all_gather(
            f"gather/{need.buffer}", group, shard, need.buffer, after=after
        )
        if fetched is not None:
            writer.free(shard, uses=(operation,))
        self.waiting[need.bucket] -= 1
        if self.strategy.zero.secondary is not None:
            self._settle_secondary(bucket, need.buffer, self.strategy.zero.secondary, first=first)
        self.gathered_elements += bucket.padded
        self.open.setdefault(need.first, []).append(operation)
        self.ending.setdefault(need.last, []).append(need)

    def _settle_secondary(self, bucket: Bucket, gathered: str, inner: int, *, first: bool) -> None:
        """Keep the secondary shard after the first gather; free it after the last gather."""
        left, compute = self.waiting[bucket.index], self.strategy.train.precision.compute
        if first and left:
            layout = self.layouts[bucket.index]
            shard = bucket.inner_buffer(self.writer, layout, inner, compute, home=COMMUNICATION)
            self.writer.allocate(shard)
            own = View(buffer=gathered, size=bucket.padded // inner, axis=INNER)
            self.writer.copy(f"keep/{shard}", own, shard, stream=COMMUNICATION)
        elif not first and not left:
            self.writer.free(_secondary(bucket))

    def after(self, index: int, used: str) -> None:
        """Free buckets last needed by visit `index`; `used` is its last operation."""
        for need in self.ending.pop(index, ()):
            self.writer.free(need.buffer, uses=(used,))
            self.gathered_elements -= self.buckets.all[need.bucket].padded

    def end(self) -> None:
        """Declare the slots that shards are read into."""
        if self.fetched is not None:
            self.fetched.end()


def _secondary(bucket: Bucket) -> str:
    return f"{bucket.name}/secondary"


class ReplicatedParameters:
    """Stages 0 to 2: parameters are whole on every rank.

    In stages 1 and 2, the first use in a step waits for the gather at the end of the previous step.
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
        """Return the name of the buffer that holds the whole bucket."""
        return self.states[bucket].parameter

    def before(self, index: int) -> tuple[Edge, ...]:
        """Return the edges that visit `index` waits for before its first reads of parameters."""
        runs = self.buckets.runs[self.sequence[index].unit]
        fresh = [run.bucket for run in runs if run.bucket not in self.seen]
        self.seen.update(fresh)
        found = (self.buckets.all[bucket] for bucket in fresh)
        if self.strategy.zero.stage == 0:
            moved = [
                each for each in found if self.states[each.index].tier is not MemoryTier.DEVICE
            ]
            return tuple(
                Previous(update_path(each, self.strategy)) for each in moved if not each.frozen
            )
        return tuple(Previous(gather_path(bucket)) for bucket in found if not bucket.frozen)

    def after(self, index: int, used: str) -> None:
        """Free nothing."""

    def end(self) -> None:
        """Declare nothing."""
