"""Both ways of a branch do what training does, and all ranks take the same one."""

from collections.abc import Mapping

import pytest
from faults.findings import left, named, the_finding
from faults.schedules import changed, edited, split, without
from trained_weight import STREAM, Trained

from zsim.model.architecture import GPT
from zsim.model.gpt import gpt
from zsim.proof import Finding, check
from zsim.runtimes.registry import make_schedule
from zsim.schedule.builder import RoleBuilder, ScheduleBuilder
from zsim.schedule.mesh import Span
from zsim.schedule.operation import (
    Action,
    Branch,
    Compute,
    Copy,
    Fill,
    Operation,
    Reduction,
    Role,
)
from zsim.schedule.replace import replace
from zsim.schedule.schedule import Kind, Schedule
from zsim.strategy.precision import Precision
from zsim.strategy.strategy import Strategy
from zsim_runtimes.deepspeed.options import DeepSpeed

SHAPE = GPT(layers=1, hidden_size=4, attention_heads=2, sequence_length=3, vocab_size=7)


def fp16(knobs: Mapping[str, object]) -> Schedule:
    given = {"zero.stage": 1, "parallel.data": 4, "train.precision": Precision.FP16}
    strategy = Strategy.of({**given, **knobs})
    model = gpt(
        SHAPE, micro_batch_size=1, precision=Precision.FP16, tensor=strategy.parallel.tensor
    )
    return make_schedule(model, strategy)


def with_skipped(made: Schedule, *added: Operation) -> Schedule:
    """The schedule with more operations on the way that skips."""

    def edit(operation: Operation) -> tuple[Operation, ...]:
        if isinstance(operation, Branch):
            return (replace(operation, then=(*operation.then, *added)),)
        return (operation,)

    return edited(made, edit)


def cast_of(made: Schedule) -> Copy:
    """The first copy of an updated master to the parameters."""
    return next(
        operation
        for operation in made.programs[0].by_id.values()
        if isinstance(operation, Copy) and operation.id.endswith("/cast")
    )


@pytest.mark.matrix(4)
@pytest.mark.parametrize("stage", range(4))
def test_a_step_that_overflowed_leaves_what_was_there(stage: int) -> None:
    assert check(fp16({"zero.stage": stage, "parallel.tensor": 2})) == ()


def test_a_way_that_skips_may_write_parameters_with_what_they_are() -> None:
    made = fp16({})
    again = replace(cast_of(made), id="step/skip/cast")
    assert check(with_skipped(made, again)) == ()


def test_parameters_that_become_something_else_though_the_step_is_skipped_are_found() -> None:
    made = fp16({})
    wrong = Fill(id="step/skip/fill", stream="compute", target=cast_of(made).target, value=0.0)
    found = the_finding(with_skipped(made, wrong), "values")
    assert "after a step that overflowed" in found.why
    half = replace(cast_of(made), id="step/skip/cast", divisor=2)
    assert "after a step that overflowed" in the_finding(with_skipped(made, half), "values").why


@pytest.mark.one_commit_in(4)
def test_parameters_of_a_runtime_that_counts_skipped_steps_are_looked_at_too() -> None:
    made = fp16({"zero.stage": 2, "parallel.data": 2, "zero.emulate": DeepSpeed()})
    parameter = next(
        operand.view
        for each in made.programs[0].step
        if isinstance(each, Compute) and each.action is Action.FORWARD
        for operand in each.operands
        if operand.role is Role.PARAMETER
    )
    wrong = Fill(id="step/wrong", stream="compute", target=parameter, value=0.0)
    assert check(made) == ()
    assert "after a step that overflowed" in the_finding(with_skipped(made, wrong), "values").why


def test_an_update_that_is_made_though_the_step_is_skipped_is_found() -> None:
    made = fp16({})
    updates = [
        replace(each, id=f"step/skip/{number}")
        for number, each in enumerate(made.programs[0].by_id.values())
        if isinstance(each, Compute) and each.action is Action.UPDATE
    ]
    assert named(with_skipped(made, *updates))[0][0] in {"values", "lifetime", "races"}


def accumulating(*, cleared_on_skip: bool, tests: bool = True) -> Schedule:
    """A persistent gradient that every step adds to; DS 6550: it is cleared after an update."""
    case = Trained()
    total = case.build.buffer("total", 8, kind=Kind.GRADIENT, layout="cut", persistent=True)
    case.build.setup.allocate(total)
    case.build.setup.fill("total", total.all, 0.0)
    flag = case.made("flag", 1)
    case.backward()
    case.step.copy("add", case.whole.all, total.all, accumulate=True)
    case.step.all_reduce("reduce", "data", total.all, stream=STREAM)
    if tests:
        operands = [(Role.GRADIENT, total.all), (Role.OUTPUT, flag.all)]
        case.step.compute("finite", Action.FINITE, operands)
        decided = case.step.all_reduce(
            "flags", "world", flag.all, reduction=Reduction.MAX, stream=STREAM
        )
    else:
        decided = case.step.fill("never", flag.all, 0.0)
    outer, case.step = case.step, case.step.side("update")
    skips = outer.side("skip")
    case.update(total.own("data", 2))
    case.step.fill("clear", total.all, 0.0)
    if cleared_on_skip:
        skips.fill("clear", total.all, 0.0)
    outer.branch("branch", flag.all, skips, case.step, after=[decided])
    case.step = outer
    case.step.free(flag)
    return case.schedule()


def test_what_is_cleared_after_an_update_is_cleared_after_a_skip() -> None:
    assert check(accumulating(cleared_on_skip=True)) == ()
    found = the_finding(accumulating(cleared_on_skip=False), "values")
    assert found.why.startswith("leaves") or found.operation == "step/update/update"


def test_a_branch_that_always_goes_one_way_may_do_anything_on_the_other() -> None:
    assert check(accumulating(cleared_on_skip=False, tests=False)) == ()


def test_a_branch_that_goes_the_wrong_way_round_is_found() -> None:
    def edit(operation: Operation) -> tuple[Operation, ...]:
        if isinstance(operation, Branch):
            return (replace(operation, then=operation.otherwise, otherwise=operation.then),)
        return (operation,)

    assert named(edited(fp16({}), edit))[0][0] in {"values", "lifetime"}


def test_a_flag_that_is_not_reduced_is_found_where_it_is_decided_on() -> None:
    """DS 8415: each rank skips by what it sees itself."""
    made = without(fp16({"zero.stage": 2}), "step/update/overflow/reduce")
    waits = changed(made, "step/update/branch", after=("step/update/overflow/measure",))
    found = the_finding(waits, "values")
    assert found.operation == "step/update/branch"
    assert "does not reach it" in found.why


def decides(*groups: str, loaded: bool = False) -> list[Finding]:
    """A flag that is added up over groups of a mesh of 2 x 2, one after the other."""
    build = ScheduleBuilder.of("decides", data=2, tensor=2)
    for group in ("data", "tensor"):
        build.group(group, group)
    build.group("world", "data", "tensor")
    x, flag = build.buffer("x", 4, persistent=True), build.buffer("flag", 1, persistent=True)
    build.setup.allocate(x, flag)
    build.setup.fill("x", x.all, 0.0)
    build.setup.fill("flag", flag.all, 0.0)
    step = build.step
    after: list[str] = []
    if loaded:
        after = [step.compute("load", Action.LOAD, [(Role.OUTPUT, flag.all)])]
    for group in groups:
        after = [step.all_reduce(f"reduce/{group}", group, flag.all, stream=STREAM)]
    yes, no = step.side("yes"), step.side("no")
    yes.all_reduce("inside", "world", x.all, stream=STREAM)
    step.branch("branch", flag.all, yes, no, after=after)
    return list(check(build.schedule()))


def test_a_constant_is_the_same_everywhere() -> None:
    assert decides() == []


def test_what_ranks_load_is_not_the_same_everywhere() -> None:
    (found,) = decides(loaded=True)
    assert (found.invariant, found.operation) == ("values", "step/branch")


def test_groups_one_after_the_other_must_span_all_ranks() -> None:
    assert decides("world", loaded=True) == []
    assert decides("data", "tensor", loaded=True) == []
    for group in ("data", "tensor"):
        (found,) = decides(group, loaded=True)
        assert (found.invariant, found.operation) == ("values", "step/branch")


def test_a_verdict_of_each_rank_alone_is_not_the_same_everywhere() -> None:
    build = ScheduleBuilder.of("verdicts", data=2)
    build.group("data", "data")
    x, flag = build.buffer("x", 4, persistent=True), build.buffer("flag", 1, persistent=True)
    build.setup.allocate(x, flag)
    build.step.compute("load", Action.LOAD, [(Role.OUTPUT, x.all)])
    operands = [(Role.GRADIENT, x.all), (Role.OUTPUT, flag.all)]
    tested = build.step.compute("finite", Action.FINITE, operands)
    yes, no = build.step.side("yes"), build.step.side("no")
    yes.all_reduce("inside", "data", x.all, stream=STREAM)
    build.step.branch("branch", flag.all, yes, no, after=[tested])
    assert named(build.schedule()) == [("values", "step/branch")]


def test_roles_that_share_a_group_decide_on_the_same_value() -> None:
    def write(role: RoleBuilder, *, swapped: bool) -> None:
        one, other = role.buffer("one", 1), role.buffer("other", 1)
        role.step.allocate(one, other)
        for flag in (one, other):
            loaded = role.step.compute(f"{flag.name}/load", Action.LOAD, [(Role.OUTPUT, flag.all)])
            reduced = role.step.all_reduce(
                f"{flag.name}/reduce", "data", flag.all, stream=STREAM, after=[loaded]
            )
        chosen = other if swapped else one
        yes, no = role.step.side("yes"), role.step.side("no")
        yes.all_reduce("inside", "data", one.all, stream=STREAM)
        role.step.branch("branch", chosen.all, yes, no, after=[reduced])
        role.step.free(one, other)

    def two(*, swapped: bool) -> tuple[Finding, ...]:
        build = ScheduleBuilder.of("two", data=2)
        build.group("data", "data")
        for place, name in enumerate(("first", "second")):
            role = build.role(name, Span(axis="data", start=place, end=place + 1))
            write(role, swapped=swapped and place == 1)
        return check(build.schedule())

    assert two(swapped=False) == ()
    (found,) = two(swapped=True)
    assert (found.invariant, found.operation) == ("values", "step/branch")
    assert found.role in {"first", "second"}


def test_roles_that_do_the_same_decide_the_same() -> None:
    made = fp16({"zero.stage": 2, "parallel.tensor": 2})
    assert check(split(made, made)) == ()


def test_a_branch_on_what_is_no_verdict_is_found() -> None:
    case = Trained()
    case.backward()
    case.scatter()
    outer, case.step = case.step, case.step.side("update")
    skips = outer.side("skip")
    case.update(case.shard.all)
    outer.branch("branch", case.y.all, skips, case.step, after=[outer.path("backward0")])
    case.step = outer
    assert ("values", "step/branch") in named(case.schedule())


def test_what_is_reduced_on_one_way_alone_is_found_after_it() -> None:
    case = Trained()
    flag = case.made("flag", 1)
    case.backward()
    filled = case.step.fill("flag", flag.all, 0.0)
    then, otherwise = case.step.side("yes"), case.step.side("no")
    then.all_reduce("reduce", "data", case.whole.all, stream=STREAM)
    case.step.branch("branch", flag.all, then, otherwise, after=[filled])
    case.update(case.whole.own("data", 2))
    case.step.free(flag)
    assert left(case.schedule()) == "step/update"
