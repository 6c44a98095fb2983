"""Judged runs that are like a run: which they are, how far off, and what was not shown."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zsim.prediction.evidence import JudgedRun, judged_runs, parse, table_text
from zsim.prediction.likeness import (
    FACTOR,
    FEWEST,
    FEWEST_PUBLICATIONS,
    LEVEL,
    NEAREST,
    JudgedQuantity,
    Likeness,
    alike,
    elsewhere,
    not_shown,
)
from zsim.prediction.run_features import RunFeatures
from zsim.prediction.trust import judged_by

FEATURES = RunFeatures(
    runtime="FSDP1",
    stage=3,
    precision="bf16",
    constants="h100",
    network=True,
    states="device",
    tensor=1,
    pipeline=1,
    context=1,
    replicate=1,
    nodes=4,
    gpu_bytes_per_s=50_000_000_000,
    oversubscription=1.0,
    tokens=4096,
    width=4096,
    architecture="GPT",
    attention="flash",
    checkpointing="full",
    compiled=False,
)


def with_features(changes: Mapping[str, object]) -> RunFeatures:
    values: dict[str, Any] = {**asdict(FEATURES), **changes}
    return RunFeatures(**values)


def judged(error: float, number: int = 0, **changes: object) -> JudgedRun:
    """A run that took a second, of which so much more was predicted."""
    return JudgedRun(
        publication="somebody",
        citation="somebody 2026",
        sweep=str(number),
        step_s=1.0,
        predicted_step_s=1.0 + error,
        peak_bytes=100,
        predicted_peak_bytes=round(100 * (1 + error)),
        features=with_features(changes),
        settings={"model.layers": number},
    )


def many(count: int, **changes: object) -> list[JudgedRun]:
    return [judged(0.01 * (number + 1), number, **changes) for number in range(count)]


@given(st.integers(1, 60))
def test_the_bound_is_an_error_of_a_like_run_that_nine_of_ten_draws_stay_within(n: int) -> None:
    found = alike(FEATURES, many(n))
    if n < FEWEST:
        assert found.bound is None
    else:
        count = len(found.errors)
        within = sum(abs(error) <= (found.bound or 0) for error in found.errors)
        # One more draw of the same kind is any of count + 1 ranks with the same chance.
        assert within / (count + 1) >= LEVEL > (within - 1) / (count + 1)


@given(st.lists(st.floats(-0.9, 3), min_size=1, max_size=30))
def test_like_runs_say_how_much_longer_they_took_and_never_less(errors: list[float]) -> None:
    found = Likeness(runs=tuple(map(judged, errors)), errors=tuple(errors))
    assert found.slower >= 1
    if found.bound is None or found.bias >= 0:
        assert found.slower == 1
    elif len(errors) % 2:
        assert found.slower == pytest.approx(1 / (1 + found.bias))


def test_errors_drawn_alike_stay_within_the_bound_as_often_as_it_says() -> None:
    generator = np.random.default_rng(19)
    held = []
    for _ in range(400):
        errors = generator.lognormal(-3, 1, size=20).tolist()
        bound = alike(FEATURES, [judged(error) for error in errors[1:]]).bound
        held.append(bound is not None and errors[0] <= bound)
    assert LEVEL - 0.04 <= np.mean(held) <= LEVEL + 0.08


OTHER_KINDS: Sequence[dict[str, object]] = (
    {"runtime": "FSDP2"},
    {"precision": "bf16 with rowwise float8"},
    {"constants": "a100"},
    {"network": False},
    {"states": "host"},
    {"stage": 2},
    {"tensor": 2},
    {"pipeline": 2},
    {"context": 2},
    {"replicate": 2},
    {"nodes": 1},
    {"oversubscription": 0.0},
    {"gpu_bytes_per_s": 6_250_000_000},
    {"oversubscription": 64.0},
    {"nodes": 4 * FACTOR + 1},
    {"tokens": 4096 * FACTOR + 1},
    {"width": 4096 // FACTOR - 1},
)


@pytest.mark.parametrize("changes", OTHER_KINDS, ids=str)
def test_a_run_of_another_kind_or_size_has_no_judged_run_like_it(
    changes: dict[str, object],
) -> None:
    asked = with_features(changes)
    assert alike(FEATURES, many(12)).bound is not None
    assert not alike(asked, many(12)).runs
    told = judged_by(asked, many(12))
    assert told.error is None
    assert told.text.startswith("no judged run is like this one: ")
    assert told.text.endswith("; the nearest are of somebody")


def test_memory_asks_neither_for_constants_nor_for_the_fabric() -> None:
    for changes in ({"constants": "a100"}, {"nodes": 1}, {"oversubscription": 64.0}):
        asked = with_features(changes)
        assert alike(asked, many(12), JudgedQuantity.PEAK_MEMORY).bound is not None


def test_the_nearest_runs_count_and_kinds_that_differ_count_as_a_factor_of_two() -> None:
    far = many(NEAREST, tokens=8192 + 1)
    near = [judged(-0.5, number, architecture="Llama") for number in range(NEAREST)]
    found = alike(FEATURES, [*far, *near])
    assert len(found.runs) == NEAREST
    assert {run.features.architecture for run in found.runs} == {"Llama"}
    assert found.bias == pytest.approx(-0.5)


@pytest.mark.parametrize("quantity", list(JudgedQuantity))
def test_formats_of_16_bits_are_alike_and_their_own_is_nearer(quantity: JudgedQuantity) -> None:
    asked = with_features({"precision": "fp16"})
    assert alike(asked, many(NEAREST), quantity).bound is not None
    both = alike(asked, [*many(NEAREST), judged(0.9, precision="fp16")], quantity)
    assert [run.features.precision for run in both.runs[:2]] == ["fp16", "bf16"]
    assert not_shown(asked, many(3)) == ["precision fp16"]
    assert not alike(with_features({"precision": "fp32"}), many(NEAREST), quantity).runs


@given(
    few=st.lists(st.floats(0.3, 0.9), min_size=1, max_size=FEWEST + 3),
    more=st.integers(FEWEST, 3 * NEAREST),
)
def test_a_publication_with_many_like_runs_does_not_hide_a_wider_one(
    few: list[float], more: int
) -> None:
    narrow = [replace(judged(0.01, number), publication="many") for number in range(more)]
    wide = [replace(judged(error), publication="few") for error in few]
    found = alike(FEATURES, [*narrow, *wide])
    assert sum(run.publication == "many" for run in found.runs) == min(more, NEAREST)
    assert sum(run.publication == "few" for run in found.runs) == len(few)
    assert found.bound is not None
    for alone in (narrow, wide):
        assert found.bound >= (alike(FEATURES, alone).bound or 0)


def of_publications(*worst: float, **changes: object) -> list[JudgedRun]:
    """Ten runs of each publication, off by up to so much."""
    return [
        replace(judged(most * part / 10, part, **changes), publication=f"team {number}")
        for number, most in enumerate(worst)
        for part in range(1, 11)
    ]


WORST = (0.1, 0.3, 0.2, *[0.05] * (FEWEST_PUBLICATIONS - 3))


@given(worst=st.lists(st.floats(0.01, 0.9), min_size=1, max_size=2 * FEWEST_PUBLICATIONS))
def test_the_widest_of_several_publications_speaks_of_runs_like_none(worst: list[float]) -> None:
    runs = of_publications(*worst, runtime="DeepSpeed", precision="fp16")
    assert not alike(FEATURES, runs).runs
    found = elsewhere(FEATURES, runs)
    assert len(found.bounds) == len(worst)
    if len(worst) < FEWEST_PUBLICATIONS:
        assert found.bound is None
    else:
        assert found.bound == pytest.approx(max(worst))
    told = judged_by(FEATURES, runs)
    assert told.error == found.bound
    assert ("publications of other runs" in told.text) == (found.bound is not None)


def test_the_widest_publication_is_named_and_how_often_one_more_is_within_it() -> None:
    told = judged_by(FEATURES, of_publications(*WORST, runtime="DeepSpeed"))
    assert told.text.endswith(
        "; of 9 publications of other runs without a pipeline on several nodes the furthest off "
        "(team 1) has 9 of 10 within 30.0%, as one more would in 9 of 10 draws"
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"pipeline": 2},
        {"nodes": 1},
        {"states": "host"},
        {"precision": "bf16 with rowwise float8"},
        {"oversubscription": 64.0},
        {"gpu_bytes_per_s": 1_000_000_000},
        {"context": 2 * FACTOR},
        {"width": 2 * FACTOR * FEATURES.width},
    ],
)
def test_publications_say_nothing_of_another_kind_or_of_sizes_beyond_theirs(
    changes: dict[str, object],
) -> None:
    runs = of_publications(*WORST, runtime="DeepSpeed")
    assert elsewhere(FEATURES, runs).bound is not None
    assert elsewhere(with_features(changes), runs).bound is None


def test_runs_that_are_alike_speak_before_other_publications() -> None:
    runs = [*many(FEWEST), *of_publications(*WORST, runtime="DeepSpeed")]
    told = judged_by(FEATURES, runs)
    assert told.error == alike(FEATURES, runs).bound
    assert "publications of other runs" not in told.text


def test_trust_says_what_was_not_shown_and_on_which_side_predictions_are_off() -> None:
    asked = replace(FEATURES, architecture="Llama", width=8192)
    words = ["architecture Llama", "width 8,192 (they have 4,096)"]
    assert not_shown(asked, many(12)) == words
    told = judged_by(asked, many(12))
    assert told.text == (
        "12 judged runs like this one (somebody): step time 6.5% off in the median, mostly too "
        f"long, at most 12.0% for 9 of 10; none has {', '.join(words)}; no other publication has "
        "any"
    )
    assert told.error == pytest.approx(0.12)
    few = judged_by(FEATURES, many(3))
    assert few.error is None
    assert "too few for a percentile (9 are needed)" in few.text


def test_a_table_is_read_as_it_was_written() -> None:
    runs = (*many(3), replace(judged(0.5), peak_bytes=None, predicted_peak_bytes=None))
    assert parse(table_text(runs)) == runs


def test_the_table_that_ships_is_written_by_its_writer_and_names_no_file_of_ours() -> None:
    runs = judged_runs()
    assert parse(table_text(runs)) == runs
    assert all(run.citation and run.publication for run in runs)
    theirs = [run.citation.removeprefix("github:") for run in runs]
    assert not any(each.startswith(("/", ".")) or each.endswith(".csv") for each in theirs)
