"""The reducer: gradients are copied into buckets, which are all-reduced in order.

Functions named in comments are from `torch/csrc/distributed/c10d/reducer.cpp` in torch 2.13.
"""

from collections.abc import Sequence

from zsim.dtype import DType
from zsim.schedule.operation import Edge, Previous, View
from zsim.schedule.schedule import Kind
from zsim.zero.bucket import Bucket, UnitRun
from zsim.zero.names import DATA
from zsim.zero.reduce import UnitsLeft, copy_run
from zsim.zero.state import Reduced, persist_zeros
from zsim.zero.step_skeleton import Step, StepPart
from zsim_runtimes.ddp.assignment import buckets_of
from zsim_runtimes.ddp.options import DDP, WIRE, CommunicationHook
from zsim_runtimes.ddp.powersgd import LowRankReducer

USED, BUFFERS = "used_parameters", "module_buffers"


class BucketReducer(StepPart):
    """Takes gradients from backward and all-reduces complete buckets.

    Attributes:
        reduced: the averaged gradients, by number of the bucket.
    """

    def __init__(self, step: Step, options: DDP, *, hook_stream: str) -> None:
        super().__init__(step)
        self.reduced: dict[int, Reduced] = {}
        self._options = options
        self._hook_stream = hook_stream
        precision = step.strategy.train.precision
        self._number = precision.optimizer
        self._casts = precision.has_master
        self._micro_batches = step.strategy.train.gradient_accumulation_steps
        groups = buckets_of(step.model, options, self._number.size_bytes)
        names = {bucket.layout.pieces[0].parameter: bucket for bucket in self.buckets.trained}
        self._order = [names[group[0].name] for group in groups]
        self._trained = sum(len(bucket.layout.pieces) for bucket in self.buckets.trained)
        self._left = UnitsLeft(self.buckets)
        self._written: set[str] = set()
        self._ready: set[int] = set()
        self._copied: dict[int, str] = {}
        self._done: dict[int, str] = {}
        self._waits: tuple[Edge, ...] = ()
        self._used: tuple[Edge, ...] = ()
        self._low_rank: LowRankReducer | None = None
        if options.comm_hook is CommunicationHook.POWER_SGD:
            self._low_rank = LowRankReducer(step, options, stream=hook_stream)

    def write_setup(self) -> None:
        """Allocate the buckets, and buffers of other collectives, for all steps."""
        for bucket in self._order:  # initialize_buckets
            self.writer.prefix = f"setup/{bucket.name}"
            persist_zeros(self.writer, self._bucket(bucket), "bucket")
            if self._low_rank is not None:
                self._low_rank.write_setup(bucket)
        self.writer.prefix = "setup"
        for name, elements in (
            (USED, self._trained if self._options.finds_unused else 0),
            (BUFFERS, self._options.broadcast_buffers),
        ):
            if elements:
                self.writer.buffer(name, elements, DType.FP32, Kind.WORKSPACE)
                persist_zeros(self.writer, name, name)

    def _bucket(self, bucket: Bucket) -> str:
        views = self._options.gradient_as_bucket_view
        kind = Kind.GRADIENT if views else Kind.COMMUNICATION
        return bucket.buffer(self.writer, "bucket", self._number, kind)

    def _gradient(self, bucket: Bucket) -> str:
        """Return the buffer of a bucket's `.grad`, apart from the bucket."""
        return bucket.buffer(self.writer, "gradient", self._number, Kind.GRADIENT)

    def syncs(self, *, last: bool) -> bool:
        """Return True if a micro-batch reduces gradients."""
        return last or not self._options.no_sync

    def broadcast_buffers(self) -> None:
        """Send the module's buffers from rank 0 to all."""
        # _sync_buffers, _distributed_broadcast_coalesced
        if self._options.broadcast_buffers:
            path = f"broadcast/{BUFFERS}"
            self._waits += (self.writer.broadcast(path, DATA, BUFFERS),)

    def waits(self) -> tuple[Edge, ...]:
        """Return the edges for which the next forward waits, once."""
        edges, self._waits = self._waits, ()
        return edges

    def take(self, unit: int, *, first: bool, last: bool) -> None:
        """Take the gradients of a unit; reduce buckets that are complete, in order."""
        syncs = self.syncs(last=last)
        for position, run in self.buckets.trained_runs(unit):
            bucket, source = self.buckets.all[run.bucket], self.passes.transient(unit, position)
            if self._keeps:
                self._accumulate(run, source, bucket)
            else:
                self._fill(run, source, bucket, first=first)
            if self._left.complete(run.bucket) and syncs:
                self._mark_ready(bucket, first=first)
        if syncs:
            self._reduce_ready()

    @property
    def _keeps(self) -> bool:
        """Return True if gradients are first added to `.grad`, then copied into the bucket."""
        if self._micro_batches > 1 and self._options.no_sync:
            return True
        adds = self._casts or self._micro_batches > 1
        return adds and not self._options.gradient_as_bucket_view

    def _fill(self, run: UnitRun, source: str, bucket: Bucket, *, first: bool) -> None:
        """Copy a gradient into the bucket, divided by the ranks; later micro-batches add theirs."""
        # mark_variable_ready_dense: `at::mul_out(bucket_view, grad, 1 / div_factor)`
        writer = self.writer
        if self._casts:  # ToCopyBackward of the cast
            kind, layout = Kind.WORKSPACE, writer.buffers[source].layout
            wide = writer.buffer(f"{source}/wide", run.size, self._number, kind, layout=layout)
            writer.allocate(wide)
            writer.copy(f"widen/{source}", source, wide, launches=len(run.trained))
            writer.free(source)
            source = wide
        divisor = self._micro_batches * (self._divisor if first else 1)
        self._copied[bucket.index] = self._copy(run, source, self._bucket(bucket), divisor=divisor)
        writer.free(source)
        if not self._options.gradient_as_bucket_view and self._gradient(bucket) not in writer.alive:
            writer.allocate(self._gradient(bucket))  # the memory of autograd's gradients

    @property
    def _divisor(self) -> int:
        """Divisor of the copy into a bucket; a hook divides by itself."""
        return 1 if self._hooked else self.strategy.replicas

    @property
    def _hooked(self) -> bool:
        return self._options.comm_hook is not CommunicationHook.NONE

    def _accumulate(self, run: UnitRun, source: str, bucket: Bucket) -> None:
        """Add a gradient to `.grad`, or make it that of the step."""
        target = self._gradient(bucket)
        if target not in self.writer.alive:
            self.writer.allocate(target)
        self._copied[bucket.index] = self._copy(run, source, target, divisor=self._micro_batches)
        self.writer.free(source)

    def _copy(self, run: UnitRun, source: str, target: str, *, divisor: int) -> str:
        """Copy gradients to their places, or add them to what is there."""
        # AccumulateGrad takes over the first gradient as it is: without a cast nothing is copied
        names = [each.name for each in run.trained]
        added = [name in self._written for name in names]
        self._written.update(names)
        moves = self._casts or target.endswith("bucket") or any(added)
        if len({*added}) == 1:
            return copy_run(
                self.writer,
                f"{'add' if added[0] else 'set'}/{source}/{target}",
                run,
                source=source,
                target=target,
                accumulate=added[0],
                divisor=divisor,
                launches=len(names) if moves else 0,
            )
        return self._copy_each(run, added, source, target, divisor=divisor)

    def _copy_each(
        self, run: UnitRun, added: Sequence[bool], source: str, target: str, *, divisor: int
    ) -> str:
        """Copy gradients one by one: some are added to that of a shared parameter."""
        pieces = {piece.parameter: piece for piece in self.buckets.all[run.bucket].layout.pieces}
        start, copied = 0, ""
        for each, adds in zip(run.trained, added, strict=True):
            size = each.elements
            copied = self.writer.copy(
                f"{'add' if adds else 'set'}/{each.name}/{target}",
                View(buffer=source, start=start, size=size),
                View(buffer=target, start=pieces[each.name].start, size=size),
                accumulate=adds,
                divisor=divisor,
            )
            start += size
        return copied

    def _mark_ready(self, bucket: Bucket, *, first: bool) -> None:
        """Complete a bucket: divide what earlier micro-batches left, or copy `.grad` into it."""
        writer, name, pieces = self.writer, self._bucket(bucket), len(bucket.layout.pieces)
        if self._keeps:
            self._copied[bucket.index] = writer.copy(
                f"fill/{bucket.name}",
                self._gradient(bucket),
                name,
                divisor=self._divisor,
                launches=pieces,
            )
            if self._options.gradient_as_bucket_view:
                writer.free(self._gradient(bucket))
        elif not first and self._divisor > 1:  # `bucket_view.div_(div_factor_)`
            self._copied[bucket.index] = writer.copy(
                f"divide/{bucket.name}", name, name, divisor=self._divisor, launches=pieces
            )
        self._ready.add(bucket.index)

    def _reduce_ready(self) -> None:
        """All-reduce the buckets whose predecessors are all in flight."""
        # mark_bucket_ready: `next_bucket_`
        for bucket in self._order:
            if bucket.index in self._done:
                continue
            if bucket.index not in self._ready:
                return
            self._ready.discard(bucket.index)
            self._done[bucket.index] = self._all_reduce(bucket)

    def _all_reduce(self, bucket: Bucket) -> str:
        """Average a bucket over the ranks; return the operation that ends it."""
        writer, name = self.writer, self._bucket(bucket)
        after = (self._copied[bucket.index],)
        path = f"reduce/{bucket.name}"
        if self._low_rank is not None:
            return self._low_rank.all_reduce(bucket, name)
        if not self._hooked:
            return writer.all_reduce(path, DATA, name, after=after)
        # as _compress_hook in ddp_comm_hooks/default_hooks.py does
        wire = WIRE[self._options.comm_hook]
        narrow = bucket.buffer(writer, "compressed", wire)
        writer.allocate(narrow)
        copied = writer.copy(f"compress/{bucket.name}", name, narrow)
        ranks = self.strategy.replicas
        copied = writer.copy(f"divide/{bucket.name}", narrow, narrow, divisor=ranks)
        summed = writer.all_reduce(path, DATA, narrow, after=(copied,))
        stream = self._hook_stream
        done = writer.copy(
            f"decompress/{bucket.name}", narrow, name, stream=stream, after=(summed,)
        )
        writer.free(narrow, uses=(done,))
        return done

    def finalize(self) -> None:
        """Wait for all buckets; copy them back unless gradients are views of them."""
        # finalize_backward, finalize_bucket_dense
        writer = self.writer
        if self._options.finds_unused:  # all_reduce_local_used_map
            last = f"step/backward/mb{self._micro_batches - 1}/end/reduce/used"
            used = writer.fill("used", USED, 1.0, after=self._used or (Previous(last),))
            self._used = (writer.all_reduce("reduce/used", DATA, USED, after=(used,)),)
        for bucket in self._order:
            done, name = self._done.pop(bucket.index), self._bucket(bucket)
            if not self._options.gradient_as_bucket_view:
                name = self._gradient(bucket)
                path, pieces = f"back/{bucket.name}", len(bucket.layout.pieces)
                source = self._bucket(bucket)
                done = writer.copy(path, source, name, launches=pieces, after=(done,))
            self.reduced[bucket.index] = Reduced(name, done)
        self._waits = tuple(each.operation for each in self.reduced.values())
