"""The rules that updates go by: groups of parameters, a learning rate that is given."""

from collections.abc import Iterator

from faults.changes import Aim, Edit, adds, becomes, in_all, made, one_by_one
from faults.of_schedules.updates import with_rule
from faults.selections import of_role, updates, with_operands
from zsim.schedule.operation import Compute, Role, SetScalar
from zsim.schedule.replace import replace
from zsim.schedule.schedule import Scalar, Schedule
from zsim.strategy.optimizer_rule import Adam, Optimizer, Rate

OTHER = Scalar(name="other", initial=0.0, given=True)


def given(update: Compute) -> str:
    """Return the host scalar that is an update's learning rate; empty if it is constant."""
    rate = update.rule.learning_rate if isinstance(update.rule, Optimizer) else 0.0
    return rate if isinstance(rate, str) else ""


def with_rate(rate: Rate, *, one: bool = False) -> Aim:
    """Return the operator that updates with another learning rate than the given one."""

    def taking(schedule: Schedule) -> list[Compute]:
        found = [each for each in updates(schedule) if given(each)]
        return found[-1:] if one else found

    aim = in_all(taking, lambda each: (with_rule(each, learning_rate=rate),), f"rate {rate}")
    return lambda schedule: aim(replace(schedule, scalars=(*schedule.scalars, OTHER)))


def halved(schedule: Schedule) -> Iterator[Edit]:
    """Halve the given learning rate on the host, before the updates."""
    for name in {given(each) for each in updates(schedule)} - {""}:
        change = SetScalar(id="step/edit/halve", scalar=name, multiply=0.5)
        first = updates(schedule)[0]
        yield from made(schedule, adds(change, before=first.id), f"{name} halved")


def by_adam_with_a_given_rate(schedule: Schedule) -> list[Compute]:
    return [each for each in updates(schedule) if isinstance(each.rule, Adam) and given(each)]


def groups(schedule: Schedule) -> dict[Optimizer, list[Compute]]:
    """Return updates by their rules."""
    found: dict[Optimizer, list[Compute]] = {}
    for each in updates(schedule):
        assert isinstance(each.rule, Optimizer)
        found.setdefault(each.rule, []).append(each)
    return found


def by_another_rule(*, one: bool) -> Aim:
    """Return the operator that updates a group, or the first of it, by the rule of another."""

    def aim(schedule: Schedule) -> Iterator[Edit]:
        found = groups(schedule)
        for rule, own in found.items():
            chosen = own[:1] if one else own
            for other in found:
                if other != rule:
                    yield from _by(schedule, {each.id: other for each in chosen}, f"by {other}")

    return aim


def _by(schedule: Schedule, rules: dict[str, Optimizer], text: str) -> Iterator[Edit]:
    chosen = [each for each in updates(schedule) if each.id in rules]
    aim = in_all(lambda _: chosen, lambda each: (replace(each, rule=rules[each.id]),), text)
    yield from aim(schedule)


def swapped(schedule: Schedule) -> Iterator[Edit]:
    """Update two groups by each other's rules."""
    first, *others = found = groups(schedule)
    for other in others:
        rules = {each.id: other for each in found[first]} | {
            each.id: first for each in found[other]
        }
        yield from _by(schedule, rules, "rules swapped")


def _at(compute: Compute, start: int, size: int) -> Compute:
    """Return the update of other elements of the same buffers."""

    def elsewhere(origin: int | None) -> int | None:
        return None if origin is None else start

    operands = [
        replace(
            each,
            view=replace(each.view, start=start, size=size, origin=elsewhere(each.view.origin)),
        )
        for each in compute.operands
    ]
    return with_operands(compute, operands)


def at_another_border(schedule: Schedule) -> Iterator[Edit]:
    """Update the last element of a parameter with the next one, of another group."""
    for one in updates(schedule):
        for other in updates(schedule):
            mine, theirs = one.operands[-1].view, other.operands[-1].view
            if mine.buffer == theirs.buffer and mine.start + mine.size == theirs.start:
                new = {
                    one.id: _at(one, mine.start, mine.size - 1),
                    other.id: _at(other, theirs.start - 1, theirs.size + 1),
                }
                text = f"border of {one.id}"
                yield from _becomes(schedule, new, text)


def _becomes(schedule: Schedule, new: dict[str, Compute], text: str) -> Iterator[Edit]:
    return in_all(lambda _: new.values(), lambda each: (new[each.id],), text)(schedule)


def moments_of_another_group(schedule: Schedule) -> Iterator[Edit]:
    """Keep the moments of an update where those of another group are."""
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
    "given learning rate for a step number": in_all(
        by_adam_with_a_given_rate,
        lambda each: (replace(each, scalars=(given(each),)),),
        "learning rate for a step number",
    ),
}
