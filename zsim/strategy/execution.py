"""Execution of a model by a runtime: what it compiles, recomputes, makes narrower."""

from dataclasses import dataclass
from enum import StrEnum

from zsim.strategy.overlap_methods import DEFAULT_METHODS, OverlapMethods


class ExecutionError(ValueError):
    """A way that cannot be; the message starts with the name of the field."""


class Float8(StrEnum):
    """What shares a scale where products of linear layers inside blocks run in 8-bit floats."""

    TENSORWISE = "tensorwise"
    """A whole operand."""
    ROWWISE = "rowwise"
    """A row of it."""


class Loss(StrEnum):
    """Ways to compute the cross entropy of next tokens from what the last block makes."""

    TORCH = "torch"
    """`torch.nn.functional.cross_entropy` of logits that were cast to fp32."""
    NARROW = "narrow"
    """The same of logits in their own format, in which the logarithm of their softmax is kept."""
    FUSED = "fused"
    """One kernel that reads logits in their own format, and makes their gradient in it
    (`flash_attn.losses.cross_entropy`, `xentropy_cuda_lib` before)."""
    CHUNKED = "chunked"
    """As PyTorch does it, of an eighth of the tokens after the other, from whole logits on
    (torchtitan #996, `chunked_cross_entropy_loss`, after torchtune)."""
    CHUNKED_HEAD = "chunked_head"
    """The same from the projection on, the backward of each eighth at once: whole logits are never
    there (torchtitan of 2026, `ChunkedLossWrapper`)."""


class TokenFusion(StrEnum):
    """Mechanism that fuses products with collectives of their tokens over a tensor axis."""

    COMPILER = "compiler"
    """PyTorch's asynchronous tensor parallelism (`micro_pipeline_tp_pass`)."""
    USERBUFFERS = "userbuffers"
    """Transformer Engine's userbuffers (`initialize_ub`): gathers around a ring beside products of
    what has come, reduce-scatters of parts of the output, and in backward what column-parallel
    layers gather and scatter beside whole products."""
    NCCL = "nccl"
    """Collectives of NCCL, of which backward has some beside whole products: what column-parallel
    layers read is gathered again while its gradient is made, and that is scattered, or summed,
    while gradients of weights are made (`LinearWithGradAccumulationAndAsyncCommunication` of
    Megatron-LM)."""


class Norms(StrEnum):
    """Ways to run norms by the root mean square in blocks that are not compiled."""

    FUSED = "fused"
    """One kernel each way (`torch.nn.functional.rms_norm` of CUDA since PyTorch 2.9, Apex's)."""
    COMPOSED = "composed"
    """One for each operator of PyTorch, most of fp32: the cast, squares, their mean, two products,
    the cast back; thirteen in backward (`torch.nn.functional.rms_norm` before 2.9, modules that
    write them out)."""


class ContextExchange(StrEnum):
    """Ways in which ranks that share a sequence see keys and values of each other's tokens."""

    ALL_GATHER = "all_gather"
    """Gathered before attention, whose gradients of them are then reduce-scattered (Llama Team
    2024, "The Llama 3 herd of models", section 3.3.2; Transformer Engine's `cp_comm_type`
    all_gather)."""
    RING = "ring"
    """Sent from each rank to the next while attention to those that are there goes on; what is
    made of each is merged in fp32 (Liu et al. 2023; Transformer Engine's `cp_comm_type` p2p,
    alltoall of PyTorch's `_context_parallel`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """Execution of the blocks of a model.

    Attributes:
        operations: selective checkpointing by operations: a block keeps what attention makes and
            every second matrix product, and makes the rest again (torchtitan's selective "op"
            policy).
        early_stop: a block that is run again stops when all is there that backward reads
            (torch.utils.checkpoint's `early_stop`, since PyTorch 2.1 where it is not reentrant).
        compiled: blocks are compiled: operations on single elements are one kernel with those
            beside them, and keep nothing of their own (Ansel et al. 2024, "PyTorch 2", section 4).
        float8: linear layers of blocks multiply in 8-bit floats, scaled as they come (Micikevicius
            et al. 2022, "FP8 formats for deep learning"); None is in the format of the rest.
        float8_gathers: with `float8`, weights of these layers are cast before they are gathered
            over the ranks that shard them (torchao's `enable_fsdp_float8_all_gather`).
        float8_tokens: with `float8`, tokens that these layers read are cast before they are
            gathered over the tensor axis, and so are gradients of what they scatter (torchao's
            `PrepareFloat8ModuleInput` and `Float8RowwiseParallel`).
        fuses_tokens: with hidden states cut by tokens over a tensor axis, what fuses products of
            linear layers of a block with the gather of what they read and the reduce-scatter of
            what they make; None if nothing does. NCCL's sums are so of hidden states that are
            not cut, too.
        overlap_methods: how userbuffers do, for each product.
        splits_outputs: userbuffers scatter a part of what the last layers make beside the next; if
            not, all of it is scattered behind them.
        context: ranks that share each sequence; each has so many of its tokens, all of whose
            queries see keys and values of all (Liu et al. 2023, "Ring Attention").
        exchange: how these ranks exchange keys and values.
        merges: attention to those that were gathered is to one rank's after the other, merged in
            fp32, as around a ring (`_templated_ring_attention`, torch 2.13, whatever the exchange).
        loss: how the loss is computed.
        metrics: cross entropies that a training loop computes once more of the logits, in their
            own format and without a gradient, to report them (Composer's `train_metrics`).
        norms: how norms run where they are not compiled.
        holds_logits: who calls the model holds its logits, in the format of the loss, while
            backward runs, as a training loop does that keeps them in a variable.
        whole_logits: with a tensor axis, logits of the whole vocabulary are gathered: every rank
            computes the loss of all (`disable_loss_parallel` of torchtitan).
        composes_loss: with a tensor axis, the loss over parts of the vocabulary is made of one
            operator after the other, each into memory of its own (`loss_parallel` of
            torch.distributed.tensor.parallel).
        whole_embedding: with hidden states cut by tokens over a tensor axis, each rank has the
            whole token embedding, and looks up all tokens.
        splits: backward is in two parts: what the loss saves is not kept for the second.
        gathers_each: with hidden states cut by tokens over a tensor axis, each linear layer of a
            block gathers what it reads, and scatters the gradient of it, by itself. Where blocks
            are compiled, layers that read the same gather it once.
        rearranges: collectives along the tokens of several sequences copy: what was gathered lies
            rank by rank, and what is to be scattered has to.
        tiles: linear layers of blocks are cut along their outputs into so many, each a unit that is
            gathered, used and freed on its own (memory-centric tiling, Rajbhandari et al. 2021,
            section 5.1.3).
    """

    operations: bool = False
    early_stop: bool = False
    compiled: bool = False
    float8: Float8 | None = None
    float8_gathers: bool = False
    float8_tokens: bool = False
    fuses_tokens: TokenFusion | None = None
    overlap_methods: OverlapMethods = DEFAULT_METHODS
    splits_outputs: bool = True
    context: int = 1
    exchange: ContextExchange = ContextExchange.ALL_GATHER
    merges: bool = False
    loss: Loss = Loss.TORCH
    metrics: int = 0
    norms: Norms = Norms.FUSED
    holds_logits: bool = False
    whole_logits: bool = False
    composes_loss: bool = False
    whole_embedding: bool = False
    splits: bool = False
    gathers_each: bool = False
    rearranges: bool = False
    tiles: int = 1

    def __post_init__(self) -> None:
        if self.context < 1:
            raise ExecutionError(f"context: {self.context} must be at least 1")

    @property
    def passes_keys(self) -> bool:
        """True if ranks that share sequences pass keys and values on around a ring."""
        return self.context > 1 and self.exchange is ContextExchange.RING


PLAIN = Execution()
"""As PyTorch does by itself."""
