"""Llama and Qwen on one node of eight GPUs, as torchtitan published them, most under FSDP2.

Rows give tokens per second and GPU, and the peak of what PyTorch's allocator reserves. What they
leave open is torchtitan's default: parameters are gathered in bf16 and gradients reduced in fp32,
gradients are clipped at a norm of 1, checkpointing is selective by operations ("full" in its
configuration of Qwen3 32B). Attention is PyTorch's own, FlashAttention-2 since 2.2. H100 of 95 or
96 GB are those with HBM2e and a limit of 500 W, which is the default of such hosts and may be
raised to 700 W (torchtitan, benchmarks/llama3_h100_202412_torchtitan.md). The exchange of keys and
values of context parallel runs is not simulated.

Memory depends on when a run was made. Until pull request 391 (12 June 2024, "del logits to save
3.9G memory") the loop held the logits, which the model returned in fp32, while backward ran. Later
its script (`run_llama_train.sh`, `run_train.sh`) set `expandable_segments:True`: it did before
train.py moved into a package, and logs of March 2025 show it (issue 929). When it began to is not
known; runs of December 2024 are taken to have it.
"""

from collections.abc import Mapping

from zsim.validation.cell import NotModelledError, Row, flag, number, whole, word
from zsim.validation.table import Measured, Table

GIB = 2**30

LARGE_H100 = ("grand_teton_h100", "h100_hbm2e")
SYSTEMS = {
    "H100 95.04GiB": LARGE_H100,
    "H100 95GB": LARGE_H100,
    "H100 96GB": LARGE_H100,
    "H100 80GB": ("dgx_h100", "h100"),
    "A100 80GB": ("dgx_a100", "a100"),
}
"""Node and profile of kernels, by the first two words of the GPU's name."""

NETWORKS = {"dgx_a100": "a100"}
"""Profiles of networks, where they are not those of H100."""

CHECKPOINTING = {
    "full": "full",
    "none": "none",
    "selective": "operations",
    "selective (op)": "operations",
    "selective op (default)": "operations",
    "selective (toml default)": "operations",
}
UNSTATED = ("", "not stated")

FLOAT8 = {"float8": "tensorwise", "float8 tensorwise": "tensorwise", "float8 rowwise": "rowwise"}

FIRST_HALF_OF_2024 = ("83c879f18763", "40f8fd007957")
"""Commits whose messages publish runs of before that pull request: of March and of 5 June 2024."""

RESHARD = {"always": True, "default": True, "": True, "never": False}
"""By the first word. The last block is not resharded by default, which is not told apart."""


def _sweep(row: Row) -> tuple[str, str, int]:
    return row["gpu"], row["model"], whole(row, "seq_len_tokens")


def _measured(row: Row) -> Measured:
    peak = number(row, "peak_reserved_memory_GiB")
    return Measured(
        step_time_s=number(row, "step_time_s_derived"),
        peak_bytes=None if peak is None else round(peak * GIB),
    )


def _scenario(row: Row) -> Mapping[str, object]:
    gpu = " ".join(row["gpu"].split()[:2])
    node, profile = word({"gpu": gpu}, "gpu", SYSTEMS)
    if whole(row, "pp") != 1:
        raise NotModelledError("pipeline parallel")
    if row["technique"].startswith("chunked"):
        raise NotModelledError(f"technique {row['technique']!r}: logits are never there as a whole")
    context = whole(row, "cp")
    stated = row["activation_checkpoint"].strip()
    reshard = (row["reshard_after_forward"].split() or [""])[0]
    train: dict[str, object] = {
        "micro_batch_size": whole(row, "local_batch_seqs"),
        "gradient_accumulation_steps": 1,
        "precision": "bf16",
        "clip_norm": 1.0,
        "compile": False if row["compile"] == "toml default" else flag(row, "compile"),
    }
    if row["precision"] in FLOAT8:
        train["float8"] = FLOAT8[row["precision"]]
    elif not row["precision"].startswith("bf16"):
        raise NotModelledError(f"precision {row['precision']!r} is not modelled")
    early = row["source"].endswith(FIRST_HALF_OF_2024)
    train["holds_logits"] = early
    default = "full" if row["model"].startswith("Qwen3 32B") else "operations"
    return {
        "title": row["model"],
        "model": _model(row),
        "cluster": {
            "node": node,
            "fabric": "single_switch",
            "allocator": "caching" if early else "expandable",
        },
        "parallel": {
            "tensor": whole(row, "tp"),
            "data": whole(row, "dp_shard") * context,
            "context": context,
        },
        "zero": _runtime(row, reshard=word({"reshard": reshard.strip(",")}, "reshard", RESHARD)),
        "activations": {
            "checkpointing": default
            if stated in UNSTATED
            else word(row, "activation_checkpoint", CHECKPOINTING),
            "early_stop": True,
        },
        "train": train,
        "compute": {"profile": profile},
        "network": {"profile": NETWORKS.get(node, "h100")},
    }


def _runtime(row: Row, *, reshard: bool) -> dict[str, object]:
    if row["technique"].startswith("FSDP1"):
        return {"emulate": "fsdp1", "fsdp1": {"reduce_dtype": "fp32"}}
    options = {"reduce_dtype": "fp32", "reshard_after_forward": reshard}
    return {"emulate": "fsdp2", "fsdp2": options}


def _model(row: Row) -> dict[str, object]:
    model: dict[str, object] = {
        "architecture": "llama",
        "layers": whole(row, "n_layers"),
        "hidden_size": whole(row, "d_model"),
        "attention_heads": whole(row, "n_heads"),
        "key_value_heads": whole(row, "n_kv_heads"),
        "intermediate_size": whole(row, "ffn"),
        "sequence_length": whole(row, "seq_len_tokens"),
        "vocab_size": whole(row, "vocab"),
        "attention": "flash2",
    }
    if row["model"].startswith("Qwen3"):
        model["head_size"] = 128  # whatever the width (Qwen3's configurations)
    return model


TABLE = Table(
    file="fsdp2_llama_training_runs", sweep=_sweep, measured=_measured, scenario=_scenario
)
