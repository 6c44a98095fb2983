"""Which state of which generator draws: right schedules pass, every other use is found."""

from collections.abc import Callable, Iterable

import pytest
from faults.cases import DROPOUT, Case, cases
from faults.of_schedules.generators import RANDOM
from faults.schedules import edited

from zsim.dtype import DType
from zsim.model.generator import Draw, Generator
from zsim.proof import check, prove
from zsim.proof.context import Context
from zsim.proof.generators import examine
from zsim.schedule.builder import ScheduleBuilder
from zsim.schedule.mesh import Span
from zsim.schedule.operation import Action, Branch, Compute, Operation, View
from zsim.schedule.replace import replace
from zsim.schedule.schedule import Buffer, Kind, RankRole, Schedule, ScheduleError


@pytest.fixture(scope="module")
def right() -> list[Case]:
    return list(cases(DROPOUT))


@pytest.mark.one_commit_in(4)
def test_masks_that_are_kept_are_proved(right: list[Case]) -> None:
    for case in right:
        proof = prove(case.subject, case.model)
        assert proof.findings == ()
        assert "random numbers" in proof.proved


@pytest.mark.matrix(7)
@pytest.mark.parametrize("share", [4, pytest.param(1, marks=pytest.mark.long)])
@pytest.mark.parametrize("kind", RANDOM)
def test_every_other_use_of_a_state_is_found(kind: str, share: int, right: list[Case]) -> None:
    """Of each schedule's edits of a kind one of `share`, the first among them."""
    edits = [(edit, case) for case in right for edit in list(RANDOM[kind](case.subject))[::share]]
    assert edits
    for edit, case in edits:
        why = {each.invariant for each in check(edit.made, case.model)}
        assert why == {"generators"}, edit.text


def wrong(case: Case, change: Callable[[Compute], Iterable[Operation]]) -> list[str]:
    """Why the first computation that draws, changed, is wrong."""
    first = next(
        each
        for each in case.subject.programs[0].step
        if isinstance(each, Compute) and each.draw is not None
    )

    def edit(each: Operation) -> Iterable[Operation]:
        return change(first) if each == first else (each,)

    made = edited(case.subject, edit)
    return [each.why for each in examine(Context.of(made, case.model))]


def test_a_forward_that_runs_twice_draws_anew(right: list[Case]) -> None:
    (why,) = wrong(right[2], lambda each: (each, replace(each, id=f"{each.id}/again")))
    assert why.startswith("draws anew what step/forward/mb0/")


def test_a_segment_that_draws_nothing_has_no_state(right: list[Case]) -> None:
    case = right[2]
    units = tuple(
        replace(unit, segments=tuple(replace(part, draws=None) for part in unit.segments))
        for unit in case.model.units
    )
    findings = examine(Context.of(case.subject, replace(case.model, units=units)))
    assert {each.why for each in findings} == {"draws random numbers, and its segment has none"}


def test_a_micro_batch_that_is_none_is_found(right: list[Case]) -> None:
    (why,) = wrong(right[2], lambda each: (replace(each, micro_batch=2),))
    assert why == "draws for micro-batch 2 of 2"


def drawing(*draws: tuple[str, Action, Draw | None], axes: tuple[str, ...] = ("data",)) -> Schedule:
    """Computations of one segment that draw as they say, on two data ranks."""
    empty = ScheduleBuilder.of("drawn", data=2).schedule()
    generators = (Generator(name="g", axes=axes), Generator(name="h", axes=axes))
    step = tuple(
        Compute(id=name, stream="compute", action=action, unit="u", operands=(), draw=draw)
        for name, action, draw in draws
    )
    (program,) = empty.programs
    return replace(empty, generators=generators, programs=(replace(program, step=step),))


def found(made: Schedule) -> list[str]:
    return [each.why for each in examine(Context.of(made))]


NEW = Draw(generator="g")
FIRST = ("first", Action.FORWARD, NEW)


@pytest.mark.parametrize(
    ("again", "why"),
    [
        (Draw(generator="g", restores="first"), None),
        (NEW, "draws anew where its forward is run again"),
        (Draw(generator="h", restores="first"), "restores a state of g into h"),
        (
            Draw(generator="g", restores="later"),
            "restores the state of later, which has not drawn yet",
        ),
    ],
)
def test_without_a_model_a_recompute_still_restores_its_forward(
    again: Draw, why: str | None
) -> None:
    later = ("later", Action.RECOMPUTE, Draw(generator="g", restores="first"))
    made = drawing(FIRST, ("again", Action.RECOMPUTE, again), later)
    assert found(made) == ([] if why is None else [why])


def test_what_draws_in_a_branch_is_found() -> None:
    made = drawing(FIRST)
    flag = View(buffer="flag", size=1)
    (program,) = made.programs
    branch = Branch(id="branch", after=(), value=flag, then=program.step, otherwise=())
    buffer = Buffer(
        name="flag",
        pool="device",
        elements=1,
        dtype=DType.FP32,
        kind=Kind.WORKSPACE,
        home="compute",
    )
    program = replace(program, buffers=(buffer,), step=(branch,))
    (why,) = found(replace(made, programs=(program,)))
    assert why.startswith("draws in a branch")


def test_roles_that_hold_copies_draw_in_one_order() -> None:
    made = drawing(FIRST, ("second", Action.FORWARD, NEW), axes=())
    (program,) = made.programs
    units = [replace(each, unit=each.id) for each in program.step if isinstance(each, Compute)]
    orders = {"first": units, "rest": units[::-1]}
    roles = tuple(
        RankRole(name=name, boxes=((Span(axis="data", start=place, end=place + 1),),))
        for place, name in enumerate(orders)
    )
    programs = tuple(
        replace(program, role=name, step=tuple(order)) for name, order in orders.items()
    )
    why = found(replace(made, roles=roles, programs=programs))
    assert "draws from g in another order than first" in why


@pytest.mark.parametrize(
    ("action", "draw", "message"),
    [
        (Action.BACKWARD, NEW, "a: backward draws no random numbers, forward does"),
        (Action.FORWARD, Draw(generator="z"), "a: no generator 'z'"),
        (
            Action.RECOMPUTE,
            Draw(generator="g", restores="b"),
            "a: restores 'b', which draws nothing",
        ),
    ],
)
def test_a_draw_of_what_is_not_there_is_refused(action: Action, draw: Draw, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        drawing(("a", action, draw))


def test_a_generator_along_no_axis_of_the_mesh_is_refused() -> None:
    with pytest.raises(ScheduleError, match="generator g: no axis 'pipe'"):
        drawing(FIRST, axes=("pipe",))
