"""Goodput of a training that fails: closed forms, the optimum, and a simulation agree."""

from math import inf
from statistics import mean, stdev

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.random import default_rng

from zsim.analysis.goodput import Interruptions, chance_of_enough, least_spares, share_down

MINUTE, HOUR = 60.0, 3600.0

CASES = st.builds(
    Interruptions,
    between_s=st.floats(10 * MINUTE, 1000 * HOUR),
    checkpoint_s=st.floats(1.0, 20 * MINUTE),
    restart_s=st.floats(0.0, 10 * MINUTE),
)


@pytest.mark.parametrize(("between_s", "minutes"), [(24 * HOUR, 117), (6 * HOUR, 57), (900, 9.1)])
def test_dalys_interval_is_that_of_the_figures_of_the_paper(
    between_s: float, minutes: float
) -> None:
    # figures 3 to 5: checkpoints of 5 minutes, restarts of 10
    found = Interruptions(between_s=between_s, checkpoint_s=5 * MINUTE, restart_s=10 * MINUTE)
    digits = 1 if minutes < 10 else 0
    assert round(found.daly_s / MINUTE, digits) == minutes


@given(CASES, st.floats(0.1, 10))
def test_no_other_interval_beats_the_optimum(case: Interruptions, factor: float) -> None:
    best = case.stretch(case.optimal_s)
    assert 1 < best <= case.stretch(factor * case.optimal_s) * (1 + 1e-9)
    assert best <= case.stretch(case.daly_s) * (1 + 1e-9)


@given(CASES)
def test_young_and_daly_approach_the_optimum_where_failures_are_rare(case: Interruptions) -> None:
    relative = (case.checkpoint_s / case.between_s) ** 0.5
    assert case.young_s == pytest.approx(case.optimal_s, rel=relative + 1e-6) or relative > 0.5
    if relative < 0.5:
        assert case.daly_s == pytest.approx(case.optimal_s, rel=relative**3 + 1e-6)


@settings(max_examples=25)
@given(
    st.floats(0.01, 0.5), st.floats(0.0, 0.5), st.floats(0.2, 3), st.integers(1, 20), st.integers(0)
)
def test_simulated_trainings_take_the_expected_time(
    checkpoint: float, restart: float, interval: float, segments: int, seed: int
) -> None:
    case = Interruptions(between_s=HOUR, checkpoint_s=checkpoint * HOUR, restart_s=restart * HOUR)
    interval_s = interval * HOUR
    work_s = segments * interval_s
    draws = default_rng(seed)
    found = [case.simulated_s(work_s, interval_s, draws) for _ in range(500)]
    error = stdev(found) / len(found) ** 0.5
    assert abs(mean(found) - work_s * case.stretch(interval_s)) < 5 * error


def test_nothing_is_lost_without_failures() -> None:
    never = Interruptions(between_s=inf, checkpoint_s=MINUTE, restart_s=MINUTE)
    assert never.optimal_s == never.daly_s == never.young_s == inf
    assert never.stretch(inf) == 1
    assert never.simulated_s(HOUR, inf, default_rng(0)) == HOUR
    assert never.simulated_s(HOUR, HOUR / 2, default_rng(0)) == HOUR + 2 * MINUTE
    assert never.stretch(HOUR / 2) == pytest.approx(1 + 2 / 60)


def test_a_training_that_fails_before_any_checkpoint_never_ends() -> None:
    case = Interruptions(between_s=1.0, checkpoint_s=HOUR, restart_s=0.0)
    assert case.stretch(case.optimal_s) == inf


@given(st.integers(1, 300), st.integers(0, 20), st.floats(1e-6, 0.5))
def test_one_more_spare_node_never_makes_a_wait_more_likely(
    nodes: int, spares: int, down: float
) -> None:
    fewer, more = (chance_of_enough(nodes, each, down) for each in (spares, spares + 1))
    assert fewer <= more + 1e-9
    assert chance_of_enough(nodes, 0, down) == pytest.approx((1 - down) ** nodes, abs=1e-12)


@given(st.integers(1, 300), st.floats(1e-4, 0.3), st.floats(0.5, 0.9999))
def test_the_least_number_of_spares_is_enough_and_one_fewer_is_not(
    nodes: int, down: float, target: float
) -> None:
    spares = least_spares(nodes, down, target, most=2 * nodes + 50)
    assert spares is not None
    assert chance_of_enough(nodes, spares, down) >= target
    assert spares == 0 or chance_of_enough(nodes, spares - 1, down) < target
    assert spares == 0 or least_spares(nodes, down, target, most=spares - 1) is None


def test_a_node_that_is_repaired_as_long_as_it_runs_is_down_half_of_the_time() -> None:
    assert share_down(1 / HOUR, HOUR) == 0.5
    assert share_down(0.0, HOUR) == 0
