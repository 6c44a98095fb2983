"""GPT under Megatron-LM on A100, as vTrain's authors published it: one node, and 512 GPUs.

vTrain (Bang et al., MICRO 2024, arXiv 2312.12391) is a simulator; its repository has the times of
real iterations that it was validated by, and of each a configuration (config/validation at
f8dda84): every block is run again in backward, gradients are reduced in one piece after the last
micro-batch, 1F1B without interleaving, 50,257 words, nodes of eight GPUs with 800 Gb/s of NICs.
The blocks that it profiles (src/model) are Megatron-LM's of then: fp16, learned positions, plain
attention with a fused softmax, fused bias and GELU, all-reduces over tensor ranks, Apex's Adam.

Their transformer transposes what it is given and what it returns, as Megatron-LM's did until
eec218d8 of March 2022. So it is a Megatron-LM without a distributed optimizer, whose ranks send
parts of hidden states (`scatter_gather_tensors_in_pipeline`, the default since 72e4230b of 2021).

Megatron-LM pads words to a multiple of 128 for each tensor rank (`make-vocab-size-divisible-by`).
"""

from collections.abc import Mapping
from typing import Annotated

from pydantic import Field

from zsim.calibration.csv_rows import MaybePositive, NotModelledError, Whole
from zsim.calibration.run_rows import RunRow, RunTable

PUBLICATION = "vTrain"
HARDWARE = "A100"
WORDS, MULTIPLE = 50_257, 128
A_NODE = 8

MS_PER_S = 1000


class _VTrainRow(RunRow):
    gpu: str = HARDWARE
    model: str = ""
    step_time_s_derived: MaybePositive = None
    seq_len_tokens: Annotated[Whole, Field(alias="sequence length")]
    gpus: Annotated[Whole, Field(alias="# GPUs")]
    global_batch: Annotated[Whole, Field(alias="global batch")]
    micro_batch: Annotated[Whole, Field(alias="micro batch")]
    hidden_size: Annotated[Whole, Field(alias="hidden size")]
    heads: Annotated[Whole, Field(alias="attention heads")]
    layers: Annotated[Whole, Field(alias="# layers")]
    tensor: Annotated[Whole, Field(alias="tensor parallelism")]
    data: Annotated[Whole, Field(alias="data parallelism")]
    pipeline: Annotated[Whole, Field(alias="pipeline parallelism")]
    iteration_ms: Annotated[MaybePositive, Field(alias="iteration time (ms)")]

    @property
    def name(self) -> str:
        return f"{self.hidden_size} x {self.layers}"

    @property
    def step_time_s(self) -> float | None:
        return None if self.iteration_ms is None else self.iteration_ms / MS_PER_S

    def part(self) -> str:
        return "pp = 1" if self.pipeline == 1 else "pp > 1"

    def scenario(self) -> Mapping[str, object]:
        ranks = self.tensor * self.data * self.pipeline
        if ranks != self.gpus:
            raise NotModelledError(f"{ranks} ranks on {self.gpus} GPUs")
        if self.global_batch % (self.data * self.micro_batch):
            raise NotModelledError("micro-batches of unequal size")
        if self.tensor > A_NODE:
            raise NotModelledError(f"tensor parallelism {self.tensor} over several nodes")
        return {
            "title": self.name,
            "model": {
                "architecture": "gpt",
                "layers": self.layers,
                "hidden_size": self.hidden_size,
                "attention_heads": self.heads,
                "sequence_length": self.seq_len_tokens,
                "vocab_size": -(-WORDS // (MULTIPLE * self.tensor)) * MULTIPLE * self.tensor,
                "tied_embeddings": True,
                "attention": "plain",
                "dropout": 0.1,  # Megatron-LM's default, and what its layers have there
            },
            "cluster": {
                "node": "dgx_a100",
                "nics_per_node": 4,
                "fabric": "single_switch" if self.gpus <= A_NODE else "fat_tree_2",
            },
            "parallel": {"data": self.data, "tensor": self.tensor, "pipeline": self.pipeline},
            "zero": {
                "stage": 0,
                "emulate": "megatron",
                "megatron": {"scatter_gather_tensors_in_pipeline": True},
            },
            "activations": {"checkpointing": "full"},
            "train": {
                "micro_batch_size": self.micro_batch,
                "gradient_accumulation_steps": self.global_batch // (self.data * self.micro_batch),
                "precision": "fp16",
                "clip_norm": 1.0,
            },
            "compute": {"profile": "a100"},
            "network": {"profile": "a100"},
        }


SINGLE = RunTable("vtrain_a100_single", _VTrainRow, PUBLICATION)
MULTI = RunTable("vtrain_a100_multi", _VTrainRow, PUBLICATION, judges=True)
