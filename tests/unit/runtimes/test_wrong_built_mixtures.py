"""Drawn wrong edits of built mixtures: an operation left out, run twice, or among other ranks."""

from dataclasses import replace
from functools import cache

from faults.schedules import edited
from hypothesis import given, settings
from hypothesis import strategies as st
from small_mixtures import EXPERTS, model_of, strategy_of

from zsim.model.experts import LoadBalancing
from zsim.model.model import Model
from zsim.proof import check
from zsim.runtimes.registry import make_schedule
from zsim.schedule.operation import (
    Action,
    AllGather,
    AllReduce,
    AllToAll,
    Compute,
    Copy,
    Fill,
    Operation,
    ReduceScatter,
    Together,
)
from zsim.schedule.program import ScheduleError
from zsim.schedule.replace import replace as but
from zsim.schedule.schedule import Schedule

PARTS = {"data": 4, "tensor": 2, "expert": 2}
"""Tensor ranks hold parts of experts."""
WHOLE = {"data": 4, "tensor": 2, "expert": 4, "expert_tensor": 1}
BALANCED = replace(EXPERTS, score_bias=True, z_loss=True, shared_intermediate_size=4)
KINDS = (
    BALANCED,
    replace(BALANCED, load_balancing_type=LoadBalancing.GLOBAL_AUX_LOSS),
    replace(BALANCED, capacity_factor=1.25),
)
PLANS = [(degrees, number) for degrees in (PARTS, WHOLE) for number in range(len(KINDS))]
COMMUNICATE = AllReduce | AllGather | ReduceScatter | AllToAll
MATTER = COMMUNICATE | Compute | Copy | Fill | Together


@cache
def made(number: int) -> tuple[Schedule, Model, tuple[Operation, ...]]:
    """Return a schedule, its model, and the operations of a step that compute or move data.

    Forwards of losses are left out: no operation reads a loss, and its backward computes it again.
    """
    degrees, kind = PLANS[number]
    strategy = strategy_of(**degrees)
    model = model_of(strategy, KINDS[kind])
    schedule = make_schedule(model, strategy)
    (program,) = schedule.programs
    losses = {
        (unit.name, place)
        for unit in model.units
        for place, segment in enumerate(unit.segments)
        if segment.loads is not None or model.loss in segment.outputs
    }
    found = [
        each
        for each in program.step
        if isinstance(each, MATTER)
        and not (
            isinstance(each, Compute)
            and each.action is Action.FORWARD
            and (each.unit, each.segment) in losses
        )
    ]
    return schedule, model, tuple(found)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, len(PLANS) - 1), st.integers(0, 2**31))
def test_an_operation_that_is_left_out_is_found(number: int, which: int) -> None:
    schedule, model, operations = made(number)
    gone = operations[which % len(operations)]
    try:
        faulty = edited(schedule, lambda each: () if each is gone else (each,))
    except ScheduleError:
        return  # another operation waits for it
    assert check(faulty, model), gone.id


@settings(max_examples=15, deadline=None)
@given(st.integers(0, len(PLANS) - 1), st.integers(0, 2**31))
def test_a_sum_over_ranks_that_runs_twice_is_found(number: int, which: int) -> None:
    schedule, model, operations = made(number)
    sums = [each for each in operations if isinstance(each, AllReduce)]
    one = sums[which % len(sums)]
    again = but(one, id=f"{one.id}/again", after=())
    faulty = edited(schedule, lambda each: (each, again) if each is one else (each,))
    assert check(faulty, model), one.id


@settings(max_examples=25, deadline=None)
@given(st.integers(0, len(PLANS) - 1), st.integers(0, 2**31), st.integers(0, 2**31))
def test_a_collective_among_other_ranks_is_found_or_refused(
    number: int, which: int, group: int
) -> None:
    schedule, model, operations = made(number)
    found = [each for each in operations if isinstance(each, COMMUNICATE)]
    one = found[which % len(found)]
    axes = {each.name: each.axes for each in schedule.groups}
    others = [name for name, own in axes.items() if own != axes[one.group]]
    other = others[group % len(others)]
    try:
        faulty = edited(
            schedule, lambda each: (but(each, group=other),) if each is one else (each,)
        )
    except ScheduleError:
        return
    assert check(faulty, model), f"{one.id} over {other}"
