"""Options of PyTorch's FSDP2: `fully_shard` on every block and on the root (torch 2.13)."""

from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, ClassVar, Self

from pydantic import Field, model_validator

from zsim.config_error import refusal, refuse
from zsim.dtype import DType
from zsim.strategy.config_table import Count, Flag, Whole
from zsim.strategy.cuda_graphs import CudaGraphs
from zsim.strategy.execution import TokenFusion
from zsim.strategy.offload import MemoryTier
from zsim.strategy.runtime_options import FloatFormat, Formats, RuntimeOptions
from zsim_runtimes.fsdp2.placement import ShardPlacement


class Sync(StrEnum):
    """Micro-batches of a step in which gradients are communicated."""

    EVERY = "every"
    LAST = "last"


class OffloadPolicy(StrEnum):
    """Where shards, their gradients and the optimizer states are kept between uses."""

    NONE = "none"
    CPU = "cpu"


class PipelineSchedule(StrEnum):
    """Pipeline schedules, as named in `torch.distributed.pipelining.schedules`."""

    ONE_FORWARD_ONE_BACKWARD = "1F1B"
    INTERLEAVED = "Interleaved1F1B"
    INTERLEAVED_ZERO_BUBBLE = "InterleavedZeroBubble"
    ZERO_BUBBLE_IN_V = "ZBVZeroBubble"


class CompileMode(StrEnum):
    """Modes of `torch.compile`."""

    DEFAULT = "default"
    REDUCE_OVERHEAD = "reduce-overhead"


class InputGathers(StrEnum):
    """Module that gathers hidden states sharded by tokens over the tensor axis."""

    MODULE = "module"
    """Attention and MLP, once for their linear layers: `PrepareModuleInput`, as in torchtitan."""
    LINEAR = "linear"
    """Each linear layer: `ColwiseParallel` with `input_layouts=Shard(1)`."""


class FSDP2(RuntimeOptions):
    """Options of `fully_shard` and of the setters of `FSDPModule`.

    Attributes:
        reshard_after_forward: of blocks: true frees after forward and gathers again for backward,
            false keeps; a number keeps parameters sharded over that many ranks, the last gathered
            first.
        reshard_after_backward: false keeps parameters from one micro-batch to the next.
        shard_placement_fn: experts shards the stacked weights of routed experts along their second
            dimension if there are more ranks than experts, as torchtitan does; first pads their
            first dimension, the experts, to a multiple of the ranks, as `fully_shard` does without
            this argument.
        reduce_dtype: dtype in which gradients are reduced; None for the parameters' dtype.
        gradient_sync: last is `set_requires_gradient_sync(False)` before the last micro-batch:
            whole gradients accumulate.
        all_reduce: last is `set_requires_all_reduce(False)` before the last micro-batch: gradients
            are reduce-scattered each time, and all-reduced over replicas once.
        forward_prefetch: number of blocks whose gather each block issues ahead
            (`set_modules_to_forward_prefetch`); 0 leaves it to the host, which runs ahead. None is
            0, and 1 with expert ranks, for whose counts the host waits (torchtitan).
        reduce_scatter_max_input_buffers: largest number of live inputs of reduce-scatters.
        offload_policy: cpu is `CPUOffloadPolicy`: shards are on the host, and updated there.
        pin_memory: with offload: copies to and from shards and gradients do not block the host.
        offload_wrapper: with full checkpointing, `offload_wrapper(checkpoint_wrapper(block))`
            (`torch.distributed.algorithms._checkpoint.checkpoint_wrapper`): inputs of checkpointed
            blocks are in pinned host memory until recompute.
        enable_sequence_parallel: with a tensor axis, hidden states between attention and MLP are
            sharded by tokens: `SequenceParallel` norms, as with torchtitan's key of this name.
        disable_loss_parallel: with sequence parallelism, logits of the whole vocabulary are
            gathered on every rank of the tensor axis, which computes the whole loss; if false, each
            rank has a part of them (`torch.distributed.tensor.parallel.loss_parallel`).
            Torchtitan's key, too.
        input_gathers: with `enable_sequence_parallel`, the module that gathers input tokens of
            linear layers and scatters their gradients: the module around them, or each layer
            separately.
        replicate_embedding: with `enable_sequence_parallel`, the token embedding is not
            parallelized: each rank of the tensor axis has all of it, in addition to its parts of
            other weights.
        repeat_kv: keys and values that several query heads share are copied for each of them before
            attention, as torchtitan's models did until ff0829c1 of 27 January 2026 ("GQA without kv
            repeats").
        reshard_root_after_forward: true frees the parameters of the root after forward, and gathers
            them again for backward: `fully_shard(model, reshard_after_forward=True)`.
        enable_fsdp_float8_all_gather: with `train.float8 = tensorwise`, weight shards of linear
            layers in blocks are cast to float8 before they are gathered (torchao). Their scales are
            computed after each update, with one all-reduce
            (`precompute_float8_dynamic_scale_for_fsdp`).
        enable_float8_tensorwise_tp: with `train.float8 = tensorwise` and sequence parallelism,
            input tokens of linear layers in blocks are cast to float8 before they are gathered, and
            so are gradients of scattered outputs, as torchtitan applies such styles.
        enable_async_tensor_parallel: with sequence parallelism and `train.compile`, GEMMs of linear
            layers in blocks are fused with the gather of their input tokens, or the reduce-scatter
            of their outputs: a rank copies parts of others from symmetric memory while it
            multiplies those that have arrived (`micro_pipeline_tp_pass`,
            torch/_inductor/fx_passes/micro_pipeline_tp.py).
        compile_mode: with `train.compile`, "reduce-overhead" captures the forward and the backward
            of each block in a CUDA graph, without the collectives of FSDP (`mode` of
            `torch.compile`; torchtitan has no option for it).
        pipeline_schedule: the schedule of a pipeline. A stage reduces gradients once, after its
            last backward, and keeps parameters after backward, regardless of `gradient_sync` and
            `reshard_after_backward`; it has no root that could be freed.
        pipeline_stages_per_rank: chunks of layers of each stage; None is 1 for 1F1B, otherwise 2.
        first_stage_less_layers: layers that the embedding counts for when layers are distributed.
        last_stage_less_layers: layers that norm and head count for.
    """

    stages = (3,)
    has_pipeline = True
    sums_copies = True
    takes_frozen = True
    trains_narrow = True
    checkpoints_every_nth = True
    checkpoint_option = "offload_wrapper"
    captures_compiled = True
    receives_separately = True
    execution_options: ClassVar[Mapping[str, str]] = {
        "gathers_logits": "disable_loss_parallel: true",
        "gathers_each": "input_gathers: linear",
        "replicates_embedding": "replicate_embedding: true",
    }
    has_context = True
    has_experts = True
    shards_experts = False  # torchtitan removed its degree in April 2026 (pull request 3167)
    merges_context = True

    reshard_after_forward: Flag | Annotated[Count, Field(ge=2)] = True
    reshard_after_backward: Flag = True
    shard_placement_fn: ShardPlacement = ShardPlacement.EXPERTS
    reduce_dtype: FloatFormat | None = None
    gradient_sync: Sync = Sync.EVERY
    all_reduce: Sync = Sync.EVERY
    forward_prefetch: Whole | None = None
    reduce_scatter_max_input_buffers: Count = 1
    offload_policy: OffloadPolicy = OffloadPolicy.NONE
    pin_memory: Flag = True
    offload_wrapper: Flag = False
    enable_sequence_parallel: Flag = True
    disable_loss_parallel: Flag = False
    input_gathers: InputGathers = InputGathers.MODULE
    replicate_embedding: Flag = False
    repeat_kv: Flag = False
    reshard_root_after_forward: Flag = False
    enable_fsdp_float8_all_gather: Flag = False
    enable_float8_tensorwise_tp: Flag = True
    enable_async_tensor_parallel: Flag = False
    compile_mode: CompileMode = CompileMode.DEFAULT
    pipeline_schedule: PipelineSchedule = PipelineSchedule.ONE_FORWARD_ONE_BACKWARD
    pipeline_stages_per_rank: Count | None = None
    first_stage_less_layers: Whole = 1
    last_stage_less_layers: Whole = 1

    @model_validator(mode="after")
    def _need_agreement(self) -> Self:
        if self.disable_loss_parallel and not self.enable_sequence_parallel:
            why = "true needs enable_sequence_parallel = true"
            refuse([refusal("disable_loss_parallel", None, why)])
        if self.gathers_each and not self.enable_sequence_parallel:
            why = f"{self.input_gathers} needs enable_sequence_parallel = true"
            refuse([refusal("input_gathers", None, why)])
        if self.replicate_embedding and not self.enable_sequence_parallel:
            why = "true needs enable_sequence_parallel = true"
            refuse([refusal("replicate_embedding", None, why)])
        if self.compile_mode is CompileMode.REDUCE_OVERHEAD and self.offload_wrapper:
            # CUDAGraph trees keep tensors of a graph in their own pool on the device
            why = "reduce-overhead excludes offload_wrapper: graphs copy nothing to the host"
            refuse([refusal("compile_mode", None, why)])
        self._need_cast_shards()
        self._need_fusable()
        chunks, is_interleaved = self.pipeline_stages_per_rank, self.is_interleaved
        if chunks is not None and is_interleaved == (chunks == 1):
            why = f"must be {'at least 2' if is_interleaved else 1} for {self.pipeline_schedule}"
            refuse([refusal("pipeline_stages_per_rank", chunks, why)])
        if self.stages_in_v and self.chunks_of_stage != 2:
            why = f"must be 2 for {self.pipeline_schedule}"
            refuse([refusal("pipeline_stages_per_rank", chunks, why)])
        return self

    @property
    def cuda_graphs(self) -> CudaGraphs | None:
        """Return the parts of a step in CUDA graphs; None if there are none."""
        if self.compile_mode is CompileMode.DEFAULT:
            return None
        return CudaGraphs(attention=True, mlp=True, joined=True)

    def _need_cast_shards(self) -> None:
        """Reject float8 gathers with shards on the host, or over fewer ranks for backward."""
        if not self.enable_fsdp_float8_all_gather:
            return
        name = "enable_fsdp_float8_all_gather"
        reshard = self.reshard_after_forward
        if not isinstance(reshard, bool):
            # FSDPParam.all_gather_inputs (_fsdp_param.py): NotImplementedError for a tensor with an
            # extension that is sharded differently for backward
            why = f"true with reshard_after_forward = {reshard}: PyTorch refuses it"
            refuse([refusal(name, None, why)])
        if self.on_host:
            why = f"true with offload_policy = {self.offload_policy}: is not modelled"
            refuse([refusal(name, None, why)])

    def _need_fusable(self) -> None:
        """Reject fusion of GEMMs with collectives that the surrounding module does not issue."""
        if not self.enable_async_tensor_parallel:
            return
        name = "enable_async_tensor_parallel"
        if not self.enable_sequence_parallel:
            refuse([refusal(name, None, "true needs enable_sequence_parallel = true")])
        if self.gathers_each:
            why = f"true with input_gathers = {self.input_gathers}: is not modelled"
            refuse([refusal(name, None, why)])

    def gathered_ahead(self, *, expert_order: bool) -> int:
        """Return the number of blocks that each block gathers ahead in forward."""
        return expert_order if self.forward_prefetch is None else self.forward_prefetch

    @property
    def is_interleaved(self) -> bool:
        """True if pipeline stages have several chunks."""
        return self.pipeline_schedule is not PipelineSchedule.ONE_FORWARD_ONE_BACKWARD

    @property
    def splits_backward(self) -> bool:
        """True if pipeline stages compute gradients of inputs first, those of weights later."""
        return self.stages_in_v or (
            self.pipeline_schedule is PipelineSchedule.INTERLEAVED_ZERO_BUBBLE
        )

    @property
    def stages_in_v(self) -> bool:
        """True if the second of two chunks runs from the last stage to the first (V shape)."""
        return self.pipeline_schedule is PipelineSchedule.ZERO_BUBBLE_IN_V

    @property
    def chunks_of_stage(self) -> int:
        """Return the number of chunks of a stage: 2 by default if interleaved, as in torchtitan."""
        return self.pipeline_stages_per_rank or (2 if self.is_interleaved else 1)

    def layers_of_stages(self, *, layers: int, stages: int) -> tuple[int, ...]:
        """Return the number of layers of each virtual pipeline stage.

        Raises:
            ValueError: there are too few layers.
        """
        # generate_llm_fqn_per_model_part of torchtitan 0.2.2, distributed/pipeline_parallel.py
        first, last = self.first_stage_less_layers, self.last_stage_less_layers
        count = stages * self.chunks_of_stage
        each, more = divmod(layers + first + last, count)
        if each < max(1, first, last):
            raise ValueError(
                f"model.layers: {layers} are too few for {count} stages of a pipeline, of which "
                f"the first has {first} less and the last {last} less"
            )
        found = [each + (stage < more) for stage in range(count)]
        found[0] -= first
        found[-1] -= last
        return tuple(found)

    @property
    def gathers_logits(self) -> bool:
        """True if ranks of the tensor axis gather logits of the whole vocabulary for the loss."""
        return self.disable_loss_parallel

    @property
    def composes_loss(self) -> bool:
        """True if `loss_parallel` computes the loss over parts of the vocabulary."""
        return self.enable_sequence_parallel and not self.disable_loss_parallel

    @property
    def weighs_at_source(self) -> bool:
        """True: `combine` of torchtitan's `AllToAllTokenDispatcher`."""
        return True

    @property
    def cuts_tokens(self) -> bool:
        """True if hidden states are sharded by tokens over the tensor axis."""
        return self.enable_sequence_parallel

    @property
    def keeps_gathered(self) -> bool:
        """True: autograd keeps the inputs of linear layers that `PrepareModuleInput` gathered."""
        return True

    @property
    def replicates_embedding(self) -> bool:
        """True if each rank of the tensor axis has the whole token embedding."""
        return self.replicate_embedding

    @property
    def writes_rotary(self) -> bool:
        """True: torchtitan's `apply_rotary_emb`, as in its Llama and Qwen 3."""
        return True

    @property
    def gathers_each(self) -> bool:
        """True if each linear layer gathers its input tokens separately."""
        return self.input_gathers is InputGathers.LINEAR

    @property
    def gathers_float8(self) -> bool:
        """True if weights of float8 linear layers are cast before they are gathered."""
        return self.enable_fsdp_float8_all_gather

    @property
    def gathers_float8_tokens(self) -> bool:
        """True if input tokens of float8 linear layers are cast before they are gathered."""
        return self.enable_float8_tensorwise_tp

    @property
    def fuses_tokens(self) -> TokenFusion | None:
        """Return COMPILER if GEMMs of linear layers are fused with their collectives, else None."""
        return TokenFusion.COMPILER if self.enable_async_tensor_parallel else None

    @property
    def rearranges(self) -> bool:
        """True: tensors of DTensor's `SequenceParallel` have sequences first, tokens second."""
        return True

    @property
    def on_host(self) -> bool:
        """True if shards are in host memory."""
        return self.offload_policy is OffloadPolicy.CPU

    def tiers(self, *, stage: int) -> dict[str, MemoryTier]:
        """Return the tier that shards are moved to."""
        del stage
        return {"offload_policy": MemoryTier.HOST} if self.on_host else {}

    def inner(self, *, stage: int, data: int) -> tuple[str, int | None]:
        """Return the option, and the ranks over which parameters stay sharded after forward.

        None if they are freed, kept whole, or sharded over all data ranks.
        """
        del stage
        reshard = self.reshard_after_forward
        # Over all ranks it is equivalent to true, as in PyTorch.
        whole = isinstance(reshard, bool) or reshard == data
        return "fsdp2.reshard_after_forward", None if whole else reshard

    def formats(self, *, stage: int, compute: DType, optimizer: DType) -> Formats:
        """Return dtypes: whole gradients accumulate in `reduce_dtype`, sharded ones in theirs.

        torch 2.13, `FSDPParam.to_accumulated_grad_if_needed`. In a backward of two parts, gradients
        of several micro-batches accumulate in their own dtype (`stage_backward_weight`) until FSDP
        converts them.
        """
        del stage
        reduction = self.reduce_dtype or compute
        narrower = min(compute, reduction, key=lambda each: each.size_bytes)
        return Formats(
            compute=compute,
            reduction=reduction,
            whole=narrower if self.splits_backward else reduction,
            reduced=optimizer,
            optimizer=optimizer,
        )

    def fewer_gathered(self) -> str | None:
        """Return the option that frees blocks after forward."""
        return None if self.reshard_after_forward is True else "reshard_after_forward=true"

    @classmethod
    def offloads(cls, *, stage: int) -> tuple[tuple[str, ...], ...]:
        """Return `CPUOffloadPolicy`, which moves all states."""
        del stage
        return (("offload_policy=cpu",),)
