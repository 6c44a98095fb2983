"""A host that is the stream: it runs each operation itself, and waits where a stream would."""

from dataclasses import replace
from fractions import Fraction
from functools import cache
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from measured_times import TIMES, cluster

import zsim
from zsim.backend.backend import Job
from zsim.cluster.profile.measured import MeasuredTimes
from zsim.schedule.operation import Compute, Copy, Fill, walk
from zsim.schedule.schedule import Schedule
from zsim.trace.trace import Event, Trace
from zsim_des.simulation import SimBackend

STAGES = (0, 1, 2, 3)


@cache
def job(stage: int) -> Job:
    changes = {"zero.stage": stage, "train.steps": 3}
    return zsim.load("tiny", changes, ranks=2).job


def simulated(stage: int, times: MeasuredTimes, share: Fraction = Fraction(0)) -> Trace:
    where = cluster(times)
    gpu = replace(where.gpu, collective_share=share)
    return SimBackend().run(replace(job(stage), cluster=replace(where, gpu=gpu)), seed=0)


def computed(schedule: Schedule, trace: Trace, step: int = 2) -> list[Event]:
    names = {
        each.id
        for each in walk(schedule.programs[0].step)
        if isinstance(each, Compute | Copy | Fill)
    }
    events = trace.ranks[0].events
    return sorted(
        (each for each in events if each.step == step and each.operation in names),
        key=lambda each: each.start_ps,
    )


@pytest.mark.parametrize("stage", STAGES)
def test_it_runs_one_operation_at_a_time_and_issues_the_next_after_it(stage: int) -> None:
    events = computed(job(stage).schedule, simulated(stage, TIMES))
    host_ps = round(TIMES.host.stream_s * 1e12)
    assert len(events) > 10
    for one, other in pairwise(events):
        assert other.start_ps >= one.end_ps + host_ps


@pytest.mark.parametrize("stage", STAGES)
def test_a_device_beside_its_host_is_never_slower(stage: int) -> None:
    beside = simulated(stage, replace(TIMES, runs_on_host=False))
    assert beside.step_end_ps[-1] < simulated(stage, TIMES).step_end_ps[-1]


@pytest.mark.parametrize("stage", STAGES)
def test_a_step_ends_with_all_that_it_handed_over(stage: int) -> None:
    trace = simulated(stage, TIMES)
    for step in (1, 2):
        begins = min(each.start_ps for each in trace.ranks[0].events if each.step == step)
        before = [each.end_ps for each in trace.ranks[0].events if each.step == step - 1]
        assert begins >= max(before)


@pytest.mark.one_commit_in(6)
@given(st.sampled_from(STAGES), st.sampled_from((Fraction(1, 10), Fraction(1, 2), Fraction(9, 10))))
def test_kernels_lose_what_a_collective_beside_them_takes(stage: int, share: Fraction) -> None:
    alone, beside = simulated(stage, TIMES), simulated(stage, TIMES, share)
    assert beside.step_end_ps[-1] >= alone.step_end_ps[-1]
    lost = sum(each.end_ps - each.start_ps for each in computed(job(stage).schedule, beside)) - sum(
        each.end_ps - each.start_ps for each in computed(job(stage).schedule, alone)
    )
    assert lost > 0


@pytest.mark.one_commit_in(6)
@settings(max_examples=10)
@given(st.floats(1.1, 10))
def test_slower_collectives_make_a_step_longer_by_no_more_than_they_are(factor: float) -> None:
    slower = replace(
        TIMES,
        collectives=tuple(
            replace(
                each,
                curve=replace(
                    each.curve, seconds=tuple(taken * factor for taken in each.curve.seconds)
                ),
            )
            for each in TIMES.collectives
        ),
    )
    quick, slow = (simulated(3, times).step_end_ps[-1] for times in (TIMES, slower))
    assert quick < slow <= quick * factor * (1 + 1e-6)
