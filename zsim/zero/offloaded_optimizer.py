"""ZeRO-Offload: gradients go to the host, which keeps the optimizer's states and updates them.

Ren et al. 2021, sections 3 and 4: a rank copies its part of the reduced gradients out beside the
backward of earlier layers, in 16 bits; a thread of the host casts, unscales, clips and applies them
to fp32 masters; the result is cast to 16 bits and copied back while the thread updates the next
bucket. Every rank moves its own part alone, over its own link.

With states on NVMe (ZeRO-Infinity, Rajbhandari et al. 2021, section 5) they come through slots in
the host's memory, sub-group by sub-group: while one is updated the next is read and the last
written, as the knobs say (DeepSpeed `runtime/swap_tensor/pipelined_optimizer_swapper.py`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from zsim.schedule.operation import Action, Edge, FreeMode, Previous, Reduction, Role, View
from zsim.schedule.schedule import Kind
from zsim.schedule.schedule_writer import (
    CPU,
    FROM_HOST,
    HOST_POOL,
    NVME_POOL,
    NVME_READ,
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

SLOTS = "optimizer_slots"
"""The pool of slots that states of sub-groups pass through."""


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
        """Measure the gradients of a bucket on the host, whose number is added up later."""
        writer, optimizer = self._writer, self._strategy.train.precision.optimizer
        view = own_view(writer, bucket, host)
        number = writer.buffer(
            part_of(action, bucket.name), 1, optimizer, Kind.WORKSPACE, pool=HOST_POOL, home=CPU
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


@dataclass(frozen=True, slots=True)
class _SubGroup:
    """Elements of a tensor whose states are in host memory at once."""

    item: UpdatedTensor
    start: int
    size: int

    @property
    def is_last(self) -> bool:
        """Tell whether the tensor ends with it."""
        return self.start + self.size == self.item.gradient.size

    @property
    def name(self) -> str:
        """Path of its operations."""
        return self.item.name if self.is_last else f"{self.item.name}/{self.start}"

    def of(self, view: View) -> View:
        """Return its part of all of a buffer."""
        return replace(view, start=view.start + self.start, size=self.size)


class NvmeOptimizerStep(HostOptimizerStep):
    """An update on the host, of states that are kept in files."""

    def begin(self) -> None:
        """Cut every tensor into sub-groups, and declare slots for the states of the largest."""
        super().begin()
        offload, most = self.strategy.offload, self.strategy.offload.sub_group_elements
        self._groups = [
            _SubGroup(item, start, min(most, item.gradient.size - start))
            for item in self.tensors
            for start in range(0, max(1, item.gradient.size), most)
        ]
        self._read: list[tuple[str, ...]] = []
        self._written: list[list[tuple[str, str]]] = []
        self._slot = max([1, *(each.size for each in self._groups)])
        states = 1 + self.strategy.moments + offload.files_gradients
        count = offload.buffers or offload.sets * states
        size_bytes = self._slot * self.strategy.train.precision.optimizer.size_bytes
        self.writer.slots(SLOTS, size_bytes, count)

    def update_one(self, writer: ScheduleWriter, item: UpdatedTensor, norm: str | None) -> None:
        """Update a tensor sub-group by sub-group, while the next is read and the last written."""
        self._kept[item.name] = item.parameter
        landed = self._landed(writer, item)
        for number, group in enumerate(self._groups):
            if group.item is item:
                ahead = number + 1 + self.strategy.offload.pipeline_read
                for following in self._groups[len(self._read) : ahead]:
                    self._read.append(self._fetch(writer, following))
                self._update_group(writer, group, landed, reads=self._read[number], norm=norm)

    def measured(
        self,
        writer: ScheduleWriter,
        action: Action,
        name: str,
        target: str,
        *,
        trained: Sequence[UpdatedTensor],
    ) -> str:
        """Add up what was measured of gradients before they were written to files."""
        if not self.strategy.offload.files_gradients or not trained:
            return super().measured(writer, action, name, target, trained=trained)
        last = ""
        for item in trained:
            part, path = part_of(action, item.name), f"{name}/measure"
            path = path if item is trained[-1] else f"{path}/{item.name}"
            last = writer.copy(path, part, target, accumulate=bool(last), stream=CPU)
            writer.free(part)
        return last

    def skipped(self, writer: ScheduleWriter) -> None:
        """Forget the norms of a step that updates nothing."""
        if self.strategy.offload.files_gradients and self.strategy.train.clip_norm is not None:
            for item in self.tensors:
                writer.free(part_of(Action.NORM, item.name))

    def completed(self, writer: ScheduleWriter) -> None:
        """Give the last slots back, and send the parameters of the last tensor."""
        self._free_written(writer, keep=0)
        super().completed(writer)

    def _states(self, writer: ScheduleWriter, group: _SubGroup) -> list[tuple[View, View]]:
        """Return what a sub-group has of each state in a file, and the slot that it goes to."""
        assert group.item.master is not None
        found: list[tuple[View, View]] = []
        kept = [group.item.master, *group.item.moments]
        if self.strategy.offload.files_gradients:
            kept.append(group.item.gradient)
        slot_bytes = self._slot * self.strategy.train.precision.optimizer.size_bytes
        for number, state in enumerate(kept):
            held = writer.buffers[state.buffer]
            slot = writer.buffer(
                f"{group.name}/slot{number}",
                slot_bytes // held.dtype.size_bytes,
                held.dtype,
                held.kind,
                pool=SLOTS,
                home=NVME_READ,
            )
            found.append((group.of(state), writer.part(slot, group.size)))
        return found

    def _fetch(self, writer: ScheduleWriter, group: _SubGroup) -> tuple[str, ...]:
        """Read the states of a sub-group to slots."""
        reads: list[str] = []
        outer, writer.prefix = writer.prefix, f"step/update/{group.name}"
        for number, (state, slot) in enumerate(self._states(writer, group)):
            writer.allocate(slot.buffer)
            after: tuple[Edge, ...] = (Previous(writer.path(f"write/{number}")),)
            if state.buffer == group.item.gradient.buffer:
                after = group.item.after
            reads.append(writer.read(f"read/{number}", state, slot, stream=NVME_READ, after=after))
        writer.prefix = outer
        return tuple(reads)

    def _update_group(
        self,
        writer: ScheduleWriter,
        group: _SubGroup,
        landed: UpdatedTensor,
        *,
        reads: tuple[str, ...],
        norm: str | None,
    ) -> None:
        """Update a sub-group in its slots, and write them back."""
        states = self._states(writer, group)
        gradient = group.of(landed.gradient)
        read_only = []
        if self.strategy.offload.files_gradients:
            read_only = [states.pop()]
            gradient = read_only[0][1]
        (_, master), *moments = states
        part = replace(
            landed,
            name=group.name,
            gradient=gradient,
            after=(*landed.after, *reads),
            parameter=group.of(landed.parameter),
            master=master,
            moments=tuple(slot for _, slot in moments),
        )
        updated = self.apply_one(writer, part, norm)
        outer, writer.prefix = writer.prefix, f"step/update/{group.name}"
        written: list[tuple[str, str]] = []
        for number, (state, slot) in enumerate(states):
            path, after = f"write/{number}", (updated,)
            write = writer.write_file(path, slot, state, stream=NVME_WRITE, after=after)
            written.append((slot.buffer, write))
        written += [(slot.buffer, updated) for _, slot in read_only]
        self._written.append(written)
        self._free_written(writer, keep=int(self.strategy.offload.pipeline_write))
        if group.is_last:
            self.finish_one(writer, landed, updated)
        writer.prefix = outer

    def _free_written(self, writer: ScheduleWriter, *, keep: int) -> None:
        """Give slots back once their writes are done, all but those of the last `keep` groups."""
        while len(self._written) > keep:
            for slot, write in self._written.pop(0):
                writer.free(slot, uses=(write,))
