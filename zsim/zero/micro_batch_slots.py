"""Micro-batches in flight on a pipeline stage.

A stage keeps the activations of several micro-batches. Each micro-batch has a slot of buffers,
which a later micro-batch reuses once it has ended. Names of values carry the slot; the rest of the
forward and backward code handles one micro-batch. Each chunk of a stage has separate buffers in
each slot.
"""

from collections.abc import Sequence, Set
from dataclasses import dataclass, replace

from zsim.model.model import Model, Segment, Unit, Value
from zsim.model.pipeline_stages import Chunk, Stage
from zsim.schedule.schedule_writer import ScheduleWriter
from zsim.strategy.strategy import Strategy
from zsim.zero.bucket import Buckets
from zsim.zero.forward_backward import ForwardBackward, Held
from zsim.zero.visit_order import Made, UnitVisit, ValueInstance, visits


class SlotForwardBackward(ForwardBackward):
    """The visits of the micro-batches that use one slot of a stage's buffers.

    Views of parameters found by the `first` slot are reused by all slots. Gradients of values in
    `kept` are received into memory that is not freed.

    Class attributes:
        shares_gradients: if True, all micro-batches use one buffer for gradients of parameters.
    """

    shares_gradients = True

    def __init__(
        self,
        writer: ScheduleWriter,
        model: Model,
        strategy: Strategy,
        *,
        buckets: Buckets,
        held: Held,
        slot: str,
        first: "SlotForwardBackward | None",
        kept: Set[str] = frozenset(),
    ) -> None:
        super().__init__(writer, model, strategy, buckets=buckets, held=held)
        self._slot = slot
        self.gradient_slot = "" if self.shares_gradients else slot
        self._kept = kept
        self._transients: dict[tuple[int, int], str] = {}
        if first is not None and self.shares_gradients:
            self._views, self._of_parameters = first._views, first._of_parameters
            self._transients = first._transients

    def transient(self, unit: int, position: int) -> str:
        """Return the buffer of gradients of a unit's run, declared once for slots that share it."""
        key = unit, position
        if key not in self._transients:
            self._transients[key] = super().transient(unit, position)
        return self._transients[key]

    def begin_gradient(self, value: str) -> None:
        """Record that another stage sent the gradient of `value`."""
        self._gradients[value] = 1

    def end_gradient(self, value: str) -> None:
        """Record that the gradient of `value` now belongs to another stage."""
        del self._gradients[value]

    def _free_gradient(self, value: Value) -> None:
        if value.name not in self._kept:
            super()._free_gradient(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkSlot:
    """Buffers of a chunk for one micro-batch at a time: its visits, and its input and output."""

    passes: SlotForwardBackward
    forward: tuple[UnitVisit, ...]
    backward: tuple[UnitVisit, ...]
    given: Value | None
    sent: Value | None
    reads_batch: bool

    def begin_forward(self) -> None:
        """Load the micro-batch if the chunk reads it."""
        if self.reads_batch:
            self.passes.load()

    def begin_backward(self) -> None:
        """Start backward from the gradient that the next chunk sent, or from that of the loss."""
        if self.sent is None:
            self.passes.seed()
        else:
            self.passes.begin_gradient(self.sent.name)

    def end_backward(self) -> None:
        """Leave the gradient of the chunk's input to the stage that sent the input."""
        if self.given is not None:
            self.passes.end_gradient(self.given.name)


def chunk_slots(
    writer: ScheduleWriter,
    stage: Stage,
    strategy: Strategy,
    *,
    buckets: Buckets,
    held: Held,
    counts: Sequence[int],
    keeps_received: bool = False,
    kind: type[SlotForwardBackward] = SlotForwardBackward,
) -> list[list[ChunkSlot]]:
    """Return slots of each chunk, as many as its entry in `counts`, with visits of a `kind`.

    With `keeps_received`, buffers that are received into or sent from are not freed.
    """
    made: list[list[ChunkSlot]] = [[] for _ in counts]
    given = {chunk.given.name for chunk in stage.chunks if chunk.given is not None}
    received = [
        chunk.sent.name
        for chunk in stage.chunks
        if keeps_received and chunk.sent is not None and chunk.sent.name not in given
    ]
    reading = [chunk for chunk in stage.chunks if chunk.reads_batch]
    first: SlotForwardBackward | None = None
    for number in range(max(counts)):
        suffix = f"@{number}" if number else ""
        renaming = _Renaming(suffix)
        passes = kind(
            writer,
            renaming.model(stage.model),
            strategy,
            buckets=buckets,
            held=held,
            slot=suffix,
            first=first,
            kept={f"{name}{suffix}" for name in received},
        )
        first = first or passes
        for own, chunk, count in zip(made, stage.chunks, counts, strict=True):
            if number < count:
                # The first chunk that reads the batch loads it; the last such chunk frees it.
                made_slot = _slot(
                    passes,
                    chunk,
                    renaming.model(chunk.model),
                    keeps_given=keeps_received,
                    reads_batch=chunk in reading[:1],
                    keeps_batch=chunk in reading[1:],
                )
                own.append(made_slot)
    return made


def _slot(
    passes: SlotForwardBackward,
    chunk: Chunk,
    own: Model,
    *,
    keeps_given: bool,
    reads_batch: bool,
    keeps_batch: bool,
) -> ChunkSlot:
    """Return a slot of a chunk; `own` is the chunk's model with the slot's value names."""
    once = visits(own, passes.strategy)
    if chunk.first:
        once = tuple([replace(visit, unit=chunk.first + visit.unit) for visit in once])
    sent = None if chunk.sent is None else own.loss
    # the forward output `sent` is freed after it is sent
    stay = (*((sent,) if sent else ()), *(own.given if keeps_given else ()))
    stay += (own.batch,) if keeps_batch else ()
    instances = {ValueInstance(value.name, Made.FORWARD) for value in stay}
    for visit in once if instances else ():
        for part in visit.segments:
            part.ends = tuple(each for each in part.ends if each not in instances)
    return ChunkSlot(
        passes=passes,
        forward=tuple(visit for visit in once if not visit.backward),
        backward=tuple(visit for visit in once if visit.backward),
        given=own.given[0] if own.given else None,
        sent=sent,
        reads_batch=reads_batch,
    )


class _Renaming:
    """Renames the values of models, and so their buffers.

    Each model and each unit, which models may share, is renamed once.
    """

    def __init__(self, suffix: str) -> None:
        self._suffix = suffix
        self._units: dict[int, Unit] = {}
        self._models: dict[int, Model] = {}

    def model(self, model: Model) -> Model:
        """Return `model` with the suffix added to the names of its values."""
        if not self._suffix:
            return model
        found = self._models.get(id(model))
        if found is None:
            found = self._models[id(model)] = replace(
                model,
                units=tuple(map(self._unit, model.units)),
                batch=self._value(model.batch),
                given=tuple(map(self._value, model.given)),
            )
        return found

    def _unit(self, unit: Unit) -> Unit:
        found = self._units.get(id(unit))
        if found is None:
            found = replace(
                unit,
                segments=tuple(map(self._segment, unit.segments)),
                biases=tuple(
                    replace(each, load=f"{each.load}{self._suffix}") for each in unit.biases
                ),
            )
            self._units[id(unit)] = found
        return found

    def _segment(self, segment: Segment) -> Segment:
        return replace(
            segment,
            inputs=tuple([f"{name}{self._suffix}" for name in segment.inputs]),
            outputs=tuple(map(self._value, segment.outputs)),
            routes=segment.routes and f"{segment.routes}{self._suffix}",
        )

    def _value(self, value: Value) -> Value:
        return replace(value, name=f"{value.name}{self._suffix}")
