"""Named edits of which rule updates go by: groups of parameters, a learning rate that is given."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from edits.aim import (
    Aim,
    adds,
    becomes,
    in_step,
    made,
    of_role,
    one_by_one,
    through,
    with_operands,
)
from edits.aims_of_updates import updates
from edits.programs import Edit
from zsim.schedule.operation import Compute, Operation, Role, SetScalar
from zsim.schedule.schedule import Scalar, Schedule
from zsim.strategy.optimizer_rule import Adam, Optimizer, Rate

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


def groups(schedule: Schedule) -> dict[Optimizer, list[Compute]]:
    """Updates by their rules."""
    found: dict[Optimizer, list[Compute]] = {}
    for each in updates(schedule):
        assert isinstance(each.rule, Optimizer)
        found.setdefault(each.rule, []).append(each)
    return found


def by_another_rule(*, one: bool) -> Aim:
    """Updates of a group, or the first of them, go by the rule of another group."""

    def aim(schedule: Schedule) -> Iterator[Edit]:
        found = groups(schedule)
        for rule, own in found.items():
            for other in found:
                names = {each.id for each in (own[:1] if one else own)}
                if other != rule:
                    yield from through(schedule, _rules(names, other), f"{sorted(names)}: {other}")

    return aim


def _rules(names: set[str], rule: Optimizer) -> Callable[[Operation], tuple[Operation, ...] | None]:
    def change(each: Operation) -> tuple[Operation, ...] | None:
        if each.id in names and isinstance(each, Compute):
            return (replace(each, rule=rule),)
        return None

    return change


def swapped(schedule: Schedule) -> Iterator[Edit]:
    """Two groups go by each other's rules."""
    first, *others = groups(schedule)
    for other in others:
        swap = {first: other, other: first}

        def change(
            each: Operation, swap: dict[Optimizer, Optimizer] = swap
        ) -> tuple[Operation, ...] | None:
            if isinstance(each, Compute) and each.rule in swap:
                return (replace(each, rule=swap[each.rule]),)
            return None

        yield from through(schedule, change, "rules swapped")


def _at(compute: Compute, start: int, size: int) -> Compute:
    """The update of other elements of the same buffers."""
    operands = tuple(
        replace(
            each,
            view=replace(
                each.view,
                start=start,
                size=size,
                origin=None if each.view.origin is None else start,
            ),
        )
        for each in compute.operands
    )
    return replace(compute, operands=operands)


def at_another_border(schedule: Schedule) -> Iterator[Edit]:
    """The last element of a parameter is updated with the next one, of another group."""
    for one in updates(schedule):
        for other in updates(schedule):
            mine, theirs = one.operands[-1].view, other.operands[-1].view
            if mine.buffer == theirs.buffer and mine.start + mine.size == theirs.start:
                new = {
                    one.id: _at(one, mine.start, mine.size - 1),
                    other.id: _at(other, theirs.start - 1, theirs.size + 1),
                }
                yield from through(schedule, _becomes(new), f"border of {one.id}")


def _becomes(
    new: Mapping[str, Compute],
) -> Callable[[Operation], tuple[Operation, ...] | None]:
    return lambda each: (new[each.id],) if each.id in new else None


def moments_of_another_group(schedule: Schedule) -> Iterator[Edit]:
    """An update keeps its moments where those of another group are."""
    for one in updates(schedule):
        for other in updates(schedule):
            mine, theirs = of_role(one, Role.MOMENT), of_role(other, Role.MOMENT)
            if one.rule == other.rule or not mine or theirs[0].view.size < mine[0].view.size:
                continue
            size = mine[0].view.size
            shared = [replace(each, view=replace(each.view, size=size)) for each in theirs]
            rest = [each for each in one.operands if each.role is not Role.MOMENT]
            new = with_operands(one, (*rest, *shared))
            yield from one_by_one(schedule, [one], becomes(new), f"moments of {other.id}")


RULES: dict[str, Aim] = {
    "rule of another group": by_another_rule(one=False),
    "rule of another group in one update": by_another_rule(one=True),
    "rules of groups swapped": swapped,
    "one element in another group": at_another_border,
    "moments of another group": moments_of_another_group,
    "constant for a given learning rate": with_rate(1e-3),
    "constant for a given learning rate in one update": with_rate(1e-3, one=True),
    "another given number for a learning rate": with_rate(OTHER.name),
    "another given number for a learning rate in one update": with_rate(OTHER.name, one=True),
    "given learning rate halved": halved,
    "given learning rate for a step number": for_a_step_number,
}
