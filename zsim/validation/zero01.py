"""Llama under nanotron, as the Ultra-Scale Playbook published its sweep (Hugging Face, 2025).

Data, tensor and pipeline parallel on 8 to 512 H100 of AWS, sequences of 4,096 tokens, 256 of them a
step. Its script (`scripts/scaling_benchmarks.py` of nanotron) collects gradients in fp32, clips
them to 1.0 and recomputes nothing; it has both ways of tensor parallelism, and the table does not
say which one a row is. Peaks are what PyTorch's allocator reserved, in GiB (`log_throughput` of
nanotron).

Which way a row is was inferred from peaks at tensor 16 and 32, where the ways differ by a factor of
two: rows of the smallest model are all-reduces, those of the others reduce-scatters that keep what
they gather. That is one bit for each model, of sweeps that judge as of those that fit. A run that
does not fit so was made in the next way that needs less. With a pipeline none is all-reduces, and
those whose tensor ranks span nodes have the trainer's default, which gathers again: so say rows of
3B and 80B, which may be fitted.
"""

from collections.abc import Mapping
from typing import Any

from zsim.validation.cell import NotModelledError, Row, number, whole, word
from zsim.validation.table import Measured, Table

GIB = 2**30

HARDWARE = {"H100 80GB": ("p5", "fat_tree_2", "h100", "h100/aws_p5")}
"""Node, fabric, and profiles of kernels and network, by the GPU's name in the table."""

STATUS = {"FOUND": False, "FOUND_no_result(crash_or_OOM)": True}
"""Whether the run ended without a result."""

STAGES = {"0": 0, "1": 1}

ALL_REDUCE: dict[str, object] = {"tp_mode": "all_reduce"}
KEPT: dict[str, object] = {"tp_mode": "reduce_scatter", "tp_recompute_allgather": False}
AGAIN: dict[str, object] = {"tp_mode": "reduce_scatter", "tp_recompute_allgather": True}

# Kernels take what they take alone: rows of 3B that are bound by compute say 0.92 to 1.07 of that.
# What the profile says of training rests on FSDP, and is a fifth too slow here.

HOST_PER_SEGMENT = "0.28 ms"
"""What the trainer's Python takes for each segment: rows of 3B with micro-batches of one and tensor
4 or 8, where every micro-batch takes 4.5 ms for each block, whatever there is to compute."""

TENSOR_WAIT = "42 us"
"""What a collective of the tensor axis waits for each rank where it spans nodes: rows of 3B with
tensor 16 and 32. Tests of the network on such nodes are some ten times quicker."""

STEPS = 1
"""Steps of a pipeline that are simulated, which takes long: the host waits at the end of each, so
that the first takes as long as others, and as much memory where there is enough."""

A_NODE = 8
"""GPUs of a node."""

SMALLEST = "1B"
"""The model whose rows are all-reduces."""


def _sweep(row: Row) -> tuple[str, str, int]:
    return row["gpu"], row["model_size"], whole(row, "seq_len_tokens")


def _measured(row: Row) -> Measured:
    if word(row, "status", STATUS):
        return Measured(failed=True)
    peak = number(row, "peak_gpu_memory_GB")
    return Measured(
        step_time_s=number(row, "step_time_s_derived"),
        peak_bytes=None if peak is None else round(peak * GIB),
    )


def _ways(row: Row) -> tuple[dict[str, object], ...]:
    """Options of nanotron, the first way first; with one rank all are the same."""
    if whole(row, "tp") == 1:
        return (ALL_REDUCE,)
    if whole(row, "pp") > 1:
        return (AGAIN,) if whole(row, "tp") > A_NODE else (KEPT, AGAIN)
    return (ALL_REDUCE, KEPT, AGAIN) if row["model_size"] == SMALLEST else (KEPT, AGAIN)


def _scenario(row: Row) -> dict[str, Any]:
    node, fabric, kernels, network = word(row, "gpu", HARDWARE)
    data, micro, steps = (whole(row, name) for name in ("dp", "micro_batch_seqs", "grad_accum"))
    if data * micro * steps != whole(row, "global_batch_seqs"):
        raise NotModelledError("dp x micro_batch_seqs x grad_accum is not global_batch_seqs")
    return {
        "title": row["model_size"],
        "model": _model(row),
        "cluster": {"node": node, "fabric": fabric},
        "parallel": {
            "data": data,
            "tensor": whole(row, "tp"),
            "pipeline": whole(row, "pp"),
        },
        "zero": {
            "emulate": "nanotron",
            "stage": word(row, "zero_stage", STAGES),
            "nanotron": _ways(row)[0],
        },
        "train": {
            "micro_batch_size": micro,
            "gradient_accumulation_steps": steps,
            "precision": "bf16",
            "clip_norm": 1.0,
            "steps": 2 if whole(row, "pp") == 1 else STEPS,
        },
        "compute": {
            "profile": kernels,
            "in_training": False,
            "host_per_segment": HOST_PER_SEGMENT,
        },
        "network": {"profile": network, "tensor_wait": TENSOR_WAIT},
    }


def _refusal(row: Row) -> str:
    """Its pipeline asserts that there are at least as many micro-batches as stages, less one."""
    least = whole(row, "pp") - 1
    if whole(row, "grad_accum") >= least:
        return ""
    return f"nanotron begins no pipeline with fewer than {least} micro-batches"


def _part(row: Row) -> str:
    return "pp = 1" if whole(row, "pp") == 1 else "pp > 1"


def _fallbacks(row: Row) -> tuple[Mapping[str, object], ...]:
    first = _scenario(row)
    return tuple({**first, "zero": {**first["zero"], "nanotron": each}} for each in _ways(row)[1:])


def _model(row: Row) -> dict[str, object]:
    heads = whole(row, "n_heads_inferred")
    # Where the table is not sure, as many as of queries: tensor 16 and 32 cannot cut fewer.
    unsure = row["n_kv_heads_inferred"].strip() == "64 or 8"
    return {
        "architecture": "llama",
        "layers": whole(row, "n_layers_inferred"),
        "hidden_size": whole(row, "d_model_inferred"),
        "attention_heads": heads,
        "key_value_heads": heads if unsure else whole(row, "n_kv_heads_inferred"),
        "intermediate_size": whole(row, "ffn_inferred"),
        "sequence_length": whole(row, "seq_len_tokens"),
        "vocab_size": whole(row, "vocab_inferred"),
        "tied_embeddings": row["embeddings_inferred"].startswith("tied") and whole(row, "pp") == 1,
    }


TABLE = Table(
    file="zero01_tp_pp_training_runs",
    sweep=_sweep,
    measured=_measured,
    scenario=_scenario,
    fallbacks=_fallbacks,
    refusal=_refusal,
    part=_part,
)
