"""Options of Megatron-LM's data parallelism (`DistributedDataParallelConfig`, 2026-08)."""

from collections.abc import Iterator
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
"""Options that split layers over the stages of a pipeline, and are nothing without one."""


ALLREDUCE_BUCKET = 500_000_000
"""Elements of a bucket (`OptimizerConfig.allreduce_bucket_size` of Aleph-Alpha/scaling)."""

BUCKET_LEAST, BUCKET_EACH = 40_000_000, 1_000_000
"""Elements of a bucket if nothing is said: at least, and for each data rank."""

OF_THE_WRAPPER = (
    "overlap_grad_reduce",
    "gradient_accumulation_fusion",
    "grad_reduce_in_fp32",
    "average_in_collective",
)
"""Options that say otherwise how gradients are collected and reduced than `allreduce_in_float32`.
"""


class Megatron(RuntimeOptions):
    """Options of the wrapper of the model; stage 1 is with `use_distributed_optimizer`.

    Attributes:
        bucket_size: with overlap_grad_reduce, elements from which a bucket is closed; None is
            max(40e6, 1e6 x data). Without, there is one bucket.
        overlap_grad_reduce: reduce a bucket while backward goes on; false has one bucket.
        overlap_param_gather: in stage 1, gather parameters while the next forward goes on; needs
            overlap_grad_reduce.
        gradient_accumulation_fusion: products that make gradients of weights add them to those that
            are collected, instead of another kernel (Megatron-LM's default with Transformer Engine
            or Apex; `fuse_wgrad_accumulation` of the former).
        grad_reduce_in_fp32: collect and reduce gradients in fp32.
        average_in_collective: let the collective divide, instead of scaling before.
        allreduce_in_float32: in stage 1, after the last backward, all-reduce gradients whole in
            fp32, bucket by bucket, where they were collected in the model's format; a rank reads
            its shard of the sum. No option of Megatron-LM, but what Aleph Alpha's trainer of its
            kind does (`allreduce_no_retain` of Aleph-Alpha/scaling at 737f8558,
            src/scaling/core/optimizer/allreduce.py).
        allreduce_bucket_size: with it, elements above which such a bucket is closed.
        sequence_parallel: with a tensor axis, what flows between attention and MLP is cut by tokens
            (`TransformerConfig.sequence_parallel`).
        async_tensor_model_parallel_allreduce: with a tensor axis, gradients of what column-parallel
            layers read are summed, or with sequence_parallel scattered, beside products of
            gradients of weights; with it what they read is gathered again beside the product
            before (Megatron-LM, on unless it was turned off since 3f652469 of September 2021).
        tp_comm_overlap: with sequence_parallel, linear layers of blocks run beside collectives of
            their tokens, in Transformer Engine's userbuffers.
        tp_comm_overlap_rs: with it, the last layer of attention and of an MLP makes its output in
            parts, each scattered beside the next; false scatters all behind it
            (`--disable-tp-comm-overlap-rs`).
        tp_comm_overlap_cfg: with it, how each product does; what is not said is as `initialize_ub`
            has it.
        num_layers_per_virtual_pipeline_stage: with a pipeline, layers of a chunk: each stage has
            several, which alternate with those of other stages (interleaved); None is one.
        num_virtual_stages_per_pipeline_rank: the same, as how many chunks each stage has.
        num_layers_in_first_pipeline_stage: with a pipeline, layers of the first stage; those of the
            other stages are as many as each other's (`--decoder-first-pipeline-num-layers`).
        num_layers_in_last_pipeline_stage: the same of the last one.
        account_for_embedding_in_pipeline_split: with a pipeline, the embedding counts for a layer:
            the first stage has one less.
        account_for_loss_in_pipeline_split: the same of the loss and the last stage.
        pipeline_model_parallel_layout: with a pipeline, what each stage has, stages of several
            chunks in turns: E is the embedding, t a layer, L the loss, such as "Et*3|(tt|)*2,tL".
        overlap_p2p_comm: with several chunks, send and receive while compute goes on; false waits
            (`--no-overlap-p2p-communication`).
        scatter_gather_tensors_in_pipeline: with a pipeline and a tensor axis, each tensor rank
            sends its part of a hidden state, and those that receive gather the parts. Megatron-LM
            did so until March 2023, on unless it was turned off, and never with sequence_parallel;
            since 3c92fa93 its argument has no effect.
        cpu_offloading_num_layers: first layers of which all that they keep for backward is in the
            host's memory (`TransformerConfig`, with Transformer Engine); neither with a pipeline
            nor with recomputation.
    """

    stages = (0, 1)
    usual_stage = 1
    has_pipeline = True
    ties_ends = True
    has_context = True
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
        """Return how many of the layers each virtual stage of a pipeline has.

        Raises:
            ValueError: they cannot be dealt out so.
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

    @property
    def split_options(self) -> tuple[str, ...]:
        """Return the options that are given of those that split layers over stages."""
        return tuple(name for name in SPLITS if getattr(self, name) not in (None, False))

    @property
    def cuts_tokens(self) -> bool:
        """True if hidden states are cut by tokens over the tensor axis."""
        return self.sequence_parallel

    @property
    def fuses_tokens(self) -> TokenFusion | None:
        """Return whose collectives of tokens linear layers run beside, if any."""
        if self.tp_comm_overlap:
            return TokenFusion.USERBUFFERS
        return TokenFusion.NCCL if self.async_tensor_model_parallel_allreduce else None

    @property
    def overlap_methods(self) -> OverlapMethods:
        """Return how products run beside collectives in userbuffers."""
        return self.tp_comm_overlap_cfg

    @property
    def splits_outputs(self) -> bool:
        """True if what is scattered is made in parts."""
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
        """Check that options of the wrapper do not say how gradients are summed in fp32."""
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
        """Check that layers are split over stages in one way."""
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
        """Return whether each tensor rank sends a part of a hidden state."""
        # `_communicate`: never with `sequence_parallel`
        scatters = self.scatter_gather_tensors_in_pipeline
        return scatters and tensor > 1 and not self.sequence_parallel

    def bucket_elements(self, *, data: int) -> int | None:
        """Return the elements from which a bucket is closed; None if one has all."""
        if self.allreduce_in_float32:  # once it has more
            return self.allreduce_bucket_size + 1
        if not self.overlap_grad_reduce:
            return None
        # DistributedDataParallel.__init__: the default of `bucket_size`, and none without overlap
        return self.bucket_size or max(BUCKET_LEAST, BUCKET_EACH * data)

    def alignment(self, *, stage: int, data: int) -> int:
        """Return what buckets of multiples of 128 leave (`param_and_grad_buffer.py`)."""
        return 128 // gcd(128, data) if stage else 1

    def without_replicas(self, *, stage: int) -> str | None:
        """Return where there are no replicas of shards, after its name; None if there are."""
        if self.allreduce_in_float32:
            return " with allreduce_in_float32"
        return super().without_replicas(stage=stage)

    def refusals(self, *, stage: int, moments: int) -> Iterator[tuple[str, object, str]]:
        """Yield what parameters cannot do that no rank has updated alone."""
        yield from super().refusals(stage=stage, moments=moments)
        # validate_args in training/arguments.py; without `zero` the trainer of the other collects
        # gradients in fp32 (step_prequel of its optimizer/parameter_group.py)
        for name in ("overlap_param_gather", "allreduce_in_float32"):
            if stage == 0 and getattr(self, name):
                yield name, None, "true needs stage = 1"

    def formats(self, *, stage: int, compute: DType, optimizer: DType) -> Formats:
        """Return formats: one buffer collects and reduces, unless that is summed in fp32."""
        del stage
        wide = DType.FP32 if self.grad_reduce_in_fp32 else compute
        summed = DType.FP32 if self.allreduce_in_float32 else wide
        return Formats(
            compute=compute, reduction=summed, whole=wide, reduced=wide, optimizer=optimizer
        )

    def gradient_bytes(self, *, stage: int, compute: DType, data: int) -> int:
        """Return those of the buffer in which gradients are collected and reduced."""
        del stage, data
        return (DType.FP32 if self.grad_reduce_in_fp32 else compute).size_bytes
