"""The sentence of trust for scenarios: which judged runs are like them, or in what none is."""

import tomllib
from dataclasses import replace
from functools import cache

import pytest

from zsim.analysis.run_comparison import compare as compared
from zsim.analysis.run_comparison import counts
from zsim.api.judged_figures import scenario_features
from zsim.api.largest_result import largest
from zsim.cli.main import answer
from zsim.files.installed import scenarios
from zsim.files.source import resolved
from zsim.prediction.evidence import judged_runs
from zsim.prediction.likeness import JudgedQuantity
from zsim.prediction.run_features import RunFeatures
from zsim.prediction.trust import Trust, judged_by
from zsim.scenario.tables import from_tables
from zsim.scenario.toml import apply

ONE_NODE = ("cluster.nodes=1", "zero.emulate=fsdp1")


@cache
def trusted(
    settings: tuple[str, ...], quantity: JudgedQuantity = JudgedQuantity.STEP_TIME
) -> Trust | str:
    """Return how far the scenario llama2_7b is trusted with `settings`, or why none is like it."""
    tables = tomllib.loads(scenarios()["llama2_7b"])
    for setting in settings:
        apply(tables, setting)
    found = scenario_features(tables)
    return judged_by(found, judged_runs(), quantity) if isinstance(found, RunFeatures) else found


def words(*settings: str) -> str:
    found = trusted((*ONE_NODE, *settings))
    assert isinstance(found, Trust)
    assert (found.error is None) == ("publications of other runs" not in found.text)
    assert found.text.startswith("no judged run is like this one: ")
    return found.text


@pytest.mark.parametrize(
    ("settings", "unlike"),
    [
        (("zero.emulate=megatron", "zero.stage=1"), "constants of h100, 0.94 ms of host a unit"),
        (("zero.emulate=deepspeed",), "DeepSpeed"),
        (("train.precision=fp32",), "fp32 (not bf16)"),
        (("train.float8=rowwise", "train.compile=true"), "bf16 with rowwise float8"),
        (("parallel.context=2",), "context degree 2 (not no context axis)"),
        (("parallel.replicate=2",), "2 replicas of the shards (not no replicate axis)"),
        (("compute.profile=v100",), "constants of v100"),
    ],
    ids=str,
)
def test_a_run_unlike_those_that_were_judged_says_in_what(
    settings: tuple[str, ...], unlike: str
) -> None:
    assert unlike in words(*settings)


def test_models_of_which_nobody_published_a_run_are_named() -> None:
    assert trusted((*ONE_NODE, "model.window=1024")) == "attention windows"
    assert trusted((*ONE_NODE, "model.lora={rank=8}")) == "frozen parameters"


def test_a_run_with_a_fault_is_like_no_judged_run(capsys: pytest.CaptureFixture[str]) -> None:
    fault = "fault=[{kind='gpu', rank=1, factor=2}]"
    assert answer(["run", "llama2_7b", "--no-check", "--set", fault]) == 0
    assert "no judged run is like this one: faults;" in " ".join(capsys.readouterr().out.split())


def test_a_simulation_has_the_error_of_the_judged_runs_that_are_like_it() -> None:
    known = (run for run in judged_runs() if judged_by(run.features, judged_runs()).error)
    run = min(
        (run for run in known if run.publication == "MosaicML llm-foundry"),
        key=lambda run: run.predicted_step_s,
    )
    told = judged_by(run.features, judged_runs())
    source = resolved("scenario", from_tables(run.scenario))
    trace = source.simulation().run(source.job(), seed=0)
    assert trace.error == told.error
    assert trace.error is not None
    assert trace.trust == f"{told.text}; collectives take fitted constants too"
    other = replace(trace, step_end_ps=tuple(2 * end_ps for end_ps in trace.step_end_ps))
    found = compared(trace, other)
    assert counts(found.step.relative or 0.0, [trace.error, other.error])


def test_the_largest_model_says_how_far_its_peak_of_memory_is_to_be_trusted() -> None:
    run = next(run for run in judged_runs() if run.peak_error is not None)
    told = judged_by(run.features, judged_runs(), JudgedQuantity.PEAK_MEMORY)
    found = largest(run.scenario)
    assert (found.trust, found.peak_error) == (told.text, told.error)
    assert found.peak_error is not None
    assert found.to_dict()["trust"] == told.text
    assert ("trust", told.text) in found.facts()
