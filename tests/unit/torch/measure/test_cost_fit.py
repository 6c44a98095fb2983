"""Costs fitted to reference steps: those of a machine that is known are found again."""

from dataclasses import asdict, replace
from fractions import Fraction
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from measured_times import ALONE, TIMES, cluster

from zsim.backend.backend import Job
from zsim.cluster.profile.measured import HostTimes, MeasuredTimes, OperationCost
from zsim_des.simulation import SimBackend
from zsim_record.measure.cost_fit import (
    WARM_UP,
    ReferenceTrace,
    fitted_costs,
    fitted_host,
    not_negative,
)
from zsim_record.measure.ladder import Ladder
from zsim_record.measure.reference_run import reference_jobs

UNSEEN = Ladder(shapes=((3, 96, 48),), steps=WARM_UP + 1)
RUNS = Ladder(shapes=((1, 32, 16), (2, 64, 32), (1, 256, 64)), steps=WARM_UP + 1)


@cache
def jobs(ladder: Ladder) -> tuple[Job, ...]:
    return reference_jobs(2, ladder)


def traces(times: MeasuredTimes, share: Fraction = Fraction(0)) -> list[ReferenceTrace]:
    """Reference runs of a machine that takes these times, whose collectives take from kernels."""
    found: list[ReferenceTrace] = []
    where = cluster(times)
    where = replace(where, gpu=replace(where.gpu, collective_share=share))
    for job in jobs(RUNS):
        trace = SimBackend(unfold=True).run(replace(job, cluster=where), seed=0)
        found += [ReferenceTrace(schedule=job.schedule, trace=rank) for rank in trace.ranks]
    return found


def step_s(job: Job, times: MeasuredTimes) -> float:
    ends = SimBackend().step_ends_ps(replace(job, cluster=cluster(times)))
    return (ends[-1] - ends[-2]) / 1e12


def fitted(times: MeasuredTimes, share: Fraction = Fraction(0)) -> MeasuredTimes:
    runs = traces(times, share)
    host = fitted_host(runs, ALONE.host.collective_s)
    return replace(
        ALONE,
        operations=fitted_costs(runs, ALONE),
        host=host,
    )


def test_costs_of_a_known_machine_are_found_again() -> None:
    found = fitted(TIMES)
    for name in ("forward", "backward"):
        known, other = TIMES.cost(name), found.cost(name)
        assert other.product == pytest.approx(known.product, rel=0.02)
        assert other.moving == pytest.approx(known.moving, rel=0.05)
        assert other.own_s == pytest.approx(known.own_s, rel=0.05)
    assert found.cost("update").moving == pytest.approx(2.5, rel=0.01)
    assert found.host.stream_s == pytest.approx(TIMES.host.stream_s, rel=0.01)
    assert found.host.book_s == pytest.approx(TIMES.host.book_s, rel=0.01)
    assert found.host.step_s == pytest.approx(TIMES.host.step_s, rel=0.01)
    assert found.host.collective_s == pytest.approx(TIMES.host.collective_s, rel=0.01)


def test_what_collectives_take_from_kernels_is_in_no_cost_of_these() -> None:
    """A prediction takes it from each kernel beside a collective: it would count twice."""
    alone, shared = fitted(TIMES), fitted(TIMES, Fraction(1, 2))
    for one, other in zip(alone.operations, shared.operations, strict=True):
        found, known = asdict(other), asdict(one)
        assert found.pop("name") == known.pop("name")
        # "other" is of several actions, and not all of them are seen as often.
        assert found == pytest.approx(known, rel=0.002, abs=1e-12)


@pytest.mark.one_commit_in(6)
@settings(max_examples=5, deadline=None)
@given(
    product=st.floats(0.5, 4),
    moving=st.floats(0.5, 4),
    own_us=st.floats(1, 1000),
    host_us=st.floats(1, 100),
)
def test_steps_of_a_model_that_was_not_measured_take_what_the_machine_takes(
    product: float, moving: float, own_us: float, host_us: float
) -> None:
    truth = replace(
        TIMES,
        host=HostTimes(
            stream_s=host_us * 1e-6,
            collective_s=4e-6 * host_us,
            book_s=host_us * 2e-7,
            step_s=host_us * 1e-5,
        ),
        operations=tuple(
            OperationCost(
                name=each.name,
                own_s=own_us * 1e-6,
                kernel_s=each.kernel_s,
                product=each.product * product,
                moving=each.moving * moving,
            )
            for each in TIMES.operations
        ),
    )
    found = fitted(truth)
    for job in jobs(UNSEEN):
        assert step_s(job, found) == pytest.approx(step_s(job, truth), rel=0.03)


@given(st.tuples(st.floats(0.1, 10), st.floats(0, 10), st.floats(0, 10)))
def test_factors_are_found_and_none_is_less_than_zero(
    factors: tuple[float, float, float],
) -> None:
    rows = [(1.0, 2.0, 5.0), (1.0, 3.0, 1.0), (1.0, 1.0, 1.0), (2.0, 1.0, 7.0)]
    taken = [sum(a * b for a, b in zip(row, factors, strict=True)) for row in rows]
    found = not_negative(rows, taken)
    assert min(found) >= 0
    again = [sum(a * b for a, b in zip(row, found, strict=True)) for row in rows]
    assert again == pytest.approx(taken, rel=1e-5)
    opposite = not_negative([(1.0, -1.0), (2.0, -2.0)], [1.0, 2.0])
    assert opposite == pytest.approx((1.0, 0.0))
