"""Sums of the loads of experts that auxiliary losses read, over the ranks of their scope.

Ranks sum the loads in place on the compute stream, before the segment of the loss. A global loss
reads the sum of this micro-batch and all earlier ones, which is kept until the end of the last
forward (`_apply_global_aux_loss` of megatron/core/transformer/moe/router.py).
"""

from zsim.closed_form.exchanged_tokens import LoadGroup, load_group
from zsim.model.experts import LoadScope
from zsim.model.model import Segment
from zsim.schedule.mesh import Group
from zsim.schedule.operation_list import COMPUTE
from zsim.schedule.schedule import Kind
from zsim.schedule.schedule_writer import ScheduleWriter
from zsim.strategy.strategy import Strategy
from zsim.zero.assemble import inside, mesh_of
from zsim.zero.names import CONTEXT, TENSOR, WORLD
from zsim.zero.visit_order import SegmentVisit


def declared(writer: ScheduleWriter, strategy: Strategy, found: LoadGroup) -> str:
    """Return the name of a group of ranks that sum loads; declare it if no axis has it."""
    if found.name not in {TENSOR, CONTEXT, WORLD}:
        group = Group(name=found.name, axes=inside(mesh_of(strategy), found.axes))
        if group not in writer.groups:
            writer.groups.append(group)
    return found.name


class LoadsOfExperts:
    """Writes the sums of loads to `writer`."""

    def __init__(self, writer: ScheduleWriter, strategy: Strategy) -> None:
        self.writer = writer
        self.strategy = strategy

    def sum(self, segment: Segment, part: SegmentVisit) -> None:
        """Sum the load that a segment reads, if it is an auxiliary loss of several tokens."""
        if segment.loads is None:
            return
        buffer = part.reads[-1].buffer
        group = load_group(self.strategy, segment.loads)
        path = f"{part.action}{part.segment}/load"
        if group is not None:
            name = declared(self.writer, self.strategy, group)
            self.writer.all_reduce(f"{path}/sum", name, buffer, stream=COMPUTE)
        if segment.loads is LoadScope.BATCH:
            self._add_earlier(path, buffer, segment.inputs[-1])

    def _add_earlier(self, path: str, buffer: str, value: str) -> None:
        """Add the load of all earlier micro-batches to that of this one."""
        writer, own = self.writer, self.writer.buffers[buffer]
        name, _, _ = value.partition("@")  # slots of micro-batches share the sum
        so_far = writer.buffer(f"{name}/so_far", own.elements, own.dtype, Kind.WORKSPACE)
        number, count = writer.micro_batch, self.strategy.train.gradient_accumulation_steps
        if not number:
            writer.allocate(so_far)
        writer.copy(f"{path}/count", buffer, so_far, accumulate=number > 0)
        if number:
            writer.copy(f"{path}/so_far", so_far, buffer)
        if number == count - 1:
            writer.free(so_far)
