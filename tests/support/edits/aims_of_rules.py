"""Named edits of which rule updates go by: the learning rate that a caller gives."""

from collections.abc import Iterator
from dataclasses import replace

from edits.aim import Aim, adds, in_step, made, through
from edits.aims_of_updates import updates
from edits.programs import Edit
from zsim.operation import Compute, Operation, SetScalar
from zsim.rule import Adam, Optimizer, Rate
from zsim.schedule import Scalar, Schedule

OTHER = Scalar(name="other", initial=0.0, given=True)


def given(update: Compute) -> str:
    """The host scalar that an update takes for its learning rate; empty if it is constant."""
    rate = update.rule.learning_rate if isinstance(update.rule, Optimizer) else 0.0
    return rate if isinstance(rate, str) else ""


def with_rate(rate: Rate, *, one: bool = False) -> Aim:
    """Updates take another learning rate than that which is given."""

    def aim(schedule: Schedule) -> Iterator[Edit]:
        found = [each.id for each in updates(schedule) if given(each)]
        chosen = set(found[-1:] if one else found)

        def change(each: Operation) -> tuple[Operation, ...] | None:
            if each.id not in chosen or not isinstance(each, Compute):
                return None
            assert isinstance(each.rule, Optimizer)
            return (replace(each, rule=replace(each.rule, learning_rate=rate)),)

        more = replace(schedule, scalars=(*schedule.scalars, OTHER))
        yield from through(more, change, f"{len(chosen)} updates take {rate}")

    return aim


def halved(schedule: Schedule) -> Iterator[Edit]:
    """The host halves what it is given, before the updates."""
    for name in {given(each) for each in updates(schedule)} - {""}:
        first = next(each for each in in_step(schedule) if each.id == updates(schedule)[0].id)
        change = SetScalar(id="step/edit/halve", scalar=name, multiply=0.5)
        yield from made(schedule, adds(change, before=first.id), f"{name} halved")


def for_a_step_number(schedule: Schedule) -> Iterator[Edit]:
    """Adam is given the learning rate for the number of its step."""

    def change(each: Operation) -> tuple[Operation, ...] | None:
        if isinstance(each, Compute) and isinstance(each.rule, Adam) and given(each):
            return (replace(each, scalars=(given(each),)),)
        return None

    yield from through(schedule, change, "learning rate for a step number")


RULES: dict[str, Aim] = {
    "constant for a given learning rate": with_rate(1e-3),
    "constant for a given learning rate in one update": with_rate(1e-3, one=True),
    "another given number for a learning rate": with_rate(OTHER.name),
    "another given number for a learning rate in one update": with_rate(OTHER.name, one=True),
    "given learning rate halved": halved,
    "given learning rate for a step number": for_a_step_number,
}
