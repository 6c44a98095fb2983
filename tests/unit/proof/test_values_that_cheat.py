"""Schedules that look right for a while, for some ranks, or in some sizes are found."""

from collections.abc import Iterable

import pytest
from faults.findings import named
from faults.schedules import edited

from zsim.model.architecture import GPT
from zsim.model.gpt import gpt
from zsim.model.model import Model
from zsim.proof import check
from zsim.runtimes.registry import make_schedule
from zsim.schedule.operation import (
    Action,
    Allocate,
    Compute,
    Copy,
    Fill,
    Operation,
    Role,
    SetScalar,
    View,
)
from zsim.schedule.replace import replace
from zsim.schedule.schedule import Kind, Program, Scalar, Schedule
from zsim.strategy.strategy import Parallel, Strategy, Zero
from zsim_runtimes.fsdp2.options import FSDP2

SHAPE = GPT(layers=1, hidden_size=4, attention_heads=2, sequence_length=3, vocab_size=7)
STEP = "step/update/step"
UPDATE = "step/update/bucket0/update"


def job(strategy: Strategy, shape: GPT = SHAPE) -> tuple[Schedule, Model]:
    """Return a right schedule without promised peaks, and its model."""
    model = gpt(shape, micro_batch_size=1, precision=strategy.train.precision)
    made = make_schedule(model, strategy)
    return replace(made, contract=replace(made.contract, peak_bytes=())), model


def before(made: Schedule, name: str, *more: Operation) -> Schedule:
    """Return the schedule with more operations before one."""
    return edited(made, lambda each: (*more, each) if each.id == name else (each,))


@pytest.fixture
def stage1() -> tuple[Schedule, Model]:
    return job(Strategy(parallel=Parallel(data=2), zero=Zero(stage=1)))


def test_a_counter_that_is_not_training_s_may_not_decide_on_the_number_of_the_update(
    stage1: tuple[Schedule, Model],
) -> None:
    made, model = stage1
    made = replace(made, scalars=(*made.scalars, Scalar(name="aux", initial=0.0)))
    again = SetScalar(id="step/again", scalar="step", add=1.0, counter="aux", every=10**6)
    found = check(before(made, STEP, again), model)
    assert [(each.invariant, each.operation) for each in found] == [("scalars", "step/again")]


def test_a_multiple_behind_an_offset_is_found(stage1: tuple[Schedule, Model]) -> None:
    made, model = stage1
    up = SetScalar(id="step/up", scalar="step", add=500.0, maximum=2.0**60)
    more = SetScalar(id="step/more", scalar="step", add=1.0, counter="step", every=503)
    down = SetScalar(id="step/down", scalar="step", add=-500.0)
    found = check(before(made, STEP, up, more, down), model)
    assert found[0].invariant == "scalars"


def test_setup_may_not_count_updates(stage1: tuple[Schedule, Model]) -> None:
    made, model = stage1
    (program,) = made.programs
    setup = (*program.setup, SetScalar(id="setup/step", scalar="step", add=10.0))
    found = check(replace(made, programs=(replace(program, setup=setup),)), model)
    assert [each.invariant for each in found] == ["scalars"]


def _shifting(program: Program, count: int) -> tuple[Program, list[Operation]]:
    """Return a program with buffers that hand on what an update read so many steps ago."""
    (update,) = (each for each in program.by_id.values() if each.id == UPDATE)
    assert isinstance(update, Compute)
    held = next(each.view for each in update.operands if each.role is Role.GRADIENT)
    like = program.by_name[held.buffer]
    names = [f"ago{number}" for number in range(count)]
    made = [
        replace(like, name=name, kind=Kind.COMMUNICATION, layout=None, produced=False)
        for name in names
    ]
    views = [View(buffer=name, size=like.elements) for name in names]
    setup: list[Operation] = []
    for view in views:
        setup.append(Allocate(id=f"setup/{view.buffer}", buffer=view.buffer))
        setup.append(
            Fill(id=f"setup/{view.buffer}/zero", stream=update.stream, target=view, value=0.0)
        )
    whole = View(buffer=like.name, size=like.elements)
    step: list[Operation] = [
        Copy(
            id="step/add",
            stream=update.stream,
            after=update.after,
            source=views[-1],
            target=whole,
            accumulate=True,
        )
    ]
    pairs = zip(reversed(views[1:]), reversed(views[:-1]), strict=True)
    step += [
        Copy(id=f"step/{to.buffer}", stream=update.stream, source=of, target=to) for to, of in pairs
    ]
    step.append(Copy(id="step/first", stream=update.stream, source=whole, target=views[0]))
    changed = replace(
        program,
        buffers=(*program.buffers, *made),
        persistent=(*program.persistent, *names),
        setup=(*program.setup, *setup),
    )
    return changed, step


@pytest.mark.one_commit_in(4)
def test_a_gradient_of_many_steps_ago_is_found(stage1: tuple[Schedule, Model]) -> None:
    made, model = stage1
    program, step = _shifting(made.programs[0], 12)
    made = before(replace(made, programs=(program,)), UPDATE, *step)
    assert "values" in {each.invariant for each in check(made, model)}


def _shrunk(made: Schedule, *names: str, actions: Iterable[Action], role: Role | None) -> Schedule:
    """Return the schedule with views half as large, of some buffers or of one role."""

    def half(operation: Operation) -> tuple[Operation, ...]:
        if not isinstance(operation, Compute) or operation.action not in set(actions):
            return (operation,)
        operands = tuple(
            replace(each, view=replace(each.view, size=max(1, each.view.size // 2)))
            if each.view.buffer in names or each.role is role
            else each
            for each in operation.operands
        )
        return (replace(operation, operands=operands),)

    made = edited(made, half)
    (program,) = made.programs
    buffers = tuple(
        replace(each, elements=each.elements // 2) if each.name in names else each
        for each in program.buffers
    )
    return replace(made, programs=(replace(program, buffers=buffers),))


@pytest.mark.parametrize(
    "names", [("batch",), ("embedding/output", "embedding/output/gradient")], ids=lambda n: n[0]
)
def test_a_value_that_is_smaller_than_the_model_s_is_found(
    stage1: tuple[Schedule, Model], names: tuple[str, ...]
) -> None:
    made, model = stage1
    found = check(_shrunk(made, *names, actions=Action, role=None), model)
    assert "values" in {each.invariant for each in found}


def test_a_backward_that_reads_half_of_what_was_saved_is_found(
    stage1: tuple[Schedule, Model],
) -> None:
    made, model = stage1
    found = check(_shrunk(made, actions=[Action.BACKWARD], role=Role.SAVED), model)
    assert [each.invariant for each in found] == ["values"]


@pytest.mark.matrix(4)
@pytest.mark.parametrize("start", [820, 1025, 1640, 2255])
def test_what_is_spoiled_of_one_rank_in_the_middle_of_a_class_is_found(start: int) -> None:
    shape = GPT(layers=1, hidden_size=16, attention_heads=2, sequence_length=16, vocab_size=16)
    made, model = job(
        Strategy(parallel=Parallel(data=16), zero=Zero(stage=3, emulate=FSDP2())), shape
    )
    spoils = Fill(
        id="step/spoils",
        stream="compute",
        after=("step/forward/mb0/block0/gather/bucket1",),
        target=View(buffer="bucket1/gathered", start=start, size=205),
        value=0.0,
    )
    made = before(made, "step/forward/mb0/block0/copy_out/bucket1", spoils)
    assert check(made, model)[0].invariant == "values"


def test_the_right_ones_are_proved(stage1: tuple[Schedule, Model]) -> None:
    made, model = stage1
    assert check(made, model) == ()
    assert named(made) == []
