"""The end of a step of DeepSpeed whose optimizer runs on the CPU.

Functions named in comments are from DeepSpeed 0.19, of `DeepSpeedZeroOptimizer` in
`runtime/zero/stage_1_and_2.py` unless another file is named.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from zsim.dtype import DType
from zsim.schedule.operation import Action, FreeMode
from zsim.schedule.operation_list import COMPUTE
from zsim.schedule.schedule import Kind
from zsim.schedule.schedule_writer import CPU, HOST_POOL, NVME_POOL, ScheduleWriter
from zsim.strategy.offload import MemoryTier
from zsim.zero.updated_tensor import UpdatedTensor
from zsim_runtimes.deepspeed.filed_parameters import FiledParameters
from zsim_runtimes.deepspeed.host_partition import LOCAL_OVERFLOW, norm_part
from zsim_runtimes.deepspeed.options import DeepSpeed
from zsim_runtimes.host_update import BlockingHostStep


class NormPerGroupOnHost(BlockingHostStep):
    """An update on the CPU, whose norms are reduced separately, one number at a time."""

    # scaled_global_norm, and _get_norm_groups in stage3.py: Python reads a norm for each group,
    # with or without clipping
    def norm(self, writer: ScheduleWriter) -> str | None:
        """Return the buffer of the sum of all norms, reduced in any case; None without clipping."""
        names = ["norm", *(f"norm{number}" for number in range(1, len(self.tensors)))]
        for name, item in zip(names, self.tensors, strict=True):
            self._measure_norm(writer, name, (item,))
            came = writer.path(f"{name}/download")
            writer.host_wait(f"{name}/download/wait", came)
            writer.free(name, uses=(came,))
        total = self._on_host(writer, names[0])
        for name in names[1:]:  # torch.linalg.vector_norm of them all
            after = (writer.path(f"{name}/download"),)
            other = self._on_host(writer, name)
            writer.copy(f"norm/add/{name}", other, total, accumulate=True, stream=CPU, after=after)
            writer.free(other)
        if self.strategy.train.clip_norm is None:
            writer.free(total, uses=(writer.path(self.norm_ready),))
            return None
        return total

    def number(self, writer: ScheduleWriter, name: str, home: str) -> str:
        """Declare an fp64 scalar in host memory."""
        return writer.buffer(name, 1, DType.FP64, Kind.WORKSPACE, pool=HOST_POOL, home=home)


class HostPartitionStep(NormPerGroupOnHost):
    """The update of stages 1 and 2: norms measured while gradients were reduced are added up.

    A delayed update stays in pinned memory until the next backward, which delivers it.
    """

    def write(self) -> None:
        """Write the step; with delayed updates, gather the delivered parameters at its end."""
        super().write()
        if self.strategy.delays_updates:  # step_with_param_delay, after the update
            self._gather(self.writer)

    @property
    def parameters(self) -> MemoryTier:
        """Tier in which parameters are kept."""
        return MemoryTier.DEVICE

    def measured(
        self,
        writer: ScheduleWriter,
        action: Action,
        name: str,
        target: str,
        *,
        trained: Sequence[UpdatedTensor],
    ) -> str:
        """Add up the measures of each parameter."""
        if action is Action.FINITE:  # has_overflow
            return self._copy_total(writer, name, LOCAL_OVERFLOW, target)
        # complete_grad_norm_calculation_for_cpu_offload: `.item()` of each parameter's norm
        (item,) = trained
        total = self.number(writer, f"{name}/sum", CPU)
        adds = False
        for part in _norm_parts(item):
            path = f"{name}/item/{part}"
            landed = self.number(writer, f"{part}/host", COMPUTE)
            writer.allocate(landed)
            came = writer.copy(path, part, landed, stream=COMPUTE, after=self.after)
            writer.host_wait(f"{path}/wait", came)
            if not adds:
                writer.allocate(total)
            added = writer.copy(
                f"{path}/add", landed, total, accumulate=adds, stream=CPU, after=(came,)
            )
            writer.free(landed, uses=(added,), mode=FreeMode.HOST)
            writer.free(part)
            adds = True
        return self._copy_total(writer, name, total, target)

    def _copy_total(self, writer: ScheduleWriter, name: str, total: str, target: str) -> str:
        """Copy a scalar on the host and free it; it is zero if nothing was measured."""
        if total not in writer.alive:
            return writer.fill(f"{name}/measure", target, 0.0, stream=CPU)
        measured = writer.copy(f"{name}/measure", total, target, stream=CPU, after=self.after)
        writer.free(total)
        return measured

    def skipped(self, writer: ScheduleWriter) -> None:
        """Free the norms of a step that updates nothing."""
        # reset_cpu_buffers
        for item in self.tensors:
            writer.free(*_norm_parts(item))

    def update_one(self, writer: ScheduleWriter, item: UpdatedTensor, norm: str | None) -> None:
        """Update a partition, and copy it to the device through pinned memory."""
        # step: unscale_and_clip_grads, _optimizer_step, `bit16_partition_buffer`
        bounce = replace(item, parameter=writer.all(f"{item.name}/bounce"))
        updated = self.apply_one(writer, bounce, norm)
        outer, writer.prefix = writer.prefix, f"{writer.prefix}/{item.name}"
        writer.host_wait("wait", updated)
        if not self.strategy.delays_updates:
            source, after = bounce.parameter, (updated,)
            writer.copy("upload", source, item.parameter, stream=COMPUTE, after=after)
        writer.prefix = outer

    def completed(self, writer: ScheduleWriter) -> None:
        """Gather all partitions, once the last copy is issued."""
        # `step` calls all_gather_dp_groups (runtime/utils.py) after its loop
        if not self.strategy.delays_updates:
            self._gather(writer)

    def _gather(self, writer: ScheduleWriter) -> None:
        """Gather all partitions on the device."""
        outer = writer.prefix
        for item in self.tensors:
            writer.prefix = f"{outer}/{item.name}"
            self.updated(writer, item, writer.path("upload"))
        writer.prefix = outer


class HostSubGroupStep(NormPerGroupOnHost):
    """The update of stage 3, sub-group by sub-group.

    `filed_parameters` holds the parameters that are in files.
    """

    filed_parameters: FiledParameters

    @property
    def parameters(self) -> MemoryTier:
        """Tier of the parameters that are not in files."""
        offloads = self.strategy.options(DeepSpeed).offload_param.is_on
        return MemoryTier.HOST if offloads else MemoryTier.DEVICE

    def measured(
        self,
        writer: ScheduleWriter,
        action: Action,
        name: str,
        target: str,
        *,
        trained: Sequence[UpdatedTensor],
    ) -> str:
        """Add up norms of parameters on the device; test the accumulated gradients on the host."""
        if action is Action.FINITE:  # has_overflow reads `grad_partitions_flat_buffer` on the CPU
            sums = [replace(each, measured=writer.all(f"{each.name}/sum")) for each in trained]
            return super().measured(writer, action, name, target, trained=sums)
        # complete_grad_norm_calculation_for_cpu_offload of stage3.py
        (item,) = trained
        parts = [*_norm_parts(item)]
        if not parts:
            return writer.fill(f"{name}/measure", target, 0.0, stream=CPU)
        after, total = self.after, parts[0]
        for part in parts[1:]:
            path = f"{name}/add/{part}"
            writer.copy(path, part, total, accumulate=True, stream=COMPUTE, after=after)
            after = ()
        landed = self.number(writer, f"{name}/item", COMPUTE)
        writer.allocate(landed)
        came = writer.copy(f"{name}/item", total, landed, stream=COMPUTE, after=after)
        writer.host_wait(f"{name}/item/wait", came)
        writer.free(*parts)
        measured = writer.copy(f"{name}/measure", landed, target, stream=CPU, after=(came,))
        writer.free(landed, uses=(measured,), mode=FreeMode.HOST)
        return measured

    def skipped(self, writer: ScheduleWriter) -> None:
        """Free the norms of a step that updates nothing."""
        for item in self.tensors:
            writer.free(*_norm_parts(item))

    def update_one(self, writer: ScheduleWriter, item: UpdatedTensor, norm: str | None) -> None:
        """Update a sub-group, and move its parameters to their tier."""
        # _reassign_or_swap_out_partitioned_parameters: `data.copy_` casts on the host, and copies
        # pageable memory: the host waits for the copy
        in_file = writer.buffers[item.parameter.buffer].pool == NVME_POOL
        if self.parameters is not MemoryTier.DEVICE and not in_file:
            super().update_one(writer, item, norm)
            return
        compute, kept = self.strategy.train.precision.compute, item.parameter
        landing = writer.buffer(
            f"{item.name}/updated", kept.size, compute, Kind.WORKSPACE, pool=HOST_POOL, home=CPU
        )
        writer.allocate(landing)
        updated = self.apply_one(writer, replace(item, parameter=writer.all(landing)), norm)
        outer, writer.prefix = writer.prefix, f"{writer.prefix}/{item.name}"
        writer.host_wait("wait", updated)
        if in_file:
            self.filed_parameters.write_back(writer, item.name, landing, updated)
        else:
            moved = writer.copy("upload", landing, kept, stream=COMPUTE, after=(updated,))
            writer.host_wait("upload/wait", moved)
        writer.free(landing)
        writer.prefix = outer


def _norm_parts(item: UpdatedTensor) -> Iterator[str]:
    return (norm_part(piece.parameter) for piece in item.layout.pieces if piece.size)
