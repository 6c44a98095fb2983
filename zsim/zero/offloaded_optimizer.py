"""ZeRO-Offload: gradients go to the host, which keeps the optimizer states and updates them.

Ren et al. 2021, sections 3 and 4: a rank copies its part of the reduced gradients to the host
during the backward of earlier layers, in 16 bits. A host thread casts, unscales and clips them and
applies them to fp32 masters. The result is cast to 16 bits and copied back while the thread updates
the next bucket. Every rank moves only its own part, over its own link.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from zsim.schedule.operation import Action, Reduction, View
from zsim.schedule.schedule import Kind
from zsim.schedule.schedule_writer import (
    CPU,
    FROM_HOST,
    HOST_POOL,
    NVME_WRITE,
    TO_HOST,
    ScheduleWriter,
)
from zsim.strategy.offload import MemoryTier
from zsim.zero.optimizer_step import OptimizerStep
from zsim.zero.updated_tensor import UpdatedTensor


@dataclass(frozen=True, slots=True)
class _UpdatedOnHost:
    """A tensor that the host has updated, the operation, and the view that keeps its parameters."""

    item: UpdatedTensor
    kept: View
    operation: str


class HostOptimizerStep(OptimizerStep):
    """An update on the host, of states that are kept there.

    Attributes:
        to_device: the stream of copies to the device.
        from_device: the stream of copies from the device.
    """

    processor = CPU
    pool = HOST_POOL
    number_home = FROM_HOST
    norm_ready = "norm/download"
    to_device = FROM_HOST
    from_device = TO_HOST

    @property
    def parameters(self) -> MemoryTier:
        """Tier in which parameters are kept."""
        return self.strategy.offload.parameters

    def begin(self) -> None:
        """Start with no updates in flight."""
        self._waiting: list[_UpdatedOnHost] = []
        self._kept: dict[str, View] = {}

    def measure(
        self,
        writer: ScheduleWriter,
        action: Action,
        target: str,
        reduction: Reduction,
        *,
        trained: Sequence[UpdatedTensor],
        group: str,
    ) -> None:
        """Measure gradients on the host, and reduce the number over ranks through the device."""
        host = self._on_host(writer, target)
        writer.allocate(host)
        measured = self.measured(writer, action, target, host, trained=trained)
        writer.host_wait(f"{target}/wait", measured)
        up = writer.copy(f"{target}/upload", host, target, stream=self.to_device, after=(measured,))
        path, after = f"{target}/reduce", (up,)
        reduced = writer.all_reduce(
            path, group, target, reduction=reduction, stream=self.stream, after=after
        )
        if action is Action.NORM:
            out = self.from_device
            writer.copy(f"{target}/download", target, host, stream=out, after=(reduced,))
        else:
            writer.free(host, uses=(up,))

    def _on_host(self, writer: ScheduleWriter, number: str) -> str:
        dtype = self.strategy.train.precision.optimizer
        return writer.buffer(f"{number}/host", 1, dtype, Kind.WORKSPACE, pool=HOST_POOL, home=CPU)

    def norm(self, writer: ScheduleWriter) -> str | None:
        """Return the buffer of the squared norm in host memory; None without clipping."""
        number = super().norm(writer)
        if number is None:
            return None
        writer.free(number, uses=(writer.path("norm/download"),))
        return self._on_host(writer, number)

    def update_one(self, writer: ScheduleWriter, item: UpdatedTensor, norm: str | None) -> None:
        """Update a tensor on the host, and send the previous tensor's parameters to their tier."""
        self._kept[item.name] = item.parameter
        super().update_one(writer, self._landed(writer, item), norm)

    def _landed(self, writer: ScheduleWriter, item: UpdatedTensor) -> UpdatedTensor:
        """Return the tensor with its updated parameters in host memory."""
        if self.parameters is MemoryTier.HOST:
            return item
        landing = writer.buffer(
            f"{item.name}/updated",
            item.parameter.size,
            self.strategy.train.precision.compute,
            Kind.COMMUNICATION,
            pool=HOST_POOL,
            home=CPU,
        )
        writer.allocate(landing)
        return replace(item, parameter=writer.all(landing))

    def finish_one(self, writer: ScheduleWriter, item: UpdatedTensor, updated: str) -> None:
        """Queue the tensor, and send the one before it, now that the thread has the next update."""
        self._waiting.append(_UpdatedOnHost(item, self._kept[item.name], updated))
        if len(self._waiting) > 1:
            self._send(writer, self._waiting.pop(0))

    def completed(self, writer: ScheduleWriter) -> None:
        """Send the parameters of the last tensor."""
        while self._waiting:
            self._send(writer, self._waiting.pop(0))

    def _send(self, writer: ScheduleWriter, done: _UpdatedOnHost) -> None:
        """Move updated parameters to the tier that keeps them, and free the gradient."""
        outer, writer.prefix = writer.prefix, f"step/update/{done.item.name}"
        landing = done.item.parameter
        moved = done.operation
        if self.parameters is MemoryTier.NVME:
            moved = writer.write_file(
                "write", landing, done.kept, stream=NVME_WRITE, after=(done.operation,)
            )
            writer.free(landing.buffer, uses=(moved,))
        writer.host_wait("wait", done.operation)
        if self.parameters is MemoryTier.DEVICE:
            moved = writer.copy(
                "upload", landing, done.kept, stream=FROM_HOST, after=(done.operation,)
            )
            writer.free(landing.buffer, uses=(moved,))
        self.updated(writer, done.item, moved)
        if not done.item.keeps_gradient:
            writer.free(done.item.gradient.buffer, uses=(done.operation,))
        writer.prefix = outer
