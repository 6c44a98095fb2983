"""Faults of one of many micro-batches, where all others are alike.

A plant makes another step of a program, which plain training does not have.
"""

import re
from itertools import pairwise

from equal_micro_batches import (
    MICRO_BATCHES,
    SPARE,
    Plant,
    before,
    computing,
    number_of,
    place_of,
    sum_of,
)

from zsim.schedule.operation import (
    Action,
    Allocate,
    Compute,
    Copy,
    Fill,
    Free,
    Operation,
    Role,
    Send,
    View,
)
from zsim.schedule.replace import replace
from zsim.schedule.schedule import Program


def zeroed(name: str) -> Plant:
    """A gradient that is set to zero while it is summed."""

    def plant(program: Program) -> list[Operation]:
        fill = Fill(id=name, stream="compute", target=sum_of(program), value=0.0)
        return before(program, 5, fill)

    return plant


def looked_at(name: str) -> Plant:
    """A gradient that is added to another one while it is summed."""

    def plant(program: Program) -> list[Operation]:
        place = place_of(program, Copy, 4)
        views = [each.target for each in program.step[place:] if isinstance(each, Copy)]
        one, other = next(pair for pair in pairwise(views) if pair[0].size == pair[1].size)
        look = Copy(id=name, stream="compute", source=one, target=other, accumulate=True)
        return before(program, 5, look)

    return plant


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


def hidden_state(program: Program, micro_batch: int) -> tuple[int, View]:
    """Return the place of the first segment of a micro-batch, and what it makes."""
    place = place_of(program, Compute, micro_batch, Action.FORWARD)
    compute = program.step[place]
    assert isinstance(compute, Compute)
    return place, next(each.view for each in compute.operands if each.role is Role.OUTPUT)


def spoilt(name: str) -> Plant:
    """A hidden state of one micro-batch that another, or the step, writes over."""

    def plant(program: Program) -> list[Operation]:
        place, state = hidden_state(program, 5)
        fill = Fill(id=name, stream="compute", target=state, value=2.0)
        return [*program.step[: place + 1], fill, *program.step[place + 1 :]]

    return plant


def peeked(program: Program) -> list[Operation]:
    """Hidden states to which sums are added, while these are zero for the first two alone."""
    step = list(program.step)
    for number in range(MICRO_BATCHES):
        place, state = hidden_state(replace(program, step=tuple(step)), number)
        more = Copy(
            id=f"step/forward/mb{number}/peek",
            stream="compute",
            source=replace(sum_of(program), size=state.size),
            target=state,
            accumulate=True,
        )
        step.insert(place + 1, more)
    return step


def loaded_otherwise(program: Program) -> list[Operation]:
    """Micro-batches that all load the data of others; only the first two have all of theirs."""

    def loading(operation: Operation) -> Operation:
        if not isinstance(operation, Compute) or operation.action is not Action.LOAD:
            return operation
        return replace(operation, micro_batch=1 if operation.micro_batch == 0 else 0)

    return list(map(loading, program.step))


def changed_and_restored(micro_batch: int, by: str = "step") -> Plant:
    """A parameter that is another one while one micro-batch reads it."""

    def plant(program: Program) -> list[Operation]:
        place, view = parameter_of(program, micro_batch)
        kept = View(buffer=SPARE, size=view.size)
        before_it = (
            Allocate(id=f"{by}/allocate/spare", buffer=SPARE),
            Copy(id=f"{by}/keep", stream="compute", source=view, target=kept),
            Fill(id=f"{by}/change", stream="compute", target=view, value=2.0),
        )
        after_it = (
            Copy(id=f"{by}/restore", stream="compute", source=kept, target=view),
            Free(id=f"{by}/free/spare", buffer=SPARE),
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
    step = list(map(reading, program.step))
    first = next(place for place, each in enumerate(step) if number_of(each) == 0)
    step[first:first] = [
        Allocate(id=f"{name}/allocate/spare", buffer=SPARE),
        Copy(id=f"{name}/copy", stream="compute", source=view, target=copy),
    ]
    step.append(Free(id=f"{name}/free/spare", buffer=SPARE))
    place = parameter_of(program, 5)[0] + 2
    spoil = Fill(id=f"{name}/spoil", stream="compute", target=copy, value=2.0)
    return [*step[:place], spoil, *step[place:]]


def with_a_constant(program: Program) -> list[Operation]:
    """Sums to which each micro-batch adds one, and that begin with minus as many as stay."""
    target = sum_of(program)
    one = View(buffer=SPARE, size=target.size)
    step: list[Operation] = []
    done: set[int] = set()
    for each in program.step:
        step.append(each)
        if isinstance(each, Fill) and each.target.buffer == target.buffer:
            start = Fill(id=f"{each.id}/less", stream="compute", target=target, value=-2.0)
            step.append(start)
        if isinstance(each, Copy) and each.target == target and number_of(each) not in done:
            done.add(number_of(each))
            step += (
                Allocate(id=f"{each.id}/allocate", buffer=SPARE),
                Fill(id=f"{each.id}/one", stream="compute", target=one, value=1.0),
                replace(each, id=f"{each.id}/more", source=one, by_parameter=False, divisor=1),
                Free(id=f"{each.id}/free", buffer=SPARE),
            )
    return step


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
    "looked at by the step": looked_at("step/look"),
    "looked at by the first": looked_at("step/backward/mb0/look"),
    "looked at by the last": looked_at("step/backward/mb7/look"),
    "sent late": sent_late,
    "loaded twice": loaded_twice,
    "loaded otherwise": loaded_otherwise,
    "spoilt by the step": spoilt("step/spoil"),
    "spoilt by the first": spoilt("step/forward/mb0/spoil"),
    "spoilt by the last": spoilt("step/forward/mb7/spoil"),
    "peeked": peeked,
    "changed and restored for the first": changed_and_restored(0),
    "changed and restored": changed_and_restored(5),
    "changed and restored by the first": changed_and_restored(5, "step/forward/mb0"),
    "changed and restored for the last": changed_and_restored(MICRO_BATCHES - 1),
    "borrowed": borrowed,
    "with a constant": with_a_constant,
    "set once": set_once,
    "left out": left_out,
}
