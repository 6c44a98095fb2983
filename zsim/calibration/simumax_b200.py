"""Llama on eight B200 under Megatron-LM, as SimuMax published its own runs (May 2026).

Names say all: model, tensor, pipeline and data degree, layers that the model was cut to, and
micro-batches of a step; `cef` is the fused cross entropy. The rest is in the repository's script
(simu_tools/megatron_scripts, run_pretrain_llama3.sh at 4dcaae5): one sequence of 4,096 tokens a
micro-batch, the distributed optimizer without overlap, gradients that collect and reduce in fp32,
sequence parallelism with a tensor axis, clipping at 1.0, nothing run again, and Transformer
Engine's layers, whose attention is cuDNN's on this GPU. Peaks are of what PyTorch's allocator had
handed out (`real alloc`).

In the same file are runs of DeepSpeed on H200 by version of PyTorch, of which the table gives no
step: those are left.
"""

import re
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from zsim.calibration.csv_rows import MaybePositive, NotModelledError, Whole
from zsim.calibration.run_rows import RunRow, RunTable

DATASET = "simumax_b200_real"
LAYERS_CUT = re.compile(r"_l(\d+)(?:_|$)")
DEGREES = {
    "tensor": re.compile(r"_tp(\d+)(?:_|$)"),
    "pipeline": re.compile(r"_pp(\d+)(?:_|$)"),
    "data": re.compile(r"_dp(\d+)(?:_|$)"),
    "micro_batches": re.compile(r"_mbc(\d+)(?:_|$)"),
}
CONTEXT = re.compile(r"_cp\d+(?:_|$)")
TOKENS = 4096
"""Tokens of a sequence where the name says none: the script's default."""

# hidden_size, ffn_hidden_size, head_num and num_query_groups of the script.
MODELS: Mapping[str, Mapping[str, int]] = {
    "llama3_8b": {
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "attention_heads": 32,
        "key_value_heads": 8,
    },
    "llama3_70b": {
        "hidden_size": 8192,
        "intermediate_size": 28_672,
        "attention_heads": 64,
        "key_value_heads": 8,
    },
    "llama3_405b": {
        "hidden_size": 16_384,
        "intermediate_size": 53_248,
        "attention_heads": 128,
        "key_value_heads": 16,
    },
}
VOCABULARY = 128_256


def _tokens(cell: str) -> str:
    return str(TOKENS) if cell == "not in name" else cell


class _SimuMaxRow(RunRow):
    dataset: str
    strategy: str
    seq_len_tokens: Annotated[Whole, BeforeValidator(_tokens)]
    step_time_s_published: Annotated[MaybePositive, Field(alias="step_time_s")]
    allocated_memory_GiB: MaybePositive  # noqa: N815  (the column is called so)

    @property
    def step_time_s(self) -> float | None:
        return self.step_time_s_published

    @property
    def peak_gib(self) -> float | None:
        return self.allocated_memory_GiB

    def scenario(self) -> dict[str, Any]:
        if self.dataset != DATASET:
            raise NotModelledError(f"dataset {self.dataset!r}: no step time is published")
        name = next((each for each in MODELS if self.strategy.startswith(f"{each}_")), None)
        if name is None:
            raise NotModelledError(f"{self.strategy}: experts are not modelled")
        if CONTEXT.search(self.strategy):
            raise NotModelledError(f"{self.strategy}: the all-to-all of context ranks")
        layers = self._number(LAYERS_CUT)
        degrees = {axis: self._number(pattern) for axis, pattern in DEGREES.items()}
        micro_batches = degrees.pop("micro_batches")
        return {
            "title": self.strategy,
            "model": {
                "architecture": "llama",
                "layers": layers,
                **MODELS[name],
                "sequence_length": self.seq_len_tokens,
                "vocab_size": VOCABULARY,
                "attention": "cudnn",
            },
            "cluster": {"node": "hgx_b200", "fabric": "single_switch"},
            "parallel": degrees,
            "zero": {
                "stage": 1,
                "emulate": "megatron",
                "megatron": {
                    "grad_reduce_in_fp32": True,
                    "sequence_parallel": degrees["tensor"] > 1,
                    "async_tensor_model_parallel_allreduce": degrees["tensor"] > 1,
                    "gradient_accumulation_fusion": True,
                },
            },
            "train": {
                "micro_batch_size": 1,
                "gradient_accumulation_steps": micro_batches,
                "precision": "bf16",
                "clip_norm": 1.0,
                "compile": True,  # as norms, rotary positions and SwiGLU are one kernel each
                "loss": "fused",
            },
            "compute": {"profile": "b200"},
            "network": {"profile": "b200"},
        }

    def _number(self, pattern: re.Pattern[str]) -> int:
        found = pattern.search(self.strategy)
        if found is None:
            raise NotModelledError(f"{self.strategy}: no {pattern.pattern}")
        return int(found.group(1))


TABLE = RunTable("zero_fsdp_runs_misc", _SimuMaxRow, "SimuMax", judges=True, reserved=False)
