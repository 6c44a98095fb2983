"""Random numbers: states that are restored, and seeds along axes."""

from collections.abc import Callable, Iterator

from faults.changes import Aim, Edit, at, in_all
from faults.fault import Mutant
from faults.selections import computes
from zsim.model.generator import Draw, Generator
from zsim.schedule.operation import Action, Compute
from zsim.schedule.replace import replace
from zsim.schedule.schedule import Schedule


def drawing(schedule: Schedule, action: Action) -> list[Compute]:
    """Return operations of a step that draw."""
    return [each for each in computes(schedule, action) if each.draw is not None]


def recomputations(schedule: Schedule) -> list[Compute]:
    return drawing(schedule, Action.RECOMPUTE)


def restoring(each: Compute, state: str | None) -> tuple[Compute, ...]:
    """Return an operation that draws with the state of another one, or with a new one."""
    assert each.draw is not None
    return (replace(each, draw=replace(each.draw, restores=state)),)


def with_state_of(choose: Callable[[Compute, list[Compute]], Compute | None], text: str) -> Aim:
    """Return the operator that recomputes with the state that another forward drew with."""

    def aim(schedule: Schedule) -> Iterator[Edit]:
        forwards = drawing(schedule, Action.FORWARD)

        def other(each: Compute) -> tuple[Compute, ...]:
            chosen = choose(each, forwards)
            if chosen is None or chosen.draw is None:
                return (each,)
            draw = Draw(generator=chosen.draw.generator, restores=chosen.id)
            return (replace(each, draw=draw),)

        yield from at(recomputations, other, text)(schedule)

    return aim


def _of_another_micro_batch(each: Compute, forwards: list[Compute]) -> Compute | None:
    where = each.unit, each.segment
    same = (one for one in forwards if (one.unit, one.segment) == where)
    return next((one for one in same if one.micro_batch != each.micro_batch), None)


def _of_another_unit(each: Compute, forwards: list[Compute]) -> Compute | None:
    return next((one for one in forwards if one.unit != each.unit), None)


def state_used_twice(schedule: Schedule) -> Iterator[Edit]:
    """Draw twice with the state of the first forward."""
    forwards = drawing(schedule, Action.FORWARD)
    same = [each for each in forwards[1:] if each.draw == forwards[0].draw]
    again = at(lambda _: same, lambda each: restoring(each, forwards[0].id), "as the first")
    yield from again(schedule)


def first_draw(schedule: Schedule) -> list[Compute]:
    """Return the first forward that draws, and its recomputations."""
    first = drawing(schedule, Action.FORWARD)[:1]
    names = {each.id for each in first}
    later = [each for each in recomputations(schedule) if each.draw and each.draw.restores in names]
    return [*first, *later]


def seeded(change: Callable[[Schedule, Generator], tuple[str, ...]], text: str) -> Aim:
    """Return the operator that seeds a generator apart along other axes."""

    def aim(schedule: Schedule) -> Iterator[Edit]:
        for place, generator in enumerate(schedule.generators):
            axes = change(schedule, generator)
            if axes != generator.axes:
                made = list(schedule.generators)
                made[place] = replace(generator, axes=axes)
                yield Mutant.of(
                    f"{text}: {generator.name}", replace(schedule, generators=tuple(made))
                )

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
    "a recomputation draws anew": at(
        recomputations, lambda each: restoring(each, None), "drawn anew"
    ),
    "state of another micro-batch": with_state_of(_of_another_micro_batch, "other micro-batch"),
    "state of another unit": with_state_of(_of_another_unit, "other unit"),
    "a state draws twice": state_used_twice,
    "no random numbers": in_all(
        first_draw, lambda each: (replace(each, draw=None),), "draws nothing"
    ),
    "data ranks draw alike": seeded(_without_data, "alike along data"),
    "parts draw alike": seeded(_without_tensor, "alike along tensor"),
    "copies draw apart": seeded(_with_tensor, "apart along tensor"),
}
