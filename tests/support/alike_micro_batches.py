"""Schedules of many alike micro-batches, and what may be wrong in some of them.

A plant makes another step of a program. In WRONG are those that plain training does not have; each
says which micro-batch, or all from some one on.
"""

import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import pairwise

from edits.programs import with_program
from fitting import fitting

from zsim.dtype import DType
from zsim.model.architecture import GPT
from zsim.model.model import Model
from zsim.model.pipeline_stages import in_blocks
from zsim.proof.execution.fewer_micro_batches import FewerMicroBatches, with_fewer
from zsim.proof.execution.inferred_model import training_of
from zsim.runtimes.nanotron.options import Nanotron
from zsim.runtimes.registry import make_schedule
from zsim.schedule.operation import (
    Action,
    Allocate,
    Compute,
    Copy,
    Edge,
    Fill,
    Free,
    HostWait,
    Operation,
    Role,
    Send,
    SetScalar,
    StreamOperation,
    View,
)
from zsim.schedule.schedule import Buffer, Kind, Program, Schedule
from zsim.strategy.precision import Precision
from zsim.strategy.strategy import Parallel, Strategy, Zero
from zsim.strategy.train import Train

MICRO_BATCHES = 8
LAST = MICRO_BATCHES - 1
SPARE = "spare"
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


def zeroed(name: str) -> Plant:
    """A gradient that is set to zero while it is summed."""

    def plant(program: Program) -> list[Operation]:
        fill = Fill(id=name, stream="compute", target=sum_of(program), value=0.0)
        return before(program, 5, fill)

    return plant


def looked_at(program: Program) -> list[Operation]:
    """A gradient that is added to another one while it is summed."""
    place = place_of(program, Copy, 4)
    views = [each.target for each in program.step[place:] if isinstance(each, Copy)]
    one, other = next(pair for pair in pairwise(views) if pair[0].size == pair[1].size)
    return before(
        program,
        5,
        Copy(id="step/look", stream="compute", source=one, target=other, accumulate=True),
    )


def counted(program: Program) -> list[Operation]:
    """A number of the host that changes on the way."""
    return before(program, 5, SetScalar(id="step/count", scalar="step", add=1.0))


def sent_late(program: Program) -> list[Operation]:
    """The first message, which goes behind the second."""
    late = [each for each in program.step if re.search(r"forward/mb0/(send|free)/block", each.id)]
    rest = [each for each in program.step if each not in late]
    place = next(n for n, each in enumerate(rest) if isinstance(each, Send))
    return [*rest[: place + 1], *late, *rest[place + 1 :]]


def loaded_twice(program: Program) -> list[Operation]:
    """A micro-batch with the data of the one before."""
    step = list(program.step)
    place = place_of(program, Compute, 5, Action.LOAD)
    compute = step[place]
    assert isinstance(compute, Compute)
    step[place] = replace(compute, micro_batch=4)
    return step


def set_once(program: Program) -> list[Operation]:
    """A gradient that one micro-batch sets, where others add."""
    step = list(program.step)
    place = place_of(program, Copy, 5)
    copy = step[place]
    assert isinstance(copy, Copy)
    step[place] = replace(copy, accumulate=False)
    return step


def left_out(program: Program) -> list[Operation]:
    """A gradient that one micro-batch does not add."""
    place = place_of(program, Copy, 5)
    return [each for n, each in enumerate(program.step) if n != place]


def spoilt(program: Program) -> list[Operation]:
    """A hidden state of one micro-batch that the step writes over."""
    place = place_of(program, Compute, 5, Action.FORWARD)
    compute = program.step[place]
    assert isinstance(compute, Compute)
    made = next(each.view for each in compute.operands if each.role is Role.OUTPUT)
    fill = Fill(id="step/spoil", stream="compute", target=made, value=2.0)
    return [*program.step[: place + 1], fill, *program.step[place + 1 :]]


def loaded_otherwise(program: Program) -> list[Operation]:
    """Micro-batches that all load the data of others; only the first two have all of theirs."""

    def loading(operation: Operation) -> Operation:
        if not isinstance(operation, Compute) or operation.action is not Action.LOAD:
            return operation
        return replace(operation, micro_batch=1 if operation.micro_batch == 0 else 0)

    return list(map(loading, program.step))


def changed_and_restored(micro_batch: int) -> Plant:
    """A parameter that is another one while one micro-batch reads it."""

    def plant(program: Program) -> list[Operation]:
        place, view = parameter_of(program, micro_batch)
        kept = View(buffer=SPARE, size=view.size)
        before_it = (
            Allocate(id="step/allocate/spare", buffer=SPARE),
            Copy(id="step/keep", stream="compute", source=view, target=kept),
            Fill(id="step/change", stream="compute", target=view, value=2.0),
        )
        after_it = (
            Copy(id="step/restore", stream="compute", source=kept, target=view),
            Free(id="step/free/spare", buffer=SPARE),
        )
        step = program.step
        return [*step[:place], *before_it, step[place], *after_it, *step[place + 1 :]]

    return plant


def parameter_of(program: Program, micro_batch: int) -> tuple[int, View]:
    """Return the place of the first segment of a micro-batch that reads one, and the parameter."""
    return next(
        (place, part.view)
        for place, each in enumerate(program.step)
        if isinstance(each, Compute) and number_of(each) == micro_batch
        for part in each.operands
        if part.role is Role.PARAMETER
    )


def borrowed(program: Program) -> list[Operation]:
    """A copy of a parameter that the first one holds for the others, and changes on the way."""
    view = parameter_of(program, 0)[1]
    copy = View(buffer=SPARE, size=view.size)

    def reading(operation: Operation) -> Operation:
        if not isinstance(operation, Compute) or number_of(operation) < 1:
            return operation
        operands = [
            replace(each, view=copy) if each.view == view else each for each in operation.operands
        ]
        return replace(operation, operands=tuple(operands))

    name = "step/forward/mb0"
    step = [
        Allocate(id=f"{name}/allocate/spare", buffer=SPARE),
        Copy(id=f"{name}/copy", stream="compute", source=view, target=copy),
        *map(reading, program.step),
        Free(id=f"{name}/free/spare", buffer=SPARE),
    ]
    place = parameter_of(program, 5)[0] + 2
    spoil = Fill(id=f"{name}/spoil", stream="compute", target=copy, value=2.0)
    return [*step[:place], spoil, *step[place:]]


def with_a_constant(program: Program) -> list[Operation]:
    """Sums to which each micro-batch adds one, and that begin with minus as many as stay."""
    target = sum_of(program)
    one = View(buffer=SPARE, size=target.size)
    step: list[Operation] = []
    for each in program.step:
        step.append(each)
        if isinstance(each, Fill) and each.target.buffer == target.buffer:
            start = Fill(id=f"{each.id}/less", stream="compute", target=target, value=-2.0)
            step.append(start)
        if isinstance(each, Copy) and each.target == target:
            step += (
                Allocate(id=f"{each.id}/allocate", buffer=SPARE),
                Fill(id=f"{each.id}/one", stream="compute", target=one, value=1.0),
                replace(each, id=f"{each.id}/more", source=one, by_parameter=False, divisor=1),
                Free(id=f"{each.id}/free", buffer=SPARE),
            )
    return step


def computing(operation: Operation, micro_batch: int) -> Operation:
    """A segment, or a load, of another micro-batch."""
    if not isinstance(operation, Compute):
        return operation
    return replace(operation, micro_batch=micro_batch)


def numbered(micro_batch: int, other: int) -> Plant:
    """A micro-batch that computes what another one does."""

    def plant(program: Program) -> list[Operation]:
        return [
            computing(each, other) if number_of(each) == micro_batch else each
            for each in program.step
        ]

    return plant


WRONG: dict[str, Plant] = {
    "zeroed by the step": zeroed("step/zero_again"),
    "zeroed by the first": zeroed("step/forward/mb0/zero_again"),
    "zeroed by the last": zeroed("step/forward/mb7/zero_again"),
    "zeroed by the same": zeroed("step/backward/mb5/zero_again"),
    "looked at": looked_at,
    "sent late": sent_late,
    "loaded twice": loaded_twice,
    "loaded otherwise": loaded_otherwise,
    "spoilt": spoilt,
    "changed and restored for the first": changed_and_restored(0),
    "changed and restored": changed_and_restored(5),
    "changed and restored for the last": changed_and_restored(MICRO_BATCHES - 1),
    "borrowed": borrowed,
    "with a constant": with_a_constant,
    "set once": set_once,
    "left out": left_out,
}


def planted(plant: Plant, role: int) -> Schedule:
    schedule, _ = made()
    program = schedule.programs[role]
    spare = Buffer(
        name=SPARE,
        pool="device",
        elements=max(each.elements for each in program.buffers if each.kind is Kind.PARAMETER),
        dtype=DType.BF16,
        kind=Kind.WORKSPACE,
        home="compute",
    )
    step = tuple(plant(program))
    buffers = (*program.buffers, spare)
    return with_program(schedule, replace(program, step=step, buffers=buffers))


def renamed(schedule: Schedule, of: Callable[[str], str]) -> Schedule:
    """The schedule with other ids, in edges too."""

    def edge(each: Edge) -> Edge:
        return of(each) if isinstance(each, str) else each

    def change(operation: Operation) -> Operation:
        found = replace(operation, id=of(operation.id))
        if isinstance(found, Free):
            return replace(found, uses=tuple(map(of, found.uses)))
        if isinstance(found, HostWait):
            return replace(found, operation=edge(found.operation))
        if isinstance(found, StreamOperation):
            return replace(found, after=tuple(map(edge, found.after)))
        return found

    return stepping(schedule, lambda each: list(map(change, each.step)))


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
