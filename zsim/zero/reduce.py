"""Gradients: copied into buckets as backward makes them, reduced while backward goes on.

Every contribution is divided by data ranks x micro-batches as it is copied, so that the sum is the
mean. Where gradients are reduced once, whole buckets of them collect over the micro-batches; the
first contribution sets, later ones add. Otherwise each micro-batch fills staging memory, and shards
collect what was reduced. With several replicas of the sharded states (hybrid sharding) the sum over
the replicas is taken once, in the last micro-batch (MiCS, Zhang et al. 2022, section 3.4).
"""

from collections import Counter
from dataclasses import dataclass, field

from zsim.model.model import Model
from zsim.schedule.operation import AllReduce, Copy, Fill, ReduceScatter, View
from zsim.schedule.schedule import Kind
from zsim.strategy.strategy import Strategy
from zsim.zero.bucket import Bucket, Buckets, Run
from zsim.zero.forward_backward import Passes
from zsim.zero.state import own_view
from zsim.zero.writer import COMMUNICATION, COMPUTE, DATA, REPLICATE, Draft


@dataclass(slots=True)
class Reduced:
    """A bucket's gradients once they are reduced: the buffer, and the operation that made it."""

    buffer: str
    operation: str


@dataclass(slots=True)
class _Progress:
    """How far a bucket is: what of it was written, and how many units have contributed."""

    written: set[tuple[int, int]] = field(default_factory=set[tuple[int, int]])
    contributions: int = 0


class Reductions:
    """Takes the gradients of each unit's backward and reduces complete buckets."""

    def __init__(
        self, draft: Draft, model: Model, strategy: Strategy, *, buckets: Buckets, passes: Passes
    ) -> None:
        self.draft = draft
        self.model = model
        self.strategy = strategy
        self.buckets = buckets
        self.passes = passes
        self.reduced: dict[int, Reduced] = {}
        self._progress = [_Progress() for _ in buckets.all]
        self._expected = Counter(
            run.bucket for unit in range(len(model.units)) for _, run in buckets.trained_runs(unit)
        )
        self._in_flight: list[tuple[str, str]] = []
        self._divisor = strategy.replicas * strategy.gradient_accumulation_steps

    def contribute(self, unit: int, micro_batch: int) -> None:
        """Move a unit's gradients into their buckets; reduce the buckets that are complete."""
        for position, run in self.buckets.trained_runs(unit):
            bucket, progress = self.buckets.all[run.bucket], self._progress[run.bucket]
            target = _collector(self.draft, self.strategy, bucket)
            while any(target == buffer for buffer, _ in self._in_flight):
                self._free_oldest("free_for_reuse")
            if target not in self.draft.alive:
                self.draft.allocate(target)
                progress.written.clear()
            copied = self._copy(run, self.passes.transient(unit, position), target, progress)
            progress.contributions += 1
            if progress.contributions == self._expected[run.bucket]:
                progress.contributions = 0
                last = micro_batch == self.strategy.gradient_accumulation_steps - 1
                if last or not self.strategy.reduces_once:
                    self._reduce(bucket, target, copied)
                if last and self.strategy.replicate > 1:
                    self._all_reduce(bucket)

    def finish(self) -> None:
        """Give the memory of every reduction still in flight back."""
        self.draft.prefix = "step/backward/end"
        while self._in_flight:
            self._free_oldest()

    def _copy(self, run: Run, source: str, target: str, progress: _Progress) -> str:
        draft, bucket = self.draft, self.buckets.all[run.bucket]
        first = (run.start, run.size) not in progress.written
        if not progress.written and bucket.padded > bucket.elements:
            padding = View(
                buffer=target, start=bucket.elements, size=bucket.padded - bucket.elements
            )
            draft.add(
                Fill(id=draft.path(f"pad/{target}"), stream=COMPUTE, target=padding, value=0.0)
            )
        progress.written.add((run.start, run.size))
        copied = draft.add(
            Copy(
                id=draft.path(f"{'set' if first else 'add'}/{target}"),
                stream=COMPUTE,
                source=draft.all(source),
                target=View(buffer=target, start=run.start, size=run.size),
                accumulate=not first,
                divisor=self._divisor,
            )
        )
        draft.free(source)
        return copied

    def _reduce(self, bucket: Bucket, source: str, copied: str) -> None:
        draft, strategy = self.draft, self.strategy
        wire = strategy.precision.compute
        if strategy.stage == 0:
            operation = draft.add(
                AllReduce(
                    id=draft.path(f"reduce/{bucket.name}"),
                    stream=COMMUNICATION,
                    after=(copied,),
                    group=DATA,
                    source=draft.all(source),
                    target=draft.all(source),
                    wire=wire,
                    accumulate=wire,
                )
            )
            self.reduced[bucket.index] = Reduced(source, operation)
            return
        target = source if strategy.stage == 1 else _shard(draft, strategy, bucket, Kind.GRADIENT)
        adds = bucket.index in self.reduced and target != source
        landing = _shard(draft, strategy, bucket, Kind.COMMUNICATION) if adds else target
        if landing not in draft.alive:
            draft.allocate(landing)
        operation = draft.add(
            ReduceScatter(
                id=draft.path(f"reduce/{bucket.name}"),
                stream=COMMUNICATION,
                after=(copied,),
                group=DATA,
                source=draft.all(source),
                target=own_view(draft, bucket, landing),
                wire=wire,
                accumulate=wire,
            )
        )
        stays = strategy.contiguous and _collects_whole(strategy)
        if source != target and not stays:
            self._in_flight.append((source, operation))
        if adds:
            operation = draft.add(
                Copy(
                    id=draft.path(f"accumulate/{bucket.name}"),
                    stream=COMMUNICATION,
                    source=draft.all(landing),
                    target=draft.all(target),
                    accumulate=True,
                )
            )
            draft.free(landing)
        self.reduced[bucket.index] = Reduced(target, operation)
        while len(self._in_flight) > strategy.reductions_in_flight:
            self._free_oldest()

    def _all_reduce(self, bucket: Bucket) -> None:
        """Sum what is reduced over the data axis over the replicas as well."""
        reduced, wire = self.reduced[bucket.index], self.strategy.precision.compute
        whole = self.strategy.stage == 0
        draft = self.draft
        view = draft.all(reduced.buffer) if whole else own_view(draft, bucket, reduced.buffer)
        operation = draft.add(
            AllReduce(
                id=draft.path(f"reduce/{bucket.name}/replicas"),
                stream=COMMUNICATION,
                group=REPLICATE,
                source=view,
                target=view,
                wire=wire,
                accumulate=wire,
            )
        )
        self.reduced[bucket.index] = Reduced(reduced.buffer, operation)

    def _free_oldest(self, verb: str = "free") -> None:
        buffer, operation = self._in_flight.pop(0)
        self.draft.free(buffer, (operation,), verb=verb)


def long_lived(draft: Draft, strategy: Strategy, bucket: Bucket) -> list[str]:
    """Buffers of a bucket's gradients that are needed for more than a micro-batch."""
    found: list[str] = []
    if _collects_whole(strategy):
        found.append(_collector(draft, strategy, bucket))
    if strategy.stage >= 2:
        found.append(_shard(draft, strategy, bucket, Kind.GRADIENT))
    return found


def _collects_whole(strategy: Strategy) -> bool:
    """Whether whole gradients outlive a micro-batch."""
    once = strategy.reduce_once and strategy.gradient_accumulation_steps > 1
    return strategy.stage < 2 or once


def _collector(draft: Draft, strategy: Strategy, bucket: Bucket) -> str:
    """The buffer that a bucket's contributions are copied into."""
    name, kind = "staging", Kind.COMMUNICATION
    if _collects_whole(strategy):
        name, kind = "gradient" if strategy.stage < 2 else "accumulated", Kind.GRADIENT
    return draft.buffer(
        f"{bucket.name}/{name}",
        bucket.padded,
        strategy.precision.compute,
        kind,
        layout=bucket.name,
    )


def _shard(draft: Draft, strategy: Strategy, bucket: Bucket, kind: Kind) -> str:
    """The buffer of what a rank has of a bucket's sum; with accumulation, of what it adds to it."""
    return draft.buffer(
        f"{bucket.name}/{'gradient' if kind is Kind.GRADIENT else 'received'}",
        bucket.shard,
        strategy.precision.compute,
        kind,
        home=COMMUNICATION,
        layout=bucket.name,
        shard=DATA,
    )
