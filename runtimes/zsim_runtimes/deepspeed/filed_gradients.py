"""Gradients of sub-groups whose states are in files: packed into buffers, and written.

Gradients are cast to fp32 on the device and copied one by one to a pinned buffer; the host waits
for each copy. A full buffer is written while the next is filled. If no buffer is left, the host
waits for all writes. Gradients that are too small for a file, and remainders that do not fill its
alignment, stay on the device in fp32 until the update of their sub-group. The whole tensor of such
a remainder stays allocated.

Functions named in comments are from DeepSpeed 0.19, of `AsyncTensorSwapper` in
`runtime/swap_tensor/async_swapper.py` unless another file is named.
"""

from dataclasses import dataclass

from zsim.schedule.operation import View
from zsim.schedule.schedule import Kind
from zsim.schedule.schedule_writer import NVME_POOL, NVME_WRITE, ScheduleWriter
from zsim.zero.bucket import Bucket
from zsim.zero.step_skeleton import Step, StepPart
from zsim_runtimes.deepspeed.options import DeepSpeed
from zsim_runtimes.deepspeed.stage_3_shards import Shards

SLOTS = "optimizer_slots"
"""The pool of buffers for states and gradients of sub-groups."""


@dataclass(frozen=True, slots=True)
class _Packed:
    """A gradient in a buffer, its place in the file, and the copy that filled it."""

    source: View
    target: View
    copied: str


@dataclass(frozen=True, slots=True)
class LeftOnDevice:
    """The end of a gradient that is not written, and its offset in its sub-group."""

    view: View
    start: int


class FiledGradients(StepPart):
    """Moves gradients to files through a fixed number of buffers."""

    def __init__(self, step: Step, shards: Shards, *, stream: str) -> None:
        super().__init__(step)
        self._shards = shards
        self._stream = stream
        self._options = step.strategy.options(DeepSpeed)
        self._optimizer = step.strategy.train.precision.optimizer
        align = self._options.file_alignment
        largest = max(group.shard for group in shards.groups.trained)
        self.slot_elements = -(-largest // align) * align
        self.count = self._options.offload_optimizer.buffer_count
        self.left: dict[str, list[LeftOnDevice]] = {}
        self._current = -1
        self._filled = 0
        self._packed: list[_Packed] = []
        self._written = ""

    def write_setup(self) -> None:
        """Declare the buffers."""
        # SwapBufferManager (runtime/swap_tensor/utils.py): of the largest sub-group
        size_bytes = self.slot_elements * self._optimizer.size_bytes
        self.writer.slots(SLOTS, size_bytes, self.count)

    def holds(self, group: Bucket) -> bool:
        """Return True if the states of a sub-group are in files."""
        return self._options.files(group.shard, self._optimizer)

    def file(self, group: Bucket) -> str:
        """Return the file of a sub-group's gradient."""
        kind, home = Kind.GRADIENT, NVME_WRITE
        return group.shard_buffer(
            self.writer, "gradient_file", self._optimizer, kind, pool=NVME_POOL, home=home
        )

    def filed(self, size: int) -> int:
        """Return the number of elements of a gradient of `size` elements that are written."""
        # as _adjust_for_misaligned_lengths in runtime/swap_tensor/optimizer_utils.py
        whole = size // self._options.file_alignment * self._options.file_alignment
        return whole if self._options.files(whole, self._optimizer) else 0

    def gradients(self, group: str) -> list[tuple[int, int]]:
        """Return start and size of each gradient of a rank in a sub-group."""
        shards = self._shards
        return [
            (start, shards.bucket(number).shard)
            for number, (index, start) in enumerate(shards.where)
            if shards.groups.all[index].name == group and shards.bucket(number).elements
        ]

    def take(self, group: Bucket, start: int, source: View) -> None:
        """Write a gradient at offset `start` of its sub-group; keep the part that stays."""
        file, size = self.file(group), self.filed(source.size)
        if size:
            if file not in self.writer.alive:
                self.writer.allocate(file)
            self._pack(View(buffer=source.buffer, start=source.start, size=size), file, start)
        if size == source.size:
            self.writer.free(source.buffer)
            return
        left = View(buffer=source.buffer, start=source.start + size, size=source.size - size)
        self.left.setdefault(group.name, []).append(LeftOnDevice(left, start + size))

    def _pack(self, source: View, file: str, start: int) -> None:
        """Copy to the current buffer, or to the next one if it is full."""
        writer = self.writer
        if self._current < 0 or self._filled + source.size > self.slot_elements:
            self._next_buffer()
        target = View(buffer=self._slot(self._current), start=self._filled, size=source.size)
        path = f"swap_out/{source.buffer}"
        copied = writer.copy(path, source, target, stream=self._stream)
        writer.host_wait(f"{path}/wait", copied)
        self._packed.append(
            _Packed(target, View(buffer=file, start=start, size=source.size), copied)
        )
        self._filled += source.size

    def _next_buffer(self) -> None:
        # _make_swap_space: _flush_ready_buffers, or without a free one
        # _flush_buffers_until_complete
        writer = self.writer
        self._written = self._write(writer) or self._written
        self._packed = []
        if self._current == self.count - 1:
            writer.host_wait(f"{self._written}/wait", self._written)
            self._current = -1
        self._current += 1
        self._filled = 0
        if self._slot(self._current) not in writer.alive:
            writer.allocate(self._slot(self._current))

    def _slot(self, number: int) -> str:
        kind, name = Kind.GRADIENT, f"gradient_slot{number}"
        return self.writer.buffer(
            name, self.slot_elements, self._optimizer, kind, pool=SLOTS, home=self._stream
        )

    def _write(self, writer: ScheduleWriter) -> str:
        """Write the packed gradients; return the last write."""
        written = ""
        for each in self._packed:
            path = f"swap_out/{each.target.buffer}/{each.target.start}"
            after = (each.copied,)
            written = writer.write_file(
                path, each.source, each.target, stream=NVME_WRITE, after=after
            )
        return written

    def finish(self, writer: ScheduleWriter) -> None:
        """Write the rest, wait for all writes and free the buffers, once in a step."""
        # release_buffers
        slots = [self._slot(number) for number in range(self.count)]
        alive = [name for name in slots if name in writer.alive]
        if alive:
            written = self._write(writer) or self._written
            writer.host_wait("swap_out/wait", written)
            writer.free(*alive)

    def drop(self, writer: ScheduleWriter) -> None:
        """Free the gradients of a step that updates nothing."""
        self.finish(writer)
        for group in self._shards.groups.trained:
            self.drop_left(writer, group.name)
            if self.holds(group) and self.file(group) in writer.alive:
                writer.free(self.file(group))

    def drop_left(self, writer: ScheduleWriter, group: str) -> None:
        """Free the gradients of a sub-group that stayed on the device."""
        writer.free(*dict.fromkeys(each.view.buffer for each in self.left.get(group, ())))
