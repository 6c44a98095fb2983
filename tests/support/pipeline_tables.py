"""Scenario tables of small pipelines with many micro-batches."""

from typing import Any


def pipeline_tables(
    runtime: str,
    *,
    stages: int,
    micro_batches: int,
    layers: int = 8,
    tensor: int = 1,
    data: int = 2,
    stage: int = 1,
    options: dict[str, object] | None = None,
    **train: object,
) -> dict[str, Any]:
    """Return the tables of `runtime` training a small Llama in a pipeline."""
    ranks = stages * tensor * data
    return {
        "title": "pipeline",
        "model": {
            "architecture": "llama",
            "layers": layers,
            "hidden_size": 1024,
            "attention_heads": 8,
            "intermediate_size": 2816,
            "sequence_length": 512,
            "vocab_size": 8000,
        },
        "cluster": {"topology": "dgx_h100_infiniband", "nodes": -(-ranks // 8)},
        "compute": {"profile": "h100"},
        "network": {"profile": "h100"},
        "parallel": {"pipeline": stages, "tensor": tensor, "data": data},
        "zero": {"stage": stage, "emulate": runtime, runtime: options or {}},
        "train": {
            "micro_batch_size": 1,
            "gradient_accumulation_steps": micro_batches,
            "precision": "bf16",
            "optimizer": "adam",
            **train,
        },
    }
