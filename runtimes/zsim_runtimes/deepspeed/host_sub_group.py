"""Gradient offload of DeepSpeed's stage 3 with a CPU optimizer: three copies over the link.

A rank's part of each reduced gradient is copied to a pinned buffer in the model's dtype; in later
micro-batches it is fetched, added to, and copied back. For its norm, the device holds it once more,
in the first micro-batch as a copy of that buffer. In the last micro-batch it is cast to fp32 and
copied to the gradient of its sub-group (DeepSpeed 4113). All of this runs on the stream of the
reduction.

Functions named in comments are from DeepSpeed 0.19, of `DeepSpeedZeroOptimizer_Stage3` in
`runtime/zero/stage3.py`.
"""

from collections.abc import Sequence

from zsim.dtype import DType
from zsim.schedule.layout import Layout
from zsim.schedule.operation import Action, View
from zsim.schedule.schedule import Kind
from zsim.schedule.schedule_writer import CPU, HOST_POOL
from zsim.zero.bucket import Bucket
from zsim.zero.step_skeleton import Step, StepPart
from zsim_runtimes.deepspeed.filed_gradients import FiledGradients
from zsim_runtimes.deepspeed.host_partition import measure, norm_part
from zsim_runtimes.deepspeed.options import DeepSpeed, OffloadDevice
from zsim_runtimes.deepspeed.stage_3_shards import Shards


class HostSubGroups(StepPart):
    """Gradients of sub-groups in host memory, and the copies of reduced gradients to them."""

    def __init__(self, step: Step, shards: Shards, *, stream: str, pinned: bool) -> None:
        super().__init__(step)
        self._shards = shards
        self._stream = stream
        self._pinned = pinned
        self._optimizer = step.strategy.train.precision.optimizer
        self._leaving: list[tuple[tuple[int, int], View]] = []
        self.files: FiledGradients | None = None
        if step.strategy.options(DeepSpeed).offload_optimizer.device is OffloadDevice.NVME:
            self.files = FiledGradients(step, shards, stream=stream)
        self._last = step.strategy.train.gradient_accumulation_steps - 1
        # A norm counts one of the copies on several tensor ranks; the layout marks copies.
        self._copied = {
            bucket.name: bucket.layout
            for bucket in shards.parameters.all
            if not bucket.frozen and any(piece.copies for piece in bucket.layout.pieces)
        }

    @property
    def layouts(self) -> tuple[Layout, ...]:
        """Return the layouts of measured gradients that tensor ranks hold copies of."""
        return tuple(self._copied.values())

    def write_setup(self) -> None:
        """Allocate the persistent host memory."""
        # _setup_for_real_optimizer: `grad_partitions_flat_buffer`; initialize_optimizer_states:
        # a gradient in fp32 for each sub-group
        if self.files is not None:
            self.files.write_setup()
        for group in self._shards.groups.trained:
            self.writer.prefix = f"setup/{group.name}/offload"
            kept = [self.sums(group), *([] if self._is_filed(group) else [self.gradient(group)])]
            for name in kept:
                self.writer.fill(f"zero/{name}", self.writer.persist(name), 0.0, stream=CPU)

    def sums(self, group: Bucket) -> str:
        """Return the pinned buffer that accumulates the gradients of micro-batches."""
        return self._shard(group, "sum", self.compute)

    def gradient(self, group: Bucket) -> str:
        """Return the buffer of a sub-group's gradient in the optimizer's dtype."""
        if self.files is not None and self.files.holds(group):
            return self.files.file(group)
        return self._shard(group, "gradient", self._optimizer)

    def _shard(self, group: Bucket, name: str, dtype: DType) -> str:
        kind = Kind.GRADIENT
        return group.shard_buffer(self.writer, name, dtype, kind, pool=HOST_POOL, home=CPU)

    def _is_filed(self, group: Bucket) -> bool:
        return self.files is not None and self.files.holds(group)

    def settle(self, numbers: Sequence[int], received: str, micro_batch: int) -> str:
        """Process the received gradients of each parameter; return the last operation."""
        # partition_grads
        done, start = "", 0
        for number in numbers:
            size = self._shards.bucket(number).shard
            view = View(buffer=received, start=start, size=size)
            done = self._take(number, view, micro_batch)
            start += size
        # _swap_out_offload_fp32_gradients: sub-group by sub-group
        for where, own in sorted(self._leaving, key=lambda each: each[0][0]):
            assert self.files is not None
            self.files.take(self._shards.groups.all[where[0]], where[1], own)
        self._leaving.clear()
        return done

    def _take(self, number: int, received: View, micro_batch: int) -> str:
        writer, stream, bucket = self.writer, self._stream, self._shards.bucket(number)
        group = self._shards.groups.all[self._shards.where[number][0]]
        kept = self._shards.shard(number, self.sums(group))
        again = self._again(number)
        writer.allocate(again)
        if micro_batch:
            self._crossed(f"fetch/{again}", kept, writer.all(again))
            writer.copy(f"add/{again}", received, again, accumulate=True, stream=stream)
            done = self._crossed(f"store/{again}", writer.all(again), kept)
        else:
            source = self._cast(received, f"{bucket.name}/gradient_cast", self.compute)
            self._crossed(f"store/{again}", source, kept)
            if source != received:
                writer.free(source.buffer)
            done = self._crossed(f"fetch/{again}", kept, writer.all(again))
        leaves = micro_batch == self._last and self._is_filed(group)
        if micro_batch == self._last:
            done = self._copy_out(bucket.layout.pieces[0].parameter, number, writer.all(again))
        if not leaves or self._leaving[-1][1].buffer != again:
            writer.free(again)
        return done

    def _again(self, number: int) -> str:
        """Declare a second device copy of a gradient; its layout tells if a norm counts it here."""
        # complete_grad_norm_calculation_for_cpu_offload: `is_model_parallel_parameter(p) or
        # (self.model_parallel_rank == 0)`
        bucket, stream, kind = self._shards.bucket(number), self._stream, Kind.WORKSPACE
        name = "gradient_again"
        if bucket.name in self._copied:
            return bucket.shard_buffer(self.writer, name, self.compute, kind, home=stream)
        path = f"{bucket.name}/{name}"
        return self.writer.buffer(path, bucket.shard, self.compute, kind, home=stream)

    def _copy_out(self, parameter: str, number: int, again: View) -> str:
        """Measure a gradient, cast it and copy it to its place in the sub-group."""
        # _offload_grad_partition_at_boundary
        group = self._shards.groups.all[self._shards.where[number][0]]
        source = self._cast(again, f"{parameter}/cast_gradient", self._optimizer)
        part, size = norm_part(parameter), again.size
        measured = measure(self, Action.NORM, again, part, size=size, stream=self._stream)
        if self._is_filed(group):
            self._leaving.append((self._shards.where[number], source))
            return measured
        kept = self._shards.shard(number, self.gradient(group))
        copied = self._crossed(f"offload/{parameter}", source, kept)
        if source != again:
            self.writer.free(source.buffer)
        return copied

    def _cast(self, view: View, name: str, dtype: DType) -> View:
        """Return the view in `dtype`: the same, or a view of a newly allocated copy."""
        writer = self.writer
        if writer.buffers[view.buffer].dtype is dtype:
            return view
        writer.buffer(name, view.size, dtype, Kind.WORKSPACE, home=self._stream)
        writer.allocate(name)
        writer.copy(f"cast/{name}", view, name, stream=self._stream)
        return writer.all(name)

    def _crossed(self, path: str, source: View, target: View) -> str:
        """Copy to the host or back; with pageable memory, the host waits for the copy."""
        copied = self.writer.copy(path, source, target, stream=self._stream)
        if not self._pinned:
            self.writer.host_wait(f"{path}/wait", copied)
        return copied
