"""Constants of training: found again from the runs that they give, written and read, applied."""

import tomllib
from dataclasses import replace
from datetime import date

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zsim.cluster.profile import in_training
from zsim.cluster.profile.in_training import (
    MATRIX,
    SHARES,
    Evidence,
    InTraining,
    InTrainingError,
)
from zsim.cluster.profile.kernels import NAMES, KernelProfile
from zsim.compute.fitted_model import Peaks, fitted_s
from zsim.dtype import DType
from zsim.model.kernel import KernelKind, flash_attention, matmul, streaming
from zsim_lab.fit.training_fit import MANY, Observed, fitted

EVIDENCE = Evidence(
    gpu="x100",
    fitted=30,
    publications=("a publication", "another"),
    judged=12,
    median=0.0125,
    p90=0.05,
    rows=("a table: 2, 5", "another: 3"),
    date=date(2026, 1, 31),
)
TRUTH = InTraining(
    product=0.75,
    attention_forward=1.5,
    attention_backward=1.25,
    flash2=0.875,
    memory=0.5,
    evidence=EVIDENCE,
)


def observed(number: int, by: InTraining) -> Observed:
    """A run whose classes of kernels weigh differently from the next one's."""
    weights = [1 + (number * prime) % 7 for prime in (1, 2, 3, 5, 4)]
    run = Observed(
        file="table",
        seconds=1.0,
        alone_s=dict(zip(SHARES, map(float, weights), strict=True)),
        rest_s=0.5,
    )
    return replace(run, seconds=run.predicted_s(by))


@settings(max_examples=3)
@given(st.lists(st.floats(0.6, 1.6), min_size=5, max_size=5))
def test_constants_are_found_again_from_the_runs_that_they_give(shares: list[float]) -> None:
    truth = InTraining()
    for name, value in zip(SHARES, shares, strict=True):
        truth = truth.changed(name, value)
    runs = [observed(number, truth) for number in range(2 * MANY)]
    found = fitted(runs, InTraining())
    for run in runs:
        assert found_near(run, found)


def found_near(run: Observed, by: InTraining) -> bool:
    return abs(run.predicted_s(by) / run.seconds - 1) < 0.02


def test_few_runs_say_how_fast_the_matrix_units_are_and_none_says_nothing() -> None:
    start = slower = TRUTH
    for name in MATRIX:
        slower = slower.changed(name, 0.8 * start.constant(name))
    for count in (1, 5):
        found = fitted([observed(number, slower) for number in range(count)], start)
        for name in SHARES:
            assert found.constant(name) == pytest.approx(slower.constant(name), rel=0.01)
    assert fitted([], start) == start


def test_a_constant_of_which_no_run_speaks_stays_where_it_was() -> None:
    start = TRUTH.changed("flash2", 0.9).changed("product", 0.9)
    runs = [observed(number, TRUTH) for number in range(2 * MANY)]
    silent = [replace(run, alone_s={**run.alone_s, "flash2": 0.0}, seconds=1.0) for run in runs]
    silent = [replace(run, seconds=run.predicted_s(TRUTH)) for run in silent]
    found = fitted(silent, start)
    assert found.flash2 == pytest.approx(0.9, rel=1e-3)
    assert found.product != 0.9


def test_every_class_of_kernels_takes_its_share() -> None:
    alone = KernelProfile(**dict.fromkeys(NAMES, 0.5))  # type: ignore[arg-type]
    peaks = Peaks(flops=1e9, bytes=1e9)
    shape = (1, 2, 2, 64, 64, 32)
    for kernel, share in (
        (matmul(64, 64, 64, DType.BF16), TRUTH.product),
        (flash_attention(shape, DType.BF16), TRUTH.attention_forward),
        (flash_attention(shape, DType.BF16, backward=True), TRUTH.attention_backward),
        (flash_attention(shape, DType.BF16, version=2), TRUTH.flash2),
        (streaming(KernelKind.NORM, (64, 64), DType.BF16, streams=2), TRUTH.memory),
    ):
        work = fitted_s(kernel, peaks, alone) - alone.fixed_s
        trained = fitted_s(kernel, peaks, replace(alone, training=TRUTH)) - alone.fixed_s
        assert trained * share == pytest.approx(work)


def test_constants_of_training_are_written_and_read() -> None:
    table = tomllib.loads("\n".join(in_training.text(TRUTH)))["training"]
    assert in_training.parse(table) == TRUTH
    assert in_training.text(InTraining()) == []


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("product", 0, "product: 0.0 must be more than 0"),
        ("product", True, "product: must be a number"),
        ("more", 1, "more: not a key of training"),
        ("evidence", 1, "evidence: must be a table"),
    ],
)
def test_a_wrong_constant_of_training_is_one_line(key: str, value: object, message: str) -> None:
    table = tomllib.loads("\n".join(in_training.text(TRUTH)))["training"]
    with pytest.raises(InTrainingError) as caught:
        in_training.parse(table | {key: value})
    assert str(caught.value) == message
    assert set(SHARES) < set(table)
