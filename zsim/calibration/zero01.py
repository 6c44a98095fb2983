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
from typing import Annotated, Any, Literal

from pydantic import Field

from zsim.calibration.csv_rows import MaybePositive, NotModelledError, Whole, word
from zsim.calibration.hardware import gpu_in
from zsim.calibration.run_rows import RunRow, RunTable
from zsim.calibration.stalls import Turn

HARDWARE = {"h100": ("p5", "fat_tree_2", "h100", "h100/aws_p5")}
"""Node, fabric, and profiles of kernels and network, by the kind of GPU."""

STATUS = {"FOUND": False, "FOUND_no_result(crash_or_OOM)": True}
"""True if the run ended without a result."""

STAGES = {"0": 0, "1": 1}

ALL_REDUCE: dict[str, object] = {"tp_mode": "all_reduce"}
KEPT: dict[str, object] = {"tp_mode": "reduce_scatter", "tp_recompute_allgather": False}
AGAIN: dict[str, object] = {"tp_mode": "reduce_scatter", "tp_recompute_allgather": True}

# Kernels take what they take alone: rows of 3B that are bound by compute say 0.92 to 1.07 of that.
# They ran in early 2025; what the profile says of training is of 2023, and a fifth too slow here.

TENSOR_WAIT = "42 us"
"""Time that a collective of the tensor axis waits for each rank where it spans nodes: rows of 3B
with tensor 16 and 32. Tests of the network on such nodes are some ten times quicker."""

PIPELINE_HOST_US = 250
"""Microseconds that a collective takes of the host for each rank of the tensor axis, where stages
of a pipeline are on several nodes: rows of 3B with tensor 2, 4 and 8 and micro-batches of one or
two on 2 to 8 nodes, which fit. Hugging Face's script for such benchmarks sets
TORCH_DISTRIBUTED_DEBUG=DETAIL (`examples/mamba/run_multinode.sh` of nanotron, 77f54c10), with which
PyTorch checks each collective on the host first: Gloo's barrier that rank 0 goes through rank by
rank, and gathers of shapes (`ProcessGroupWrapper::runCollectiveChecks`). That the runs of a
pipeline on several nodes had it set is inferred: on one node they did not."""

MESSAGE_HOST = "280 ms"
"""Time that a message takes of the host on 64 nodes. The version that the sweep's authors kept
polls the tensors of shapes that go ahead of a message, and sleeps 0.1 s where one has not arrived
(`_send_meta` and `_recv_meta` of p2p.py in nanotron, branch nouamane/bench2, 67c5ebb6). There are
two to a message, and forward has a message more, the mask of tokens: 0.3 s if each sleeps once.
Rows of 3B on 64 nodes with 2, 4 and 8 stages, which fit, say 0.28. All rows of 3B and 80B on 64
nodes that have more than one stage are as slow as that."""

POLLED_NODES = 64

STEPS = 1
"""Steps of a pipeline that are simulated, which takes long: the host waits at the end of each, so
that the first takes as long as others, and as much memory where there is enough."""

A_NODE = 8
"""GPUs of a node."""

FEW_NODES = 4
"""Nodes of a pipeline whose errors are told apart from those of more."""

SMALLEST = "1B"
"""The model whose rows are all-reduces."""


class _Zero01Row(RunRow):
    model: Annotated[str, Field(alias="model_size")]
    status: str
    peak_gpu_memory_GB: MaybePositive  # noqa: N815  (the column is called so)
    dp: Whole
    tp: Whole
    pp: Whole
    micro_batch_seqs: Whole
    grad_accum: Whole
    global_batch_seqs: Whole
    zero_stage: str
    n_layers_inferred: Whole
    d_model_inferred: Whole
    n_heads_inferred: Whole
    n_kv_heads_inferred: Whole | Literal["64 or 8"]
    ffn_inferred: Whole
    vocab_inferred: Whole
    embeddings_inferred: str

    @property
    def peak_gib(self) -> float | None:
        return self.peak_gpu_memory_GB

    @property
    def failed(self) -> bool:
        return word("status", self.status, STATUS)

    def ways(self) -> tuple[dict[str, object], ...]:
        """Return options of nanotron, the first way first; with one rank all are the same."""
        if self.pp > 1:
            return tuple({**each, "keep_head_whole": True} for each in self._tensor_ways())
        return self._tensor_ways()

    def _tensor_ways(self) -> tuple[dict[str, object], ...]:
        if self.tp == 1:
            return (ALL_REDUCE,)
        if self.pp > 1:
            return (AGAIN,) if self.tp > A_NODE else (KEPT, AGAIN)
        return (ALL_REDUCE, KEPT, AGAIN) if self.model == SMALLEST else (KEPT, AGAIN)

    def scenario(self) -> dict[str, Any]:
        kind = gpu_in(self.gpu)
        if kind not in HARDWARE:
            raise NotModelledError(f"gpu {self.gpu!r} is not one of {', '.join(HARDWARE)}")
        node, fabric, kernels, network = HARDWARE[kind]
        if self.dp * self.micro_batch_seqs * self.grad_accum != self.global_batch_seqs:
            raise NotModelledError("dp x micro_batch_seqs x grad_accum is not global_batch_seqs")
        return {
            "title": self.model,
            "model": self._model(),
            "cluster": {"node": node, "fabric": fabric},
            "parallel": {"data": self.dp, "tensor": self.tp, "pipeline": self.pp},
            "zero": {
                "emulate": "nanotron",
                "stage": word("zero_stage", self.zero_stage, STAGES),
                "nanotron": self.ways()[0],
            },
            "train": {
                "micro_batch_size": self.micro_batch_seqs,
                "gradient_accumulation_steps": self.grad_accum,
                "precision": "bf16",
                "clip_norm": 1.0,
                "steps": 2 if self.pp == 1 else STEPS,
            },
            "compute": {"profile": kernels, "in_training": False, **self._host()},
            "network": {"profile": network, "tensor_wait": TENSOR_WAIT},
        }

    def fallbacks(self) -> tuple[Mapping[str, object], ...]:
        first = self.scenario()
        return tuple(
            {**first, "zero": {**first["zero"], "nanotron": each}} for each in self.ways()[1:]
        )

    def refusal(self) -> str:
        # Its pipeline asserts that there are at least as many micro-batches as stages, less one.
        least = self.pp - 1
        if self.grad_accum >= least:
            return ""
        return f"nanotron begins no pipeline with fewer than {least} micro-batches"

    def part(self) -> str:
        return "pp = 1" if self.pp == 1 else "pp > 1"

    def extent(self) -> str:
        if self.pp == 1:
            return ""
        return f"pp > 1, {'up to' if self._nodes <= FEW_NODES else 'more than'} {FEW_NODES} nodes"

    def turn(self) -> Turn | None:
        if self.failed or self.step_time_s is None:
            return None
        return Turn(
            alike=(self.model, self.tp, self.pp, self.micro_batch_seqs),
            nodes=self._nodes,
            seconds=self.step_time_s / (self.grad_accum + self.pp - 1),
        )

    @property
    def _nodes(self) -> int:
        return -(-self.dp * self.tp * self.pp // A_NODE)

    def _host(self) -> dict[str, object]:
        """Return what collectives take of the host, where it is more than the profile says."""
        found: dict[str, object] = {}
        if self.pp > 1 and self._nodes == POLLED_NODES:
            found["host_per_message"] = MESSAGE_HOST
        if self.pp > 1 and self.tp > 1 and self._nodes > 1:
            found["host_per_collective"] = f"{PIPELINE_HOST_US * self.tp} us"
        return found

    def _model(self) -> dict[str, object]:
        # Where the table is not sure, as many as of queries: tensor 16 and 32 cannot cut fewer.
        key_value_heads = self.n_kv_heads_inferred
        if not isinstance(key_value_heads, int):
            key_value_heads = self.n_heads_inferred
        return {
            "architecture": "llama",
            "layers": self.n_layers_inferred,
            "hidden_size": self.d_model_inferred,
            "attention_heads": self.n_heads_inferred,
            "key_value_heads": key_value_heads,
            "intermediate_size": self.ffn_inferred,
            "sequence_length": self.seq_len_tokens,
            "vocab_size": self.vocab_inferred,
            "tied_embeddings": self.embeddings_inferred.startswith("tied") and self.pp == 1,
        }


TABLE = RunTable("zero01_tp_pp_training_runs", _Zero01Row, "Ultra-Scale Playbook")
