"""Execution of a model by a runtime: compilation, recompute, narrow dtypes, fusion."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import ClassVar

from zsim.strategy.overlap_methods import DEFAULT_METHODS, OverlapMethods


class ExecutionError(ValueError):
    """An invalid execution setting; the message starts with the name of the field."""


class Float8(StrEnum):
    """Scaling of 8-bit GEMMs of linear layers inside blocks."""

    TENSORWISE = "tensorwise"
    """One scale for a whole operand, of its largest magnitude (`Float8CurrentScaling` of
    Transformer Engine, torchao's default)."""
    ROWWISE = "rowwise"
    """One scale for each row (torchao)."""
    DELAYED = "delayed"
    """One scale for a whole operand, of its magnitudes in earlier steps (`DelayedScaling` of
    Transformer Engine)."""
    BLOCKWISE = "blockwise"
    """One scale for 128 elements of activations and gradients, or 128 x 128 of weights
    (DeepSeek-AI 2024, "DeepSeek-V3 technical report", section 3.3; `Float8BlockScaling`)."""
    MXFP8 = "mxfp8"
    """One scale for 32 elements along the inner extent (`MXFP8BlockScaling`, torchao's `mx`)."""


class Float4(StrEnum):
    """Scaling of 4-bit GEMMs of linear layers inside blocks."""

    NVFP4 = "nvfp4"
    """One scale for 16 elements along the inner extent, or 16 x 16 of weights, and one for the
    operand. Operands of weight gradients pass a random Hadamard transform, and gradients are
    rounded stochastically (NVIDIA 2025, arXiv 2509.25149; `NVFP4BlockScaling`)."""


Recipe = Float8 | Float4
"""Scaling of narrow GEMMs."""


class Quantizer(StrEnum):
    """Library that casts the operands of narrow GEMMs."""

    TORCHAO = "torchao"
    """Saves activations in the compute dtype and casts operands before each GEMM (torchao 0.19)."""
    TRANSFORMER_ENGINE = "Transformer Engine"
    """Casts an operand once for both GEMMs that read it, and saves the cast input (2.20)."""


RECIPES: Mapping[Quantizer, tuple[Recipe, ...]] = {
    Quantizer.TORCHAO: (Float8.TENSORWISE, Float8.ROWWISE, Float8.MXFP8),
    Quantizer.TRANSFORMER_ENGINE: (
        *(Float8.DELAYED, Float8.TENSORWISE, Float8.BLOCKWISE, Float8.MXFP8),
        Float4.NVFP4,
    ),
}
"""Scalings of each library that are modelled."""


class NarrowWeights(StrEnum):
    """How weights of narrow GEMMs are kept between steps, if a library casts them once a step."""

    CAST = "cast"
    """Whole in the compute dtype, with additional cast copies."""
    KEPT = "kept"
    """In 8 bits, in which they are gathered (`--fp8-param-gather`)."""
    CAST_FROM_SHARDS = "cast_from_shards"
    """Gathered in the compute dtype, then cast; a rank keeps the cast copies and its shard."""


class Loss(StrEnum):
    """Implementations of the cross entropy of next tokens, given the output of the last block."""

    TORCH = "torch"
    """`torch.nn.functional.cross_entropy` of logits that were cast to fp32."""
    IN_PLACE = "in_place"
    """The same, whose softmax backward overwrites with the gradient of the logits (Megatron-LM,
    `vocab_parallel_cross_entropy`).
    """
    NARROW = "narrow"
    """The same on logits in their own dtype, which also stores their log-softmax."""
    FUSED = "fused"
    """One kernel that reads logits in their own dtype and writes their gradient in it
    (`flash_attn.losses.cross_entropy`, formerly `xentropy_cuda_lib`).
    """
    CHUNKED = "chunked"
    """PyTorch's loss in eight chunks of tokens, given the whole logits (torchtitan #996,
    `chunked_cross_entropy_loss`, after torchtune).
    """
    CAST_CHUNKED = "cast_chunked"
    """PyTorch's loss in chunks of 128 tokens of each sequence, of logits that the head computes in
    the same chunks and that are cast to fp32 (LitGPT, `chunked_cross_entropy`; `convert_output` of
    Lightning's precision plugins casts).
    """
    CHUNKED_HEAD = "chunked_head"
    """Eight chunks including the projection, each with its backward: the whole logits never exist
    (torchtitan of 2026, `ChunkedLossWrapper`).
    """


class TokenFusion(StrEnum):
    """Mechanism that fuses GEMMs with collectives of their tokens over a tensor axis."""

    COMPILER = "compiler"
    """PyTorch's asynchronous tensor parallelism (`micro_pipeline_tp_pass`)."""
    USERBUFFERS = "userbuffers"
    """Transformer Engine's userbuffers (`initialize_ub`). Ring gathers overlap GEMMs of the parts
    that have arrived; reduce-scatters overlap GEMMs of parts of the output. In backward, gathers
    and scatters of column-parallel layers overlap whole GEMMs.
    """
    NCCL = "nccl"
    """NCCL collectives, some of which overlap whole GEMMs in backward: the input of column-parallel
    layers is gathered again while its gradient is computed, and that gradient is reduce-scattered
    or all-reduced while gradients of weights are computed
    (`LinearWithGradAccumulationAndAsyncCommunication` of Megatron-LM).
    """


class Norms(StrEnum):
    """Implementations of RMS norm in blocks that are not compiled."""

    FUSED = "fused"
    """One kernel per direction (`torch.nn.functional.rms_norm` on CUDA since PyTorch 2.9, Apex's).
    """
    COMPOSED = "composed"
    """One kernel for each PyTorch operator, mostly in fp32: the cast, squares, their mean, two
    products, the cast back; thirteen in backward (`torch.nn.functional.rms_norm` before 2.9,
    modules that write them out).
    """


class ContextExchange(StrEnum):
    """How ranks that share a sequence access keys and values of each other's tokens."""

    ALL_GATHER = "all_gather"
    """All-gathered before attention; their gradients are reduce-scattered (Llama Team 2024, "The
    Llama 3 herd of models", section 3.3.2; Transformer Engine's `cp_comm_type` all_gather).
    """
    RING = "ring"
    """Sent from each rank to the next while attention runs over those present; partial results are
    merged in fp32 (Liu et al. 2023; Transformer Engine's `cp_comm_type` p2p, alltoall of PyTorch's
    `_context_parallel`).
    """


class Recomputed(StrEnum):
    """Parts of a block that selective checkpointing runs again in backward."""

    ATTENTION = "attention"
    """Scores and softmax of plain attention (Korthikanti et al. 2022, section 5)."""
    EXPERT_ACTIVATION = "expert_activation"
    """The activation of grouped experts, whose output is dropped."""
    SHARED_EXPERTS = "shared_experts"
    """Shared experts as a whole."""
    MLP = "mlp"
    """The MLP of blocks without experts."""
    NORMS = "norms"
    """Norms that are modules: before latent attention, and before experts. Outputs are dropped."""
    LATENT = "latent"
    """Layers that expand compressed queries, keys and values, and their rotations."""
    EXPERTS = "experts"
    """Experts as a whole: router, exchanges of tokens, routed and shared experts."""


class DispatchLibrary(StrEnum):
    """Libraries of `--moe-flex-dispatcher-backend`."""

    DEEPEP = "deepep"
    """DeepEP 1.x, normal kernels: a token crosses once to each node, on the rail of its GPU, and
    goes from there once to each GPU."""
    HYBRIDEP = "hybridep"
    """HybridEP, the branch hybrid-ep of DeepEP: the same with TMA copies, in fewer blocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenDispatch:
    """A library, and the multiprocessors that its kernels occupy."""

    library: DispatchLibrary
    num_sms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """Execution of the blocks of a model.

    Attributes:
        operations: selective checkpointing by operations: a block keeps the outputs of attention
            and of every second matrix multiplication, and recomputes the rest (torchtitan's
            selective "op" policy).
        early_stop: recompute of a block stops as soon as backward's inputs exist (`early_stop` of
            torch.utils.checkpoint, since PyTorch 2.1 if not reentrant).
        compiled: blocks are compiled: elementwise operations are fused with adjacent ones into one
            kernel and save no tensors (Ansel et al. 2024, "PyTorch 2", section 4).
        recipe: scaling of 8-bit or 4-bit GEMMs of the linear layers of blocks (Micikevicius et al.
            2022, "FP8 formats for deep learning"); None for GEMMs in the compute dtype.
        quantizer: library that casts operands for these GEMMs.
        wide_layers: number of first and of last layers whose GEMMs are in the compute dtype.
        any_layout: 8-bit GEMMs with one scale read operands in any layout, so they need no
            transposed copies. It depends on the GPU and not on the strategy.
        float8_gathers: with 8-bit GEMMs, weights of these layers are cast before they are gathered
            over the ranks that shard them (torchao's `enable_fsdp_float8_all_gather`).
        float8_tokens: with 8-bit GEMMs, input tokens of these layers are cast before they are
            gathered over the tensor axis, and so are gradients of scattered outputs (torchao's
            `PrepareFloat8ModuleInput` and `Float8RowwiseParallel`).
        fuses_tokens: with sequence parallelism, the mechanism that fuses GEMMs of linear layers
            with gathers of their inputs and reduce-scatters of their outputs; None for no fusion.
            NCCL also overlaps all-reduces without sequence parallelism.
        overlap_methods: overlap of each GEMM with userbuffers.
        splits_outputs: userbuffers scatter one part of the last layers' output during the next
            part's GEMM; if False, they scatter all of it afterwards.
        context: ranks that share each sequence. Each has an equal part of its tokens; their queries
            attend to keys and values of all tokens (Liu et al. 2023, "Ring Attention").
        exchange: how these ranks exchange keys and values.
        expert: ranks that the experts of a block are distributed over. Copies of tokens are sent to
            the ranks of their experts, and results are sent back.
        dispatch: the library that does so; None for NCCL's all-to-all.
        whole_experts: with a tensor axis, each of its ranks routes its own tokens to whole experts.
        expert_tensor: ranks with parts of the same experts; each runs the rows of all.
        own_loads: auxiliary losses of experts depend on the tokens of the rank alone.
        weighs_at_source: weights of expert copies stay with their tokens and multiply the results
            that come back; ranks exchange counts of copies in place of gathering them (torchtitan).
            If False, weights are sent with the copies.
        gathers_experts: expert ranks gather all tokens, with the map and the weights of all
            experts, and add up results, in place of sending copies (`MoEAllGatherTokenDispatcher`).
        overlaps_shared: shared experts run on a side stream, in parts, while expert ranks exchange
            tokens and results (`--moe-shared-expert-overlap`).
        merges_micro_batches: a forward runs in turn with the backward of the micro-batch before it;
            shared experts come before the exchange of tokens.
        loops_experts: a rank runs its experts in sequence, whatever the model says.
        recomputes: parts of a block that run again in backward, apart from plain attention.
        cuts_latent: latent attention may have a tensor axis, whose ranks compress their own tokens.
        merges: attention to gathered keys runs rank by rank and is merged in fp32, as around a ring
            (`_templated_ring_attention`, torch 2.13, for every exchange).
        loss: implementation of the loss.
        metrics: number of additional cross entropies that a training loop computes of the logits,
            in their dtype and without a gradient, to report them (Composer's `train_metrics`).
        norms: implementation of norms that are not compiled.
        writes_rotary: rotary positions that are not compiled run as the operators that torchtitan's
            models write; if False, as one kernel with the share of the bandwidth that was timed of
            Megatron's first implementation.
        repeats_keys: keys and values that several query heads share are copied for each of them
            before attention, and their gradients summed (`repeat_kv`).
        holds_logits: the caller of the model holds its logits, in the dtype of the loss, during
            backward, as a training loop does that keeps them in a variable.
        gathers_logits: with a tensor axis, logits of the whole vocabulary are gathered, and every
            rank computes the whole loss (`disable_loss_parallel` of torchtitan).
        composes_loss: with a tensor axis, the loss over parts of the vocabulary runs as separate
            operators with separate outputs (`loss_parallel` of torch.distributed.tensor.parallel).
        replicates_embedding: with sequence parallelism, each rank has the whole token embedding,
            and looks up all tokens.
        splits: backward has two parts; tensors saved by the loss are not kept for the second.
        gathers_each: with sequence parallelism, each linear layer of a block gathers its input and
            scatters its gradient separately. In compiled blocks, layers that read the same input
            gather it once.
        rearranges: collectives along the tokens of several sequences copy: gathered data is ordered
            by rank, and so must be data to be scattered.
        tiles: number of tiles of each linear layer of blocks, split along its outputs; each is a
            unit that is gathered, used and freed separately (memory-centric tiling, Rajbhandari et
            al. 2021, section 5.1.3).
    """

    omitted_defaults: ClassVar[frozenset[str]] = frozenset(
        {
            "expert",
            "whole_experts",
            "expert_tensor",
            "own_loads",
            "weighs_at_source",
            "gathers_experts",
            "overlaps_shared",
            "merges_micro_batches",
            "loops_experts",
            "recomputes",
        }
    )

    operations: bool = False
    early_stop: bool = False
    compiled: bool = False
    recipe: Recipe | None = None
    quantizer: Quantizer = Quantizer.TORCHAO
    wide_layers: tuple[int, int] = (0, 0)
    any_layout: bool = field(default=False, compare=False)
    float8_gathers: bool = False
    float8_tokens: bool = False
    fuses_tokens: TokenFusion | None = None
    overlap_methods: OverlapMethods = DEFAULT_METHODS
    splits_outputs: bool = True
    context: int = 1
    exchange: ContextExchange = ContextExchange.ALL_GATHER
    expert: int = 1
    dispatch: TokenDispatch | None = None
    whole_experts: bool = False
    expert_tensor: int = 1
    own_loads: bool = False
    weighs_at_source: bool = False
    gathers_experts: bool = False
    overlaps_shared: bool = False
    merges_micro_batches: bool = False
    loops_experts: bool = False
    recomputes: tuple[Recomputed, ...] = ()
    cuts_latent: bool = True
    merges: bool = False
    loss: Loss = Loss.TORCH
    metrics: int = 0
    norms: Norms = Norms.FUSED
    writes_rotary: bool = False
    repeats_keys: bool = False
    holds_logits: bool = False
    gathers_logits: bool = False
    composes_loss: bool = False
    replicates_embedding: bool = False
    splits: bool = False
    gathers_each: bool = False
    rearranges: bool = False
    tiles: int = 1

    def __post_init__(self) -> None:
        if self.context < 1:
            raise ExecutionError(f"context: {self.context} must be at least 1")

    def quantizes(self, layer: int, layers: int) -> bool:
        """Return True if the GEMMs of `layer`, one of `layers`, are narrow."""
        first, last = self.wide_layers
        return self.recipe is not None and first <= layer < layers - last

    @property
    def measures_tokens(self) -> bool:
        """True if tokens are measured, over all ranks that have some, before they are cast."""
        return self.recipe in (Float8.TENSORWISE, Float4.NVFP4)

    @property
    def keeps_cast_weights(self) -> bool:
        """True if cast copies of weights persist from step to step."""
        return self.recipe is not None and self.quantizer is Quantizer.TRANSFORMER_ENGINE

    @property
    def shares_scales(self) -> bool:
        """True if ranks that have parts of one weight must agree on its scale."""
        return self.quantizer is Quantizer.TORCHAO

    @property
    def passes_keys(self) -> bool:
        """True if ranks that share sequences pass keys and values around a ring."""
        return self.context > 1 and self.exchange is ContextExchange.RING


PLAIN = Execution()
"""PyTorch's default execution."""
