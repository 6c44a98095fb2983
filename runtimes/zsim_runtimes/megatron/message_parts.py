"""Messages between stages of Megatron-LM; each tensor rank may send only a part."""

from collections.abc import Sequence

from zsim.model.model import Value
from zsim.schedule.operation import View
from zsim.schedule.operation_list import COMPUTE
from zsim.schedule.schedule import Kind
from zsim.schedule.schedule_writer import ScheduleWriter
from zsim.strategy.strategy import Strategy
from zsim.zero.micro_batch_slots import ChunkSlot
from zsim.zero.names import TENSOR
from zsim_runtimes.megatron.options import Megatron
from zsim_runtimes.stage_actions import Task
from zsim_runtimes.stage_messages import StageMessages


class MessageParts(StageMessages):
    """Messages of a stage: whole values, or a part of each on every tensor rank.

    Functions named in comments are from `megatron/p2p_communication.py` and `megatron/utils.py`
    until March 2023 (0b44909c).
    """

    def __init__(
        self,
        writer: ScheduleWriter,
        slots: Sequence[Sequence[ChunkSlot]],
        strategy: Strategy,
    ) -> None:
        super().__init__(writer, slots)
        self._ranks = strategy.parallel.tensor
        self._cuts = strategy.options(Megatron).cuts_messages(tensor=self._ranks)

    def moved(self, task: Task, *, is_sent: bool) -> str | View:
        """Return the buffer or view that is sent or received."""
        value = self.value(task, is_sent=is_sent)
        if not is_sent:
            return self.received(task)
        name = self.buffer(task, is_sent=True)
        if not self._is_cut(value):
            return name
        # split_tensor_into_1d_equal_chunks: a view
        return View(buffer=name, size=value.elements // self._ranks, axis=TENSOR)

    def received(self, task: Task) -> str:
        """Return the buffer that receives the input of a task."""
        value, whole = self.value(task, is_sent=False), self._whole(task)
        if not self._is_cut(value):
            return whole
        elements = value.elements // self._ranks
        return self.writer.buffer(f"{whole}/part", elements, value.dtype, Kind.WORKSPACE)

    def gather(self, task: Task) -> None:
        """Gather the input of a task if each tensor rank has received a part of it."""
        # gather_split_1d_tensor
        if not self._is_cut(self.value(task, is_sent=False)):
            return
        self.writer.prefix = self.path(task)
        part, whole = self.received(task), self._whole(task)
        self.writer.allocate(whole)
        self.writer.all_gather(f"gather/{whole}", TENSOR, part, whole, stream=COMPUTE)
        self.writer.free(part)

    def _is_cut(self, value: Value) -> bool:
        """Return True if each tensor rank sends its part of `value`, False if each sends it all."""
        # otherwise `override_scatter_gather_tensors_in_pipeline`
        return self._cuts and value.elements % self._ranks == 0

    def _whole(self, task: Task) -> str:
        """Return the buffer of the whole input of a task."""
        value, name = self.value(task, is_sent=False), self.buffer(task, is_sent=False)
        return self.writer.buffer(name, value.elements, value.dtype, Kind.WORKSPACE)
