"""Options of Megatron-LM's data parallelism (`DistributedDataParallelConfig`, 2026-08)."""

from collections.abc import Iterator, Mapping
from math import gcd
from typing import Self

from pydantic import model_validator

from zsim.config_error import refusal, refuse
from zsim.dtype import DType
from zsim.runtimes.megatron.layer_split import LayerSplit, stages_in
from zsim.strategy.config_table import Count, Flag, Whole
from zsim.strategy.execution import ContextExchange, TokenFusion
from zsim.strategy.overlap_methods import DEFAULT_METHODS, OverlapMethods
from zsim.strategy.runtime_options import Formats, RuntimeOptions

VIRTUAL_STAGES = "num_virtual_stages_per_pipeline_rank"
ENDS = ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage")
COUNTED = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
SPLITS = (
    "num_layers_per_virtual_pipeline_stage",
    VIRTUAL_STAGES,
    *ENDS,
    *COUNTED,
    "pipeline_model_parallel_layout",
)
"""Options that split layers over pipeline stages; they need a pipeline."""


ALLREDUCE_BUCKET = 500_000_000
"""Elements of a bucket (`OptimizerConfig.allreduce_bucket_size` of Aleph-Alpha/scaling)."""

BUCKET_LEAST, BUCKET_EACH = 40_000_000, 1_000_000
"""Default elements of a bucket: the minimum, and the number for each data rank."""

OF_THE_WRAPPER = (
    "overlap_grad_reduce",
    "gradient_accumulation_fusion",
    "grad_reduce_in_fp32",
    "average_in_collective",
)
"""Options for accumulating and reducing gradients that `allreduce_in_float32` excludes."""


class Megatron(RuntimeOptions):
    """Options of the model's wrapper; stage 1 is with `use_distributed_optimizer`.

    Attributes:
        bucket_size: with overlap_grad_reduce, elements at which a bucket is closed; None is
            max(40e6, 1e6 x data). Without overlap, there is one bucket.
        overlap_grad_reduce: reduce buckets during backward; false has one bucket.
        overlap_param_gather: in stage 1, gather parameters during the next forward; needs
            overlap_grad_reduce.
        gradient_accumulation_fusion: GEMMs of weight gradients add to the accumulated gradients,
            instead of a separate kernel (Megatron-LM's default with Transformer Engine or Apex;
            `fuse_wgrad_accumulation` of the former).
        grad_reduce_in_fp32: accumulate and reduce gradients in fp32.
        average_in_collective: let the collective divide, instead of scaling before.
        allreduce_in_float32: in stage 1, after the last backward, all-reduce whole gradients in
            fp32, bucket by bucket, where they were accumulated in the model's dtype; a rank reads
            its shard of the sum. Not an option of Megatron-LM; the similar trainer of Aleph Alpha
            does so (`allreduce_no_retain` of Aleph-Alpha/scaling at 737f8558,
            src/scaling/core/optimizer/allreduce.py).
        allreduce_bucket_size: with it, elements above which such a bucket is closed.
        sequence_parallel: with a tensor axis, hidden states between attention and MLP are sharded
            by tokens (`TransformerConfig.sequence_parallel`).
        async_tensor_model_parallel_allreduce: with a tensor axis, input gradients of
            column-parallel layers are all-reduced (with sequence_parallel, reduce-scattered) during
            GEMMs of weight gradients. With sequence_parallel, the inputs are gathered again during
            the previous GEMM (Megatron-LM, on by default since 3f652469 of September 2021).
        tp_comm_overlap: with sequence_parallel, linear layers of blocks overlap collectives of
            their tokens, in Transformer Engine's userbuffers.
        tp_comm_overlap_rs: with tp_comm_overlap, the last layer of attention and of an MLP computes
            its output in parts, each scattered during the next; false scatters all of it afterwards
            (`--disable-tp-comm-overlap-rs`).
        tp_comm_overlap_cfg: with tp_comm_overlap, the overlap of each GEMM; defaults are those of
            `initialize_ub`.
        num_layers_per_virtual_pipeline_stage: with a pipeline, layers of a chunk: each stage has
            several chunks, which alternate with those of other stages (interleaved); None is one
            chunk.
        num_virtual_stages_per_pipeline_rank: the same, as the number of chunks of each stage.
        num_layers_in_first_pipeline_stage: with a pipeline, layers of the first stage; the other
            stages have equally many (`--decoder-first-pipeline-num-layers`).
        num_layers_in_last_pipeline_stage: the same for the last stage.
        account_for_embedding_in_pipeline_split: with a pipeline, the embedding counts as a layer:
            the first stage has one less.
        account_for_loss_in_pipeline_split: the same for the loss and the last stage.
        pipeline_model_parallel_layout: with a pipeline, the content of each stage; stages with
            several chunks take turns: E is the embedding, t a layer, L the loss, such as
            "Et*3|(tt|)*2,tL".
        overlap_p2p_comm: with several chunks, send and receive during compute; false waits
            (`--no-overlap-p2p-communication`).
        scatter_gather_tensors_in_pipeline: with a pipeline and a tensor axis, each tensor rank
            sends its part of a hidden state, and receivers gather the parts. Megatron-LM did so by
            default until March 2023, but never with sequence_parallel; since 3c92fa93 its argument
            has no effect.
        cpu_offloading_num_layers: number of first layers whose activations are kept in host memory
            (`TransformerConfig`, with Transformer Engine); neither with a pipeline nor with
            recomputation.
    """

    stages = (0, 1)
    usual_stage = 1
    has_pipeline = True
    sums_copies = True
    ties_ends = True
    has_context = True
    has_experts = True
    layers_option = "cpu_offloading_num_layers"
    stored_least = (
        256 * 1024
    )  # _check_if_offload of Transformer Engine 2.20, pytorch/cpu_offload.py
    context_exchange = ContextExchange.RING  # cp_comm_type of TransformerConfig is p2p

    bucket_size: Count | None = None
    overlap_grad_reduce: Flag = False
    overlap_param_gather: Flag = False
    gradient_accumulation_fusion: Flag = False
    grad_reduce_in_fp32: Flag = False
    average_in_collective: Flag = False
    allreduce_in_float32: Flag = False
    allreduce_bucket_size: Count = ALLREDUCE_BUCKET
    sequence_parallel: Flag = False
    async_tensor_model_parallel_allreduce: Flag = False
    tp_comm_overlap: Flag = False
    tp_comm_overlap_rs: Flag = True
    tp_comm_overlap_cfg: OverlapMethods = DEFAULT_METHODS
    num_layers_per_virtual_pipeline_stage: Count | None = None
    num_virtual_stages_per_pipeline_rank: Count | None = None
    num_layers_in_first_pipeline_stage: Count | None = None
    num_layers_in_last_pipeline_stage: Count | None = None
    account_for_embedding_in_pipeline_split: Flag = False
    account_for_loss_in_pipeline_split: Flag = False
    pipeline_model_parallel_layout: str | None = None
    overlap_p2p_comm: Flag = True
    scatter_gather_tensors_in_pipeline: Flag = False
    cpu_offloading_num_layers: Whole = 0

    def layers_of_stages(self, *, layers: int, stages: int) -> tuple[int, ...]:
        """Return the number of layers of each virtual pipeline stage.

        Raises:
            ValueError: layers cannot be distributed so.
        """
        split = LayerSplit(
            first=self.num_layers_in_first_pipeline_stage,
            last=self.num_layers_in_last_pipeline_stage,
            embedding=self.account_for_embedding_in_pipeline_split,
            loss=self.account_for_loss_in_pipeline_split,
            layers_of_chunk=self.num_layers_per_virtual_pipeline_stage,
            chunks=self.num_virtual_stages_per_pipeline_rank,
            layout=self.pipeline_model_parallel_layout,
        )
        return split.sizes(layers, stages)

    @classmethod
    def has_chunks(cls, options: Mapping[str, object], *, stages: int) -> bool:
        """Return True if pipeline stages have several chunks with these given options."""
        layout = options.get("pipeline_model_parallel_layout")
        if isinstance(layout, str):
            try:
                return len(stages_in(layout)) > stages
            except ValueError:  # the options refuse an invalid layout
                return False
        keys = ("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank")
        return any(options.get(key) is not None for key in keys)

    @property
    def split_options(self) -> tuple[str, ...]:
        """Return the options in use that split layers over stages."""
        return tuple(name for name in SPLITS if getattr(self, name) not in (None, False))

    @property
    def cuts_tokens(self) -> bool:
        """True if hidden states are sharded by tokens over the tensor axis."""
        return self.sequence_parallel

    @property
    def fuses_tokens(self) -> TokenFusion | None:
        """Return the mechanism that overlaps linear layers with collectives of tokens, if any."""
        if self.tp_comm_overlap:
            return TokenFusion.USERBUFFERS
        return TokenFusion.NCCL if self.async_tensor_model_parallel_allreduce else None

    @property
    def overlap_methods(self) -> OverlapMethods:
        """Return how GEMMs overlap collectives in userbuffers."""
        return self.tp_comm_overlap_cfg

    @property
    def splits_outputs(self) -> bool:
        """True if scattered outputs are computed in parts."""
        return self.tp_comm_overlap_rs

    @model_validator(mode="after")
    def _need_agreement(self) -> Self:
        if self.overlap_param_gather and not self.overlap_grad_reduce:
            refuse([refusal("overlap_param_gather", None, "true needs overlap_grad_reduce = true")])
        if self.tp_comm_overlap and not self.sequence_parallel:  # validate_args
            refuse([refusal("tp_comm_overlap", None, "true needs sequence_parallel = true")])
        if self.tp_comm_overlap and self.async_tensor_model_parallel_allreduce:
            why = "true is instead of tp_comm_overlap = true, which has collectives of its own"
            refuse([refusal("async_tensor_model_parallel_allreduce", None, why)])
        if not (self.tp_comm_overlap_rs or self.tp_comm_overlap):
            refuse([refusal("tp_comm_overlap_rs", None, "false needs tp_comm_overlap = true")])
        if self.tp_comm_overlap_cfg != DEFAULT_METHODS and not self.tp_comm_overlap:
            refuse([refusal("tp_comm_overlap_cfg", None, "needs tp_comm_overlap = true")])
        self._need_one_sum()
        self._need_one_split()
        return self

    def _need_one_sum(self) -> None:
        """Reject options that contradict `allreduce_in_float32`, and its options without it."""
        if not self.allreduce_in_float32:
            if self.allreduce_bucket_size != ALLREDUCE_BUCKET:
                why = "needs allreduce_in_float32 = true"
                refuse([refusal("allreduce_bucket_size", None, why)])
            return
        for name in OF_THE_WRAPPER:
            if getattr(self, name):
                why = f"true contradicts {name}: allowed is one of the two"
                refuse([refusal("allreduce_in_float32", None, why)])

    def _need_one_split(self) -> None:
        """Reject contradicting options for the split of layers over stages."""
        # validate_args of training/arguments.py, __post_init__ of TransformerConfig
        given = self.split_options
        ends, counted = {*given} & {*ENDS}, {*given} & {*COUNTED}
        for name, others in (
            ("pipeline_model_parallel_layout", {*given} - {"pipeline_model_parallel_layout"}),
            ("num_layers_per_virtual_pipeline_stage", {*given} & {*ENDS, VIRTUAL_STAGES}),
            (next(iter(sorted(ends)), ""), counted),
        ):
            if name in given and others:
                other = next(each for each in given if each in others)
                refuse([refusal(name, None, f"contradicts {other}: allowed is one of the two")])
        if self.pipeline_model_parallel_layout is not None:
            try:
                stages_in(self.pipeline_model_parallel_layout)
            except ValueError as error:
                refuse([refusal("pipeline_model_parallel_layout", None, str(error))])

    def cuts_messages(self, *, tensor: int) -> bool:
        """Return True if each tensor rank sends a part of a hidden state."""
        # `_communicate`: never with `sequence_parallel`
        scatters = self.scatter_gather_tensors_in_pipeline
        return scatters and tensor > 1 and not self.sequence_parallel

    def bucket_elements(self, *, data: int) -> int | None:
        """Return the elements at which a bucket is closed; None if there is one bucket."""
        if self.allreduce_in_float32:  # closed once it has more
            return self.allreduce_bucket_size + 1
        if not self.overlap_grad_reduce:
            return None
        # DistributedDataParallel.__init__: the default of `bucket_size`, and none without overlap
        return self.bucket_size or max(BUCKET_LEAST, BUCKET_EACH * data)

    def alignment(self, *, stage: int, data: int) -> int:
        """Return the alignment of shards of buckets padded to 128 (`param_and_grad_buffer.py`)."""
        return 128 // gcd(128, data) if stage else 1

    def without_experts(self) -> str | None:
        """Return the option that excludes expert ranks; None if there is none."""
        return "allreduce_in_float32" if self.allreduce_in_float32 else None

    def without_replicas(self, *, stage: int) -> str | None:
        """Return None if replicas of shards are supported, else the condition for the message."""
        if self.allreduce_in_float32:
            return " with allreduce_in_float32"
        return super().without_replicas(stage=stage)

    def refusals(self, *, stage: int, moments: int) -> Iterator[tuple[str, object, str]]:
        """Yield options that need the distributed optimizer (stage 1)."""
        yield from super().refusals(stage=stage, moments=moments)
        # validate_args in training/arguments.py; without `zero` the other trainer accumulates
        # gradients in fp32 (step_prequel of its optimizer/parameter_group.py)
        for name in ("overlap_param_gather", "allreduce_in_float32"):
            if stage == 0 and getattr(self, name):
                yield name, None, "true needs stage = 1"

    def formats(self, *, stage: int, compute: DType, optimizer: DType) -> Formats:
        """Return dtypes: one buffer accumulates and reduces, unless sums are in fp32."""
        del stage
        wide = DType.FP32 if self.grad_reduce_in_fp32 else compute
        summed = DType.FP32 if self.allreduce_in_float32 else wide
        return Formats(
            compute=compute, reduction=summed, whole=wide, reduced=wide, optimizer=optimizer
        )

    def gradient_bytes(self, *, stage: int, compute: DType, data: int) -> int:
        """Return the bytes of an element of the buffer that accumulates and reduces gradients."""
        del stage, data
        return (DType.FP32 if self.grad_reduce_in_fp32 else compute).size_bytes
