"""Throughput of InternLM 7B under InternEvo, as its authors published it: ZeRO-1 on 16 to 256 A100.

Optimizer states lie over all data ranks or inside some of a node. Each rank of them broadcasts its
part of the parameters, so there are as many collectives as ranks, which is what buckets of that
size say. The rows do not give the shape of the model: it is that of `configs/7B_sft.py` in the same
repository.
"""

from collections.abc import Mapping
from typing import Annotated

from pydantic import BeforeValidator

from zsim.calibration.csv_rows import MaybePositive, MaybeWhole, NotModelledError, Whole
from zsim.calibration.run_rows import RunRow, RunTable

MODELS = ("InternLM 7B (configs/7B_sft.py)",)
PARAMETERS = 7_321_526_272
"""32 blocks of width 4,096 and 11,008, and twice 103,168 words."""


def _whole(cell: str) -> str:
    return cell.removesuffix(".0")


class _InternEvoRow(RunRow):
    seq_len_tokens: Whole
    step_time_s_derived: MaybePositive
    n_gpus: Whole
    tp: Whole
    zero1_group: int
    activation_checkpoint: bool
    micro_batch_seqs: Whole
    grad_accum: Whole
    peak_gpu_memory_GB: Annotated[MaybeWhole, BeforeValidator(_whole)]  # noqa: N815

    def part(self) -> str:
        return f"{self.n_gpus} GPUs"

    def scenario(self) -> Mapping[str, object]:
        if self.model not in MODELS:
            raise NotModelledError(f"model {self.model!r}: its shape and network are not published")
        data = self.n_gpus // self.tp
        inside = data if self.zero1_group < 0 else min(data, self.zero1_group)
        return {
            "title": self.model,
            "model": {
                "architecture": "llama",
                "layers": 32,
                "hidden_size": 4096,
                "attention_heads": 32,
                "intermediate_size": 11008,
                "sequence_length": self.seq_len_tokens,
                "vocab_size": 103168,
            },
            "cluster": {"node": "a100_roce", "fabric": "single_switch"},
            "parallel": {"tensor": self.tp, "data": inside, "replicate": data // inside},
            "zero": {"stage": 1, "bucket_elements": -(-PARAMETERS // self.tp // inside)},
            "activations": {"checkpointing": "full" if self.activation_checkpoint else "none"},
            "train": {
                "micro_batch_size": self.micro_batch_seqs,
                "gradient_accumulation_steps": self.grad_accum,
                "precision": "bf16",
                "clip_norm": 1.0,
            },
            "compute": {"profile": "a100"},
            "network": {"profile": "a100"},
        }


TABLE = RunTable("internevo_zero1_a100", _InternEvoRow, "InternEvo", judges=True)
