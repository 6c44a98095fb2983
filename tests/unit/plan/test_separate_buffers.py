"""Pipelines that receive each micro-batch into memory of its own, judged from few micro-batches."""

from typing import Any

import pytest

from zsim.analysis.memory_footprint import certain_footprint
from zsim_plan.answer.folded_pipeline import FoldedPipeline, folded_pipeline


def tables(
    micro_batches: int, *, stages: int = 2, checkpointing: str = "full", **fsdp2: object
) -> dict[str, Any]:
    return {
        "title": "many micro-batches",
        "model": {
            "architecture": "llama",
            "layers": 4 * stages,
            "hidden_size": 512,
            "attention_heads": 8,
            "intermediate_size": 1024,
            "sequence_length": 1024,
            "vocab_size": 2000,
        },
        "cluster": {"node": "dgx_h100", "fabric": "single_switch"},
        "parallel": {"pipeline": stages, "data": 8 // stages},
        "train": {
            "precision": "bf16",
            "micro_batch_size": 1,
            "gradient_accumulation_steps": micro_batches,
        },
        "zero": {"emulate": "fsdp2", "stage": 3, "fsdp2": fsdp2},
        "activations": {"checkpointing": checkpointing},
    }


def least_of(found: FoldedPipeline) -> int:
    known, is_certain = found.memory()
    assert known is not None
    assert is_certain
    return known.peak_allocated_bytes


@pytest.mark.parametrize(
    ("schedule", "stages", "checkpointing"),
    [
        ("1F1B", 2, "full"),
        ("1F1B", 4, "none"),
        ("Interleaved1F1B", 2, "none"),
        ("Interleaved1F1B", 4, "full"),
        ("ZBVZeroBubble", 2, "none"),
    ],
)
def test_memory_of_many_micro_batches_is_known_from_few(
    schedule: str, stages: int, checkpointing: str
) -> None:
    options = {"pipeline_schedule": schedule, "reshard_after_forward": schedule == "1F1B"}
    setting = tables(32 * stages, stages=stages, checkpointing=checkpointing, **options)
    found = folded_pipeline(setting)
    assert found is not None
    whole = certain_footprint(found.job)
    assert whole is not None
    assert least_of(found) == whole.allocated_bytes


def test_many_micro_batches_that_cannot_fit_are_not_written() -> None:
    setting = tables(4096)
    setting["cluster"]["gpu_memory"] = "2 GB"
    found = folded_pipeline(setting)
    assert found is not None
    known, is_certain = found.memory()
    assert known is not None
    assert is_certain
    assert not known.fits
    assert known.peak_allocated_bytes > 4000 * 1024 * 512 * 2
    assert "first" not in vars(found)
