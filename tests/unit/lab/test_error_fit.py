"""The rule for errors: coverage of exchangeable groups, equivariance, monotone quantiles."""

from collections.abc import Sequence
from math import exp

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zsim.prediction.error_rule import LEVEL, ErrorRule
from zsim_lab.fit.error_fit import ErrorFit, ErrorRow, FitRow, fitted_fit, quantile_of

GROUPS, DRAWS = 20, 300


def drawn(seed: int, groups: int = GROUPS, scale: float = 0.1) -> list[ErrorRow]:
    """Rows of exchangeable groups, which have scales of their own and one column that matters."""
    random = np.random.default_rng(seed)
    rows: list[ErrorRow] = []
    for group in range(groups):
        own = scale * float(random.lognormal(0, 0.5))
        for _ in range(int(random.integers(1, 12))):
            wide = float(random.integers(0, 2))
            error = float(random.normal(0, own * (1 + 2 * wide)))
            rows.append(ErrorRow(str(group), error, {"wide": wide}))
    return rows


def is_inside(rule: ErrorRule, row: ErrorRow) -> bool:
    interval = rule.interval(row.columns)
    return interval.low <= exp(-row.error) <= interval.high


@pytest.mark.one_commit_in(6)
def test_one_more_exchangeable_group_is_inside_as_often_as_the_level_says() -> None:
    """One row of each left group is drawn, so that trials are independent."""
    hits = 0
    for seed in range(DRAWS):
        rows = drawn(seed)
        left = [row for row in rows if row.group == "0"]
        hits += is_inside(ErrorFit(rows).rule(without="0"), left[seed % len(left)])
    # Three standard deviations of a binomial; a fit to few groups is a little too narrow.
    spread = 3 * (LEVEL * (1 - LEVEL) / DRAWS) ** 0.5
    assert LEVEL - spread <= hits / DRAWS <= LEVEL + spread


@given(
    scores=st.lists(st.floats(0, 10), min_size=2, max_size=40),
    level=st.floats(0.05, 0.95),
    more=st.floats(0, 0.5),
)
def test_a_higher_level_has_no_lower_quantile(
    scores: list[float], level: float, more: float
) -> None:
    groups = [str(at % 5) for at in range(len(scores))]
    low = quantile_of(scores, groups, level)
    assert low in scores
    assert low <= quantile_of(scores, groups, min(1.0, level + more))


@given(st.lists(st.floats(0, 10), min_size=1, max_size=40), st.floats(0.1, 10))
def test_quantiles_scale_with_scores(scores: list[float], factor: float) -> None:
    groups = [str(at % 7) for at in range(len(scores))]
    scaled = quantile_of([factor * each for each in scores], groups)
    assert scaled == pytest.approx(factor * quantile_of(scores, groups))


@given(st.lists(st.integers(1, 30), min_size=9, max_size=15))
def test_a_group_with_many_rows_counts_as_one_with_few(sizes: list[int]) -> None:
    """Copies of the rows of one group change no quantile."""
    scores = [float(at) for at, _ in enumerate(sizes)]
    groups = [str(at) for at, _ in enumerate(sizes)]
    many = [score for score, size in zip(scores, sizes, strict=True) for _ in range(size)]
    of_many = [group for group, size in zip(groups, sizes, strict=True) for _ in range(size)]
    assert quantile_of(many, of_many) == quantile_of(scores, groups)


@settings(max_examples=20)
@given(seed=st.integers(0, 99), factor=st.floats(2, 20))
def test_intervals_of_larger_errors_are_wider_in_proportion(seed: int, factor: float) -> None:
    """As far as errors are large beside the number that is added before logarithms."""
    rows = drawn(seed, scale=1.0)
    larger = [ErrorRow(row.group, factor * row.error, row.columns) for row in rows]
    one, other = (
        rule.quantile * rule.scale({"wide": 1.0})
        for rule in (ErrorFit(rows).rule(), ErrorFit(larger).rule())
    )
    assert other / one == pytest.approx(factor, rel=0.15)


@settings(max_examples=30)
@given(seed=st.integers(0, 99))
def test_symmetric_intervals_do_not_depend_on_signs(seed: int) -> None:
    rows = drawn(seed)
    turned = [ErrorRow(row.group, -row.error, row.columns) for row in rows]
    assert ErrorFit(rows, is_symmetric=True).rule() == ErrorFit(turned, is_symmetric=True).rule()
    rule, other = ErrorFit(rows).rule(), ErrorFit(turned).rule()
    assert rule.skew == pytest.approx(1 / other.skew)
    assert rule.interval({}).low == pytest.approx(1 / other.interval({}).high)


def test_a_choice_that_no_pair_changes_counts_as_the_widest() -> None:
    rows = [
        ErrorRow(str(at % 6), 0.01 * (1 + at % 4) * (1 + 5 * (at % 2)), {f"another {at % 2}": 1.0})
        for at in range(60)
    ]
    rule = ErrorFit(rows, is_symmetric=True, widest=("another ",)).rule()
    assert rule.weight("another key") == max(rule.weights.values()) > 0
    assert rule.weight("a name that begins otherwise") == 0.0


@settings(max_examples=30)
@given(
    centre=st.floats(-0.1, 0.1),
    spread=st.floats(0.02, 0.2),
    needed=st.lists(st.floats(0.5, 2), min_size=2, max_size=6),
)
def test_more_needed_memory_is_less_likely_to_fit(
    centre: float, spread: float, needed: Sequence[float]
) -> None:
    random = np.random.default_rng(7)
    rows = [
        FitRow("one", round(1e9 * exp(-spare)), 10**9, bool(spare + each > centre))
        for spare, each in zip(
            random.normal(0, 0.3, 200), random.normal(0, spread, 200), strict=True
        )
    ]
    rule = fitted_fit(rows)
    chances = [rule.probability(each, 1.0) for each in sorted(needed)]
    assert chances == sorted(chances, reverse=True)
    assert all(0 <= each <= 1 for each in chances)
    for chance in (0.05, 0.5, 0.95):
        assert rule.probability(rule.room(chance), 1.0) == pytest.approx(chance)
    # The mean of fitted probabilities is the share that fitted: a property of the likelihood.
    mean = np.mean([rule.probability(row.needed_bytes, row.usable_bytes) for row in rows])
    assert mean == pytest.approx(np.mean([row.ran for row in rows]), abs=1e-3)
