"""Gradients: copied into buckets as backward makes them, reduced while backward continues.

Contributions are divided by data ranks x micro-batches, so that the sum is the mean. If gradients
are reduced once, whole buckets accumulate over the micro-batches; the first contribution sets,
later ones add. Otherwise shards accumulate reduced gradients. With several replicas (hybrid
sharding), the sum over them is taken once, in the last micro-batch (MiCS, Zhang et al. 2022,
section 3.4).
"""

from collections import Counter
from functools import partial

from zsim.model.model import Model
from zsim.schedule.operation import View
from zsim.schedule.operation_list import COMMUNICATION, COMPUTE
from zsim.schedule.schedule import Kind
from zsim.schedule.schedule_writer import ScheduleWriter
from zsim.strategy.strategy import Strategy
from zsim.zero.bucket import Bucket, Buckets, UnitRun
from zsim.zero.forward_backward import ForwardBackward
from zsim.zero.names import REPLICATE
from zsim.zero.offloaded_gradients import GradientsToHost
from zsim.zero.state import Reduced, own_view
from zsim.zero.token_copies import shared_views, sum_over_tokens


class UnitsLeft:
    """Number of units that have yet to contribute to each bucket before it is complete."""

    def __init__(self, buckets: Buckets) -> None:
        self._all = buckets.uses
        self._left = Counter(self._all)

    def complete(self, bucket: int) -> bool:
        """Count one more contribution; after the last one return True and reset the count."""
        self._left[bucket] -= 1
        if self._left[bucket]:
            return False
        self._left[bucket] = self._all[bucket]
        return True

    def is_first(self, bucket: int) -> bool:
        """Return True if no unit has contributed so far."""
        return self._left[bucket] == self._all[bucket]


def copy_run(
    writer: ScheduleWriter,
    name: str,
    run: UnitRun,
    *,
    source: str,
    target: str,
    accumulate: bool = True,
    divisor: int = 1,
    launches: int = 1,
) -> str:
    """Copy or add the gradients of a run to their place in a buffer of the whole bucket."""
    return writer.copy(
        name,
        source,
        writer.part(target, run.size, run.start) if run.layout is None else target,
        accumulate=accumulate,
        divisor=divisor,
        by_parameter=run.layout is not None,
        launches=launches,
    )


class BucketReductions:
    """Takes the gradients of each unit's backward and reduces complete buckets."""

    def __init__(
        self, writer: ScheduleWriter, model: Model, strategy: Strategy, passes: ForwardBackward
    ) -> None:
        self.writer = writer
        self.model = model
        self.strategy = strategy
        self.buckets = passes.buckets
        self.passes = passes
        self.reduced: dict[int, Reduced] = {}
        self._written: list[set[tuple[int, int]]] = [set() for _ in self.buckets.all]
        self._left = UnitsLeft(self.buckets)
        self._in_flight: list[tuple[str, str]] = []
        self.to_host: GradientsToHost | None = None
        self._divisor = strategy.replicas * strategy.train.gradient_accumulation_steps
        self._fuses = strategy.reduction_format is not strategy.train.precision.compute

    def contribute(self, unit: int, *, last: bool) -> None:
        """Move a unit's gradients into their buckets; reduce the buckets that are complete."""
        for position, run in self.buckets.trained_runs(unit):
            bucket = self.buckets.all[run.bucket]
            source = self.passes.transient(unit, position)
            copies = shared_views(run, source, self.passes.tokens.shared)
            if summed := sum_over_tokens(self.writer, copies):
                self.writer.together(f"sum/{source}", len(summed))
            target = _collector(self.writer, self.strategy, bucket)
            while any(target == buffer for buffer, _ in self._in_flight):
                self._free_oldest("free_for_reuse")
            if target not in self.writer.alive:
                self.writer.allocate(target)
                self._written[run.bucket].clear()
            copied = self._copy(run, source, target)
            if not self._left.complete(run.bucket):
                continue
            if last or not self.strategy.reduces_once:
                self._reduce(bucket, target, copied)
            if last and self.strategy.parallel.replicate > 1:
                self._all_reduce(bucket)
            if last and self.to_host is not None:
                done = self.reduced[run.bucket]
                self.reduced[run.bucket] = self.to_host.copy_out(bucket, done)

    def finish(self) -> None:
        """Free the buffers of all reductions in flight."""
        while self._in_flight:
            self._free_oldest()
        if self.to_host is not None:
            self.to_host.end()

    def _copy(self, run: UnitRun, source: str, target: str) -> str:
        writer, bucket = self.writer, self.buckets.all[run.bucket]
        written = self._written[run.bucket]
        if not written and bucket.padded > bucket.elements:
            rest = bucket.padded - bucket.elements
            padding = View(buffer=target, start=bucket.elements, size=rest)
            writer.fill(f"pad/{target}", padding, 0.0)
        key = (run.start, run.size)  # several empty parameters may have the same start
        adds = key in written
        written.add(key)
        copied = copy_run(
            writer,
            f"{'add' if adds else 'set'}/{target}",
            run,
            source=source,
            target=target,
            accumulate=adds,
            divisor=self._divisor,
        )
        writer.free(source)
        return copied

    def _reduce(self, bucket: Bucket, source: str, copied: str) -> None:
        writer, strategy = self.writer, self.strategy
        path, after = f"reduce/{bucket.name}", (copied,)
        if strategy.zero.stage == 0:
            reduce = self._fuse if self._fuses else partial(writer.all_reduce, after=after)
            self.reduced[bucket.index] = Reduced(source, reduce(path, bucket.axis, source))
            return
        target = (
            source if strategy.zero.stage == 1 else _shard(writer, strategy, bucket, Kind.GRADIENT)
        )
        adds = bucket.index in self.reduced and target != source
        landing = _shard(writer, strategy, bucket, Kind.COMMUNICATION) if adds else target
        if landing not in writer.alive:
            writer.allocate(landing)
        own = own_view(writer, bucket, landing)
        done = writer.reduce_scatter(path, bucket.axis, source, own, after=after)
        stays = strategy.zero.contiguous and _collects_whole(strategy)
        if source != target and not stays:
            self._in_flight.append((source, done))
        if adds:
            done = writer.copy(
                f"accumulate/{bucket.name}",
                landing,
                target,
                accumulate=True,
                stream=COMMUNICATION,
            )
            writer.free(landing)
        self.reduced[bucket.index] = Reduced(target, done)
        while len(self._in_flight) > strategy.zero.reductions_in_flight:
            self._free_oldest()

    def _fuse(self, path: str, axis: str, source: str) -> str:
        """Copy all gradients into a buffer, cast, reduce and copy them back; return the copy."""
        # allreduce_params with fp32_allreduce (megatron/model/distributed.py at f86bb67, 2019)
        writer, (held, kind) = self.writer, (self.writer.buffers[source], Kind.COMMUNICATION)
        size, layout, wider = held.elements, held.layout, self.strategy.reduction_format
        flat = writer.buffer(f"{source}/fused", size, held.dtype, kind, layout=layout)
        wide = writer.buffer(f"{source}/wide", size, wider, kind, layout=layout)
        writer.allocate(flat, wide)
        writer.copy(f"fuse/{source}", source, flat)
        writer.copy(f"widen/{source}", flat, wide)
        writer.free(flat)
        writer.all_reduce(path, axis, wide, stream=COMPUTE)
        done = writer.copy(f"spread/{source}", wide, source)
        writer.free(wide)
        return done

    def _all_reduce(self, bucket: Bucket) -> None:
        """Sum gradients that are reduced over the data axis over the replicas as well."""
        reduced, writer = self.reduced[bucket.index], self.writer
        whole = self.strategy.zero.stage == 0
        view = writer.all(reduced.buffer) if whole else own_view(writer, bucket, reduced.buffer)
        path, after = f"reduce/{bucket.name}/replicas", (reduced.operation,) * self._fuses
        reduced.operation = writer.all_reduce(path, REPLICATE, view, after=after)

    def _free_oldest(self, verb: str = "free") -> None:
        buffer, operation = self._in_flight.pop(0)
        self.writer.free(buffer, uses=(operation,), verb=verb)


def long_lived(writer: ScheduleWriter, strategy: Strategy, bucket: Bucket) -> list[str]:
    """Return buffers of a bucket's gradients that outlive a micro-batch."""
    found: list[str] = []
    if _collects_whole(strategy):
        found.append(_collector(writer, strategy, bucket))
    if strategy.zero.stage >= 2:
        found.append(_shard(writer, strategy, bucket, Kind.GRADIENT))
    return found


def _collects_whole(strategy: Strategy) -> bool:
    """Return True if whole (unsharded) gradients outlive a micro-batch."""
    once = strategy.zero.reduce_once and strategy.train.gradient_accumulation_steps > 1
    return strategy.zero.stage < 2 or once


def _collector(writer: ScheduleWriter, strategy: Strategy, bucket: Bucket) -> str:
    """Return the buffer that a bucket's contributions are copied into."""
    name, kind = "staging", Kind.COMMUNICATION
    if _collects_whole(strategy):
        name, kind = "gradient" if strategy.zero.stage < 2 else "accumulated", Kind.GRADIENT
    return bucket.buffer(writer, name, strategy.train.precision.compute, kind)


def _shard(writer: ScheduleWriter, strategy: Strategy, bucket: Bucket, kind: Kind) -> str:
    """Return the buffer of the rank's shard of a bucket's sum, or of a received contribution."""
    name = "gradient" if kind is Kind.GRADIENT else "received"
    compute = strategy.train.precision.compute
    return bucket.shard_buffer(writer, name, compute, kind, home=COMMUNICATION)
