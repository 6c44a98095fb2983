"""Edits of schedules of experts, drawn at random: whether one is wrong is for the oracle to say."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from experts_by_hand import Plan
from faults.schedules import edited

from zsim.model.experts import Drops, LoadScope
from zsim.schedule.operation import (
    AllReduce,
    AllToAll,
    Compute,
    Copy,
    Fill,
    Operation,
    ReadCounts,
    Reduction,
    View,
)
from zsim.schedule.replace import replace as changed
from zsim.schedule.schedule import Program, Schedule, ScheduleError

PLANS = (
    Plan(layers=1, auxiliary=LoadScope.RANK, bias=True, shared=True),
    Plan(layers=1, data=2, auxiliary=LoadScope.MICRO_BATCH, clipped=True),
    Plan(layers=1, tensor=2, auxiliary=LoadScope.SEQUENCE, bias=True),
    Plan(layers=1, drops=Drops(capacity=2), recomputed=True, bias=True),
    Plan(layers=1, auxiliary=LoadScope.BATCH, shared=True, whole=True),
    Plan(stages=2, micro_batches=1, clipped=True, shared=True),
    Plan(sent=12, micro_batches=1),
)
MOVES = AllReduce | AllToAll | Copy | Fill | Compute


class Random:
    """Choices by a seed."""

    def __init__(self, seed: int) -> None:
        self._generator = np.random.default_rng(seed)

    def choice(self, among: Sequence[Any]) -> Any:  # noqa: ANN401  # an element
        """Return one of some elements."""
        if not among:
            raise IndexError("nothing to choose from")
        return among[int(self._generator.integers(len(among)))]

    def random(self) -> float:
        """Return a number from 0 to 1."""
        return float(self._generator.random())


Draw = Callable[[Random, Schedule, Program, Operation], Sequence[Operation]]


def _views(operation: Operation) -> list[View]:
    """Return the views of an operation that can be changed."""
    match operation:
        case Compute(operands=operands):
            return [each.view for each in operands]
        case Copy() | AllToAll() | AllReduce():
            return [operation.source, operation.target]
        case Fill(target=target) | ReadCounts(source=target):
            return [target]
        case _:
            return []


def other_buffer(
    random: Random, _: Schedule, program: Program, operation: Operation
) -> Sequence[Operation]:
    """Use another buffer of the same size in place of one."""
    views = _views(operation)
    view = random.choice(views)
    own = program.by_name[view.buffer]
    others = [
        each.name
        for each in program.buffers
        if each.name != own.name
        and each.elements == own.elements
        and (each.rows is None) is (own.rows is None)
        and each.pool == own.pool
    ]
    new = changed(view, buffer=random.choice(others))
    if isinstance(operation, Compute):
        place = random.choice([n for n, each in enumerate(operation.operands) if each.view == view])
        operands = tuple(
            changed(each, view=new) if n == place else each
            for n, each in enumerate(operation.operands)
        )
        return (changed(operation, operands=operands),)
    fields = [name for name in ("source", "target") if getattr(operation, name, None) == view]
    names = fields if isinstance(operation, AllReduce) else [random.choice(fields)]
    return (changed(operation, **dict.fromkeys(names, new)),)


def left_out(*_: object) -> Sequence[Operation]:
    """Leave an operation out."""
    return ()


def run_twice(_: Random, __: Schedule, ___: Program, operation: Operation) -> Sequence[Operation]:
    """Run an operation twice."""
    return operation, changed(operation, id=f"{operation.id}/again")


def other_group(
    random: Random, schedule: Schedule, _: Program, operation: Operation
) -> Sequence[Operation]:
    """Meet in another group."""
    assert isinstance(operation, AllReduce | AllToAll)
    names = [each.name for each in schedule.groups if each.name != operation.group]
    return (changed(operation, group=random.choice(names)),)


def other_number(
    random: Random, _: Schedule, __: Program, operation: Operation
) -> Sequence[Operation]:
    """Change a number of an operation."""
    match operation:
        case Copy(divisor=divisor):
            if random.random() < 0.5:
                return (changed(operation, accumulate=not operation.accumulate),)
            return (changed(operation, divisor=divisor * random.choice((2, 3))),)
        case Fill(value=value):
            return (changed(operation, value=value + random.choice((-1.0, 1.0))),)
        case AllReduce():
            return (changed(operation, reduction=Reduction.AVERAGE),)
        case Compute(micro_batch=batch):
            return (changed(operation, micro_batch=1 - min(batch, 1)),)
        case ReadCounts(layer=layer):
            return (changed(operation, layer=1 - min(layer, 1)),)
        case _:
            return (operation,)


DRAWS: dict[str, Draw] = {
    "other buffer": other_buffer,
    "left out": left_out,
    "twice": run_twice,
    "other group": other_group,
    "other number": other_number,
}


def drawn(seed: int, write: Callable[[Plan], Schedule]) -> tuple[Plan, Schedule, str] | None:
    """Return an edit of the schedule of some plan, in words too; None if it cannot be written."""
    random = Random(seed)
    plan = random.choice(PLANS)
    schedule = write(plan)
    program = random.choice(schedule.programs)
    name = random.choice([*DRAWS])
    allowed = AllReduce | AllToAll if name == "other group" else MOVES | ReadCounts
    operations = [each for each in program.step if isinstance(each, allowed)]
    if not operations:
        return None
    operation = random.choice(operations)
    try:
        made = DRAWS[name](random, schedule, program, operation)
        if random.random() < 0.4:  # a shift by some places
            wrong = _shifted(random, schedule, program, operation)
            name = "shifted"
        else:
            wrong = _replaced(schedule, program, operation, made)
    except (ScheduleError, IndexError, TypeError, AssertionError):
        return None
    return plan, wrong, f"{name}: {operation.id}"


def _replaced(
    schedule: Schedule, program: Program, operation: Operation, made: Iterable[Operation]
) -> Schedule:
    others = tuple(made)
    step = tuple(own for each in program.step for own in (others if each is operation else (each,)))
    return _with_step(schedule, program, step)


def _shifted(
    random: Random, schedule: Schedule, program: Program, operation: Operation
) -> Schedule:
    step = [each for each in program.step if each is not operation]
    place = program.step.index(operation) + random.choice((-9, -5, -3, -2, -1, 1, 2, 3, 5, 9))
    step.insert(max(0, place), operation)
    return _with_step(schedule, program, tuple(step))


def _with_step(schedule: Schedule, program: Program, step: tuple[Operation, ...]) -> Schedule:
    programs = tuple(
        replace(each, step=step) if each is program else each for each in schedule.programs
    )
    return edited(replace(schedule, programs=programs), lambda each: (each,))
