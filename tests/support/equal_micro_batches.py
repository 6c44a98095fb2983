"""Schedules of many alike micro-batches, taken apart by micro-batch and put together again."""

import re
from collections.abc import Callable
from functools import cache

from faults.of_schedules.each_micro_batch import renamed as with_ids
from faults.schedules import with_program
from fitting import fitting

from zsim.dtype import DType
from zsim.model.architecture import GPT
from zsim.model.model import Model
from zsim.model.pipeline_stages import in_blocks
from zsim.proof.execution.fewer_micro_batches import FewerMicroBatches, with_fewer
from zsim.proof.execution.inferred_model import training_of
from zsim.runtimes.registry import make_schedule
from zsim.schedule.operation import (
    Action,
    Compute,
    Copy,
    Operation,
    View,
)
from zsim.schedule.replace import replace
from zsim.schedule.schedule import Buffer, Kind, Program, Schedule
from zsim.strategy.precision import Precision
from zsim.strategy.strategy import Parallel, Strategy, Zero
from zsim.strategy.train import Train
from zsim_runtimes.nanotron.options import Nanotron

MICRO_BATCHES = 8
LAST = MICRO_BATCHES - 1
SPARE, OTHER = "spare", "other"
"""Buffers that plants may take."""
SHAPE = GPT(layers=2, hidden_size=4, attention_heads=2, sequence_length=2, vocab_size=6)
STRATEGY = Strategy(
    parallel=Parallel(pipeline=2),
    zero=Zero(stage=1, emulate=Nanotron()),
    train=Train(precision=Precision.BF16, gradient_accumulation_steps=MICRO_BATCHES),
)
Plant = Callable[[Program], list[Operation]]
"""Makes another step of a program."""


@cache
def made() -> tuple[Schedule, Model]:
    """Two stages; the second has one slot of buffers, the first two."""
    model = in_blocks(fitting(SHAPE, STRATEGY))
    return make_schedule(model, STRATEGY), model


@cache
def accumulating() -> tuple[Schedule, Model]:
    """Micro-batches one after the other; the first sets gradients, and the last reduces them."""
    strategy = Strategy(parallel=Parallel(data=2), zero=Zero(stage=1), train=STRATEGY.train)
    model = fitting(SHAPE, strategy)
    return make_schedule(model, strategy), model


def fewer(schedule: Schedule) -> FewerMicroBatches | None:
    training = training_of(schedule)
    assert training is not None
    return with_fewer(schedule, training)


def number_of(operation: Operation) -> int:
    """Return the micro-batch that an id names; -1 is none."""
    _, found, behind = operation.id.partition("/mb")
    return int(behind.split("/")[0]) if found else -1


def place_of(
    program: Program, kind: type[Operation], micro_batch: int, action: Action | None = None
) -> int:
    """Return the place of the first operation of a kind in a micro-batch."""
    return next(
        place
        for place, each in enumerate(program.step)
        if isinstance(each, kind)
        and number_of(each) == micro_batch
        and (action is None or (isinstance(each, Compute) and each.action is action))
    )


def sum_of(program: Program) -> View:
    """Return a view of the first gradient that a micro-batch adds to."""
    found = program.step[place_of(program, Copy, 4)]
    assert isinstance(found, Copy)
    return found.target


def before(program: Program, micro_batch: int, operation: Operation) -> list[Operation]:
    """Put an operation before the first sum of a micro-batch."""
    place = place_of(program, Copy, micro_batch)
    return [*program.step[:place], operation, *program.step[place:]]


def computing(operation: Operation, micro_batch: int) -> Operation:
    """A segment, or a load, of another micro-batch."""
    if not isinstance(operation, Compute):
        return operation
    return replace(operation, micro_batch=micro_batch)


def planted(plant: Plant, role: int) -> Schedule:
    schedule, _ = made()
    program = schedule.programs[role]
    spares = [
        Buffer(
            name=name,
            pool="device",
            elements=max(each.elements for each in program.buffers if each.kind is Kind.PARAMETER),
            dtype=DType.BF16,
            kind=Kind.WORKSPACE,
            home="compute",
        )
        for name in (SPARE, OTHER)
    ]
    step = tuple(plant(program))
    buffers = (*program.buffers, *spares)
    return with_program(schedule, replace(program, step=step, buffers=buffers))


def renamed(schedule: Schedule, of: Callable[[str], str]) -> Schedule:
    """The schedule with other ids, in edges too."""

    return stepping(schedule, lambda each: [with_ids(one, of) for one in each.step])


def stepping(schedule: Schedule, plant: Plant) -> Schedule:
    """The schedule in which every role makes another step."""
    programs = [replace(each, step=tuple(plant(each))) for each in schedule.programs]
    return replace(schedule, programs=tuple(programs))


def numbered_backwards(schedule: Schedule) -> Schedule:
    """The schedule in which the last micro-batch has the number 0, and runs last all the same."""

    def name(found: re.Match[str]) -> str:
        return f"/mb{MICRO_BATCHES - 1 - int(found.group(1))}/"

    def turned(operation: Operation) -> Operation:
        if number_of(operation) < 0 or not isinstance(operation, Compute):
            return operation
        return computing(operation, MICRO_BATCHES - 1 - operation.micro_batch)

    return renamed(
        stepping(schedule, lambda each: list(map(turned, each.step))),
        lambda path: re.sub(r"/mb(\d+)/", name, path),
    )
