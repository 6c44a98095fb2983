"""Llama and Qwen under PyTorch's second FSDP, as torchtitan published them.

Rows give tokens per second and GPU, and the peak of what PyTorch's allocator reserves, on one node
of eight GPUs. Parameters are gathered in bf16; gradients are reduced in fp32 unless the row says
that everything is bf16 (torchtitan's `mixed_precision_reduce`, default float32).
"""

from collections.abc import Mapping

from zsim.validation.cell import NotModelledError, Row, number, whole, word
from zsim.validation.table import Measured, Table

SYSTEMS = {"H100": ("dgx_h100_infiniband", "h100"), "A100": ("dgx_a100_infiniband", "a100")}
"""Topology and profiles, by the first word of the GPU's name."""

GIB = 2**30


def _sweep(row: Row) -> tuple[str, str, int]:
    return row["gpu"], row["model"], whole(row, "seq_len_tokens")


def _measured(row: Row) -> Measured:
    peak = number(row, "peak_reserved_memory_GiB")
    return Measured(
        step_time_s=number(row, "step_time_s_derived"),
        peak_bytes=None if peak is None else round(peak * GIB),
    )


def _scenario(row: Row) -> Mapping[str, object]:
    topology, profile = word({"gpu": row["gpu"].split()[0]}, "gpu", SYSTEMS)
    if whole(row, "cp") != 1 or whole(row, "tp") != 1 or whole(row, "pp") != 1:
        raise NotModelledError("context, tensor or pipeline parallel")
    return {
        "title": row["model"],
        "model": _model(row),
        "cluster": {"topology": topology},
        "parallel": {"data": whole(row, "n_gpus")},
        "zero": {"emulate": "fsdp2", "fsdp2": {"reduce_dtype": "fp32"}},
        "activations": {"checkpointing": "none"},
        "train": {
            "micro_batch_size": whole(row, "local_batch_seqs"),
            "gradient_accumulation_steps": 1,
            "precision": "bf16",
            "clip_norm": 1.0,
        },
        "compute": {"profile": profile},
        "network": {"profile": profile},
    }


def _model(row: Row) -> dict[str, object]:
    return {
        "architecture": "llama",
        "layers": whole(row, "n_layers"),
        "hidden_size": whole(row, "d_model"),
        "attention_heads": whole(row, "n_heads"),
        "key_value_heads": whole(row, "n_kv_heads"),
        "intermediate_size": whole(row, "ffn"),
        "sequence_length": whole(row, "seq_len_tokens"),
        "vocab_size": whole(row, "vocab"),
    }


TABLE = Table(
    file="fsdp2_llama_training_runs", sweep=_sweep, measured=_measured, scenario=_scenario
)
