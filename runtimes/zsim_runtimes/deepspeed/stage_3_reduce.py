"""Gradients in ZeRO-3: copied into one bucket in backward order, reduced when it is full.

Everything runs on one stream, so one bucket suffices. The gradients in the bucket are rearranged
rank by rank, each parameter padded, divided by the ranks, and reduce-scattered. The result is
written to the gradients of the sub-groups, or added from the second micro-batch on. The bucket is
allocated in setup and has `reduce_bucket_size` elements for any model. A larger gradient is reduced
from its own memory. Here the received shards are separate from the rearranged gradients; in
DeepSpeed they are in the rank's slot of them.

Functions named in comments are from DeepSpeed 0.19, of `DeepSpeedZeroOptimizer_Stage3` in
`runtime/zero/stage3.py` unless another file is named.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from zsim.schedule.layout import Layout
from zsim.schedule.operation import FreeMode, View
from zsim.schedule.operation_list import COMPUTE
from zsim.schedule.schedule import Kind
from zsim.zero.bucket import Bucket
from zsim.zero.names import DATA
from zsim.zero.reduce import UnitsLeft
from zsim.zero.state import persist_zeros
from zsim.zero.step_skeleton import Step, StepPart
from zsim_runtimes.deepspeed.host_sub_group import HostSubGroups
from zsim_runtimes.deepspeed.options import DeepSpeed
from zsim_runtimes.deepspeed.stage_3_shards import Shards, flat_buffers

REDUCTIONS_IN_FLIGHT = 2
"""Number of unfinished reductions with which the host continues."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Filling:
    """Gradients that are reduced together.

    Attributes:
        name: name of the layout in which they are rearranged.
        numbers: parameters, in backward order.
        bucket: the buffer that is filled; None for one gradient that is too large for it.
    """

    name: str
    numbers: tuple[int, ...]
    bucket: str | None


class FilledBuckets(StepPart):
    """Takes the gradients of each unit's backward, fills the bucket and reduces it."""

    def __init__(self, step: Step, options: DeepSpeed, shards: Shards, *, stream: str) -> None:
        super().__init__(step)
        self.shards = shards
        self.stream = stream
        self._mode = FreeMode.WAITED if stream == COMPUTE else FreeMode.DEFERRED
        self.finished = ""
        self.layouts: list[Layout] = []
        self._wire = options.communication_data_type or self.compute
        self._left = UnitsLeft(self.buckets)
        self._sums: dict[int, str] = {}
        self._events: deque[str] = deque()
        self._limit = options.reduce_bucket_size
        fillings = self._fill()
        self._filling = {number: filling for filling in fillings for number in filling.numbers}
        self._starts: dict[int, int] = {}
        for filling in fillings:
            sizes = (shards.bucket(number).elements for number in filling.numbers)
            self._starts |= zip(filling.numbers, accumulate(sizes, initial=0), strict=False)
        forms = (each.bucket for each in fillings if each.bucket is not None)
        self._first = next(forms, None) or self._bucket_buffer("bucket", None)
        self._bucket = self._first
        self._open: _Filling | None = None
        self._source = ""
        self._written = ""
        self.host: HostSubGroups | None = None
        if options.offload_optimizer.is_on:
            pinned = options.offload_optimizer.pin_memory
            self.host = HostSubGroups(step, shards, stream=stream, pinned=pinned)

    def _fill(self) -> list[_Filling]:
        """Return the gradients reduced together, in the order in which they are complete."""
        # reduce_independent_p_g_buckets_and_remove_grads
        left = UnitsLeft(self.buckets)
        found: list[list[int]] = []
        filled = self._limit
        for unit in reversed(range(len(self.buckets.runs))):
            for _, run in reversed(self.buckets.trained_runs(unit)):
                size = self.shards.bucket(run.bucket).elements
                if not left.complete(run.bucket) or not size:
                    continue
                if not found or filled + size > self._limit:
                    found.append([])
                    filled = 0
                found[-1].append(run.bucket)
                filled += size
        return [self._declare(index, numbers) for index, numbers in enumerate(found)]

    def _declare(self, index: int, numbers: Sequence[int]) -> _Filling:
        """Declare the buffers of one filling, with their layouts."""
        name, ranks = f"reduction{index}", self.strategy.parallel.data
        # __reduce_and_partition_ipg_grads sorts by `ds_id`
        together = self.shards.together(name, sorted(numbers), DATA)
        self.layouts.append(together)
        names = (f"{name}/input", f"{name}/received")
        flat_buffers(self.writer, together, names, ranks=ranks, dtype=self._wire, home=self.stream)
        bucket = None
        layout = self.shards.one_after_the_other(f"{name}/bucket", numbers)
        if layout.elements <= self._limit:
            self.layouts.append(layout)
            bucket = self._bucket_buffer(layout.name, layout.name)
        return _Filling(name=name, numbers=tuple(numbers), bucket=bucket)

    def _bucket_buffer(self, name: str, layout: str | None) -> str:
        """Declare the bucket with the layout of its gradients; None if no gradient fits into it."""
        limit, kind = self._limit, Kind.COMMUNICATION
        return self.writer.buffer(name, limit, self.compute, kind, home=self.stream, layout=layout)

    def write_setup(self) -> None:
        """Allocate the bucket and the gradients of sub-groups."""
        # __init__: IPGBucketZ3.buffer; _partition_gradients' `__param_id_to_grad_partition`
        if self.host is not None:
            self.host.write_setup()
        for group in self.shards.groups.trained if self.host is None else ():
            self.writer.prefix = f"setup/{group.name}"
            persist_zeros(self.writer, self.gradient(group), "gradient")
        self.writer.prefix = "setup/bucket"
        self.writer.persist(self._bucket)

    def gradient(self, group: Bucket) -> str:
        """Return the buffer of a sub-group's gradient: the rank's shard."""
        if self.host is not None:
            return self.host.gradient(group)
        return group.shard_buffer(self.writer, "gradient", self.compute, Kind.GRADIENT)

    def collect(self, unit: int, done: str, micro_batch: int) -> None:
        """Put the gradients of `unit` into the bucket; `done` is the end of its backward."""
        for position, run in reversed(self.buckets.trained_runs(unit)):
            number, source = run.bucket, self.passes.transient(unit, position)
            complete = self._left.complete(number)
            if not self.shards.bucket(number).elements:
                self.writer.free(source)
                continue
            if number in self._sums:  # autograd adds the contributions of several units
                target, added = self._sums[number], source
                done = self.writer.copy(f"add/{target}", added, target, accumulate=True)
                self.writer.free(added)
                source = target
            if complete:
                self._sums.pop(number, None)
                self._put(number, source, done, micro_batch)
            else:
                self._sums[number] = source

    def _put(self, number: int, source: str, done: str, micro_batch: int) -> None:
        filling = self._filling[number]
        if filling is not self._open:
            self._reduce(micro_batch)
            self._open = filling
            self._take(filling.bucket)
        if filling.bucket is None:
            self._source, self._written = source, done
            return
        # __add_grad_to_ipg_bucket: the stream that reduces copies, and is recorded
        name, size = self.shards.bucket(number).name, self.shards.bucket(number).elements
        copied = self.writer.copy(
            f"put/{name}",
            source,
            View(buffer=filling.bucket, start=self._starts[number], size=size),
            divisor=self.strategy.train.gradient_accumulation_steps,
            stream=self.stream,
            after=(done,),
        )
        self.writer.free(source, uses=(copied,), mode=self._mode)

    def _take(self, bucket: str | None) -> None:
        """Switch the bucket to the layout of the next gradients; the memory is the same."""
        if bucket is not None and bucket != self._bucket:
            self.writer.free(self._bucket)
            self.writer.allocate(bucket)
            self._bucket = bucket

    def _reduce(self, micro_batch: int) -> None:
        """Reduce the gradients in the bucket, if there are any."""
        writer, filling, stream = self.writer, self._open, self.stream
        if filling is None:
            return
        # __reduce_and_partition_ipg_grads: more than max_param_reduce_events make the host wait
        if len(self._events) > REDUCTIONS_IN_FLIGHT:
            writer.host_wait(f"host_wait/{filling.name}", self._events.popleft())
        source, target = f"{filling.name}/input", f"{filling.name}/received"
        writer.allocate(source)
        self._put_together(filling, source)
        # __avg_scatter_grads calls reduce_scatter_coalesced, which divides before it reduces
        # (runtime/comm/coalesced_collectives.py).
        path, ranks = f"divide/{filling.name}", self.strategy.parallel.data
        writer.copy(path, source, source, divisor=ranks, stream=stream)
        writer.allocate(target)
        writer.reduce_scatter(f"reduce/{filling.name}", DATA, source, target, stream=stream)
        writer.free(source)
        if self.host is None:
            self._settle(filling, target, adds=micro_batch > 0)
        else:
            self.finished = self.host.settle(sorted(filling.numbers), target, micro_batch)
        writer.free(target)
        self._events.append(self.finished)
        self._open = None

    def _put_together(self, filling: _Filling, target: str) -> None:
        """Rearrange all gradients rank by rank."""
        # in reduce_scatter_coalesced: chunks of each rank, padded
        if filling.bucket is not None:
            size = sum(self.shards.bucket(number).elements for number in filling.numbers)
            filled = View(buffer=filling.bucket, size=size)
            divisor = 1
        else:  # one gradient, too large for the bucket
            filled = self.writer.all(self._source)
            divisor = self.strategy.train.gradient_accumulation_steps
        path, stream = f"put_together/{filling.name}", self.stream
        after = (self._written,) if filling.bucket is None else ()
        copied = self.writer.copy(
            path, filled, target, divisor=divisor, by_parameter=True, stream=stream, after=after
        )
        if filling.bucket is None:
            self.writer.free(self._source, uses=(copied,), mode=self._mode)

    def _settle(self, filling: _Filling, received: str, *, adds: bool) -> None:
        """Copy or add the received shards to the gradients of the sub-groups."""
        # partition_grads copies with `micro_step_id` 0, and adds later
        verb, stream = "add" if adds else "set", self.stream
        for group in sorted({self.shards.where[number][0] for number in filling.numbers}):
            target = self.gradient(self.shards.groups.all[group])
            path = f"{verb}/{target}/{filling.name}"
            self.finished = self.writer.copy(
                path, received, target, accumulate=adds, by_parameter=True, stream=stream
            )

    def end_backward(self, micro_batch: int) -> None:
        """Reduce the remaining gradients; the host waits for all reductions."""
        # independent_gradient_partition_epilogue waits for reduce_and_partition_stream
        self._reduce(micro_batch)
        if self._events:
            self._events.clear()
            self.writer.host_wait("host_wait", self.finished)
        self._take(self._first)
