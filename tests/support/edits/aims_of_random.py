"""Named edits of what draws random numbers: states that are restored, and seeds along axes."""

from collections.abc import Callable, Iterator
from dataclasses import replace

from edits.aim import Aim, computes, one_by_one, through
from edits.programs import Edit
from zsim.model.generator import Draw, Generator
from zsim.schedule.operation import Action, Compute, Operation
from zsim.schedule.schedule import Schedule


def drawing(schedule: Schedule, action: Action) -> list[Compute]:
    """Operations of a step that draw."""
    return [each for each in computes(schedule, action) if each.draw is not None]


def drawn_anew(schedule: Schedule) -> Iterator[Edit]:
    def anew(each: Operation) -> tuple[Operation, ...]:
        assert isinstance(each, Compute)
        assert each.draw is not None
        return (replace(each, draw=replace(each.draw, restores=None)),)

    yield from one_by_one(schedule, drawing(schedule, Action.RECOMPUTE), anew, "drawn anew")


def with_state_of(choose: Callable[[Compute, list[Compute]], Compute | None], text: str) -> Aim:
    """One recomputation draws with the state that another forward drew with."""

    def aim(schedule: Schedule) -> Iterator[Edit]:
        forwards = drawing(schedule, Action.FORWARD)

        def other(each: Operation) -> tuple[Operation, ...]:
            assert isinstance(each, Compute)
            chosen = choose(each, forwards)
            if chosen is None or chosen.draw is None:
                return (each,)
            draw = Draw(generator=chosen.draw.generator, restores=chosen.id)
            return (replace(each, draw=draw),)

        yield from one_by_one(schedule, drawing(schedule, Action.RECOMPUTE), other, text)

    return aim


def _of_another_micro_batch(each: Compute, forwards: list[Compute]) -> Compute | None:
    where = each.unit, each.segment
    same = (one for one in forwards if (one.unit, one.segment) == where)
    return next((one for one in same if one.micro_batch != each.micro_batch), None)


def _of_another_unit(each: Compute, forwards: list[Compute]) -> Compute | None:
    return next((one for one in forwards if one.unit != each.unit), None)


def state_used_twice(schedule: Schedule) -> Iterator[Edit]:
    forwards = drawing(schedule, Action.FORWARD)

    def again(each: Operation) -> tuple[Operation, ...]:
        assert isinstance(each, Compute)
        assert each.draw is not None
        return (replace(each, draw=replace(each.draw, restores=forwards[0].id)),)

    same = [each for each in forwards[1:] if each.draw == forwards[0].draw]
    yield from one_by_one(schedule, same, again, "with the state of the first")


def not_drawn(schedule: Schedule) -> Iterator[Edit]:
    names = {each.id for each in drawing(schedule, Action.FORWARD)[:1]}
    names |= {
        each.id
        for each in drawing(schedule, Action.RECOMPUTE)
        if each.draw is not None and each.draw.restores in names
    }

    def without(each: Operation) -> tuple[Operation, ...] | None:
        if isinstance(each, Compute) and each.id in names:
            return (replace(each, draw=None),)
        return None

    yield from through(schedule, without, "draws nothing")


def seeded(change: Callable[[Schedule, Generator], tuple[str, ...]], text: str) -> Aim:
    """A generator is seeded apart along other axes."""

    def aim(schedule: Schedule) -> Iterator[Edit]:
        for place, generator in enumerate(schedule.generators):
            axes = change(schedule, generator)
            if axes != generator.axes:
                made = list(schedule.generators)
                made[place] = replace(generator, axes=axes)
                yield Edit(f"{text}: {generator.name}", replace(schedule, generators=tuple(made)))

    return aim


def _several(schedule: Schedule, axis: str) -> bool:
    return any(each.name == axis and each.size > 1 for each in schedule.mesh.axes)


def _without_data(schedule: Schedule, generator: Generator) -> tuple[str, ...]:
    among = {axis for axis in schedule.contract.data_axes if _several(schedule, axis)}
    return tuple(axis for axis in generator.axes if axis not in among)


def _without_tensor(schedule: Schedule, generator: Generator) -> tuple[str, ...]:
    return tuple(
        axis for axis in generator.axes if axis != "tensor" or not _several(schedule, axis)
    )


def _with_tensor(schedule: Schedule, generator: Generator) -> tuple[str, ...]:
    if "tensor" in generator.axes or not _several(schedule, "tensor"):
        return generator.axes
    return (*generator.axes, "tensor")


RANDOM: dict[str, Aim] = {
    "a recomputation draws anew": drawn_anew,
    "state of another micro-batch": with_state_of(_of_another_micro_batch, "other micro-batch"),
    "state of another unit": with_state_of(_of_another_unit, "other unit"),
    "a state draws twice": state_used_twice,
    "no random numbers": not_drawn,
    "data ranks draw alike": seeded(_without_data, "alike along data"),
    "parts draw alike": seeded(_without_tensor, "alike along tensor"),
    "copies draw apart": seeded(_with_tensor, "apart along tensor"),
}
