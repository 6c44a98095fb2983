"""A forecast of many micro-batches is that of all of them, from a few that are simulated."""

from collections.abc import Mapping

import pytest

import zsim
from zsim.api.forecast import forecast, simulated_micro_batches
from zsim.api.run_forecast import RunForecast
from zsim.schedule import schedule_writer


def pipeline_of(
    stages: int, *, layers: int, vocab_size: int, options: Mapping[str, object], micro_batches: int
) -> dict[str, object]:
    """Tables of Megatron-LM's pipeline on a node of H100."""
    return {
        "title": "a pipeline",
        "model": {
            "architecture": "llama",
            "layers": layers,
            "hidden_size": 256,
            "attention_heads": 4,
            "sequence_length": 512,
            "vocab_size": vocab_size,
        },
        "cluster": {"topology": "dgx_h100_infiniband", "nodes": 1},
        "compute": {"profile": "h100"},
        "network": {"profile": "h100"},
        "zero": {"stage": 1, "emulate": "megatron", "megatron": options},
        "parallel": {"pipeline": stages},
        "train": {
            "micro_batch_size": 1,
            "gradient_accumulation_steps": micro_batches,
            "precision": "bf16",
            "optimizer": "adam",
        },
    }


@pytest.mark.matrix(9)
@pytest.mark.parametrize(
    "chunks",
    [
        {},
        {"num_layers_per_virtual_pipeline_stage": 1},
        {"num_virtual_stages_per_pipeline_rank": 2},
        {"pipeline_model_parallel_layout": "Ettt|tL"},
        {"pipeline_model_parallel_layout": "Et|t|tt|L"},
        {"num_layers_in_first_pipeline_stage": 3},
        {"num_layers_in_last_pipeline_stage": 3},
    ],
)
def test_micro_batches_of_a_pipeline_are_extended_by_turns(chunks: dict[str, object]) -> None:
    tables = pipeline_of(2, layers=4, vocab_size=1000, options=chunks, micro_batches=12)
    found = forecast(tables)
    assert isinstance(found, RunForecast), found
    assert found.step_time_s == pytest.approx(zsim.run(tables).step_time_s, rel=1e-9)


@pytest.mark.one_commit_in(9)
def test_a_slow_first_stage_counts_though_what_fills_the_pipeline_hides_it() -> None:
    # At first each micro-batch more takes what the last stage needs, which began last; once the
    # first one has waited for no gradient since, what its five layers need.
    layout = {"pipeline_model_parallel_layout": "Et*5|t*3|t*3|t*3L"}
    tables = pipeline_of(4, layers=14, vocab_size=8000, options=layout, micro_batches=24)
    found = forecast(tables)
    assert isinstance(found, RunForecast), found
    assert found.step_time_s == pytest.approx(zsim.run(tables).step_time_s, rel=1e-9)


@pytest.mark.one_commit_in(9)
def test_of_more_micro_batches_than_can_be_simulated_half_say_what_all_take(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layout = {"pipeline_model_parallel_layout": "Et*5|t*3|t*3|t*3L"}
    tables = pipeline_of(4, layers=14, vocab_size=8000, options=layout, micro_batches=24)
    whole = zsim.run(tables)
    most = max(len(program.step) for program in whole.job.schedule.programs)
    monkeypatch.setattr(schedule_writer, "OPERATIONS_MAX", most - 1)
    found = forecast({**tables, "title": "once more"})
    assert isinstance(found, RunForecast), found
    assert found.step_time_s == pytest.approx(whole.step_time_s, rel=1e-3)


def test_no_micro_batch_is_left_out_where_each_has_memory_of_its_own() -> None:
    train = {"gradient_accumulation_steps": 12}
    tables = {"zero": {"stage": 3, "emulate": "fsdp2"}, "train": train}
    assert simulated_micro_batches({**tables, "parallel": {"pipeline": 2}}) == (12, 1)
    assert simulated_micro_batches(tables)[0] < 12
