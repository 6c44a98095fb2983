"""The order in which one micro-batch visits units and segments, and the lifetime of each value.

A checkpointed unit keeps only the inputs of its forward. It is recomputed before its backward,
which makes separate instances of its values (`Made.AGAIN`). Units of one block are checkpointed
together: all of them are recomputed, each in a separate visit, before backward starts.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field, replace
from enum import StrEnum

from msgspec import Struct

from zsim.model.model import BATCH, Model, Unit
from zsim.schedule.operation import Action
from zsim.strategy.activations import Checkpointing
from zsim.strategy.strategy import Strategy


class Made(StrEnum):
    """When an instance of a value was made."""

    FORWARD = "forward"
    AGAIN = "again"
    GATHERED = "gathered"
    """Not computed, but moved to a store after forward and restored for backward."""


class ValueInstance(Struct, frozen=True):
    """A value as computed in one pass."""

    value: str
    made: Made

    @property
    def buffer(self) -> str:
        """Name of the buffer that holds it."""
        return self.value if self.made is Made.FORWARD else f"{self.value}/{self.made}"

    def is_kept_for(self, action: Action) -> bool:
        """Return True if `action` belongs to backward and reads a value of an earlier pass.

        Recompute reads checkpoints; the values that it makes are for the backward that follows.
        """
        if action is Action.RECOMPUTE:
            return self.made is not Made.AGAIN
        return action is not Action.FORWARD


@dataclass(slots=True)
class SegmentVisit:
    """One segment in one pass: the values it reads, makes, and is the last to read (`ends`)."""

    action: Action
    segment: int
    reads: tuple[ValueInstance, ...]
    makes: tuple[ValueInstance, ...]
    ends: tuple[ValueInstance, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitVisit:
    """One unit in one pass, with the inputs moved to a store after it or restored before it.

    `again` is True if the unit is checkpointed: its forward saves nothing, and it is recomputed in
    backward. `opens` and `closes` are True in the first and the last visit, in this direction, of
    the units that are checkpointed together.
    """

    unit: int
    backward: bool
    again: bool
    segments: tuple[SegmentVisit, ...]
    parts: tuple[str, ...] = ()
    opens: bool = True
    closes: bool = True
    only_recomputes: bool = field(init=False)
    """True if the visit only recomputes the unit; its backward is then a separate visit."""

    def __post_init__(self) -> None:
        recomputes = all(each.action is Action.RECOMPUTE for each in self.segments)
        object.__setattr__(self, "only_recomputes", bool(self.segments) and recomputes)


def visits(model: Model, strategy: Strategy) -> tuple[UnitVisit, ...]:
    """Return every visit of one micro-batch: forward, then backward of the units that have one.

    `parts` are the checkpoints that move to a store after the last forward visit of units
    checkpointed together, and return before their first backward visit. Inputs that other blocks
    read, too, are not moved.
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
                        if segment.loads is None or not (block.again or segment.reruns)
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
    """Units that are checkpointed together, the values they make, and checkpoints that are moved.

    They are recomputed before their backward (`again`), or keep the values that it reads: on the
    device, or in a store (`stored`). Values in `rerun` have a second instance all the same.
    """

    units: tuple[int, ...]
    own: frozenset[str]
    given: tuple[str, ...]
    again: bool
    stored: bool = False
    parts: tuple[str, ...] = ()
    rerun: frozenset[str] = frozenset()


def _blocks(model: Model, strategy: Strategy) -> list[_CheckpointedUnits]:
    """Return the model's units in groups that are checkpointed together."""
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
            # counted as in _apply_layer_sac (torchtitan, distributed/activation_checkpoint.py)
            blocks += 1
            again = full and blocks % strategy.activations.every_nth == 0
            stored = blocks <= strategy.layers_on_host
        indices = tuple(range(first, first + len(units)))
        rerun = frozenset(
            value.name for segment in segments if segment.reruns for value in segment.outputs
        )
        found.append(_CheckpointedUnits(indices, own, given, again, stored, rerun=rerun))
        first += len(units)
    readers = Counter(name for block in found for name in block.given)
    moved = [_parts(model, strategy, each, readers) for each in found]
    return [
        replace(each, parts=parts) if parts else each
        for each, parts in zip(found, moved, strict=True)
    ]


def _parts(
    model: Model, strategy: Strategy, block: _CheckpointedUnits, readers: Mapping[str, int]
) -> tuple[str, ...]:
    """Return the checkpoints that move to a store: inputs that no other block reads."""
    if block.stored:
        return _stored(model, strategy, block, readers)
    if not (block.again and strategy.moves_checkpoints):
        return ()
    if not any(_differentiated(model, model.units[index]) for index in block.units):
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
    """Return True if a unit is visited in backward; units before the first trained one are not."""
    return any(map(model.runs_backward, unit.segments)) or not unit.segments


def _backward(model: Model, block: _CheckpointedUnits, *, again: bool) -> list[UnitVisit]:
    """Return the backward visits of a block; a single recomputed unit has one visit for both."""
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
    """Return the instances of `names` that the backward of a block reads."""

    def instance(name: str) -> ValueInstance:
        if name in block.parts:
            return ValueInstance(name, Made.GATHERED)
        made_again = name in (block.own if again else block.rerun)
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
    ends = {} if again or not block.rerun else _reruns(model.units[unit])
    for number, segment in reversed(list(enumerate(model.units[unit].segments))):
        found += _recomputes(model, block, unit, ends.get(number, range(0)))
        if model.runs_backward(segment):
            kept = _reads(block, segment.kept_inputs, again=again)
            found.append(SegmentVisit(Action.BACKWARD, number, kept, ()))
    return tuple(found)


def _reruns(unit: Unit) -> dict[int, range]:
    """Return runs of segments that run again, by the segment before whose backward they do.

    It is the last segment before the next run: the one that ends the module, or adds its output.
    """
    segments = unit.segments
    starts = [
        number
        for number, each in enumerate(segments)
        if each.reruns and not (number and segments[number - 1].reruns)
    ]
    found: dict[int, range] = {}
    for start, after in zip(starts, [*starts[1:], len(segments)], strict=True):
        end = start
        while end < after and segments[end].reruns:
            end += 1
        found[after - 1] = range(start, end)
    return found


def _recomputes(
    model: Model, block: _CheckpointedUnits, unit: int, numbers: range
) -> Iterator[SegmentVisit]:
    """Yield the visits that run segments of a unit again that keep nothing."""
    for number in numbers:
        segment = model.units[unit].segments[number]
        made = tuple(ValueInstance(value.name, Made.AGAIN) for value in segment.outputs)
        read = _reads(block, segment.inputs, again=False)
        yield SegmentVisit(Action.RECOMPUTE, number, read, made)


def _end_values(found: list[UnitVisit], parts: Set[str]) -> None:
    """Record in each visit the instances that no later visit reads.

    Values in `parts` are excluded: moving them to a store frees them.
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
