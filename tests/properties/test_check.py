"""Every schedule that the scheduler writes is proved, and faults planted in it are found."""

import pytest
from drawn import jobs, with_share_that_fits
from drawn_emulated import emulated_jobs, pipelined_jobs
from drawn_examples import examples
from faults.schedules import edited, split, twice, without
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from zsim.model.model import Model
from zsim.proof import check
from zsim.runtimes.registry import make_schedule
from zsim.schedule.operation import (
    Allocate,
    AllReduce,
    Compute,
    Free,
    Operation,
    ReduceScatter,
    Role,
)
from zsim.schedule.replace import replace
from zsim.schedule.schedule import Schedule
from zsim.schedule.view_bounds import window_of
from zsim.strategy.strategy import Strategy

Job = tuple[Model, Strategy]


def one_of(draw: st.DrawFn, made: Schedule, *kinds: type[Operation]) -> str:
    """The id of an operation of the step, drawn."""
    (program,) = made.programs
    setup = {operation.id for operation in program.setup}
    names = [
        name
        for name, operation in program.by_id.items()
        if isinstance(operation, kinds) and name not in setup
    ]
    assume(names)
    return draw(st.sampled_from(names))


EVERY = st.one_of(jobs(), emulated_jobs(), pipelined_jobs())
"""Every stage, runtime and knob, with data, tensor and pipeline axes."""


@pytest.mark.one_commit_in(6)
@examples(100)
@given(EVERY)
def test_every_drawn_schedule_is_proved(job: Job) -> None:
    assert check(make_schedule(*job), job[0]) == ()


@pytest.mark.long
@pytest.mark.timeout(7200)
@settings(max_examples=2000)
@given(EVERY)
def test_two_thousand_drawn_schedules_are_proved(job: Job) -> None:
    assert check(make_schedule(*job), job[0]) == ()


@pytest.mark.one_commit_in(3)
@given(jobs(max_data=4, max_tensor=2))
def test_it_is_proved_too_where_a_role_is_split_in_two_that_do_the_same(job: Job) -> None:
    assume(job[1].parallel.data > 1)
    made = make_schedule(*job)
    assert check(split(made, made), job[0]) == ()


@pytest.mark.one_commit_in(3)
@given(jobs())
def test_it_is_proved_as_well_for_as_many_ranks_as_one_likes(job: Job) -> None:
    model, strategy = job
    # Padded for so many ranks, shards would be cut into too many of the small sub-groups drawn.
    many = strategy.but({"parallel.data": 400_003, "offload.sub_group_elements": 10**9})
    many = with_share_that_fits(model, many)  # padded so far, the first bucket is more
    assert check(make_schedule(model, many), model) == ()


@given(jobs(), st.data())
def test_a_free_that_is_left_out_is_found(job: Job, data: st.DataObject) -> None:
    made = make_schedule(*job)
    name = data.draw(st.composite(lambda draw: one_of(draw, made, Free))())
    assert "lifetime" in {finding.invariant for finding in check(without(made, name))}


@given(jobs(), st.data())
def test_an_allocation_that_is_left_out_is_found(job: Job, data: st.DataObject) -> None:
    made = make_schedule(*job)
    name = data.draw(st.composite(lambda draw: one_of(draw, made, Allocate))())
    assert "lifetime" in {finding.invariant for finding in check(without(made, name))}


@given(jobs(), st.data())
def test_a_second_free_is_found(job: Job, data: st.DataObject) -> None:
    made = make_schedule(*job)
    name = data.draw(st.composite(lambda draw: one_of(draw, made, Free))())
    found = check(twice(made, name))
    assert (f"{name}/again", "lifetime") in {(each.operation, each.invariant) for each in found}


@pytest.mark.one_commit_in(5)
@given(jobs(), st.data())
def test_a_reduction_that_is_left_out_is_found(job: Job, data: st.DataObject) -> None:
    assume(job[1].parallel.data > 1)
    made = make_schedule(*job)
    name = data.draw(st.composite(lambda draw: one_of(draw, made, ReduceScatter, AllReduce))())
    (program,) = made.programs
    operation = program.by_id[name]
    assert isinstance(operation, ReduceScatter | AllReduce)
    size = {group.name: group.size(made.mesh) for group in made.groups}[operation.group]
    assume(size > 1 and operation.source.size > 0)
    found = {finding.invariant for finding in check(without(made, name))}
    assert found & {"values", "volume"}


@pytest.mark.one_commit_in(7)
@settings(suppress_health_check=[HealthCheck.filter_too_much])  # two buckets of one size are rare
@given(jobs(), st.data())
def test_an_update_with_the_gradient_of_another_bucket_is_found(
    job: Job, data: st.DataObject
) -> None:
    """Sizes agree, layouts do not; windows on another layout are refused before."""
    assume(job[1].parallel.data > 1)
    made = make_schedule(*job)
    (program,) = made.programs
    updates = [
        operation
        for operation in program.by_id.values()
        if isinstance(operation, Compute) and operation.rule is not None
        if operation.action == "update"
    ]
    views = [
        next(each.view for each in update.operands if each.role is Role.GRADIENT)
        for update in updates
    ]
    pairs = [
        (one, other)
        for one, mine in enumerate(views)
        for other, yours in enumerate(views)
        if one != other
        and window_of(mine) == window_of(yours)
        and mine.buffer != yours.buffer  # a delayed update stands in two lists
        and mine.size == yours.size > 0  # where there is nothing, any other nothing will do
        and program.by_name[mine.buffer].layout
        and program.by_name[yours.buffer].layout
    ]
    assume(pairs)
    one, other = data.draw(st.sampled_from(pairs))
    operands = tuple(
        replace(each, view=views[other]) if each.role is Role.GRADIENT else each
        for each in updates[one].operands
    )
    wrong = replace(updates[one], operands=operands)
    faulty = edited(made, lambda each: (wrong if each.id == wrong.id else each,))
    found = check(faulty, job[0])
    assert {each.invariant for each in found} & {"values", "lifetime", "races"}
