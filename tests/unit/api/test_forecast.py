"""A forecast of many micro-batches is that of all of them, from a few that are simulated."""

import pytest

import zsim
from zsim.api.forecast import forecast, simulated_micro_batches
from zsim.calibration.training_verdict import RunForecast


@pytest.mark.parametrize("chunks", [{}, {"num_layers_per_virtual_pipeline_stage": 1}])
def test_micro_batches_of_a_pipeline_are_extended_by_turns(chunks: dict[str, int]) -> None:
    tables: dict[str, object] = {
        "title": "a pipeline",
        "model": {
            "architecture": "llama",
            "layers": 4,
            "hidden_size": 256,
            "attention_heads": 4,
            "sequence_length": 512,
            "vocab_size": 1000,
        },
        "cluster": {"topology": "dgx_h100_infiniband", "nodes": 1},
        "compute": {"profile": "h100"},
        "network": {"profile": "h100"},
        "zero": {"stage": 1, "emulate": "megatron", "megatron": chunks},
        "parallel": {"pipeline": 2},
        "train": {
            "micro_batch_size": 1,
            "gradient_accumulation_steps": 12,
            "precision": "bf16",
            "optimizer": "adam",
        },
    }
    found = forecast(tables)
    assert isinstance(found, RunForecast), found
    assert found.step_time_s == pytest.approx(zsim.run(tables).step_time_s, rel=1e-9)


def test_no_micro_batch_is_left_out_where_each_has_memory_of_its_own() -> None:
    train = {"gradient_accumulation_steps": 12}
    tables = {"zero": {"stage": 3, "emulate": "fsdp2"}, "train": train}
    assert simulated_micro_batches({**tables, "parallel": {"pipeline": 2}}) == (12, 1)
    assert simulated_micro_batches(tables)[0] < 12
