"""The end of a step of DeepSpeed's stage 3 with states in files: swapped in and out.

For each sub-group, states and gradient are read into buffers while the host waits, updated on the
CPU, and written back. With `pipeline_read`, the next sub-group is read during the update; with
`pipeline_write`, the previous one is written.

Functions named in comments are from DeepSpeed 0.19, of `PipelinedOptimizerSwapper` in
`runtime/swap_tensor/pipelined_optimizer_swapper.py`.
"""

from zsim.schedule.operation import Previous, View
from zsim.schedule.operation_list import COMPUTE
from zsim.schedule.replace import replace
from zsim.schedule.schedule_writer import NVME_POOL, NVME_READ, NVME_WRITE, ScheduleWriter
from zsim.zero.updated_tensor import UpdatedTensor
from zsim_runtimes.deepspeed.filed_gradients import SLOTS, FiledGradients
from zsim_runtimes.deepspeed.host_update import HostSubGroupStep
from zsim_runtimes.deepspeed.options import DeepSpeed


class FiledSubGroupStep(HostSubGroupStep):
    """The update of sub-groups; large ones are in files.

    `files` holds their gradients.
    """

    files: FiledGradients

    def begin(self) -> None:
        """Start with no reads or writes in flight."""
        super().begin()
        self._reads: dict[str, tuple[str, ...]] = {}
        self._writing: tuple[str, tuple[str, ...]] | None = None

    def skipped(self, writer: ScheduleWriter) -> None:
        """Free the norms and gradients of a step that updates nothing."""
        super().skipped(writer)
        self.files.drop(writer)

    def update_one(self, writer: ScheduleWriter, item: UpdatedTensor, norm: str | None) -> None:
        """Update a sub-group in buffers, between its reads and its writes."""
        if not _is_filed(writer, item):
            super().update_one(writer, item, norm)
            return
        # swap_in_optimizer_state, _swap_in_optimizer_state
        options = self.strategy.options(DeepSpeed).offload_optimizer
        behind = self.tensors[self.tensors.index(item) + 1 :]
        following = next((each for each in behind if _is_filed(writer, each)), None)
        outer = writer.prefix
        self.files.finish(writer)
        self._fetch(writer, item)
        writer.prefix = f"{outer}/{item.name}"
        reads = self._reads[item.name]
        writer.host_wait("read/wait", reads[-1])
        writer.prefix = outer
        if options.pipeline_read and following is not None:
            self._fetch(writer, following)
        gradient, master, *moments = (slot for _, slot in self._staged(writer, item))
        staged = replace(
            item,
            gradient=gradient,
            after=(*item.after, *reads),
            master=master,
            moments=tuple(moments),
        )
        super().update_one(writer, staged, norm)
        writer.prefix = f"{outer}/{item.name}"
        self._write_back(writer, item, waits=not options.pipeline_write or following is None)
        writer.prefix = outer

    def _staged(self, writer: ScheduleWriter, item: UpdatedTensor) -> list[tuple[View, View]]:
        """Return gradient, master and moments in files, each with its buffer in host memory."""
        assert item.master is not None
        found: list[tuple[View, View]] = []
        for number, state in enumerate((item.gradient, item.master, *item.moments)):
            held = writer.buffers[state.buffer]
            slot = writer.buffer(
                f"{item.name}/slot{number}",
                self.files.slot_elements,
                held.dtype,
                held.kind,
                pool=SLOTS,
                home=NVME_READ,
            )
            found.append((state, writer.part(slot, state.size)))
        return found

    def _fetch(self, writer: ScheduleWriter, item: UpdatedTensor) -> None:
        """Read the states of a sub-group and the written part of its gradient; copy the rest."""
        if item.name in self._reads:
            return
        outer, writer.prefix = writer.prefix, f"{writer.prefix}/{item.name}"
        staged = self._staged(writer, item)
        writer.allocate(*(slot.buffer for _, slot in staged))
        (file, gradient), *states = staged
        left = self.files.left.get(item.name, [])
        reads: list[str] = []
        for number, (state, slot) in enumerate(states):
            path, before = f"read/{number}", (Previous(writer.path(f"write/{number}")),)
            reads.append(writer.read(path, state, slot, stream=NVME_READ, after=before))
        for start, size in self._filed(item):
            source, target = (replace(each, start=start, size=size) for each in (file, gradient))
            path = f"read/gradient/{start}"
            reads.append(writer.read(path, source, target, stream=NVME_READ))
        copies: list[str] = []
        for each in left:  # _retrieve_unswapped_grad_partitions: a blocking copy
            target = replace(gradient, start=each.start, size=each.view.size)
            path = f"retrieve/{each.start}"
            copies.append(writer.copy(path, each.view, target, stream=COMPUTE, after=self.after))
            writer.host_wait(f"{path}/wait", copies[-1])
        self.files.drop_left(writer, item.name)
        self._reads[item.name] = (*copies, *reads)
        writer.prefix = outer

    def _filed(self, item: UpdatedTensor) -> list[tuple[int, int]]:
        """Return start and size of each written part of a sub-group's gradient."""
        found: list[tuple[int, int]] = []
        for start, size in self.files.gradients(item.name):
            if filed := self.files.filed(size):
                found.append((start, filed))
        return found

    def _write_back(self, writer: ScheduleWriter, item: UpdatedTensor, *, waits: bool) -> None:
        """Write the states of a sub-group, after the previous one is written."""
        # swap_out_optimizer_state, _complete_swap_out
        self._complete(writer)
        staged = self._staged(writer, item)
        after = (writer.path("cast"),)
        written = ""
        for number, (state, slot) in enumerate(staged[1:]):
            path = f"write/{number}"
            written = writer.write_file(path, slot, state, stream=NVME_WRITE, after=after)
        if item.gradient.buffer in writer.alive:
            writer.free(item.gradient.buffer, uses=self._reads[item.name][-1:])
        self._writing = (written, tuple(slot.buffer for _, slot in staged))
        if waits:
            self._complete(writer)

    def _complete(self, writer: ScheduleWriter) -> None:
        """Wait for the writes of a sub-group, and free its buffers."""
        if self._writing is not None:
            written, slots = self._writing
            writer.host_wait(f"wait/{written}", written)
            writer.free(*slots)
            self._writing = None


def _is_filed(writer: ScheduleWriter, item: UpdatedTensor) -> bool:
    return writer.buffers[item.gradient.buffer].pool == NVME_POOL
