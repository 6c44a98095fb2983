"""Llama on H200, as the Kempner Institute published its trainer's throughput (April 2026).

FSDP2 over the data axis, DTensor's tensor and sequence parallelism inside a node of four GPUs,
`torch.compile` of the whole model, checkpoints of whole blocks. Where rows are silent the trainer's
code of that day speaks (KempnerForge at 01b461a): gradients are reduced in fp32 with the last
micro-batch alone (`maybe_no_sync`) and clipped at 1.0, each linear layer gathers the tokens that
it reads, and each tensor rank has the whole token embedding (`apply_tensor_parallel`), logits are
gathered on every tensor rank, whose loss is made of them in bf16 (scripts/train.py), the root is
freed after forward (`apply_fsdp2`), norms are written out (`RMSNorm`), which several kernels are
where nothing is compiled, and attention is PyTorch's own: its lock file has PyTorch 2.11 with cuDNN
9.19, which that version prefers on Hopper. Parameters, gradients and moments are bf16, with no
master beside them (`build_parallel_model`: `.to(dtype=param_dtype)`). One GPU alone has no mesh
(`init_distributed`), so that nothing is wrapped there. Peaks of memory are not read.

The width of the MLP is Llama's rule with a multiplier of 1.3, rounded up to 256, of which the
published numbers of parameters are; that of 70B is in the benchmark's script.
"""

from collections.abc import Mapping

from zsim.calibration.csv_rows import MaybePositive, NotModelledError, Whole, WholeOrOne, word
from zsim.calibration.hardware import gpu_in
from zsim.calibration.run_rows import RunRow, RunTable

GPU = "h200"
NODE = "h200_4_infiniband"
FABRIC = "nccl_issue_1229"
"""The named fabric that is most like theirs: InfiniBand, and the one that loses least with nodes.
On it the reduce-scatters of benchmarks/profiling/13b_24gpu_profiling.md reach 22.2 GB/s; 23.7 are
published."""

GPUS_PER_NODE = 4
VOCABULARY = 128_256
"""Of Llama 3, to which its data are tokenized."""

MULTIPLIER, MULTIPLE = 1.3, 256
WIDTHS = {8192: 28_672}
"""Widths of the MLP that do not follow from the rule."""

CHECKPOINTING = {"full": "full", "none": "none"}


class _KempnerRow(RunRow):
    step_time_s_derived: MaybePositive = None
    d_model: Whole
    n_layers: Whole
    n_heads: Whole
    n_kv_heads: Whole
    gpus_per_node: Whole
    fsdp: WholeOrOne
    tp: WholeOrOne
    pp: WholeOrOne
    batch_size_per_dp_rank: Whole
    grad_accum: Whole
    precision: str
    activation_checkpoint: str
    torch_compile: bool
    tokens_per_s: MaybePositive

    @property
    def step_time_s(self) -> float | None:
        """Return the time that the published throughput says, which has more digits."""
        if self.tokens_per_s is None:
            return None
        sequences = self.fsdp * self.batch_size_per_dp_rank * self.grad_accum
        return sequences * self.seq_len_tokens / self.tokens_per_s

    def scenario(self) -> Mapping[str, object]:
        if gpu_in(self.gpu) != GPU or self.gpus_per_node != GPUS_PER_NODE:
            raise NotModelledError(f"{self.gpus_per_node} {self.gpu!r} a node are not 4 H200")
        if self.pp != 1:
            raise NotModelledError("pipeline parallel")
        if not self.precision.startswith("bf16"):
            raise NotModelledError(f"precision {self.precision!r} is not modelled")
        return {
            "title": self.model,
            "model": {
                "architecture": "llama",
                "layers": self.n_layers,
                "hidden_size": self.d_model,
                "attention_heads": self.n_heads,
                "key_value_heads": self.n_kv_heads,
                "intermediate_size": _mlp_width(self.d_model),
                "sequence_length": self.seq_len_tokens,
                "vocab_size": VOCABULARY,
                "attention": "cudnn",
            },
            "cluster": {"node": NODE, "fabric": "single_switch"},
            "parallel": {"data": self.fsdp, "tensor": self.tp},
            "zero": self._runtime(),
            "activations": {
                "checkpointing": word(
                    "activation_checkpoint", self.activation_checkpoint, CHECKPOINTING
                ),
                "early_stop": True,
            },
            "train": {
                "micro_batch_size": self.batch_size_per_dp_rank,
                "gradient_accumulation_steps": self.grad_accum,
                "precision": "pure_bf16",
                "clip_norm": 1.0,
                "loss": "narrow",
                "compile": self.torch_compile,
                "norms": "composed",
            },
            "compute": {"profile": GPU},
            "network": {"profile": f"{GPU}/{FABRIC}"},
        }

    def _runtime(self) -> Mapping[str, object]:
        if self.fsdp * self.tp == 1:  # `init_distributed` makes no mesh, so nothing is wrapped
            return {"stage": 0}
        return {
            "emulate": "fsdp2",
            "fsdp2": {
                "reduce_dtype": "fp32",
                "gradient_sync": "last",
                "disable_loss_parallel": self.tp > 1,
                "replicate_embedding": self.tp > 1,
                "input_gathers": "linear" if self.tp > 1 else "module",
                "reshard_root_after_forward": True,
            },
        }


def _mlp_width(hidden_size: int) -> int:
    """Return the width of the MLP of Llama's rule."""
    wide = int(int(2 * 4 * hidden_size / 3) * MULTIPLIER)
    return WIDTHS.get(hidden_size, -(-wide // MULTIPLE) * MULTIPLE)


TABLE = RunTable("kempner_h200_fsdp", _KempnerRow, "KempnerForge")
