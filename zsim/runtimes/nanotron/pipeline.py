"""nanotron's pipeline: each stage a role, one forward and one backward in turn.

`OneForwardOneBackwardPipelineEngine` of `nanotron/parallel/pipeline_parallel` (2025-02), after
Narayanan et al. 2021, section 2.2.1: a stage runs as many micro-batches forward as there are stages
behind it, then one forward and one backward in turn, then what is left backward. Nothing is handed
on until the next communication is needed (`run_communication`): before a forward a stage takes an
activation, then sends the gradient it owes back; before a backward it sends the activation it
owes, then takes a gradient. Both are waited for on the compute stream at once. The shape goes ahead
of a tensor, and hosts read it: one that receives waits for the device, and so does one that sends.
What it takes to send shapes, and the mask of tokens that nanotron sends beside hidden states, is
left out.

A stage keeps what several micro-batches saved: each has a slot of buffers, which the next one takes
that begins after it has ended. Gradients are collected and reduced as without a pipeline.
"""

from dataclasses import dataclass, replace

from zsim.model.model import Model, Segment, Unit, Value
from zsim.model.pipeline_stages import Stage, stages
from zsim.runtimes.nanotron.options import Nanotron
from zsim.runtimes.nanotron.schedule import STREAMS, Step, filled, holding, worst_case
from zsim.runtimes.nanotron.volume import VOLUME
from zsim.schedule.mesh import Span
from zsim.schedule.operation import Receive, Send
from zsim.schedule.schedule import Kind, Schedule
from zsim.strategy.strategy import Strategy
from zsim.zero.assemble import Part, framed, need_fitting, need_single_calls
from zsim.zero.bucket import Buckets
from zsim.zero.forward_backward import Held, Passes
from zsim.zero.state import BucketState, write_setup
from zsim.zero.visit_order import Instance, Made, SegmentVisit, UnitVisit, visits
from zsim.zero.writer import COMPUTE, PIPELINE, Draft

NEXT, BEFORE = 1, -1
"""Offsets along the pipeline."""


def schedule(model: Model, strategy: Strategy) -> Schedule:
    """What nanotron does to train `model` in `strategy.pipeline` stages.

    Raises:
        ModelError: the model was resolved for another tensor degree, or does not fill the stages.
    """
    options = strategy.options(Nanotron)
    need_fitting(model, strategy)
    need_single_calls(model, "nanotron")
    parts: list[Part] = []
    layouts: list[Buckets] = []
    for stage in stages(model, strategy.pipeline):
        draft = Draft()
        buckets = filled(stage.model, strategy, options, name=f"{stage.name}/bucket")
        states = write_setup(draft, buckets, holding(strategy))
        step = _StageStep(draft, stage, strategy, buckets=buckets, states=states)
        step.write_setup()
        setup, draft.operations = draft.operations, []
        step.write()
        box = (Span(axis=PIPELINE, start=stage.index, end=stage.index + 1),)
        parts.append(Part(role=stage.name, draft=draft, setup=setup, box=box))
        layouts.append(buckets)
    return framed(
        f"nanotron, ZeRO-{strategy.stage}, {strategy.pipeline} stages",
        model=model,
        strategy=strategy,
        volume=VOLUME,
        parts=parts,
        streams=STREAMS,
        layouts=tuple(layout for buckets in layouts for layout in buckets.layouts),
        peak_of=worst_case,
    )


class _SlotPasses(Passes):
    """The visits of micro-batches that have one slot of a stage's buffers."""

    def __init__(
        self,
        draft: Draft,
        model: Model,
        strategy: Strategy,
        *,
        buckets: Buckets,
        held: Held,
        slot: str,
    ) -> None:
        super().__init__(draft, model, strategy, buckets=buckets, held=held)
        self._slot = slot

    def _saved(self, visit: UnitVisit, part: SegmentVisit) -> str:
        segment, dtype = self._segment(visit, part), self.strategy.precision.compute
        return self.draft.buffer(
            f"{self.model.units[visit.unit].name}/saved{part.segment}{self._slot}",
            -(-segment.saved_bytes // dtype.size_bytes),
            dtype,
            Kind.SAVED,
            produced=True,
        )

    def begin_slope(self, value: str) -> None:
        """The gradient of `value` has come from elsewhere."""
        self._slopes[value] = 1

    def end_slope(self, value: str) -> None:
        """The gradient of `value` is another stage's."""
        del self._slopes[value]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Slot:
    """Buffers of one micro-batch at a time: who writes its visits, and what is handed on."""

    passes: _SlotPasses
    visits: tuple[UnitVisit, ...]
    given: Value | None
    sent: Value | None


class _StageStep(Step):
    """Forward and backward of every micro-batch on one stage, then the update."""

    def __init__(
        self,
        draft: Draft,
        stage: Stage,
        strategy: Strategy,
        *,
        buckets: Buckets,
        states: tuple[BucketState, ...],
    ) -> None:
        super().__init__(draft, stage.model, strategy, buckets=buckets, states=states)
        self.stage = stage
        self.ahead = min(strategy.pipeline - 1 - stage.index, strategy.gradient_accumulation_steps)
        count = min(self.ahead + 1, strategy.gradient_accumulation_steps)
        self.slots = [self._slot(f"@{number}" if number else "") for number in range(count)]
        self._owed_activation: int | None = None
        self._owed_gradient: int | None = None

    def _slot(self, suffix: str) -> _Slot:
        stage, own = self.stage, _renamed(self.stage.model, suffix)
        passes = _SlotPasses(
            self.draft, own, self.strategy, buckets=self.buckets, held=self._held, slot=suffix
        )
        once = visits(own, self.strategy)
        sent = None if stage.sent is None else own.loss
        if sent is not None:  # what forward made of it goes when it has been sent
            made = Instance(sent.name, Made.FORWARD)
            for visit in once:
                for part in visit.segments:
                    part.ends = tuple(each for each in part.ends if each != made)
        given = own.given[0] if own.given else None
        return _Slot(passes=passes, visits=once, given=given, sent=sent)

    def write(self) -> None:
        """Append the step to the draft."""
        count = self.strategy.gradient_accumulation_steps
        self.begin()
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
        self.end()

    def _slot_of(self, micro_batch: int) -> _Slot:
        return self.slots[micro_batch % len(self.slots)]

    def _forward(self, micro_batch: int) -> None:
        slot, draft = self._slot_of(micro_batch), self.draft
        slot.passes.micro_batch = micro_batch
        part = draft.prefix = f"step/forward/mb{micro_batch}"
        if slot.given is not None:
            self._receive(slot.given.name, slot.given, BEFORE)
            self._send_gradient()
        draft.prefix = part
        if self.stage.reads_batch:
            slot.passes.load()
        for visit in slot.visits[: len(self.model.units)]:
            draft.prefix = f"{part}/{self.model.units[visit.unit].name}"
            slot.passes.forward(visit, ())
        self._owed_activation = None if slot.sent is None else micro_batch

    def _backward(self, micro_batch: int) -> None:
        slot, draft = self._slot_of(micro_batch), self.draft
        last = micro_batch == self.strategy.gradient_accumulation_steps - 1
        part = draft.prefix = f"step/backward/mb{micro_batch}"
        slot.passes.micro_batch = micro_batch
        if slot.sent is None:
            slot.passes.seed()
        else:
            self._send_activation()
            draft.prefix = part
            self._receive(f"{slot.sent.name}/gradient", slot.sent, NEXT)
            slot.passes.begin_slope(slot.sent.name)
        self.passes = slot.passes
        for visit in slot.visits[len(self.model.units) :]:
            draft.prefix = f"{part}/{self.model.units[visit.unit].name}"
            self.backward(visit, last=last)
        if slot.given is not None:
            slot.passes.end_slope(slot.given.name)
            self._owed_gradient = micro_batch
        self.collect(part, last=last)

    def _send_activation(self) -> None:
        """Hand on what the last forward made, if that is owed yet."""
        if self._owed_activation is None:
            return
        micro_batch, self._owed_activation = self._owed_activation, None
        slot = self._slot_of(micro_batch)
        assert slot.sent is not None
        self.draft.prefix = f"step/forward/mb{micro_batch}"
        self._send(slot.sent.name, slot.sent, NEXT)

    def _send_gradient(self) -> None:
        """The same of the gradient that the last backward made."""
        if self._owed_gradient is None:
            return
        micro_batch, self._owed_gradient = self._owed_gradient, None
        slot = self._slot_of(micro_batch)
        assert slot.given is not None
        self.draft.prefix = f"step/backward/mb{micro_batch}"
        self._send(f"{slot.given.name}/gradient", slot.given, BEFORE)

    def _send(self, buffer: str, value: Value, offset: int) -> None:
        """Send `buffer`, of the form of `value`, once it is there, and give its memory back."""
        draft = self.draft
        draft.host_wait(self.made(), f"send/{buffer}/wait")
        draft.add(
            Send(
                id=draft.path(f"send/{buffer}"),
                stream=COMPUTE,
                group=PIPELINE,
                offset=offset,
                source=draft.all(buffer),
                wire=value.dtype,
            )
        )
        draft.free(buffer)

    def _receive(self, buffer: str, value: Value, offset: int) -> None:
        """Take memory for `buffer`, of the form of `value`, and what is sent into it."""
        draft = self.draft
        draft.buffer(buffer, value.elements, value.dtype, Kind.WORKSPACE)
        draft.allocate(buffer)
        done = draft.add(
            Receive(
                id=draft.path(f"receive/{buffer}"),
                stream=COMPUTE,
                group=PIPELINE,
                offset=offset,
                target=draft.all(buffer),
                wire=value.dtype,
            )
        )
        draft.host_wait(done, f"receive/{buffer}/wait")


def _renamed(model: Model, suffix: str) -> Model:
    """`model` with other names of its values, which are those of their buffers."""
    if not suffix:
        return model

    def renamed(value: Value) -> Value:
        return replace(value, name=f"{value.name}{suffix}")

    def segment(each: Segment) -> Segment:
        return replace(
            each,
            inputs=tuple(f"{name}{suffix}" for name in each.inputs),
            outputs=tuple(map(renamed, each.outputs)),
        )

    def unit(each: Unit) -> Unit:
        return replace(each, segments=tuple(map(segment, each.segments)))

    return replace(
        model,
        units=tuple(map(unit, model.units)),
        batch=renamed(model.batch),
        given=tuple(map(renamed, model.given)),
    )
