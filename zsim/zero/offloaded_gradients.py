"""Gradient offload: reduced gradients are copied to the host, and optionally to files.

ZeRO-Offload (Ren et al. 2021, section 4) copies them during the backward of earlier layers, in 16
bits. ZeRO-Infinity (Rajbhandari et al. 2021, section 5) may then write them to NVMe.
"""

from collections.abc import Iterator, Set

from zsim.dtype import DType
from zsim.schedule.operation import Action, FreeMode, Role
from zsim.schedule.schedule import Kind
from zsim.schedule.schedule_writer import (
    CPU,
    HOST_POOL,
    NVME_POOL,
    NVME_WRITE,
    TO_HOST,
    ScheduleWriter,
)
from zsim.strategy.precision import Precision
from zsim.strategy.strategy import Strategy
from zsim.zero.bucket import Bucket
from zsim.zero.state import Reduced, own_view, updated_view


def measures(strategy: Strategy) -> Iterator[Action]:
    """Yield the measures of gradients before the update: FINITE with fp16, NORM if clipping."""
    if strategy.train.precision is Precision.FP16:
        yield Action.FINITE
    if strategy.train.clip_norm is not None:
        yield Action.NORM


def part_of(action: Action, bucket: str) -> str:
    """Return the buffer of the measure of one bucket's gradients."""
    return f"{bucket}/{action}_part"


class GradientsToHost:
    """Copies reduced gradients to the host; frees device memory after the next copy is issued."""

    def __init__(
        self, writer: ScheduleWriter, strategy: Strategy, *, stays: Set[int] = frozenset()
    ) -> None:
        self._writer = writer
        self._strategy = strategy
        self._stays = stays
        self._leaving: list[tuple[str, str]] = []
        self._written: list[tuple[str, tuple[str, ...]]] = []

    def copy_out(self, bucket: Bucket, reduced: Reduced) -> Reduced:
        """Copy the gradients of a bucket that the rank updates to the host; return the copy.

        Gradients of buckets that the device updates stay on the device.
        """
        if bucket.index in self._stays:
            return reduced
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
        """Measure gradients on the host, and write them to a file.

        The host waits for the write of the previous bucket, so that its memory is reused.
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
        """Measure the gradients of a bucket on the host; the results are added up later.

        The result is fp64, so that the sum over buckets is rounded only once.
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
        """Free the device memory of all gradients that were copied to the host."""
        while self._leaving:
            buffer, copied = self._leaving.pop()
            self._writer.free(buffer, uses=(copied,))

    def end(self) -> None:
        """Free the device memory that was copied, and the host memory that was written to files."""
        self.finish()
        self._free_written()
