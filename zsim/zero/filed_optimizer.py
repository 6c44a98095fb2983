"""Updates of optimizer states kept in NVMe files, through slots in host memory.

ZeRO-Infinity (Rajbhandari et al. 2021, section 5): states are read into slots by sub-group. While
one sub-group is updated, the next may be read and the previous one written, as the offload options
set (DeepSpeed 0.19, `runtime/swap_tensor/pipelined_optimizer_swapper.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from zsim.dtype import DType
from zsim.schedule.operation import Action, Edge, Previous, View
from zsim.schedule.replace import replace
from zsim.schedule.schedule import Kind
from zsim.schedule.schedule_writer import CPU, HOST_POOL, NVME_READ, NVME_WRITE, ScheduleWriter
from zsim.zero.offloaded_gradients import part_of
from zsim.zero.offloaded_optimizer import HostOptimizerStep
from zsim.zero.updated_tensor import UpdatedTensor

SLOTS = "optimizer_slots"
"""The pool of slots that hold the states of sub-groups."""


@dataclass(frozen=True, slots=True)
class _SubGroup:
    """Consecutive elements of a tensor whose states are in host memory together."""

    item: UpdatedTensor
    start: int
    size: int

    @property
    def is_last(self) -> bool:
        """Return True if this is the last sub-group of its tensor."""
        return self.start + self.size == self.item.gradient.size

    @property
    def name(self) -> str:
        """Path of its operations."""
        return self.item.name if self.is_last else f"{self.item.name}/{self.start}"

    def of(self, view: View) -> View:
        """Return the sub-group's part of `view`, a view of the whole tensor."""
        return replace(view, start=view.start + self.start, size=self.size)


class NvmeOptimizerStep(HostOptimizerStep):
    """An update on the host, of states that are kept in files."""

    def begin(self) -> None:
        """Split every tensor into sub-groups, and declare slots for the states of the largest."""
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
        """Update a tensor by sub-group, with reads ahead and writes behind if pipelined."""
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
        """Add up the partial measures taken before gradients were written to files."""
        if not self.strategy.offload.files_gradients or not trained:
            return super().measured(writer, action, name, target, trained=trained)
        total = writer.buffer(
            f"{name}/sum", 1, DType.FP64, Kind.WORKSPACE, pool=HOST_POOL, home=CPU
        )
        writer.allocate(total)
        for item in trained:
            part, adds = part_of(action, item.name), item is not trained[0]
            path = f"{name}/measure/{item.name}"
            writer.copy(path, part, total, accumulate=adds, stream=CPU)
            writer.free(part)
        measured = writer.copy(f"{name}/measure", total, target, stream=CPU)
        writer.free(total)
        return measured

    def skipped(self, writer: ScheduleWriter) -> None:
        """Free the partial norms of a step that updates nothing."""
        if self.strategy.offload.files_gradients and self.strategy.train.clip_norm is not None:
            for item in self.tensors:
                writer.free(part_of(Action.NORM, item.name))

    def completed(self, writer: ScheduleWriter) -> None:
        """Free the last slots, and send the parameters of the last tensor."""
        self._free_written(writer, keep=0)
        super().completed(writer)

    def _states(self, writer: ScheduleWriter, group: _SubGroup) -> list[tuple[View, View]]:
        """Return (view in the file, view of the slot) of each state of a sub-group."""
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
        """Read the states of a sub-group into slots; return the reads."""
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
        """Free slots once their writes are done, except those of the last `keep` groups."""
        while len(self._written) > keep:
            for slot, write in self._written.pop(0):
                writer.free(slot, uses=(write,))
