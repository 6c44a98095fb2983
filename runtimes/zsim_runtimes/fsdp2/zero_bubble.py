"""A stage of PyTorch's pipelines with FSDP2 whose backwards are in two parts.

The first part computes gradients of inputs, and leaves the output gradients of operators with
parameters. All saved tensors stay, and so does the sent output of the chunk. The input of the
model's first chunk has no gradient: its first part is empty, and its second part is the whole
backward.

A second part computes gradients of the gathered parameters, in their dtype. Those of the next
second part are added to them, unless a first part ran in between: in it, FSDP adds existing
gradients to sums in the dtype of the reduction, if that differs.

Functions named in comments are from `torch/distributed/pipelining` in torch 2.13, unless
another folder is named.
"""

from collections.abc import Set

from zsim.zero.micro_batch_slots import ChunkSlot
from zsim.zero.split_backward import SplitForwardBackward
from zsim.zero.visit_order import ValueInstance
from zsim_runtimes.fsdp2.order import Action, WeightTask
from zsim_runtimes.fsdp2.stage import FSDP2Stage
from zsim_runtimes.stage_actions import Direction, Task


class ZeroBubbleStage(FSDP2Stage):
    """Forward and both parts of backward of every micro-batch on one stage, then the update."""

    visits_of_slot = SplitForwardBackward

    def do(self, action: Action) -> None:
        """Write one action."""
        match action:
            case WeightTask():
                self._weights(action)
            case _:
                super().do(action)

    def before_reduction(self, bucket: int) -> None:
        """Add up gradients from second parts since the last first part."""
        # FSDPParamGroup.post_backward: accumulate_unsharded_grad_if_needed of each parameter
        self.reductions.add_up_left(bucket)

    def _enter(self, task: Task, part: str = "") -> ChunkSlot:
        """Continue with a micro-batch, whose gradients of parameters have separate buffers."""
        slot = super()._enter(task, part)
        self.reductions.passes = slot.passes
        return slot

    def _backward(self, task: Task) -> None:
        """Run the first part: gradients of inputs."""
        # backward_one_chunk, with full_backward off
        slot = self._enter(task)
        if slot.given is None:  # the first stage
            return
        passes = _passes(slot)
        slot.begin_backward()
        stay = passes.kept(slot.backward)
        for visit in self.messages.visits(task):
            passes.backward_inputs(visit, stay)
            block = self.block(visit.unit)
            if block is not None:  # its inputs have a gradient, so post_backward runs here
                self.reductions.add_up_left(block)
        self.writer.prefix = f"{self.messages.path(task)}/end"
        if self.root is not None:  # FSDPState._root_post_backward_final_callback
            self.reductions.add_up_left(self.root)
        slot.end_backward()
        self._hand_back(task)

    def _weights(self, task: WeightTask) -> None:
        """Run the second part in forward order; on the first stage, the whole backward."""
        # backward_weight_one_chunk
        backward = Task(Direction.BACKWARD, task.chunk, task.micro_batch)
        slot, path = self._enter(backward, "/weights"), self.messages.path(backward)
        if slot.given is None:
            self._full_backward(slot, backward)
        else:
            passes = _passes(slot)
            stay: Set[ValueInstance] = passes.kept(slot.backward)
            for visit in reversed(slot.backward):
                self.writer.prefix = f"{path}/weights/{self.model.units[visit.unit].name}"
                passes.backward_weights(visit)
                self.reductions.collect_or_add(visit.unit)
            self.writer.prefix = f"{path}/weights/end"
            passes.end_weights(slot.backward, stay)
        if slot.sent is not None:  # backward_state keeps the output of the stage
            self._free_sent(Task(Direction.FORWARD, task.chunk, task.micro_batch))


def _passes(slot: ChunkSlot) -> SplitForwardBackward:
    assert isinstance(slot.passes, SplitForwardBackward)
    return slot.passes
