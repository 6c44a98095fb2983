"""Options of Megatron-LM's data parallelism (`DistributedDataParallelConfig`, 2026-08)."""

from collections.abc import Iterator, Mapping
from enum import StrEnum
from math import gcd
from typing import Annotated, Self

from pydantic import BeforeValidator, model_validator

from zsim.config_error import refusal, refuse
from zsim.dtype import DType
from zsim.strategy.config_table import Count, Flag, Whole
from zsim.strategy.cuda_graphs import CudaGraphs, GraphImpl, GraphScope
from zsim.strategy.execution import (
    ContextExchange,
    DispatchLibrary,
    Float4,
    Float8,
    Quantizer,
    Recipe,
    Recomputed,
    TokenDispatch,
    TokenFusion,
)
from zsim.strategy.overlap_methods import DEFAULT_METHODS, OverlapMethods
from zsim.strategy.runtime_options import Formats, KeptFormats, RuntimeOptions
from zsim_runtimes.megatron.layer_split import LayerSplit, stages_in

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


def _listed(value: object) -> object:
    """Return the scopes of a list, or of a word, which may separate them by commas."""
    return tuple(value.split(",")) if isinstance(value, str) else value


Scopes = Annotated[tuple[GraphScope, ...], BeforeValidator(_listed)]
Modules = Annotated[tuple["RecomputedModule", ...], BeforeValidator(_listed)]


DEEPEP_SMS, HYBRIDEP_SMS = 20, 16
"""Defaults of `moe_deepep_num_sms` and `moe_hybridep_num_sms` (`TransformerConfig`)."""


class DispatcherType(StrEnum):
    """Choices of `--moe-token-dispatcher-type`."""

    ALLGATHER = "allgather"
    """Every rank gathers all tokens, and keeps the tokens of its experts."""
    ALLTOALL = "alltoall"
    """Copies of tokens are exchanged by NCCL's send and receive."""
    FLEX = "flex"
    """The library of `--moe-flex-dispatcher-backend` exchanges them."""


class RecomputedModule(StrEnum):
    """Choices of `--recompute-modules` for models that zsim builds."""

    CORE_ATTN = "core_attn"
    MOE_ACT = "moe_act"
    MLP = "mlp"
    SHARED_EXPERTS = "shared_experts"
    LAYERNORM = "layernorm"
    MLA_UP_PROJ = "mla_up_proj"
    MOE = "moe"


MODULES: Mapping[RecomputedModule, Recomputed] = {
    RecomputedModule.CORE_ATTN: Recomputed.ATTENTION,
    RecomputedModule.MOE_ACT: Recomputed.EXPERT_ACTIVATION,
    RecomputedModule.MLP: Recomputed.MLP,
    RecomputedModule.SHARED_EXPERTS: Recomputed.SHARED_EXPERTS,
    RecomputedModule.LAYERNORM: Recomputed.NORMS,
    RecomputedModule.MLA_UP_PROJ: Recomputed.LATENT,
    RecomputedModule.MOE: Recomputed.EXPERTS,
}
"""Parts of blocks that these modules are."""


class GradientFormat(StrEnum):
    """Choices of `--main-grads-dtype`."""

    FP32 = "fp32"
    BF16 = "bf16"


class MomentFormat(StrEnum):
    """Choices of `--exp-avg-dtype` and `--exp-avg-sq-dtype`."""

    FP32 = "fp32"
    FP16 = "fp16"
    BF16 = "bf16"
    FP8 = "fp8"


ADAM_MOMENTS = 2

OF_STATES = ("main_grads_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")


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
        fp8_param_gather: in stage 1, weights of linear layers with 8-bit GEMMs are kept in 8 bits
            alone, and gathered so. With mxfp8 they are gathered in 16 bits, then cast along both
            axes (`--reuse-grad-buf-for-mxfp8-param-ag`).
        use_precision_aware_optimizer: Transformer Engine's FusedAdam, with states in the formats
            of the next three options. With fp32 masters of bf16 parameters it keeps only the lower
            16 bits of each (`store_param_remainders`), unless GEMMs are scaled otherwise than
            delayed.
        main_grads_dtype: of gradients that the update reads; bf16 needs grad_reduce_in_fp32 =
            false.
        exp_avg_dtype, exp_avg_sq_dtype: of moments: fp32, fp16, bf16 or fp8.
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
        cuda_graph_impl: the implementation of CUDA graphs: "local" (`--enable-cuda-graph`) and
            "transformer_engine" (`--external-cuda-graph`) capture blocks, "full_iteration" all of
            forward and backward.
        cuda_graph_scope: with graphs of blocks, the captured parts, "attn" and "mlp"; empty or
            "full" is one graph for a block. With "local", "full_iteration" captures all of forward
            and backward (the name before 2026).
        recompute_modules: with selective checkpointing, the modules that run again in backward:
            core_attn, moe_act, mlp, shared_experts, layernorm, mla_up_proj and moe; None is
            core_attn.
        moe_token_dispatcher_type: with expert ranks, how tokens reach their experts: "alltoall",
            "flex" with a library, or "allgather", Megatron-LM's default.
        moe_shared_expert_overlap: with expert ranks, shared experts run on a side stream while
            tokens are exchanged.
        overlap_moe_expert_parallel_comm: without a pipeline, layers of a forward run in turn with
            layers of the backward before it, and exchanges of tokens on another stream.
        moe_flex_dispatcher_backend: the library of "flex": "deepep" or "hybridep".
        moe_deepep_num_sms, moe_hybridep_num_sms: multiprocessors that its kernels occupy.
    """

    stages = (0, 1)
    usual_stage = 1
    has_pipeline = True
    sums_copies = True
    ties_ends = True
    has_context = True
    has_experts = True
    sums_loads = True
    cuts_latent = True
    layers_option = "cpu_offloading_num_layers"
    stored_least = (
        256 * 1024
    )  # _check_if_offload of Transformer Engine 2.20, pytorch/cpu_offload.py
    context_exchange = ContextExchange.RING  # cp_comm_type of TransformerConfig is p2p
    quantizer = Quantizer.TRANSFORMER_ENGINE
    casts_tokens_with = (Float8.DELAYED, Float8.TENSORWISE, Float4.NVFP4)

    bucket_size: Count | None = None
    overlap_grad_reduce: Flag = False
    overlap_param_gather: Flag = False
    gradient_accumulation_fusion: Flag = False
    grad_reduce_in_fp32: Flag = False
    average_in_collective: Flag = False
    allreduce_in_float32: Flag = False
    allreduce_bucket_size: Count = ALLREDUCE_BUCKET
    fp8_param_gather: Flag = False
    use_precision_aware_optimizer: Flag = False
    main_grads_dtype: GradientFormat = GradientFormat.FP32
    exp_avg_dtype: MomentFormat = MomentFormat.FP32
    exp_avg_sq_dtype: MomentFormat = MomentFormat.FP32
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
    cuda_graph_impl: GraphImpl = GraphImpl.NONE
    cuda_graph_scope: Scopes = ()
    recompute_modules: Modules | None = None
    moe_token_dispatcher_type: DispatcherType = DispatcherType.ALLTOALL
    moe_flex_dispatcher_backend: DispatchLibrary = DispatchLibrary.DEEPEP
    moe_shared_expert_overlap: Flag = False
    overlap_moe_expert_parallel_comm: Flag = False
    moe_deepep_num_sms: Count = DEEPEP_SMS
    moe_hybridep_num_sms: Count = HYBRIDEP_SMS

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
    def cuda_graphs(self) -> CudaGraphs | None:
        """Return the parts of a step in CUDA graphs; None if there are none."""
        if self.cuda_graph_impl is GraphImpl.NONE:
            return None
        scopes = set(self.cuda_graph_scope)
        if self.captures_iteration:
            return CudaGraphs(iteration=True)
        whole = not scopes or GraphScope.FULL in scopes
        return CudaGraphs(
            attention=whole or GraphScope.ATTENTION in scopes,
            mlp=whole or GraphScope.MLP in scopes,
            joined=whole,
        )

    @property
    def recomputes(self) -> tuple[Recomputed, ...]:
        """Parts of blocks that selective checkpointing runs again in backward."""
        if self.recompute_modules is None:
            return super().recomputes
        return tuple(dict.fromkeys(MODULES[each] for each in self.recompute_modules))

    @property
    def token_dispatch(self) -> TokenDispatch | None:
        """Return the library that exchanges tokens of experts; None if NCCL does."""
        if self.moe_token_dispatcher_type is not DispatcherType.FLEX:
            return None
        library = self.moe_flex_dispatcher_backend
        is_deepep = library is DispatchLibrary.DEEPEP
        sms = self.moe_deepep_num_sms if is_deepep else self.moe_hybridep_num_sms
        return TokenDispatch(library=library, num_sms=sms)

    @property
    def gathers_experts(self) -> bool:
        """True if every expert rank gathers all tokens."""
        return self.moe_token_dispatcher_type is DispatcherType.ALLGATHER

    @property
    def merges_micro_batches(self) -> bool:
        """True if a forward overlaps the backward of the micro-batch before it."""
        return self.overlap_moe_expert_parallel_comm

    @property
    def overlaps_shared(self) -> bool:
        """True if shared experts run on a side stream while tokens are exchanged."""
        return self.moe_shared_expert_overlap

    @property
    def captures_iteration(self) -> bool:
        """True if forward and backward are one CUDA graph."""
        scoped = GraphScope.FULL_ITERATION in self.cuda_graph_scope
        return self.cuda_graph_impl is GraphImpl.FULL_ITERATION or (
            scoped and self.cuda_graph_impl is GraphImpl.LOCAL
        )

    @property
    def gathers_float8_tokens(self) -> bool:
        """True if tokens are cast before they are gathered, unless userbuffers gather them."""
        return not self.tp_comm_overlap

    @property
    def keeps_float8(self) -> bool:
        """True if weights of linear layers with 8-bit GEMMs are kept in 8 bits alone."""
        return self.fp8_param_gather

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
        for name in OF_STATES:
            value = getattr(self, name)
            if value != DType.FP32 and not self.use_precision_aware_optimizer:
                why = "needs use_precision_aware_optimizer = true"
                refuse([refusal(name, value, why)])
        if self.main_grads_dtype is GradientFormat.BF16 and self.grad_reduce_in_fp32:
            why = "needs grad_reduce_in_fp32 = false"
            refuse([refusal("main_grads_dtype", self.main_grads_dtype, why)])
        self._need_library()
        self._need_one_sum()
        self._need_one_split()
        self._need_capturable()
        return self

    def _need_capturable(self) -> None:
        """Reject scopes that an implementation of CUDA graphs does not have."""
        # TransformerConfig.__post_init__ and normalize_cuda_graph_modules
        impl, scopes = self.cuda_graph_impl, self.cuda_graph_scope
        whole = GraphScope.FULL_ITERATION in scopes
        name = "cuda_graph_scope"
        if scopes and impl is GraphImpl.NONE:
            refuse([refusal(name, None, "needs cuda_graph_impl")])
        if whole and len(scopes) > 1:
            refuse([refusal(name, None, "full_iteration allows no other scope")])
        if whole and impl is GraphImpl.TRANSFORMER_ENGINE:
            refuse([refusal(name, None, 'full_iteration needs cuda_graph_impl = "local"')])
        if scopes and not whole and impl is GraphImpl.FULL_ITERATION:
            refuse([refusal(name, None, 'must be empty with cuda_graph_impl = "full_iteration"')])
        if self.cuda_graphs and self.cpu_offloading_num_layers and not self.captures_iteration:
            why = "graphs of blocks exclude cpu_offloading_num_layers; capture full_iteration"
            refuse([refusal("cuda_graph_impl", None, why)])

    def _need_library(self) -> None:
        """Reject options of a library or of an exchange of tokens that is not used."""
        if self.moe_shared_expert_overlap and self.gathers_experts:
            why = "true needs moe_token_dispatcher_type = alltoall or flex"
            refuse([refusal("moe_shared_expert_overlap", None, why)])
        merges = self.overlap_moe_expert_parallel_comm
        for name, other in (
            ("moe_token_dispatcher_type = allgather", self.gathers_experts),
            ("moe_shared_expert_overlap = true", self.moe_shared_expert_overlap),
        ):
            if merges and other:
                refuse([refusal("overlap_moe_expert_parallel_comm", None, f"true excludes {name}")])
        again = self.recompute_modules or ()
        if self.moe_shared_expert_overlap and RecomputedModule.SHARED_EXPERTS in again:
            why = "true contradicts shared_experts in recompute_modules: allowed is one of the two"
            refuse([refusal("moe_shared_expert_overlap", None, why)])
        used = None if self.token_dispatch is None else self.token_dispatch.library
        flex = "needs moe_token_dispatcher_type = flex"
        if self.moe_flex_dispatcher_backend is not DispatchLibrary.DEEPEP and used is None:
            refuse([refusal("moe_flex_dispatcher_backend", self.moe_flex_dispatcher_backend, flex)])
        for library, default in (
            (DispatchLibrary.DEEPEP, DEEPEP_SMS),
            (DispatchLibrary.HYBRIDEP, HYBRIDEP_SMS),
        ):
            name = f"moe_{library}_num_sms"
            if (value := getattr(self, name)) != default and used is not library:
                refuse([refusal(name, value, f"{flex}, with backend {library}")])

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
        of_stage_1 = ("overlap_param_gather", "allreduce_in_float32", "fp8_param_gather")
        for name in (*of_stage_1, "use_precision_aware_optimizer"):
            if stage == 0 and getattr(self, name):
                yield name, None, "true needs stage = 1"
        if self.use_precision_aware_optimizer and moments != ADAM_MOMENTS:
            yield "use_precision_aware_optimizer", None, "true needs train.optimizer = adam"

    def formats(self, *, stage: int, compute: DType, optimizer: DType) -> Formats:
        """Return dtypes: one buffer accumulates and reduces, unless sums are in fp32."""
        del stage
        wide = DType.FP32 if self.grad_reduce_in_fp32 else compute
        summed = DType.FP32 if self.allreduce_in_float32 else wide
        return Formats(
            compute=compute, reduction=summed, whole=wide, reduced=wide, optimizer=optimizer
        )

    def kept_formats(
        self, *, compute: DType, optimizer: DType, moments: int, recipe: Recipe | None
    ) -> KeptFormats:
        """Return the formats of the optimizer's states, of a precision-aware optimizer."""
        if not self.use_precision_aware_optimizer:
            return super().kept_formats(
                compute=compute, optimizer=optimizer, moments=moments, recipe=recipe
            )
        # use_precision_aware_optimizer_no_fp8_or_ds_fp8 of optimizer/optimizer_config.py
        keeps_rest = compute is DType.BF16 and recipe in (None, Float8.DELAYED)
        return KeptFormats(
            gradient=DType(self.main_grads_dtype) if compute is not DType.FP32 else optimizer,
            master=DType.BF16 if keeps_rest else optimizer,
            moments=(DType(self.exp_avg_dtype), DType(self.exp_avg_sq_dtype))[:moments],
        )
