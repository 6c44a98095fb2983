"""ZeRO-Offload: gradients go to the host, which keeps the optimizer's states and updates them.

Ren et al. 2021, sections 3 and 4: a rank copies its part of the reduced gradients out beside the
backward of earlier layers, in 16 bits; a thread of the host casts, unscales, clips and applies them
to fp32 masters; the result is cast to 16 bits and copied back while the thread updates the next
bucket. Every rank moves its own part alone, over its own link.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from zsim.dtype import DType
from zsim.schedule.operation import Action, FreeMode, Reduction, Role, View
from zsim.schedule.schedule import Kind
from zsim.schedule.schedule_writer import (
    CPU,
    FROM_HOST,
    HOST_POOL,
    NVME_POOL,
    NVME_WRITE,
    TO_HOST,
    ScheduleWriter,
)
from zsim.strategy.offload import MemoryTier
from zsim.strategy.precision import Precision
from zsim.strategy.strategy import Strategy
from zsim.zero.bucket import Bucket
from zsim.zero.optimizer_step import OptimizerStep, UpdatedTensor
from zsim.zero.reduce import Reduced
from zsim.zero.state import own_view, updated_view


def measures(strategy: Strategy) -> Iterator[Action]:
    """Yield what is measured of gradients before they are applied."""
    if strategy.train.precision is Precision.FP16:
        yield Action.FINITE
    if strategy.train.clip_norm is not None:
        yield Action.NORM


def part_of(action: Action, bucket: str) -> str:
    """Return the buffer of what is measured of a bucket's gradients alone."""
    return f"{bucket}/{action}_part"


class GradientsToHost:
    """Copies reduced gradients to the host, and frees the device's when the next are on the way."""

    def __init__(self, writer: ScheduleWriter, strategy: Strategy) -> None:
        self._writer = writer
        self._strategy = strategy
        self._leaving: list[tuple[str, str]] = []
        self._written: list[tuple[str, tuple[str, ...]]] = []

    def copy_out(self, bucket: Bucket, reduced: Reduced) -> Reduced:
        """Copy what the rank updates of a bucket's gradients to the host; return it there."""
        writer, compute = self._writer, self._strategy.train.precision.compute
        declare = bucket.buffer if self._strategy.zero.stage == 0 else bucket.shard_buffer
        name = "gradient_on_host"
        host = declare(writer, name, compute, Kind.GRADIENT, home=TO_HOST, pool=HOST_POOL)
        writer.allocate(host)
        source = updated_view(writer, bucket, reduced.buffer, self._strategy)
        path, after = f"offload/{bucket.name}", (reduced.operation,)
        copied = writer.copy(path, source, host, stream=TO_HOST, after=after)
        if not self._strategy.zero.contiguous:
            self.finish()
            self._leaving.append((reduced.buffer, copied))
        if self._strategy.offload.files_gradients:
            return self._to_file(bucket, host, copied)
        return Reduced(host, copied)

    def _to_file(self, bucket: Bucket, host: str, copied: str) -> Reduced:
        """Measure gradients that have come to the host, and write them to a file.

        The host waits for the write of the bucket before it: its memory is used again.
        """
        writer, held = self._writer, self._writer.buffers[host]
        uses = [self._measure(bucket, host, action, copied) for action in measures(self._strategy)]
        name = writer.buffer(
            f"{bucket.name}/gradient_in_file",
            held.elements,
            held.dtype,
            Kind.GRADIENT,
            pool=NVME_POOL,
            home=NVME_WRITE,
            layout=held.layout,
            shard=held.shard,
        )
        writer.allocate(name)
        path = f"offload/{bucket.name}/write"
        written = writer.write_file(path, host, name, stream=NVME_WRITE, after=(copied,))
        self._free_written()
        self._written.append((host, (*uses, written)))
        return Reduced(name, written)

    def _measure(self, bucket: Bucket, host: str, action: Action, copied: str) -> str:
        """Measure the gradients of a bucket on the host, whose number is added up later.

        In fp64, so that a sum of parts is rounded as often as one of everything: once.
        """
        writer, view = self._writer, own_view(self._writer, bucket, host)
        number = writer.buffer(
            part_of(action, bucket.name), 1, DType.FP64, Kind.WORKSPACE, pool=HOST_POOL, home=CPU
        )
        writer.allocate(number)
        return writer.compute(
            f"offload/{bucket.name}/{action}",
            action,
            [(Role.GRADIENT, view), (Role.OUTPUT, writer.all(number))],
            stream=CPU,
            after=(copied,),
        )

    def _free_written(self) -> None:
        while self._written:
            host, uses = self._written.pop()
            self._writer.free(host, uses=uses, mode=FreeMode.HOST)

    def finish(self) -> None:
        """Give the device's memory of all that was copied out back."""
        while self._leaving:
            buffer, copied = self._leaving.pop()
            self._writer.free(buffer, uses=(copied,))

    def end(self) -> None:
        """Give the memory of all that was copied out back, and of what was written on the host."""
        self.finish()
        self._free_written()


@dataclass(frozen=True, slots=True)
class _UpdatedOnHost:
    """A tensor that the host has updated, by an operation, and where its parameters are kept."""

    item: UpdatedTensor
    kept: View
    operation: str


class HostOptimizerStep(OptimizerStep):
    """An update on the host, of states that are kept there."""

    processor = CPU
    pool = HOST_POOL
    number_home = FROM_HOST
    norm_ready = "norm/download"

    def begin(self) -> None:
        """Begin with nothing on its way."""
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
        """Measure gradients on the host, and reduce the number over ranks by way of the device."""
        host = self._on_host(writer, target)
        writer.allocate(host)
        measured = self.measured(writer, action, target, host, trained=trained)
        writer.host_wait(f"{target}/wait", measured)
        up = writer.copy(f"{target}/upload", host, target, stream=FROM_HOST, after=(measured,))
        path, after = f"{target}/reduce", (up,)
        reduced = writer.all_reduce(
            path, group, target, reduction=reduction, stream=self.stream, after=after
        )
        if action is Action.NORM:
            writer.copy(f"{target}/download", target, host, stream=TO_HOST, after=(reduced,))
        else:
            writer.free(host, uses=(up,))

    def _on_host(self, writer: ScheduleWriter, number: str) -> str:
        dtype = self.strategy.train.precision.optimizer
        return writer.buffer(f"{number}/host", 1, dtype, Kind.WORKSPACE, pool=HOST_POOL, home=CPU)

    def norm(self, writer: ScheduleWriter) -> str | None:
        """Return the buffer of the squared norm in the host's memory; None without clipping."""
        number = super().norm(writer)
        if number is None:
            return None
        writer.free(number, uses=(writer.path("norm/download"),))
        return self._on_host(writer, number)

    def update_one(self, writer: ScheduleWriter, item: UpdatedTensor, norm: str | None) -> None:
        """Update a tensor on the host, and send the parameters of the one before where they go."""
        self._kept[item.name] = item.parameter
        super().update_one(writer, self._landed(writer, item), norm)

    def _landed(self, writer: ScheduleWriter, item: UpdatedTensor) -> UpdatedTensor:
        """Return the tensor with its updated parameters in the host's memory."""
        if self.strategy.offload.parameters is MemoryTier.HOST:
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
        """Let the tensor wait until the thread has begun with the next one."""
        self._waiting.append(_UpdatedOnHost(item, self._kept[item.name], updated))
        if len(self._waiting) > 1:
            self._send(writer, self._waiting.pop(0))

    def completed(self, writer: ScheduleWriter) -> None:
        """Send the parameters of the last tensor."""
        while self._waiting:
            self._send(writer, self._waiting.pop(0))

    def _send(self, writer: ScheduleWriter, done: _UpdatedOnHost) -> None:
        """Move updated parameters where they are kept, and give the gradient's memory back."""
        outer, writer.prefix = writer.prefix, f"step/update/{done.item.name}"
        landing = done.item.parameter
        moved = done.operation
        if self.strategy.offload.parameters is MemoryTier.NVME:
            moved = writer.write_file(
                "write", landing, done.kept, stream=NVME_WRITE, after=(done.operation,)
            )
            writer.free(landing.buffer, uses=(moved,))
        writer.host_wait("wait", done.operation)
        if self.strategy.offload.parameters is MemoryTier.DEVICE:
            moved = writer.copy(
                "upload", landing, done.kept, stream=FROM_HOST, after=(done.operation,)
            )
            writer.free(landing.buffer, uses=(moved,))
        self.updated(writer, done.item, moved)
        if not done.item.keeps_gradient:
            writer.free(done.item.gradient.buffer, uses=(done.operation,))
        writer.prefix = outer
