"""Llama and Qwen on one node of eight GPUs, as torchtitan published them, most under FSDP2.

Rows give tokens per second and GPU, and the peak of what PyTorch's allocator reserves. What they
leave open is torchtitan's default: parameters are gathered in bf16 and gradients reduced in fp32,
gradients are clipped at a norm of 1, checkpointing is selective by operations ("full" in its
configuration of Qwen3 32B). H100 of 95 or 96 GB are those with HBM2e and a limit of 500 W, which is
the default of such hosts and may be raised to 700 W (torchtitan,
benchmarks/llama3_h100_202412_torchtitan.md). Context ranks gather keys and values, by default
(`context_parallel_rotate_method`); their gradients, which PyTorch sends around a ring in fp32
whatever that says, are reduce-scattered here, so such runs fit no constant.

Attention is PyTorch's own, FlashAttention-2 since 2.2. Pull request 1196 (14 May 2025) put cuDNN's
before it on B200, 1776 (9 October 2025) on every GPU; which PyTorch has for Hopper and later.

Memory depends on when a run was made. Until pull request 391 (12 June 2024, "del logits to save
3.9G memory") the loop held the logits, which the model returned in fp32, while backward ran. Later
its script (`run_llama_train.sh`, `run_train.sh`) set `expandable_segments:True`: it did before
train.py moved into a package, and logs of March 2025 show it (issue 929). When it began to is not
known; runs of December 2024 are taken to have it. Since pull request
1033 (2 April 2025) the loss is compiled where blocks are: one kernel reads the logits, and keeps
them as they are. The chunked loss is that of pull request 996.
"""

from collections.abc import Mapping
from datetime import date
from typing import Literal

from zsim.calibration.csv_rows import MaybePositive, NotModelledError, Whole, WholeOrOne, word
from zsim.calibration.hardware import gpu_in, memory_gb_in
from zsim.calibration.run_rows import RunRow, RunTable
from zsim.calibration.torchtitan_dates import published_on

SYSTEMS = {
    ("h100", 96): ("grand_teton_h100", "h100_hbm2e", "h100_hbm2e_2025"),
    ("h100", 80): ("dgx_h100", "h100", "h100_2026"),
    ("h200", 141): ("dgx_h200", "h200", "h200"),
    ("b200", 180): ("hgx_b200", "b200", "b200"),
    ("a100", 80): ("dgx_a100", "a100", "a100"),
    ("a100", 40): ("p4d", "a100", "a100"),
}
"""Node, and profiles of kernels before and since `LATER`, by kind of GPU and its memory in GB."""

LATER = date(2025, 9, 1)
"""From here on runs on such H100 are a quarter faster, eager as compiled, and no publication says
why: later libraries, or a higher limit of power. No run of April to August 2025 is at hand."""

NEAR_GB = 6
"""A name may say gigabytes or what a driver leaves of them."""

CHECKPOINTING = {
    "full": "full",
    "none": "none",
    "off": "none",
    "selective": "operations",
    "per-op": "operations",
    "sac": "operations",
    "op": "operations",
}
"""By the first word."""
UNSTATED = ("", "not stated")

FLOAT8 = {"float8": "tensorwise", "float8 tensorwise": "tensorwise", "float8 rowwise": "rowwise"}

FLOAT8_GATHER = "fp8 all-gather"
"""What a technique says where weights are cast before their gather; their scales are precomputed
(pull request 808)."""

LOGITS_ARE_DELETED = date(2024, 6, 12)
LOSS_IS_COMPILED = date(2025, 4, 2)
CUDNN_FIRST = {"b200": date(2025, 5, 14), "h100": date(2025, 10, 9), "h200": date(2025, 10, 9)}
"""Days of those pull requests."""

RESHARD = {"always": True, "default": True, "": True, "never": False}
"""By the first word. The last block is not resharded by default, which is not told apart."""


class _Fsdp2LlamaRow(RunRow):
    peak_reserved_memory_GiB: MaybePositive  # noqa: N815  (the column is called so)
    pp: WholeOrOne
    technique: str
    cp: WholeOrOne
    activation_checkpoint: str
    reshard_after_forward: str
    local_batch_seqs: Whole
    compile: bool | Literal["toml default", ""]
    precision: str
    tp: WholeOrOne
    dp_shard: Whole
    n_layers: Whole
    d_model: Whole
    n_heads: Whole
    n_kv_heads: Whole
    ffn: Whole
    vocab: Whole

    @property
    def peak_gib(self) -> float | None:
        return self.peak_reserved_memory_GiB

    def scenario(self) -> Mapping[str, object]:
        node, profile, network = self._system()
        if self.pp != 1:
            raise NotModelledError("pipeline parallel")
        early = self._day() < LOGITS_ARE_DELETED
        return {
            "title": self.model,
            "model": self._model(),
            "cluster": {
                "node": node,
                "fabric": "single_switch",
                "allocator": "caching" if early else "expandable",
            },
            "parallel": {
                "tensor": self.tp,
                "data": self.dp_shard * self.cp,
                "context": self.cp,
            },
            "zero": self._runtime(),
            "activations": {"checkpointing": self._checkpointing(), "early_stop": True},
            "train": self._train() | {"holds_logits": early, "loss": self._loss()},
            "compute": {"profile": profile},
            "network": {"profile": network},
        }

    def incomplete(self) -> str:
        why = "gradients of keys and values go around a ring in fp32, which is not simulated"
        return why if self.cp > 1 else ""

    def _day(self) -> date:
        return published_on(self.source)

    def _system(self) -> tuple[str, str, str]:
        """Return the node, and the profiles of kernels and network."""
        gpu, memory_gb = gpu_in(self.gpu), memory_gb_in(self.gpu)
        for (kind, there_gb), (node, before, since) in SYSTEMS.items():
            if kind == gpu and (memory_gb is None or abs(memory_gb - there_gb) <= NEAR_GB):
                return node, before if self._day() < LATER else since, kind
        known = ", ".join(f"{kind} {there_gb} GB" for kind, there_gb in SYSTEMS)
        raise NotModelledError(f"gpu {self.gpu!r} is not one of {known}")

    def _loss(self) -> str:
        if self.technique.startswith("chunked"):
            return "chunked"
        compiled = self.compile is True and self._day() >= LOSS_IS_COMPILED
        return "fused" if compiled else "torch"

    def _train(self) -> dict[str, object]:
        train: dict[str, object] = {
            "micro_batch_size": self.local_batch_seqs,
            "gradient_accumulation_steps": 1,
            "precision": "bf16",
            "clip_norm": 1.0,
            "compile": self.compile is True,
        }
        if self.precision in FLOAT8:
            train["float8"] = FLOAT8[self.precision]
        elif not self.precision.startswith("bf16"):
            raise NotModelledError(f"precision {self.precision!r} is not modelled")
        return train

    def _checkpointing(self) -> str:
        if self.activation_checkpoint in UNSTATED:
            return "full" if self.model.startswith("Qwen3 32B") else "operations"
        first = self.activation_checkpoint.lower().split()[0].strip("(),")
        return word("activation_checkpoint", first, CHECKPOINTING)

    def _runtime(self) -> dict[str, object]:
        first = (self.reshard_after_forward.split() or [""])[0].strip(",")
        reshard = word("reshard_after_forward", first, RESHARD)
        if self.technique.startswith("FSDP1"):
            return {"emulate": "fsdp1", "fsdp1": {"reduce_dtype": "fp32"}}
        options: dict[str, object] = {"reduce_dtype": "fp32", "reshard_after_forward": reshard}
        if FLOAT8_GATHER in self.technique:
            options["enable_fsdp_float8_all_gather"] = True
        return {"emulate": "fsdp2", "fsdp2": options}

    def _has_cudnn(self) -> bool:
        since = CUDNN_FIRST.get(gpu_in(self.gpu))
        return since is not None and self._day() >= since

    def _model(self) -> dict[str, object]:
        model: dict[str, object] = {
            "architecture": "llama",
            "layers": self.n_layers,
            "hidden_size": self.d_model,
            "attention_heads": self.n_heads,
            "key_value_heads": self.n_kv_heads,
            "intermediate_size": self.ffn,
            "sequence_length": self.seq_len_tokens,
            "vocab_size": self.vocab,
            "attention": "cudnn" if self._has_cudnn() else "flash2",
        }
        if self.model.startswith("Qwen3"):
            model["head_size"] = 128  # whatever the width (Qwen3's configurations)
        return model


TABLE = RunTable("fsdp2_llama_training_runs", _Fsdp2LlamaRow, "torchtitan")
