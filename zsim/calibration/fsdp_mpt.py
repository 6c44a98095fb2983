"""Throughput of MPT models under PyTorch's first FSDP, as MosaicML's llm-foundry published it.

What the rows do not say is in the scripts and configurations of that repository: learned positions,
biases, tied embeddings, flash attention in Triton, gradients clipped at a norm of 1, AdamW. The
loss is flash-attention's (`modeling_mpt`: `loss_fn` is `fused_crossentropy` by default). FSDP's
units are whole blocks and the root. Precision DEFAULT reduces in fp32, PURE in bf16 (Composer's
documentation of `fsdp_config.mixed_precision`). A100 nodes have eight NICs of 200 Gb/s (RoCE);
those of H100 are not published, and taken to be InfiniBand's 400 Gb/s.
"""

from collections.abc import Mapping

from zsim.calibration.csv_rows import NotModelledError, Whole, word
from zsim.calibration.hardware import gpu_in, memory_gb_in
from zsim.calibration.run_rows import RunRow, RunTable

SYSTEMS = {"a100": "dgx_a100_infiniband", "h100": "dgx_h100_infiniband"}
"""Topology of each kind of GPU, which is also the name of its profiles."""
MEMORY_GB = 80

GPUS_PER_NODE = 8
METRICS = 2
"""`ComposerMPTCausalLM` has `use_train_metrics`, on by default: cross entropy and perplexity, each
of which computes `torch.nn.CrossEntropyLoss` (llm-foundry; Composer's `LanguageCrossEntropy`)."""

REDUCE = {"DEFAULT": "fp32", "PURE": "bf16"}
STRATEGIES = {"FULL_SHARD": "full_shard", "SHARD_GRAD_OP": "shard_grad_op"}
HALF = {"amp_bf16": True, "bf16": False}
"""Blocks that are run again stop early. Inferred: rows of amp_bf16 with checkpoints take a
twelfth less than those of bf16, without they take the same. PyTorch stops early since 2.1, and the
scripts named 1.13 and 2.0 when rows of bf16 were published."""


class _FsdpMptRow(RunRow):
    n_layers: Whole
    d_model: Whole
    n_heads: Whole
    vocab: Whole
    mlp_expansion: Whole
    n_gpus: Whole
    precision: str
    gpus_per_node: Whole
    activation_cpu_offload: bool
    activation_checkpointing: bool
    fsdp_mixed_precision: str
    sharding_strategy: str
    micro_batch_per_gpu_seqs: Whole
    grad_accum: Whole

    def scenario(self) -> Mapping[str, object]:
        profile = gpu_in(self.gpu)
        if profile not in SYSTEMS or memory_gb_in(self.gpu) not in {MEMORY_GB, None}:
            raise NotModelledError(f"gpu {self.gpu!r} is not one of {' or '.join(SYSTEMS)} 80 GB")
        topology = SYSTEMS[profile]
        if self.precision not in HALF:
            raise NotModelledError(
                f"precision {self.precision!r}: products in fp8 are not modelled"
            )
        if self.gpus_per_node != GPUS_PER_NODE:
            raise NotModelledError(f"gpus_per_node {self.gpus_per_node} is not {GPUS_PER_NODE}")
        if self.activation_cpu_offload:
            raise NotModelledError("activations are moved to the host")
        return {
            "title": self.model,
            "model": {
                "architecture": "gpt",
                "layers": self.n_layers,
                "hidden_size": self.d_model,
                "attention_heads": self.n_heads,
                "sequence_length": self.seq_len_tokens,
                "vocab_size": self.vocab,
                "intermediate_size": self.d_model * self.mlp_expansion,
                "tied_embeddings": True,
            },
            "cluster": {"topology": topology},
            "parallel": {"data": self.n_gpus},
            "zero": {
                "emulate": "fsdp1",
                "fsdp1": {
                    "sharding_strategy": word(
                        "sharding_strategy", self.sharding_strategy, STRATEGIES
                    ),
                    "reduce_dtype": word("fsdp_mixed_precision", self.fsdp_mixed_precision, REDUCE),
                },
            },
            "activations": {
                "checkpointing": "full" if self.activation_checkpointing else "none",
                "early_stop": HALF[self.precision],
            },
            "train": {
                "micro_batch_size": self.micro_batch_per_gpu_seqs,
                "gradient_accumulation_steps": self.grad_accum,
                "precision": "bf16",
                "clip_norm": 1.0,
                "loss": "fused",
                "metrics": METRICS,
            },
            "compute": {"profile": profile},
            "network": {"profile": profile},
        }


TABLE = RunTable("fsdp_mpt_training_runs", _FsdpMptRow, "MosaicML llm-foundry")
