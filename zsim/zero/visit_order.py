"""The order in which one micro-batch visits units and segments, and how long each value lives.

A checkpointed unit keeps nothing of its forward but what it was given; before its backward it is
run again, and what that makes are values of their own (`Made.AGAIN`). Units of one block are
checkpointed as one: all of them are run again, each in a visit of its own, then backward begins.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, replace
from enum import StrEnum

from zsim.model.model import BATCH, Model, Unit
from zsim.schedule.operation import Action
from zsim.schedule.quick_init import quick_init
from zsim.strategy.activations import Checkpointing
from zsim.strategy.strategy import Strategy


class Made(StrEnum):
    """When an instance of a value was made."""

    FORWARD = "forward"
    AGAIN = "again"
    GATHERED = "gathered"
    """Not made, but put away after forward and brought back for backward."""


@quick_init
@dataclass(frozen=True, slots=True)
class ValueInstance:
    """A value as one pass made it."""

    value: str
    made: Made

    @property
    def buffer(self) -> str:
        """Name of the buffer that holds it."""
        return self.value if self.made is Made.FORWARD else f"{self.value}/{self.made}"

    def is_kept_for(self, action: Action) -> bool:
        """Return True if `action` is of backward and reads what an earlier pass has made.

        What runs again makes values for the backward that follows, and reads checkpoints.
        """
        if action is Action.RECOMPUTE:
            return self.made is not Made.AGAIN
        return action is not Action.FORWARD


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
    again. `opens` and `closes` say that it is the first visit, or the last, of all units that are
    checkpointed with it, in its direction.
    """

    unit: int
    backward: bool
    again: bool
    segments: tuple[SegmentVisit, ...]
    parts: tuple[str, ...] = ()
    opens: bool = True
    closes: bool = True

    @property
    def only_recomputes(self) -> bool:
        """True if it runs the unit again, whose backward is a visit of its own."""
        return bool(self.segments) and all(
            each.action is Action.RECOMPUTE for each in self.segments
        )


def visits(model: Model, strategy: Strategy) -> tuple[UnitVisit, ...]:
    """Every visit of one micro-batch, forward then backward, of all units that have one.

    `parts` are the checkpoints that are put away after the last forward visit of what is
    checkpointed as one, and brought back before its first backward one. What others are given, too,
    stays where it is.
    """
    blocks = _blocks(model, strategy)
    forward: list[UnitVisit] = []
    backward: list[UnitVisit] = []
    for block in blocks:
        for index in block.units:
            unit, last = model.units[index], index == block.units[-1]
            forward.append(
                UnitVisit(
                    unit=index,
                    backward=False,
                    again=block.again,
                    segments=tuple(
                        SegmentVisit(
                            Action.FORWARD,
                            number,
                            tuple(ValueInstance(name, Made.FORWARD) for name in segment.inputs),
                            tuple(
                                ValueInstance(value.name, Made.FORWARD) for value in segment.outputs
                            ),
                        )
                        for number, segment in enumerate(unit.segments)
                    ),
                    parts=block.parts if last else (),
                    opens=index == block.units[0],
                    closes=last,
                )
            )
    for block in reversed(blocks):
        backward += _backward(model, block, again=block.again)
    found = [*forward, *backward]
    _end_values(found, {name for block in blocks for name in block.parts})
    return tuple(found)


@dataclass(frozen=True, slots=True)
class _CheckpointedUnits:
    """Units that are checkpointed as one, what they make, and which checkpoints are put away.

    They are run `again` before their backward, or keep what it reads: on the device, or `stored`.
    """

    units: tuple[int, ...]
    own: frozenset[str]
    given: tuple[str, ...]
    again: bool
    stored: bool = False
    parts: tuple[str, ...] = ()


def _blocks(model: Model, strategy: Strategy) -> list[_CheckpointedUnits]:
    """Return all units by what is checkpointed as one."""
    found: list[_CheckpointedUnits] = []
    full = strategy.activations.checkpointing is Checkpointing.FULL
    first = blocks = 0
    for units in model.checkpointed_together:
        segments = [segment for unit in units for segment in unit.segments]
        own = frozenset(value.name for segment in segments for value in segment.outputs)
        read = dict.fromkeys(name for segment in segments for name in segment.inputs)
        given = tuple(name for name in read if name not in own and name != BATCH)
        again = stored = False
        if units[0].checkpoint:
            # as _apply_layer_sac (torchtitan, distributed/activation_checkpoint.py) counts
            blocks += 1
            again = full and blocks % strategy.activations.every_nth == 0
            stored = blocks <= strategy.layers_on_host
        indices = tuple(range(first, first + len(units)))
        found.append(_CheckpointedUnits(indices, own, given, again, stored))
        first += len(units)
    readers = Counter(name for block in found for name in block.given)
    return [replace(each, parts=_parts(model, strategy, each, readers)) for each in found]


def _parts(
    model: Model, strategy: Strategy, block: _CheckpointedUnits, readers: Mapping[str, int]
) -> tuple[str, ...]:
    """Return checkpoints that are put away: of what is run again, what no other block reads."""
    units = [model.units[index] for index in block.units]
    if block.stored:
        return _stored(model, strategy, block, readers)
    differentiated = any(_differentiated(model, unit) for unit in units)
    if not (block.again and strategy.moves_checkpoints and differentiated):
        return ()
    return tuple(
        name for name in block.given if readers[name] == 1 and model.values[name].requires_gradient
    )


def _stored(
    model: Model, strategy: Strategy, block: _CheckpointedUnits, readers: Mapping[str, int]
) -> tuple[str, ...]:
    """Return values that the backward of a block reads, and no other block."""
    segments = [each for unit in block.units for each in model.units[unit].segments]
    kept = dict.fromkeys(
        name for each in segments if model.runs_backward(each) for name in each.kept_inputs
    )
    return tuple(
        name
        for name in kept
        if name != BATCH
        and readers[name] == (name in block.given)
        and model.values[name].elements >= strategy.stored_least
    )


def _differentiated(model: Model, unit: Unit) -> bool:
    """Tell whether a unit is visited in backward: before the first trained parameter none is."""
    return any(map(model.runs_backward, unit.segments)) or not unit.segments


def _backward(model: Model, block: _CheckpointedUnits, *, again: bool) -> list[UnitVisit]:
    """Return backward visits of a block; of one unit that is run again, one for both."""
    differentiated = [each for each in block.units if _differentiated(model, model.units[each])]
    if not differentiated:
        return []
    found: list[tuple[int, tuple[SegmentVisit, ...]]] = []
    if again:
        found += [(each, _run_again(model, block, each)) for each in block.units]
    for each in reversed(differentiated):
        before = found.pop()[1] if again and len(block.units) == 1 else ()
        found.append((each, (*before, *_run_backward(model, block, each, again=again))))
    return [
        UnitVisit(
            unit=unit,
            backward=True,
            again=again,
            segments=segments,
            parts=() if number else block.parts,
            opens=not number,
            closes=number == len(found) - 1,
        )
        for number, (unit, segments) in enumerate(found)
    ]


def _reads(
    block: _CheckpointedUnits, names: Iterable[str], *, again: bool
) -> tuple[ValueInstance, ...]:
    """Return what the backward of a block has of inputs of a segment."""

    def instance(name: str) -> ValueInstance:
        if name in block.parts:
            return ValueInstance(name, Made.GATHERED)
        made_again = again and name in block.own
        return ValueInstance(name, Made.AGAIN if made_again else Made.FORWARD)

    return tuple(map(instance, names))


def _run_again(model: Model, block: _CheckpointedUnits, unit: int) -> tuple[SegmentVisit, ...]:
    return tuple(
        SegmentVisit(
            Action.RECOMPUTE,
            number,
            _reads(block, segment.inputs, again=True),
            tuple(ValueInstance(value.name, Made.AGAIN) for value in segment.outputs),
        )
        for number, segment in enumerate(model.units[unit].segments)
        if segment.runs_again
    )


def _run_backward(
    model: Model, block: _CheckpointedUnits, unit: int, *, again: bool
) -> tuple[SegmentVisit, ...]:
    found: list[SegmentVisit] = []
    for number, segment in reversed(list(enumerate(model.units[unit].segments))):
        if model.runs_backward(segment):
            kept = _reads(block, segment.kept_inputs, again=again)
            found.append(SegmentVisit(Action.BACKWARD, number, kept, ()))
    return tuple(found)


def _end_values(found: list[UnitVisit], parts: Set[str]) -> None:
    """Note with each visit the instances that nothing reads later.

    What is put away ends with that: it frees the whole.
    """
    ended = {ValueInstance(name, Made.FORWARD) for name in parts}
    for visit in reversed(found):
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
