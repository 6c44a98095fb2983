"""Errors of predictions: every question has a bound, and ratios have narrower ones."""

import tomllib
from collections.abc import Callable
from dataclasses import asdict, replace
from math import exp, hypot, log, prod
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from step_errors import FEATURES, step_error

import zsim
from zsim.api.error_text import probability_text
from zsim.api.run_result import RunResult
from zsim.files.shipped_files import scenarios
from zsim.prediction.closest_runs import (
    FEWEST,
    NEAREST,
    ClosestRuns,
    closest,
    closest_of,
    distance,
    slower,
)
from zsim.prediction.error_columns import Columns, changed, ratio_columns, time_columns
from zsim.prediction.error_rule import SURE, ErrorRule, shipped_rules
from zsim.prediction.evidence import JudgedRun, judged_runs, memory_outcomes, parse, table_text
from zsim.prediction.predicted_error import PredictedError, error_of, explained, ratio_half_width
from zsim.prediction.run_features import RunFeatures
from zsim.scenario.toml import apply
from zsim.trace.trace import StepError
from zsim.units import format_bytes
from zsim_lab.fit.error_fit import ErrorFit, ErrorRow
from zsim_lab.fit.error_rows import rules_of, scored

FEW = judged_runs()[::100]
"""Published runs, of which the closest is named."""


def stated(found: PredictedError) -> StepError | None:
    """Return an error as a trace has it."""
    return StepError.of(found.bounds, found.features_text)


UNPUBLISHED = "a trainer that nobody published"
DEGREES = st.sampled_from((1, 2, 4, 16, 128))
ASKED = st.builds(
    RunFeatures,
    runtime=st.sampled_from(("FSDP2", UNPUBLISHED)),
    stage=st.integers(0, 3),
    precision=st.sampled_from(("bf16", "fp32", "bf16 with rowwise float8")),
    constants=st.sampled_from(("h100", "a100, kernels as alone", "a GPU of next year")),
    network=st.booleans(),
    states=st.sampled_from(("device", "host", "nvme")),
    tensor=DEGREES,
    pipeline=DEGREES,
    context=DEGREES,
    replicate=DEGREES,
    nodes=st.integers(1, 4096),
    gpu_bytes_per_s=st.sampled_from((1, 50_000_000_000)),
    oversubscription=st.sampled_from((0.0, 1.0, 64.0)),
    tokens=st.integers(1, 10**6),
    width=st.integers(1, 10**5),
    architecture=st.sampled_from(("GPT", "Llama")),
    attention=st.sampled_from(("plain", "flash")),
    checkpointing=st.sampled_from(("none", "full")),
    compiled=st.booleans(),
    data=DEGREES,
    layers=st.integers(1, 200),
    spans=st.booleans(),
)


def is_new_pipeline(asked: RunFeatures) -> bool:
    """Whether it has a pipeline of a runtime without published ones."""
    return asked.runtime == UNPUBLISHED and asked.pipeline > 1


@given(ASKED)
def test_every_question_has_a_bound(asked: RunFeatures) -> None:
    found = error_of(asked, FEW)
    assert found.interval is not None
    assert 0 < found.interval.low < 1 < found.interval.high
    assert found.interval.high < 100 or is_new_pipeline(asked)
    assert found.text.startswith(f"±{found.interval.half_width:.0%}".replace("%", " %"))
    assert "; closest measured: " in found.text
    error = stated(found)
    assert error is not None
    assert error.half_width == pytest.approx(found.interval.half_width)


@given(ASKED, st.sampled_from(sorted({run.features.runtime for run in judged_runs()})))
def test_a_pipeline_of_a_new_runtime_is_as_uncertain_as_the_least_known_one(
    asked: RunFeatures, runtime: str
) -> None:
    asked = replace(asked, pipeline=4)
    new = error_of(replace(asked, runtime=UNPUBLISHED), FEW).interval
    known = error_of(replace(asked, runtime=runtime), FEW).interval
    assert new is not None
    assert known is not None
    assert log(new.high / new.low) >= log(known.high / known.low) * (1 - 1e-9)


@given(ASKED, ASKED)
def test_the_error_of_a_ratio_is_the_same_in_both_directions(
    one: RunFeatures, other: RunFeatures
) -> None:
    first, second = (stated(error_of(each, FEW)) for each in (one, other))
    assert first is not None
    assert second is not None
    error = ratio_half_width(first, second)
    assert error == ratio_half_width(second, first) > 0
    assert ratio_half_width(first, first) > 0
    assert ratio_half_width(first, first) < 1 or is_new_pipeline(one)


def test_context_ranks_are_counted_once_among_the_gpus_of_published_runs() -> None:
    shared = [run for run in judged_runs() if run.features.context > 1]
    assert shared
    for run in shared:
        names = ("data", "replicate", "tensor", "pipeline")
        degrees = (run.settings.get(f"parallel.{name}", 1) for name in names)
        assert run.features.gpus == prod(int(str(each)) for each in degrees)


def test_runs_of_two_gpus_share_no_error() -> None:
    one, other = step_error(0.1), step_error(0.2, "a100")
    widths = [log(each.high / each.low) / 2 for each in (one, other)]
    assert ratio_half_width(one, other) == pytest.approx(exp(hypot(*widths)) - 1)


def test_two_settings_of_one_model_share_most_of_their_error() -> None:
    """In the median over published runs, beside the same run with one choice changed."""
    narrower = 0
    runs = judged_runs()[::25]
    for run in runs:
        other = replace(run.features, checkpointing="another")
        first, second = (stated(error_of(each, runs)) for each in (run.features, other))
        assert first is not None
        assert second is not None
        alone = exp(hypot(*(log(each.high / each.low) / 2 for each in (first, second)))) - 1
        narrower += ratio_half_width(first, second) < alone
    assert narrower > 0.9 * len(runs)


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"checkpointing": "none"}, ("checkpointing",)),
        ({"tensor": 2, "data": 16}, ("tensor degree",)),
        ({"tensor": 2}, ("tensor degree",)),
        ({"data": 16}, ("data degree",)),
        ({"data": 16, "replicate": 2}, ("data degree",)),
        ({"data": 16, "compiled": True}, ("compilation", "data degree")),
        ({"gpu_bytes_per_s": 1}, ("fabric",)),
        ({}, ()),
    ],
    ids=str,
)
def test_on_as_many_gpus_the_data_degree_follows(
    changes: dict[str, Any], names: tuple[str, ...]
) -> None:
    assert changed(FEATURES, replace(FEATURES, **changes)) == names


def judged(error: float, number: int = 0, **changes: Any) -> JudgedRun:  # noqa: ANN401  (any feature)
    """A run that took a second, of which so much more was predicted."""
    return JudgedRun(
        publication="somebody",
        citation="somebody 2026",
        sweep=str(number),
        step_s=1.0,
        predicted_step_s=1.0 + error,
        peak_bytes=100,
        predicted_peak_bytes=round(100 * (1 + error)),
        features=replace(FEATURES, **changes),
        settings={"model.layers": number},
    )


@given(st.lists(st.floats(-0.9, 3), min_size=1, max_size=NEAREST))
def test_runs_of_one_kind_rank_by_the_time_they_took_and_never_less(errors: list[float]) -> None:
    found = slower(FEATURES, [judged(error) for error in errors])
    assert found >= 1
    if len(errors) < FEWEST:
        assert found == 1
    elif len(errors) % 2:
        median = sorted(1 / (1 + error) for error in errors)[len(errors) // 2]
        assert found == pytest.approx(max(1.0, median))
    assert slower(FEATURES, [judged(error, tensor=2) for error in errors]) == 1


def test_the_closest_runs_come_first_and_their_publication_is_named() -> None:
    runs = [judged(0.1, tensor=8), judged(0.1, constants="a100"), judged(0.1)]
    assert closest(FEATURES, runs)[0] is runs[2]
    steps = [distance(FEATURES, run.features) for run in closest(FEATURES, runs)]
    assert steps == sorted(steps)
    near = closest_of(FEATURES, runs)
    assert near is not None
    assert near.text() == "somebody on H100, 2 runs"
    assert closest_of(FEATURES, []) is None


def test_an_explanation_multiplies_to_the_interval() -> None:
    run = judged_runs()[0]
    found = error_of(run.features, judged_runs())
    error = stated(found)
    assert error is not None
    lines = dict(explained(error, 2.0))
    low_s, high_s = 2 * error.low, 2 * error.high
    assert lines["interval"].startswith(f"{low_s:.4g} to {high_s:.4g} s a step")
    rule = shipped_rules().time
    parts = [name for name, value in time_columns(run.features).items() if value]
    assert all(name in lines["made of"] for name in parts)
    assert rule.scale({}) * rule.quantile == pytest.approx(
        float(lines["made of"].partition("%")[0][1:]) / 100, abs=1e-3
    )


def test_the_interval_in_json_is_that_of_the_text() -> None:
    tables = tomllib.loads(scenarios()["llama2_7b"])
    apply(tables, "cluster.nodes=1")
    found = zsim.run(zsim.load(tables), check=False)
    bounds = found.step_time_interval_s
    assert bounds is not None
    error: Any = found.to_dict()["error"]
    assert (error["step_time_low_s"], error["step_time_high_s"]) == bounds
    half = (bounds[1] - bounds[0]) / 2 / found.step_time_s
    assert error["half_width"] == pytest.approx(half)
    assert dict(found.facts())["error"] == error["text"]
    assert error["text"].startswith(f"±{half:.0%}".replace("%", " %"))
    assert found.fit_probability == found.to_dict()["fit_probability"]
    assert found.fit_probability is not None
    assert found.fit_probability >= SURE
    assert dict(found.facts())["fits"].startswith("yes: ")


def test_whether_a_run_fits_is_said_with_its_probability_where_it_is_not_clear(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(RunResult, "remedies", ())  # to look for them takes 12 times as long
    words = set[str]()
    for megabytes in range(8, 33, 2):
        changes = {"cluster.gpu_memory": f"{megabytes} MB", "model.layers": 12}
        found = zsim.run("tiny", changes, check=False)
        chance = found.fit_probability
        assert chance is not None
        verdict = dict(found.facts())["fits"].partition(":")[0]
        word, _, risk = verdict.partition(" (probability ")
        clear = chance >= SURE if found.fits else chance <= 1 - SURE
        assert risk.removesuffix(")") == ("" if clear else probability_text(chance))
        assert word in ({"yes", "probably", "uncertain"} if found.fits else {"no", "probably not"})
        assert (word == "uncertain") is (found.fits and chance < 1 / 2)
        words.add(word)
    assert {"no", "yes"} < words


@pytest.mark.one_commit_in(9)
def test_a_run_that_may_not_fit_says_what_is_left_and_what_takes_less_memory() -> None:
    said: set[bool] = set()
    for memory in (20, 15):
        changes = {"cluster.gpu_memory": f"{memory} MB", "model.layers": 12}
        found = zsim.run("tiny", changes, check=False)
        usable, taken = found.summary.usable_bytes, found.peak_reserved_bytes
        assert taken is not None
        line = dict(found.facts()).get("to be sure", "")
        risky = found.fits and (found.fit_probability or 0) < SURE
        assert bool(line) is risky
        said.add(risky)
        if risky:
            left = f"{format_bytes(taken)} of {format_bytes(usable)} leaves "
            assert line.startswith(f"{left}{format_bytes(usable - taken)}, ")
            most = float(line.split("; ")[1].split()[0]) * 1e6
            assert shipped_rules().fit.probability(most, usable) == pytest.approx(SURE, abs=0.01)
            assert line.endswith(
                ": try cluster.allocator=expandable, train.micro_batch_size=1, "
                "activations.checkpointing=full or more GPUs"
            )
    assert said == {True, False}


def test_an_allocator_that_is_set_is_not_suggested() -> None:
    for memory in range(10, 60):
        changes = {"cluster.gpu_memory": f"{memory} MB", "model.layers": 12}
        found = zsim.run("tiny", {**changes, "cluster.allocator": "expandable"}, check=False)
        if line := dict(found.facts()).get("to be sure"):
            assert "cluster.allocator" not in line
            return
    pytest.fail("no run that may not fit")


def test_settings_that_take_less_memory_are_of_the_runtime() -> None:
    changes = {"model.layers": 12, "zero": {"stage": 0, "emulate": "megatron"}}
    for memory in range(20, 60, 2):
        found = zsim.run("tiny", {**changes, "cluster.gpu_memory": f"{memory} MB"}, check=False)
        if line := dict(found.facts()).get("to be sure"):
            assert "zero.stage=1 or more GPUs" in line
            return
    pytest.fail("no run that may not fit")


def test_every_sweep_with_runs_that_did_not_fit_has_those_that_did() -> None:
    """Else memory near the limit would never have been enough."""
    ran = {each.group for each in memory_outcomes() if each.ran}
    assert {each.group for each in memory_outcomes() if not each.ran} <= ran


@pytest.mark.one_commit_in(6)
def test_a_fault_has_no_published_error() -> None:
    fault = "fault=[{kind='gpu', rank=1, factor=2}]"
    found = zsim.run("llama2_7b", [fault, "cluster.nodes=1"], check=False)
    assert found.error == "unknown: no published run has faults"
    assert found.recorded.error is None
    assert found.explain_error() == []


@pytest.mark.one_commit_in(4)
def test_the_rules_that_ship_are_fitted_to_the_table_that_ships() -> None:
    made, ships = rules_of(judged_runs(), memory_outcomes()), shipped_rules()
    for one, other in zip(asdict(made).values(), asdict(ships).values(), strict=True):
        assert one.keys() == other.keys()
        for name, value in one.items():
            assert value == pytest.approx(other[name], rel=1e-6), name


@pytest.mark.parametrize("columns", [time_columns, None], ids=["step time", "ratio"])
def test_pipelines_of_one_runtime_do_not_widen_those_of_another(
    columns: Callable[[RunFeatures], Columns] | None,
) -> None:
    def of(runtime: str) -> Columns:
        run = replace(FEATURES, runtime=runtime, pipeline=4)
        if columns is not None:
            return columns(run)
        found = ratio_columns(run, replace(run, tensor=2, data=4))
        assert found is not None
        return found

    def rule(errors: dict[str, float]) -> ErrorRule:
        rows = [
            ErrorRow(f"{name} {group}", error * (-1) ** group, of(name))
            for name, error in errors.items()
            for group in range(12)
        ]
        return ErrorFit(rows).rule()

    alike, apart = rule({"one": 0.1, "other": 0.1}), rule({"one": 0.1, "other": 0.8})
    assert alike.interval(of("one")) == alike.interval(of("other"))
    widths = [apart.interval(of(name)).half_width for name in ("one", "other")]
    assert widths[1] > 2 * widths[0]


def test_a_run_from_which_a_choice_was_read_gives_no_score() -> None:
    runs = [judged(0.1, number) for number in range(4)]
    runs[1] = replace(runs[1], fitted=True)
    assert scored(runs) == [runs[0], *runs[2:]]
    assert parse(table_text(runs)) == tuple(runs)
    kept = rules_of(scored(runs), memory_outcomes())
    assert rules_of(runs, memory_outcomes()) == kept


def test_a_table_is_read_as_it_was_written() -> None:
    runs = (judged(0.1), replace(judged(0.5, 1), peak_bytes=None, predicted_peak_bytes=None))
    assert parse(table_text(runs)) == runs


def test_the_table_that_ships_is_written_by_its_writer_and_names_no_file_of_ours() -> None:
    runs = judged_runs()
    assert parse(table_text(runs)) == runs
    assert all(run.citation and run.publication for run in runs)
    theirs = [run.citation.removeprefix("github:") for run in runs]
    assert not any(each.startswith(("/", ".")) or each.endswith(".csv") for each in theirs)


@pytest.mark.parametrize("publication", ["A paper", "A paper on H100"])
def test_the_closest_runs_name_their_gpu_once(publication: str) -> None:
    assert ClosestRuns(publication, "h100", 2).text() == "A paper on H100, 2 runs"


def test_a_probability_just_below_the_level_of_sure_settings_does_not_read_like_it() -> None:
    assert probability_text(SURE) == "95%"
    assert probability_text(0.9499) == "almost 95%"
    assert probability_text(0.944) == "94%"
    assert [probability_text(each) for each in (0.001, 0.999)] == ["under 1%", "over 99%"]
