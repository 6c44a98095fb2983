"""nanotron's 1F1B pipeline schedule, with one role for each stage.

The order follows Narayanan et al. 2021, section 2.2.1. A stage first runs one forward for each
stage after it, then alternates forward and backward, then runs the remaining backwards.

A stage delays its sends until it must communicate next. Before a forward it receives an activation,
then sends the pending gradient. Before a backward it sends the pending activation, then receives a
gradient. The compute stream waits for each transfer at once. nanotron sends the shape before each
tensor, and the host reads it. So the hosts of sender and receiver both wait for the device.

Not simulated: the time to send shapes, and the token mask that nanotron sends with hidden states.

Gradients are accumulated and reduced as without a pipeline.

Functions named in comments are those of `src/nanotron/parallel/pipeline_parallel` in February 2025
(0e0a27ea).
"""

from zsim.model.model import Model, Value
from zsim.model.pipeline_stages import Stage, stages
from zsim.schedule.mesh import Span
from zsim.schedule.operation_list import COMMUNICATION, COMPUTE
from zsim.schedule.schedule import Kind, Schedule
from zsim.schedule.schedule_writer import ScheduleWriter
from zsim.strategy.strategy import Strategy
from zsim.zero.assemble import assemble, need_fitting, need_single_calls
from zsim.zero.micro_batch_slots import ChunkSlot, chunk_slots
from zsim.zero.names import PIPELINE
from zsim_runtimes.nanotron.schedule import NanotronStep, filled
from zsim_runtimes.nanotron.volume import VOLUME

NEXT, BEFORE = 1, -1
"""Offsets along the pipeline."""


def schedule(model: Model, strategy: Strategy) -> Schedule:
    """Return nanotron's schedule to train `model` in `strategy.parallel.pipeline` stages.

    Raises:
        ModelError: the model was resolved for another tensor degree, or does not fill the stages.
    """
    need_fitting(model, strategy)
    need_single_calls(model, "nanotron")
    steps = [StageOfPipeline(stage, strategy) for stage in stages(model, strategy)]
    for step in steps:
        step.write()
    return assemble(
        f"nanotron, ZeRO-{strategy.zero.stage}, {strategy.parallel.pipeline} stages",
        model=model,
        strategy=strategy,
        volume=VOLUME,
        writers=[step.writer for step in steps],
        streams=(COMPUTE, COMMUNICATION),
        layouts=tuple(layout for step in steps for layout in step.buckets.layouts),
    )


class StageOfPipeline(NanotronStep):
    """Forward and backward of every micro-batch on one stage, then the update."""

    def __init__(self, stage: Stage, strategy: Strategy) -> None:
        box = (Span(axis=PIPELINE, start=stage.index, end=stage.index + 1),)
        buckets = filled(stage.model, strategy, name=f"{stage.name}/bucket")
        writer = ScheduleWriter(stage.name, box)
        super().__init__(stage.model, strategy, buckets, writer=writer)
        count = strategy.train.gradient_accumulation_steps
        self.ahead = min(strategy.parallel.pipeline - 1 - stage.index, count)
        (self.slots,) = chunk_slots(
            writer,
            stage,
            strategy,
            buckets=buckets,
            held=self.held,
            counts=[min(self.ahead + 1, count)],
        )
        self._owed_activation: int | None = None
        self._owed_gradient: int | None = None

    def write(self) -> None:
        """Write the rest of setup, and the step."""
        self.write_setup()
        self.writer.begin_step()
        self.begin()
        # as OneForwardOneBackwardPipelineEngine.train_batch_iter in engine.py does
        count = self.strategy.train.gradient_accumulation_steps
        for micro_batch in range(self.ahead):
            self._forward(micro_batch)
            self._send_activation()
        for micro_batch in range(self.ahead, count):
            self._forward(micro_batch)
            self._backward(micro_batch - self.ahead)
        for micro_batch in range(count - self.ahead, count):
            self._send_gradient()
            self._backward(micro_batch)
        self._send_gradient()
        self.writer.prefix = "step/backward/end"
        self.end()

    def _slot_of(self, micro_batch: int) -> ChunkSlot:
        return self.slots[micro_batch % len(self.slots)]

    def _enter(self, micro_batch: int, direction: str) -> ChunkSlot:
        """Switch to a micro-batch; return its slot."""
        slot = self._slot_of(micro_batch)
        self.passes = slot.passes
        self.enter(micro_batch)
        self.writer.prefix = f"step/{direction}/mb{micro_batch}"
        return slot

    def _forward(self, micro_batch: int) -> None:
        slot = self._enter(micro_batch, "forward")
        part = self.writer.prefix
        if slot.given is not None:
            # recv_from_pipeline_state_buffer (functional.py) calls run_communication (state.py),
            # which receives an activation, then sends a gradient.
            self._receive(slot.given.name, slot.given, BEFORE)
            self._send_gradient()
        self.writer.prefix = part
        slot.begin_forward()
        for visit in slot.forward:
            self.writer.prefix = f"{part}/{self.model.units[visit.unit].name}"
            slot.passes.forward(visit, ())
        self._owed_activation = None if slot.sent is None else micro_batch

    def _backward(self, micro_batch: int) -> None:
        slot = self._enter(micro_batch, "backward")
        part = self.writer.prefix
        if slot.sent is not None:
            # SendTensorToPipelineBuffer.backward (functional.py) calls run_communication, too: it
            # sends an activation, then receives a gradient.
            self._send_activation()
            self.writer.prefix = part
            self._receive(f"{slot.sent.name}/gradient", slot.sent, NEXT)
        slot.begin_backward()
        for visit in slot.backward:
            self.writer.prefix = f"{part}/{self.model.units[visit.unit].name}"
            self.backward(visit)
        slot.end_backward()
        if slot.given is not None:
            self._owed_gradient = micro_batch
        self.end_backward()

    def _send_activation(self) -> None:
        """Send the activation of the last forward to the next stage, unless it is sent already."""
        # SendActivation in state.py
        if self._owed_activation is None:
            return
        micro_batch, self._owed_activation = self._owed_activation, None
        sent = self._slot_of(micro_batch).sent
        assert sent is not None
        self.writer.prefix = f"step/forward/mb{micro_batch}"
        self._send(sent.name, NEXT)

    def _send_gradient(self) -> None:
        """Send the last backward's gradient to the stage before, unless it is sent already."""
        # SendGrad in state.py
        if self._owed_gradient is None:
            return
        micro_batch, self._owed_gradient = self._owed_gradient, None
        given = self._slot_of(micro_batch).given
        assert given is not None
        self.writer.prefix = f"step/backward/mb{micro_batch}"
        self._send(f"{given.name}/gradient", BEFORE)

    def _send(self, buffer: str, offset: int) -> None:
        """Wait until `buffer` is computed, send it, and free it."""
        # P2P.isend_tensors (p2p.py): _send_meta copies the shape to the host first
        writer = self.writer
        writer.host_wait(f"send/{buffer}/wait", self.made())
        writer.send(f"send/{buffer}", PIPELINE, buffer, offset, stream=COMPUTE)
        writer.free(buffer)

    def _receive(self, buffer: str, value: Value, offset: int) -> None:
        """Allocate `buffer` with the size and type of `value`, and receive into it."""
        # P2P.irecv_tensors (p2p.py): _recv_meta makes the host read the shape to allocate
        writer, path = self.writer, f"receive/{buffer}"
        writer.allocate(writer.buffer(buffer, value.elements, value.dtype, Kind.WORKSPACE))
        done = writer.receive(path, PIPELINE, buffer, offset, stream=COMPUTE)
        writer.host_wait(f"{path}/wait", done)
