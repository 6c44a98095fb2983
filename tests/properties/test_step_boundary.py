"""What a step knows of the steps before: exactly what runs of a few steps show, pair by pair."""

from dataclasses import replace
from itertools import product

from drawn_programs import programs
from few_steps import Run
from hypothesis import given, settings

from zsim.proof.context import Context
from zsim.proof.step_boundary import StepBoundary
from zsim.schedule.happens_before import BranchPath
from zsim.schedule.operation import Branch, HostWait
from zsim.schedule.program_index import HOST, Numbered
from zsim.schedule.schedule import Schedule

STEPS = 4
"""Of 100,000 drawn pairs none needed more to show that it has no order."""

Unordered = set[tuple[bool, str, str]]
"""In a step whose flag is set or not, an operation, and one of earlier steps that may still run."""


def unordered(schedule: Schedule) -> Unordered:
    """What runs of a few steps show, access or not."""
    (program,) = schedule.programs
    found: Unordered = set()
    for flags in product((True, False), repeat=STEPS):
        run = Run(program)
        last: dict[str, int] = {}
        for flag in flags:
            begun = len(run.ran)
            run.step({"flag0": flag})
            for operation, known in run.ran[begun:]:
                found |= {
                    (flag, operation.id, each) for each, at in last.items() if at not in known
                }
            for at, (operation, _) in enumerate(run.ran[begun:], begun):
                if not isinstance(operation, Branch):
                    last[operation.id] = at
    return found


def flags_of(numbered: Numbered, path: BranchPath) -> set[bool]:
    """Whether the flag is set on `path`; both, where nothing depends on it."""
    ran = {
        side == 0
        for sides in numbered.sides.values()
        for side, numbers in enumerate(sides)
        if any(path.known[number] is not None for number in numbers)
    }
    return ran or {True, False}


@settings(max_examples=40)
@given(programs())
def test_an_operation_knows_the_steps_before_exactly_as_runs_of_a_few_steps_do(
    schedule: Schedule,
) -> None:
    (program,) = Context.of(schedule).programs
    numbered, order = program.step, program.step_order
    boundary, shown = StepBoundary(order), unordered(schedule)
    started = [
        number
        for number, operation in enumerate(numbered.operations)
        if not isinstance(operation, HostWait)
    ]
    for path, later in product(order.paths, started):
        if path.known[later] is None:
            continue
        for earlier in started:
            if numbered.stream[earlier] != HOST:
                one, other = numbered.operations[earlier].id, numbered.operations[later].id
                may_run = any((flag, other, one) in shown for flag in flags_of(numbered, path))
                assert boundary.knows(path, later, earlier) != may_run


@settings(max_examples=40)
@given(programs(flags=2))
def test_a_way_that_forks_from_another_hands_on_what_it_does_from_the_start(
    schedule: Schedule,
) -> None:
    """Branches in lists of others, and several in a row, of two flags."""
    (program,), (same,) = Context.of(schedule).programs, Context.of(schedule).programs
    order, alone = program.step_order, same.step_order
    alone.paths = [replace(path, since=0) for path in alone.paths]
    one, other = StepBoundary(order), StepBoundary(alone)
    numbers = [number for entries in program.step.entries for number in entries]
    for path, whole in zip(order.paths, alone.paths, strict=True):
        for later, earlier in product(range(len(path.known)), numbers):
            if path.known[later] is not None:
                assert one.knows(path, later, earlier) == other.knows(whole, later, earlier)
