"""The order in which one micro-batch visits units and segments, and how long each value lives.

A checkpointed unit keeps nothing of its forward but what it was given; before its backward it is
run again, and what that makes are values of their own (`Made.AGAIN`).
"""

from collections import Counter
from dataclasses import dataclass
from enum import StrEnum

from zsim.model.model import BATCH, Model, Segment, Unit
from zsim.schedule.operation import Action
from zsim.strategy.strategy import Checkpointing, Strategy


class Made(StrEnum):
    """When an instance of a value was made."""

    FORWARD = "forward"
    AGAIN = "again"
    GATHERED = "gathered"
    """Not made, but put away after forward and brought back for backward."""


@dataclass(frozen=True, slots=True)
class ValueInstance:
    """A value as one pass made it."""

    value: str
    made: Made

    @property
    def buffer(self) -> str:
        """Name of the buffer that holds it."""
        return self.value if self.made is Made.FORWARD else f"{self.value}/{self.made}"


@dataclass(slots=True)
class SegmentVisit:
    """One segment in one pass: what it reads and makes, and what is last read here."""

    action: Action
    segment: int
    reads: tuple[ValueInstance, ...]
    makes: tuple[ValueInstance, ...]
    ends: tuple[ValueInstance, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitVisit:
    """One unit in one pass, with what of its input is put away after it or brought back before.

    `again` says that the unit is checkpointed: its forward saves nothing, its backward runs it
    again.
    """

    unit: int
    backward: bool
    again: bool
    segments: tuple[SegmentVisit, ...]
    parts: tuple[str, ...] = ()


def visits(model: Model, strategy: Strategy) -> tuple[UnitVisit, ...]:
    """Every visit of one micro-batch, forward then backward, of all units that have one.

    `parts` are the checkpoints that are put away after the forward visit and brought back before
    the backward one. What several units are given stays where it is.
    """
    full = strategy.activations.checkpointing is Checkpointing.FULL
    readers = Counter(name for unit in model.units for name in _given(unit))
    found: list[UnitVisit] = []
    for index, unit in enumerate(model.units):
        again = full and unit.checkpoint
        parts: tuple[str, ...] = ()
        if again and strategy.moves_checkpoints and _differentiated(model, unit):
            parts = tuple(
                name
                for name in _given(unit)
                if readers[name] == 1 and model.values[name].requires_gradient
            )
        segments = tuple(
            SegmentVisit(
                Action.FORWARD,
                number,
                tuple(ValueInstance(name, Made.FORWARD) for name in segment.inputs),
                tuple(ValueInstance(value.name, Made.FORWARD) for value in segment.outputs),
            )
            for number, segment in enumerate(unit.segments)
        )
        found.append(
            UnitVisit(unit=index, backward=False, again=again, segments=segments, parts=parts)
        )
    for index in reversed(range(len(model.units))):
        unit, again = model.units[index], found[index].again
        if not _differentiated(model, unit):
            continue
        found.append(
            UnitVisit(
                unit=index,
                backward=True,
                again=again,
                segments=_backward(model, unit, again=again, parts=found[index].parts),
                parts=found[index].parts,
            )
        )
    _end_values(found)
    return tuple(found)


def _given(unit: Unit) -> tuple[str, ...]:
    """Values that the unit reads and others make, but for the batch."""
    own = {value.name for segment in unit.segments for value in segment.outputs}
    given = [name for segment in unit.segments for name in segment.inputs]
    return tuple(dict.fromkeys(name for name in given if name not in own and name != BATCH))


def _differentiated(model: Model, unit: Unit) -> bool:
    """Tell whether a unit is visited in backward: before the first trained parameter none is."""
    return any(map(model.runs_backward, unit.segments)) or not unit.segments


def _backward(
    model: Model, unit: Unit, *, again: bool, parts: tuple[str, ...]
) -> tuple[SegmentVisit, ...]:
    own = {value.name for segment in unit.segments for value in segment.outputs}

    def instance(name: str) -> ValueInstance:
        if name in parts:
            return ValueInstance(name, Made.GATHERED)
        return ValueInstance(name, Made.AGAIN if again and name in own else Made.FORWARD)

    def reads(segment: Segment) -> tuple[ValueInstance, ...]:
        return tuple(instance(name) for name in segment.inputs)

    found: list[SegmentVisit] = []
    if again:
        found += [
            SegmentVisit(
                Action.RECOMPUTE,
                number,
                reads(segment),
                tuple(ValueInstance(value.name, Made.AGAIN) for value in segment.outputs),
            )
            for number, segment in enumerate(unit.segments)
        ]
    for number in reversed(range(len(unit.segments))):
        segment = unit.segments[number]
        if not model.runs_backward(segment):
            continue
        kept = reads(segment) if segment.saves_input else ()
        found.append(SegmentVisit(Action.BACKWARD, number, kept, ()))
    return tuple(found)


def _end_values(found: list[UnitVisit]) -> None:
    """Note with each visit the instances that nothing reads later."""
    ended: set[ValueInstance] = set()
    for visit in reversed(found):
        parted = {ValueInstance(name, Made.FORWARD) for name in visit.parts}
        if not visit.backward:
            # Put away after the visit, which frees the whole.
            ended |= parted
        for segment in reversed(visit.segments):
            last: list[ValueInstance] = []
            for instance in (*segment.reads, *segment.makes):
                if instance not in ended:
                    ended.add(instance)
                    last.append(instance)
            segment.ends = tuple(last)


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """A bucket that must be whole from visit `first` to visit `last`."""

    bucket: int
    buffer: str
    first: int
    last: int
