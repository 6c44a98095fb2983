"""Threads of a host that carry the bytes of a collective take from kernels that it runs beside."""

from dataclasses import replace
from fractions import Fraction
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st
from measured_times import TIMES, cluster

import zsim
from zsim.backend.backend import Job
from zsim.cluster.profile.measured import CollectiveTimes, MeasuredTimes, MeasuredTimesError
from zsim.schedule.operation import AllGather, AllReduce, ReduceScatter, walk
from zsim_des.simulation import SimBackend

STAGES = (0, 1, 2, 3)
IN_TURN = {"zero.prefetch_units": 0, "zero.reductions_in_flight": 0}


@cache
def job(stage: int, **knobs: object) -> Job:
    changes = {"zero.stage": stage, "train.steps": 3, **knobs}
    return zsim.load("tiny", changes, ranks=2).job


def that_take(share: float) -> MeasuredTimes:
    """Collectives that take a share of their time alone from kernels."""
    return replace(
        TIMES,
        collectives=tuple(
            replace(each, taken_s=tuple(share * s for s in each.curve.seconds))
            for each in TIMES.collectives
        ),
    )


def step_ps(made: Job, times: MeasuredTimes, share: Fraction = Fraction(0)) -> int:
    where = cluster(times)
    where = replace(where, gpu=replace(where.gpu, collective_share=share))
    ends = SimBackend().step_ends_ps(replace(made, cluster=where))
    return ends[-1] - ends[-2]


@cache
def alone_ps(stage: int) -> int:
    return step_ps(job(stage), TIMES)


def most_taken_ps(made: Job, times: MeasuredTimes) -> float:
    return 1e12 * sum(
        times.taken_s(each.name, 2, each.whole.size * each.wire.size_bytes)
        for each in walk(made.schedule.programs[0].step)
        if isinstance(each, AllGather | ReduceScatter | AllReduce)
    )


@pytest.mark.matrix(9)
@pytest.mark.parametrize("stage", STAGES)
@given(share=st.floats(0.01, 20.0))
def test_a_step_is_longer_by_at_most_what_is_taken(stage: int, share: float) -> None:
    made, times = job(stage), that_take(share)
    longer = step_ps(made, times) - alone_ps(stage)
    # Each time is rounded to whole picoseconds.
    assert -1000 <= longer <= most_taken_ps(made, times) + 1000


def test_kernels_beside_collectives_lose_what_was_measured() -> None:
    """Parameters of the next units are gathered while kernels run."""
    made = job(3)
    assert step_ps(made, that_take(5.0)) > step_ps(made, that_take(1.0)) > step_ps(made, TIMES)


@pytest.mark.parametrize("stage", STAGES)
def test_what_takes_less_than_it_is_waited_for_takes_nothing(stage: int) -> None:
    knobs = {**IN_TURN, **({"zero.bucket_elements": 10**9} if stage < 3 else {})}
    made = job(stage, **knobs)
    # In stage 3 the gather of a unit may fly while the host ends the reduction of another one.
    allowed = 1e-3 if stage == 3 else 1e-6
    assert step_ps(made, that_take(0.5)) == pytest.approx(step_ps(made, TIMES), rel=allowed)


def test_where_it_was_measured_the_one_share_of_all_collectives_says_nothing() -> None:
    made, times = job(3), that_take(2.0)
    assert step_ps(made, times, share=Fraction(1, 2)) == step_ps(made, times)
    assert step_ps(made, TIMES, share=Fraction(1, 2)) > step_ps(made, TIMES)


@pytest.mark.parametrize("stage", STAGES)
def test_a_device_beside_its_host_loses_nothing_to_threads(stage: int) -> None:
    made = job(stage)
    beside, before = (replace(times, runs_on_host=False) for times in (that_take(3.0), TIMES))
    assert step_ps(made, beside, share=Fraction(1, 4)) == step_ps(
        made, before, share=Fraction(1, 4)
    )


def test_what_is_taken_is_given_for_each_size() -> None:
    curve = TIMES.collectives[0].curve
    for taken_s in ((1.0,), (0.0, *curve.seconds[1:])):
        with pytest.raises(MeasuredTimesError, match="seconds"):
            CollectiveTimes(collective="all_gather", ranks=2, curve=curve, taken_s=taken_s)


def test_a_group_of_more_ranks_loses_as_much_more_as_a_ring_passes() -> None:
    times = that_take(1.0)
    # Of 4 ranks each passes 3/4 of the whole, of 2 one half.
    two, four = (times.taken_s("all_gather", ranks, 2**20) for ranks in (2, 4))
    assert four == pytest.approx(1.5 * two)
