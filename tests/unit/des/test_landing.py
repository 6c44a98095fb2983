"""A host that runs operations itself has a part in each collective: it learns of its end."""

from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st
from measured_times import TIMES, cluster

import zsim
from zsim.backend.backend import Job
from zsim.cluster.profile.measured import (
    CollectiveTimes,
    HostTimes,
    MeasuredTimes,
    MeasuredTimesError,
)
from zsim.schedule.operation import AllGather, AllReduce, ReduceScatter, walk
from zsim_des.simulation import SimBackend

STAGES = (0, 1, 2, 3)
IN_TURN = {"zero.prefetch_units": 0, "zero.reductions_in_flight": 0}


@cache
def job(stage: int, **knobs: object) -> Job:
    changes = {"zero.stage": stage, "train.steps": 3, **knobs}
    return zsim.load("tiny", changes, ranks=2).job


def with_landing(share: float, factor: float = 1.0) -> MeasuredTimes:
    """Collectives of which the host has a share, and which take `factor` times as long."""
    return replace(
        TIMES,
        collectives=tuple(
            replace(
                each,
                curve=replace(each.curve, seconds=tuple(factor * s for s in each.curve.seconds)),
                landing_s=tuple(share * factor * s for s in each.curve.seconds),
            )
            for each in TIMES.collectives
        ),
    )


def step_ps(made: Job, times: MeasuredTimes) -> int:
    ends = SimBackend().step_ends_ps(replace(made, cluster=cluster(times)))
    return ends[-1] - ends[-2]


def landed_s(made: Job, times: MeasuredTimes) -> float:
    """Return what the host has to do with all collectives of a step."""
    return sum(
        times.landing_s(each.name, 2, each.whole.size * each.wire.size_bytes)
        for each in walk(made.schedule.programs[0].step)
        if isinstance(each, AllGather | ReduceScatter | AllReduce)
    )


@pytest.mark.matrix(6)
@pytest.mark.parametrize("stage", STAGES)
@given(share=st.floats(0.01, 0.99))
def test_where_the_host_waits_for_each_it_does_not_matter_whose_time_it_is(
    stage: int, share: float
) -> None:
    made = job(stage, **IN_TURN, **{"zero.bucket_elements": 10**9} if stage < 3 else {})
    # A host that takes time for its operations spends it while bytes move.
    idle = HostTimes(stream_s=0.0, collective_s=0.0, book_s=0.0)
    whole, parted = (
        step_ps(made, replace(times, host=idle)) for times in (TIMES, with_landing(share))
    )
    # Each time is rounded to whole picoseconds, and to those of bytes over a link. In stage 3 the
    # gather of a unit may fly while the host ends the reduction of another one.
    assert parted <= whole * (1 + 1e-4)
    if stage < 3:
        assert parted >= whole * (1 - 1e-4)


@pytest.mark.matrix(6)
@pytest.mark.parametrize("stage", STAGES)
def test_it_hides_behind_nothing_that_the_host_runs(stage: int) -> None:
    """Collectives that take next to nothing but for the host make a step as much longer."""
    made = job(stage)
    slow, quick = with_landing(0.999, 0.5), with_landing(0.999, 0.01)
    longer_s = (step_ps(made, slow) - step_ps(made, quick)) / 1e12
    assert longer_s == pytest.approx(landed_s(made, slow) - landed_s(made, quick), rel=0.01)


@pytest.mark.parametrize("stage", STAGES)
def test_a_device_beside_its_host_has_no_part_in_it(stage: int) -> None:
    made = job(stage)
    beside, whole = (replace(times, runs_on_host=False) for times in (with_landing(0.5), TIMES))
    assert step_ps(made, beside) == step_ps(made, whole)


def test_the_host_s_part_is_less_than_the_whole() -> None:
    curve = TIMES.collectives[0].curve
    for landing_s in ((1.0,), tuple(curve.seconds), (0.0, *curve.seconds[1:])):
        with pytest.raises(MeasuredTimesError, match="landing_s"):
            CollectiveTimes(collective="all_gather", ranks=2, curve=curve, landing_s=landing_s)
