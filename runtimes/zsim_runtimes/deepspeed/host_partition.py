"""Gradient offload of DeepSpeed's stages 1 and 2 with a CPU optimizer.

For each parameter in a reduced bucket, the rank's part is measured on the device. Python reads the
result of its test for infinities at once. The part is then cast to fp32 and copied to its place in
the pinned gradient of the partition. If stage 2 accumulates, the sum of earlier micro-batches is
copied from the host in 16 bits, added to on the device, and copied back. All of this runs on the
stream of the reduction, because a separate stream raced with the next reduction (DeepSpeed 1219).
With `migration_stream`, the cast and the copy run on a separate stream. No stream waits for them
before the end of backward, so reduced gradients stay allocated until they are copied. In DeepSpeed
they were in a bucket that was overwritten meanwhile, in memory for 4.5 buckets.

With `delay_param_update`, the copy of a gradient is followed by one of the parameter, which the CPU
has updated after the previous step. The branch copied masters in fp32, which PyTorch casts on the
CPU; here they are cast after the update.

DeepSpeed keeps the whole parameter if a rank owns a part of it; zsim keeps the part. In DeepSpeed
an owner measures only its parameters; in zsim a rank measures its parts of all parameters.

Functions named in comments are from `DeepSpeedZeroOptimizer` in
`runtime/zero/stage_1_and_2.py`, DeepSpeed 0.19.
"""

from dataclasses import dataclass

from msgspec.structs import replace

from zsim.dtype import DType
from zsim.model.kernel import Kernel, KernelKind
from zsim.schedule.operation import Action, Edge, Role, View
from zsim.schedule.schedule import Kind
from zsim.schedule.schedule_writer import CPU, HOST_POOL
from zsim.strategy.precision import Precision
from zsim.zero.bucket import Bucket
from zsim.zero.step_skeleton import Step, StepPart

LOCAL_OVERFLOW = "local_overflow"
"""Name of the rank's overflow flag so far, on the host."""


@dataclass(frozen=True, slots=True)
class ReducedSlice:
    """A rank's part of a parameter: a view of the whole flat tensor, in a reduced bucket."""

    flat: Bucket
    parameter: str
    view: View


def norm_part(parameter: str) -> str:
    """Return the buffer of the squared norm of a rank's part of a parameter."""
    return f"{parameter}/norm_part"


class HostPartitions(StepPart):
    """The partition's gradients in pinned memory, and the copies of reduced slices to them."""

    def __init__(self, step: Step, *, stream: str, copies: str, pinned: bool) -> None:
        super().__init__(step)
        self._stream = stream
        self.copies = copies
        self._pinned = pinned
        self._delays = step.strategy.delays_updates
        self._flats = step.buckets.trained
        self._optimizer = step.strategy.train.precision.optimizer
        largest = max(each.elements for each in step.model.parameters)
        self._temporary = self.writer.buffer(
            "temporary_gradient", largest, self.compute, Kind.WORKSPACE, home=stream
        )
        micro_batches = step.strategy.train.gradient_accumulation_steps
        self.accumulates = step.strategy.zero.stage == 2 and micro_batches > 1
        self.measured: dict[str, list[str]] = {flat.name: [] for flat in self._flats}
        self.copied = ""  # the last copy to gradients of the partition

    def write_setup(self) -> None:
        """Allocate the persistent host memory, and device memory for one parameter."""
        # __init__: `single_partition_of_fp32_groups[i].grad`, `accumulated_grads_in_cpu`,
        # `param_buffer_of_bit16_for_cpu_offload_groups`, `temp_grad_buffer_for_gpu_offload`
        for flat in self._flats:
            self.writer.prefix = f"setup/{flat.name}/offload"
            pinned = [self.gradient(flat), self.bounce(flat)]
            for name in (*pinned, *([self._sum(flat)] if self.accumulates else [])):
                self.writer.fill(f"zero/{name}", self.writer.persist(name), 0.0, stream=CPU)
            master = self.states[flat.index].master
            if self._delays and master is not None:
                self.writer.copy("cast", master, self.bounce(flat), stream=CPU)
        self.writer.prefix = "setup/offload"
        if self.accumulates:
            self.writer.persist(self._temporary)
            self.writer.fill("zero", self._temporary, 0.0, stream=self._stream)

    def gradient(self, flat: Bucket) -> str:
        """Return the buffer of the partition's gradient in the optimizer's dtype."""
        return self._pinned_shard(flat, "gradient", self._optimizer, Kind.GRADIENT)

    def bounce(self, flat: Bucket) -> str:
        """Return the buffer through which updated parameters go to the device."""
        return self._pinned_shard(flat, "bounce", self.compute, Kind.COMMUNICATION)

    def _sum(self, flat: Bucket) -> str:
        return self._pinned_shard(flat, "sum", self.compute, Kind.GRADIENT)

    def _pinned_shard(self, flat: Bucket, name: str, dtype: DType, kind: Kind) -> str:
        return flat.shard_buffer(self.writer, name, dtype, kind, pool=HOST_POOL, home=CPU)

    def keep(self, each: ReducedSlice, *, first: bool, last: bool) -> str:
        """Process a reduced slice; return the last operation that reads its bucket."""
        # copy_grads_in_partition
        done = ""
        if self.accumulates:
            done = self._accumulate(each, first=first)
        if last:
            measured = self._measure(each)
            done = self._copy_out(each, measured)
        return done

    def _accumulate(self, each: ReducedSlice, *, first: bool) -> str:
        """Add the host's sum of a slice on the device, and copy the new sum to the host."""
        # async_accumulate_grad_in_cpu_via_gpu
        writer, stream = self.writer, self._stream
        kept = replace(each.view, buffer=self._sum(each.flat), origin=None)
        if not first:
            landed = replace(each.view, buffer=self._temporary, origin=0)
            self._crossed(f"fetch/{each.parameter}", kept, landed)
            path = f"add/{each.parameter}"
            writer.copy(path, landed, each.view, accumulate=True, stream=stream)
        return self._crossed(f"store/{each.parameter}", each.view, kept)

    def _measure(self, each: ReducedSlice) -> str:
        """Measure the norm, and test for infinities; return the copy that Python reads."""
        # set_norm_for_param_grad_in_gpu, update_offload_overflow_tracker_for_param_grad
        writer = self.writer
        part, size = norm_part(each.parameter), min(each.view.size, each.flat.shard)
        measure(self, Action.NORM, each.view, part, size=size, stream=self._stream)
        self.measured[each.flat.name].append(each.parameter)
        flag, held = f"{each.parameter}/overflow_part", self._optimizer
        # Except with fp16, the answer has no effect: the norm is read in its place.
        scales = self.strategy.train.precision is Precision.FP16
        action = Action.FINITE if scales else Action.NORM
        writer.buffer(flag, 1, held, Kind.WORKSPACE, home=self._stream)
        tested = measure(self, action, each.view, flag, size=size, stream=self._stream)
        answer = writer.buffer(
            f"{flag}/host", 1, held, Kind.WORKSPACE, pool=HOST_POOL, home=self._stream
        )
        writer.allocate(answer)
        path = f"overflow/{each.parameter}"
        read = writer.copy(path, flag, answer, stream=self._stream, after=(tested,))
        writer.free(flag)
        writer.host_wait(f"{path}/wait", read)
        uses: tuple[str, ...] = ()
        if scales:
            total = local_overflow(self)
            adds = total in writer.alive
            if not adds:
                writer.allocate(total)
            uses = (writer.copy(f"{path}/add", answer, total, accumulate=adds, stream=CPU),)
            writer.host_wait(f"{path}/add/wait", uses[0])
        writer.free(answer, uses=uses)
        return read

    def _copy_out(self, each: ReducedSlice, measured: str) -> str:
        """Cast a slice and copy it to the partition's gradient; return its last reader."""
        # async_inplace_copy_grad_to_fp32_buffer_from_gpu
        writer, stream, source, cast, read = self.writer, self.copies, each.view, "", ""
        after: tuple[Edge, ...] = (measured,) if stream != self._stream else ()
        if writer.buffers[source.buffer].dtype is not self._optimizer:
            cast = writer.buffer(
                f"{each.parameter}/cast_gradient",
                source.size,
                self._optimizer,
                Kind.WORKSPACE,
                home=stream,
            )
            writer.allocate(cast)
            path, target = f"cast/{each.parameter}", replace(source, buffer=cast, origin=0)
            read = writer.copy(path, source, target, stream=stream, after=after)
            source, after = target, ()
        kept = replace(source, buffer=self.gradient(each.flat), origin=None)
        path = f"offload/{each.parameter}"
        copied = self._crossed(path, source, kept, stream=stream, after=after)
        self.copied = self._deliver(each) if self._delays else copied
        if not cast:
            return copied
        writer.free(cast)
        return read

    def _deliver(self, each: ReducedSlice) -> str:
        """Copy a slice of the last update to the device; its gradient is already complete."""
        # "copy p32 to p16" in async_inplace_copy_grad_to_fp32_buffer_from_gpu of the branch
        view, parameter = each.view, self.states[each.flat.index].parameter
        source = replace(view, buffer=self.bounce(each.flat), origin=None)
        target = replace(view, buffer=parameter, origin=view.start)
        return self.writer.copy(f"deliver/{each.parameter}", source, target, stream=self.copies)

    def _crossed(
        self,
        path: str,
        source: View,
        target: View,
        *,
        stream: str | None = None,
        after: tuple[Edge, ...] = (),
    ) -> str:
        """Copy to the host or back; with pageable memory, the host waits for the copy."""
        copied = self.writer.copy(path, source, target, stream=stream or self._stream, after=after)
        if not self._pinned:
            self.writer.host_wait(f"{path}/wait", copied)
        return copied


def measure(
    part: StepPart, action: Action, view: View, name: str, *, size: int, stream: str
) -> str:
    """Measure a gradient on the device into a scalar (fp64 if new); return the operation.

    A sum of fp64 parts is rounded only once.
    """
    writer = part.writer
    writer.buffer(name, 1, DType.FP64, Kind.WORKSPACE, home=stream)
    writer.allocate(name)
    dtype = writer.buffers[view.buffer].dtype
    read = size * dtype.size_bytes
    kernel = Kernel(kind=KernelKind.ELEMENTWISE, flops=2 * size, bytes=read, dtype=dtype)
    return writer.compute(
        f"measure/{name}",
        action,
        [(Role.GRADIENT, view), (Role.OUTPUT, writer.all(name))],
        stream=stream,
        kernels=(kernel,),
    )


def local_overflow(part: StepPart) -> str:
    """Return the buffer of the rank's overflow flag so far."""
    dtype = part.strategy.train.precision.optimizer
    return part.writer.buffer(LOCAL_OVERFLOW, 1, dtype, Kind.WORKSPACE, pool=HOST_POOL, home=CPU)
