"""Coverage of the percentile that trust prints, by the table that ships."""

from collections.abc import Sequence
from dataclasses import replace
from math import comb

import pytest

from zsim.calibration.coverage import MANY, LeftOut, binomial_p, coverage
from zsim.prediction.evidence import JudgedRun, judged_runs
from zsim.prediction.likeness import JudgedQuantity

QUANTITIES = list(JudgedQuantity)

TENSOR = "Megatron, tensor, 16 bits, a100, 0.94 ms of host a unit, several nodes"
PIPELINES = "Megatron, tensor, pipeline, 16 bits, a100, 0.94 ms of host a unit, several nodes"
STAGES = "Megatron, pipeline, 16 bits, a100, 0.94 ms of host a unit, several nodes"
SEGMENT = "16 bits, h100, kernels as alone, 0.28 ms of host a segment"
PLAYBOOK = {
    f"Nanotron, pipeline, {SEGMENT}, several nodes",
    f"Nanotron, tensor, pipeline, {SEGMENT}, several nodes",
    f"Nanotron, tensor, pipeline, {SEGMENT}, 280 ms of host a message, several nodes",
}
REJECTED = {
    (JudgedQuantity.STEP_TIME, LeftOut.SWEEP): {TENSOR, PIPELINES},
    (JudgedQuantity.STEP_TIME, LeftOut.PUBLICATION): {TENSOR, STAGES, *PLAYBOOK},
}
"""Kinds whose coverage is rejected, which docs/validation.md tells of."""


def rejected(runs: Sequence[JudgedRun], left_out: LeftOut, quantity: JudgedQuantity) -> set[str]:
    kinds = coverage(runs, left_out, quantity).kinds
    tested = [each for each in kinds if each.stated >= MANY]
    assert tested or left_out is LeftOut.PUBLICATION
    return {each.kind for each in tested if (each.p_value or 0) <= 0.05}


@pytest.mark.parametrize("quantity", QUANTITIES)
def test_what_is_printed_holds_as_often_as_it_says_when_a_sweep_is_left_out(
    quantity: JudgedQuantity,
) -> None:
    everything = coverage(judged_runs(), LeftOut.SWEEP, quantity).everything
    assert everything.share is not None
    assert 0.85 <= everything.share <= 0.95
    assert everything.stated >= 0.7 * everything.rows
    assert everything.printed is not None
    assert everything.observed is not None
    assert everything.printed <= 2 * everything.observed
    found = rejected(judged_runs(), LeftOut.SWEEP, quantity)
    assert found == REJECTED.get((quantity, LeftOut.SWEEP), set())


@pytest.mark.parametrize("quantity", QUANTITIES)
def test_what_other_publications_say_holds_too_where_they_say_anything(
    quantity: JudgedQuantity,
) -> None:
    found = rejected(judged_runs(), LeftOut.PUBLICATION, quantity)
    assert found == REJECTED.get((quantity, LeftOut.PUBLICATION), set())


def test_nine_of_ten_step_times_have_a_bound_of_other_publications() -> None:
    found = coverage(judged_runs(), LeftOut.PUBLICATION, JudgedQuantity.STEP_TIME)
    for each in (found.everything, found.steady):
        assert each.stated >= 0.9 * each.rows
        assert each.printed is not None
        assert each.observed is not None
        assert each.printed <= 2 * each.observed


def test_a_bound_of_other_publications_holds_of_all_runs_and_of_those_that_do_not_stall() -> None:
    found = coverage(judged_runs(), LeftOut.PUBLICATION, JudgedQuantity.STEP_TIME)
    assert found.steady.rows < found.everything.rows
    for each in (found.everything, found.steady):
        assert each.share is not None
        assert 0.85 <= each.share <= 0.95


def test_runs_that_stall_are_asked_apart_and_judge_others_as_any_does() -> None:
    runs = judged_runs()
    (stalling,) = {run.publication for run in runs if run.stalls}
    found = coverage(runs, LeftOut.SWEEP, JudgedQuantity.STEP_TIME)
    stalls = sum(run.stalls for run in runs)
    assert (found.everything.rows, found.steady.rows) == (len(runs), len(runs) - stalls)
    unmarked = [replace(run, stalls=False) for run in runs]
    assert coverage(unmarked, LeftOut.SWEEP, JudgedQuantity.STEP_TIME).kinds == found.kinds
    assert 0 < stalls < sum(run.publication == stalling for run in runs) / 2


def test_errors_that_are_understated_are_seen() -> None:
    runs = judged_runs()
    worst = {
        id(run) for run in sorted(runs, key=lambda run: -abs(run.step_error))[: len(runs) // 3]
    }
    flattered = [
        replace(run, sweep="seen")
        if id(run) in worst
        else replace(run, predicted_step_s=run.step_s)
        for run in runs
    ]
    everything = coverage(flattered, LeftOut.SWEEP, JudgedQuantity.STEP_TIME).everything
    assert everything.p_value is not None
    assert everything.p_value < 0.05


def test_the_binomial_test_counts_what_is_no_likelier() -> None:
    assert binomial_p(9, 10) == pytest.approx(1.0)
    tail = sum(comb(20, hits) * 0.9**hits * 0.1 ** (20 - hits) for hits in range(15))
    assert binomial_p(14, 20) == pytest.approx(tail)
    # Of so many rows the coefficients are beyond a float; the likeliest count is no surprise.
    assert binomial_p(1800, 2000) == pytest.approx(1.0)
    assert binomial_p(1700, 2000) < 1e-9
