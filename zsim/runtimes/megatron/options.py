"""Options of Megatron-LM's data parallelism (`DistributedDataParallelConfig`, 2026-08)."""

from collections.abc import Iterator
from math import gcd
from typing import Self

from pydantic import model_validator

from zsim.config_error import refusal, refuse
from zsim.dtype import DType
from zsim.strategy.config_table import Count, Flag, Whole
from zsim.strategy.execution import ContextExchange, TokenFusion
from zsim.strategy.overlap_methods import DEFAULT_METHODS, OverlapMethods
from zsim.strategy.runtime_options import Formats, RuntimeOptions


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
        sequence_parallel: with a tensor axis, what flows between attention and MLP is cut by tokens
            (`TransformerConfig.sequence_parallel`).
        tp_comm_overlap: with sequence_parallel, linear layers of blocks run beside collectives of
            their tokens, in Transformer Engine's userbuffers.
        tp_comm_overlap_cfg: with it, how each product does; what is not said is as `initialize_ub`
            has it.
        num_layers_per_virtual_pipeline_stage: with a pipeline, layers of a chunk: each stage has
            several, which alternate with those of other stages (interleaved); None is one.
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
    even_stages = True
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
    sequence_parallel: Flag = False
    tp_comm_overlap: Flag = False
    tp_comm_overlap_cfg: OverlapMethods = DEFAULT_METHODS
    num_layers_per_virtual_pipeline_stage: Count | None = None
    overlap_p2p_comm: Flag = True
    scatter_gather_tensors_in_pipeline: Flag = False
    cpu_offloading_num_layers: Whole = 0

    @property
    def layers_of_chunk(self) -> int | None:
        """Return the layers of a virtual stage of a pipeline; None if stages have one chunk."""
        return self.num_layers_per_virtual_pipeline_stage

    @property
    def cuts_tokens(self) -> bool:
        """True if hidden states are cut by tokens over the tensor axis."""
        return self.sequence_parallel

    @property
    def fuses_tokens(self) -> TokenFusion | None:
        """Return userbuffers, if linear layers run beside collectives of their tokens."""
        return TokenFusion.USERBUFFERS if self.tp_comm_overlap else None

    @property
    def overlap_methods(self) -> OverlapMethods:
        """Return how products run beside collectives in userbuffers."""
        return self.tp_comm_overlap_cfg

    @model_validator(mode="after")
    def _need_agreement(self) -> Self:
        if self.overlap_param_gather and not self.overlap_grad_reduce:
            refuse([refusal("overlap_param_gather", None, "true needs overlap_grad_reduce = true")])
        if self.tp_comm_overlap and not self.sequence_parallel:  # validate_args
            refuse([refusal("tp_comm_overlap", None, "true needs sequence_parallel = true")])
        if self.tp_comm_overlap_cfg != DEFAULT_METHODS and not self.tp_comm_overlap:
            refuse([refusal("tp_comm_overlap_cfg", None, "needs tp_comm_overlap = true")])
        return self

    def cuts_messages(self, *, tensor: int) -> bool:
        """Return whether each tensor rank sends a part of a hidden state."""
        # `_communicate`: never with `sequence_parallel`
        scatters = self.scatter_gather_tensors_in_pipeline
        return scatters and tensor > 1 and not self.sequence_parallel

    def alignment(self, *, stage: int, data: int) -> int:
        """Return what buckets of multiples of 128 leave (`param_and_grad_buffer.py`)."""
        return 128 // gcd(128, data) if stage else 1

    def refusals(self, *, stage: int, moments: int) -> Iterator[tuple[str, object, str]]:
        """Yield what parameters cannot do that no rank has updated alone."""
        yield from super().refusals(stage=stage, moments=moments)
        if stage == 0 and self.overlap_param_gather:
            # validate_args in training/arguments.py
            yield "overlap_param_gather", None, "true needs stage = 1"

    def formats(self, *, stage: int, compute: DType, optimizer: DType) -> Formats:
        """Return formats: one buffer collects and reduces (`grad_reduce_in_fp32`)."""
        del stage
        wide = DType.FP32 if self.grad_reduce_in_fp32 else compute
        return Formats(
            compute=compute, reduction=wide, whole=wide, reduced=wide, optimizer=optimizer
        )

    def gradient_bytes(self, *, compute: DType, data: int) -> int:
        """Return those of the buffer in which gradients are collected and reduced."""
        del data
        return (DType.FP32 if self.grad_reduce_in_fp32 else compute).size_bytes
