"""Throughput of MPT models under PyTorch's first FSDP, as MosaicML's llm-foundry published it.

What the rows do not say is in the scripts and configurations of that repository: learned positions,
biases, tied embeddings, flash attention in Triton, gradients clipped at a norm of 1, AdamW. FSDP's
units are whole blocks and the root. Precision DEFAULT reduces in fp32, PURE in bf16 (Composer's
documentation of `fsdp_config.mixed_precision`). A100 nodes have eight NICs of 200 Gb/s (RoCE);
those of H100 are not published, and taken to be InfiniBand's 400 Gb/s.
"""

from collections.abc import Mapping

from zsim.validation.cell import NotModelledError, Row, flag, number, whole, word
from zsim.validation.table import Measured, Table

SYSTEMS = {
    "a100_80gb": ("dgx_a100_infiniband", "a100"),
    "h100_80gb": ("dgx_h100_infiniband", "h100"),
}
"""Topology and profiles of each kind of GPU."""

GPUS_PER_NODE = 8

REDUCE = {"DEFAULT": "fp32", "PURE": "bf16"}
STRATEGIES = {"FULL_SHARD": "full_shard", "SHARD_GRAD_OP": "shard_grad_op"}
HALF = {"amp_bf16": True, "bf16": False}
"""Whether blocks that are run again stop early. Inferred: rows of amp_bf16 with checkpoints take a
twelfth less than those of bf16, without they take the same. PyTorch stops early since 2.1, and the
scripts named 1.13 and 2.0 when rows of bf16 were published."""


def _sweep(row: Row) -> tuple[str, str, int]:
    return row["gpu"], row["model"], whole(row, "seq_len_tokens")


def _measured(row: Row) -> Measured:
    return Measured(step_time_s=number(row, "step_time_s_derived"))


def _scenario(row: Row) -> Mapping[str, object]:
    topology, profile = word(row, "gpu", SYSTEMS)
    if row["precision"] not in HALF:
        raise NotModelledError(f"precision {row['precision']!r}: products in fp8 are not modelled")
    if whole(row, "gpus_per_node") != GPUS_PER_NODE:
        raise NotModelledError(f"gpus_per_node {row['gpus_per_node']!r} is not {GPUS_PER_NODE}")
    if flag(row, "activation_cpu_offload"):
        raise NotModelledError("activations are moved to the host")
    hidden = whole(row, "d_model")
    return {
        "title": row["model"],
        "model": {
            "architecture": "gpt",
            "layers": whole(row, "n_layers"),
            "hidden_size": hidden,
            "attention_heads": whole(row, "n_heads"),
            "sequence_length": whole(row, "seq_len_tokens"),
            "vocab_size": whole(row, "vocab"),
            "intermediate_size": hidden * whole(row, "mlp_expansion"),
            "tied_embeddings": True,
        },
        "cluster": {"topology": topology},
        "parallel": {"data": whole(row, "n_gpus")},
        "zero": {
            "emulate": "fsdp1",
            "fsdp1": {
                "sharding_strategy": word(row, "sharding_strategy", STRATEGIES),
                "reduce_dtype": word(row, "fsdp_mixed_precision", REDUCE),
            },
        },
        "activations": {
            "checkpointing": "full" if flag(row, "activation_checkpointing") else "none",
            "early_stop": HALF[row["precision"]],
        },
        "train": {
            "micro_batch_size": whole(row, "micro_batch_per_gpu_seqs"),
            "gradient_accumulation_steps": whole(row, "grad_accum"),
            "precision": "bf16",
            "clip_norm": 1.0,
        },
        "compute": {"profile": profile},
        "network": {"profile": profile},
    }


TABLE = Table(file="fsdp_mpt_training_runs", sweep=_sweep, measured=_measured, scenario=_scenario)
