"""DeepSpeed's ZeRO-3 on Azure: 175 billion parameters on 128 to 512 A100, as its authors published.

Throughput is by the formula that the post prints, which counts recomputation, so it says the time
of a step. Rows name a model; its shape is in a table of the same post. What the post does not say
is as in Megatron-DeepSpeed of that time: plain attention, fp16, Adam, a padded vocabulary. It says
of larger models alone that checkpoints were in host memory; these are not modelled.
"""

from collections.abc import Mapping
from typing import Annotated

from pydantic import Field

from zsim.calibration.csv_rows import MaybePositive, Positive, Whole, word
from zsim.calibration.run_rows import RunRow, RunTable

MODELS = {"175B": (96, 12288, 96)}
"""Layers, width and heads: table 2 of the post."""

VOCABULARY = 51200


class _AzureRow(RunRow):
    gpu: str = "a100_80gb"
    model: Annotated[str, Field(alias="model_label")]
    seq_len_tokens: Annotated[Whole, Field(alias="seq_length")]
    source: Annotated[str, Field(alias="provenance")]
    step_time_s_derived: MaybePositive = None
    ranks: Annotated[Whole, Field(alias="n_gpus_A100_80GB")]
    micro_batch: Annotated[Whole, Field(alias="microbatch_per_gpu")]
    teraflops_per_s: Annotated[Positive, Field(alias="throughput_TFLOPS_per_gpu")]

    @property
    def step_time_s(self) -> float:
        """Return the seconds that 96 B s l h^2 (1 + s / 6h + V / 16lh) FLOPs take."""
        layers, width, _ = word("model_label", self.model, MODELS)
        length = self.seq_len_tokens
        flops = 96 * self.micro_batch * length * layers * width**2
        more = 1 + length / (6 * width) + VOCABULARY / (16 * layers * width)
        return flops * more / (self.teraflops_per_s * 1e12)

    def part(self) -> str:
        return f"{self.ranks} GPUs"

    def scenario(self) -> Mapping[str, object]:
        layers, width, heads = word("model_label", self.model, MODELS)
        return {
            "title": self.model,
            "model": {
                "layers": layers,
                "hidden_size": width,
                "attention_heads": heads,
                "sequence_length": self.seq_len_tokens,
                "vocab_size": VOCABULARY,
                "tied_embeddings": True,
                "attention": "plain",
            },
            "cluster": {"node": "azure_ndm_a100_v4", "fabric": "fat_tree_2"},
            "parallel": {"data": self.ranks},
            "zero": {"emulate": "deepspeed", "stage": 3},
            "activations": {"checkpointing": "full"},
            "train": {
                "micro_batch_size": self.micro_batch,
                "gradient_accumulation_steps": 1,
                "precision": "fp16",
            },
            "compute": {"profile": "a100"},
            "network": {"profile": "a100/azure_nd"},
        }


TABLE = RunTable("paper_azure_zero3_a100_throughput", _AzureRow, "DeepSpeed on Azure", judges=True)
