"""How a model is sharded and trained: by zsim's own ZeRO stages, or those of another runtime.

A `Strategy` is nested like a scenario file, and its fields have the same names: `zero.stage` here
is `stage` of `[zero]` there. If a file may leave open a value that a run needs (the size of the
data axis, say), its table and the one here share a base class, so that an option is defined once.
"""

from collections.abc import Iterator
from functools import cached_property
from typing import Annotated, Self, TypeVar

from pydantic import BeforeValidator, InstanceOf, model_validator
from pydantic_core import InitErrorDetails

from zsim.config_error import ConfigError, refusal, refuse, shown, whole
from zsim.dtype import DType
from zsim.strategy.activations import Activations, Checkpointing
from zsim.strategy.config_table import Count, Table
from zsim.strategy.execution import (
    Execution,
    Float8,
    Loss,
    NarrowWeights,
    Recomputed,
    TokenDispatch,
    TokenFusion,
)
from zsim.strategy.expert_ranks import Degree, against_order, cut_axis
from zsim.strategy.offload import MemoryTier, Offload
from zsim.strategy.optimizer_rule import Optimizer
from zsim.strategy.overlap_methods import DEFAULT_METHODS
from zsim.strategy.parallel_axes import ParallelAxes
from zsim.strategy.runtime_options import KeptFormats, RuntimeOptions
from zsim.strategy.train import Train, quantizer_of
from zsim.strategy.zero_knobs import BUCKET_ELEMENTS, FusedBuffers, ZeroKnobs

STAGES = (0, 1, 2, 3)
"""zsim's own ZeRO stages."""


def _stage(value: object) -> object:
    stage = whole(value)
    if isinstance(stage, bool) or stage not in STAGES:
        raise ValueError("must be 0, 1, 2 or 3")
    return stage


Stage = Annotated[int, BeforeValidator(_stage)]


class Parallel(ParallelAxes):
    """`[parallel]` of a strategy: the size of each axis.

    `data` is the number of ranks that model states are sharded over.
    """

    data: Count = 1


class Zero(ZeroKnobs):
    """`[zero]` of a strategy.

    Attributes:
        stage: ZeRO stage (Rajbhandari et al. 2020, section 5): 0 replicates everything, 1 shards
            optimizer state, 2 gradients as well, 3 parameters as well.
        emulate: options of the emulated runtime; None for zsim's own stages.
    """

    stage: Stage
    emulate: InstanceOf[RuntimeOptions] | None = None


Options = TypeVar("Options", bound=RuntimeOptions)


class Strategy(Table):
    """Degrees of parallelism, ZeRO stage, precision and the options of the schedule."""

    parallel: Parallel = Parallel()
    zero: Zero
    activations: Activations = Activations()
    offload: Offload = Offload()
    train: Train = Train()

    @model_validator(mode="after")
    def _need_agreement(self) -> Self:
        """Reject tables that contradict each other; report all contradictions at once."""
        refuse(
            [
                *self._against_runtime(),
                *self._against_stage(),
                *self._against_checkpointing(),
                *self._against_experts(),
                *self.train.contradictions(self.zero.emulate, self.offload, self.zero.stage),
                *self.offload.contradictions(
                    stage=self.zero.stage,
                    emulates=self.zero.emulate is not None,
                    of_runtime=self._checkpoint_key,
                    pipeline=self.parallel.pipeline,
                    moments=self.moments,
                    has_groups=bool(self.train.groups),
                ),
            ]
        )
        return self

    def _against_runtime(self) -> Iterator[InitErrorDetails]:
        runtime, parallel, zero = self.zero.emulate, self.parallel, self.zero
        if parallel.pipeline > 1 and (runtime is None or not runtime.has_pipeline):
            *others, last = (each.table() for each in RuntimeOptions.kinds() if each.has_pipeline)
            why = f"is modelled for emulate = {', '.join(others)} or {last} alone"
            yield refusal("parallel.pipeline", parallel.pipeline, why)
        if runtime is None:
            return
        name = type(runtime).__name__
        if zero.stage not in runtime.stages:
            allowed = " or ".join(map(str, runtime.stages))
            yield refusal("zero.stage", zero.stage, f"must be {allowed} for {name}")
        if self.gathers_logits and self.train.loss is Loss.CHUNKED_HEAD:
            why = f"{self.train.loss} never has the whole logits that disable_loss_parallel gathers"
            yield refusal("train.loss", None, why)
        if runtime.gathers_float8 and self.train.float8 is not Float8.TENSORWISE:
            field, why = "enable_fsdp_float8_all_gather", "true needs train.float8 = tensorwise"
            yield refusal(f"zero.{runtime.table()}.{field}", None, why)
        if runtime.keeps_float8 and self.train.float8 is None:
            yield refusal(
                f"zero.{runtime.table()}.fp8_param_gather", None, "true needs train.float8"
            )
        if runtime.fuses_tokens is TokenFusion.COMPILER and parallel.tensor > 1:
            yield from self._against_fused_tokens(runtime.table())
        if runtime.fuses_tokens is TokenFusion.USERBUFFERS:
            yield from self._against_userbuffers(runtime.table())
        if runtime.in_place_loss and self.train.loss is not Loss.TORCH:
            yield refusal("train.loss", self.train.loss, f"must be torch for {name}")
        where = runtime.without_replicas(stage=zero.stage)
        if parallel.replicate > 1 and where is not None:
            why = f"is not modelled for {name}{where}"
            yield refusal("parallel.replicate", parallel.replicate, why)
        if self.activations.every_nth > 1 and not runtime.checkpoints_every_nth:
            why = f"is not in {name}, allowed is 1"
            yield refusal("activations.every_nth", self.activations.every_nth, why)
        for option, value, why in runtime.refusals(stage=zero.stage, moments=self.moments):
            yield refusal(f"zero.{runtime.table()}.{option}", value, why)
        own: dict[str, tuple[object, object]] = {
            f"zero.{knob}": (getattr(zero, knob), field.default)
            for knob, field in ZeroKnobs.model_fields.items()
        }
        for knob, (value, kept) in own.items():
            if value != kept:
                why = f"is for zsim's own stages; with emulate it stays at {shown(kept)}"
                yield refusal(knob, value, why)

    def _against_fused_tokens(self, table: str) -> Iterator[InitErrorDetails]:
        """Yield conflicts with PyTorch's asynchronous tensor parallelism."""
        field = f"zero.{table}.enable_async_tensor_parallel"
        if not self.train.compile:  # maybe_enable_async_tp of torchtitan
            yield refusal(field, None, "true needs train.compile = true")
        if self.train.recipe is not None and not self.casts_tokens:
            why = "true is not modelled where tokens are cast to 8-bit floats behind their gather"
            yield refusal(field, None, why)

    def _against_userbuffers(self, table: str) -> Iterator[InitErrorDetails]:
        """Yield conflicts with Transformer Engine's userbuffers."""
        field = f"zero.{table}.tp_comm_overlap"
        if self.parallel.tensor == 1:
            # validate_args (megatron/training/arguments.py) turns sequence_parallel off, then
            # requires it
            yield refusal(field, None, "true needs parallel.tensor of at least 2")
        if self.activations.checkpointing is Checkpointing.FULL:
            # without autograd, TE gathers first, then multiplies (`is_grad_enabled` in
            # `_LayerNormLinear.forward`): other kernels than in recompute
            yield refusal(field, None, "true is not modelled with activations.checkpointing = full")

    def _against_stage(self) -> Iterator[InitErrorDetails]:
        zero = self.zero
        if zero.secondary is not None and zero.stage != 3:
            yield refusal("zero.secondary", zero.secondary, f"is for stage 3, not {zero.stage}")
        if zero.tiles > 1 and zero.stage != 3:
            yield refusal("zero.tiles", zero.tiles, f"is for stage 3, not {zero.stage}")
        if zero.tiles > 1:
            yield from self.parallel.against_tiles(zero.tiles)
        name, inner = self._inner
        if inner is not None and (inner < 1 or self.parallel.data % inner):
            yield refusal(f"zero.{name}", inner, f"must divide data = {self.parallel.data}")
        yield from self.parallel.against_context(self.parallel.data, self._inner)
        if zero.fused_buffers is FusedBuffers.MODEL:
            if zero.stage == 3:
                why = "is for stages 0 to 2, stage 3 gathers units"
                yield refusal("zero.fused_buffers", zero.fused_buffers, why)
            why = "is for fused_buffers = constant"
            if zero.bucket_elements != BUCKET_ELEMENTS:
                yield refusal("zero.bucket_elements", zero.bucket_elements, why)
            if zero.first_bucket_elements is not None:
                yield refusal("zero.first_bucket_elements", zero.first_bucket_elements, why)
        elif zero.first_bucket_elements is not None and zero.stage == 3:
            why = "is for stages 0 to 2, stage 3 reduces units"
            yield refusal("zero.first_bucket_elements", zero.first_bucket_elements, why)

    def _against_checkpointing(self) -> Iterator[InitErrorDetails]:
        activations, pipeline = self.activations, self.parallel.pipeline
        if activations.checkpointing is Checkpointing.OPERATIONS:
            for field, value, it in (
                ("zero.tiles", self.zero.tiles, self.zero.tiles > 1),
                ("parallel.context_exchange", "ring", self.execution.passes_keys),
            ):
                if it:
                    yield refusal(field, value, "is not modelled for checkpointing = operations")
        if activations.checkpointing is not Checkpointing.FULL:
            if activations.partition:
                yield refusal("activations.partition", None, "true needs checkpointing = full")
            if activations.every_nth > 1:
                why = "needs checkpointing = full"
                yield refusal("activations.every_nth", activations.every_nth, why)
            if self.offload.checkpoints is not MemoryTier.DEVICE:
                why = "needs activations.checkpointing = full"
                yield refusal("offload.checkpoints", self.offload.checkpoints, why)
            yield from self._against_moved("true needs activations.checkpointing = full")
        if self.layers_on_host:
            yield from self._against_layers_on_host()
        graphs = None if self.zero.emulate is None else self.zero.emulate.cuda_graphs
        if graphs is not None and not graphs.iteration:
            yield from self._against_graphs_of_blocks()
        if activations.partition and pipeline > 1:
            why = f"true is not modelled for pipeline = {pipeline}"
            yield refusal("activations.partition", None, why)
        if activations.partition and self.cuts_tokens:
            why = "true cuts what sequence parallelism has cut"
            yield refusal("activations.partition", None, why)

    def _against_graphs_of_blocks(self) -> Iterator[InitErrorDetails]:
        """Yield conflicts with CUDA graphs of blocks."""
        runtime = self.zero.emulate
        assert runtime is not None
        if runtime.captures_compiled:  # cudagraph trees of torch.compile
            field = f"zero.{runtime.table()}.compile_mode"
            if not self.train.compile:
                yield refusal(field, None, "reduce-overhead needs train.compile = true")
            if self.parallel.tensor > 1:  # torchtitan #2486
                why = "reduce-overhead excludes parallel.tensor: DTensor's collectives hang in it"
                yield refusal(field, None, why)
        elif self.activations.checkpointing is Checkpointing.FULL:
            why = "full needs a CUDA graph of the whole iteration, or none (cuda_graph_impl)"
            yield refusal("activations.checkpointing", None, why)

    def _against_experts(self) -> Iterator[InitErrorDetails]:
        """Yield conflicts of expert ranks; none if experts have no separate rank order."""
        if not self.has_expert_order:
            return
        parallel, runtime = self.parallel, self.zero.emulate
        field, degree = "parallel.expert", parallel.expert
        if degree == 1:
            field, degree = "parallel.expert_tensor", self.expert_tensor
        if runtime is not None and not runtime.shards_experts and self.expert_tensor > 1:
            why = f"must be 1 for {type(runtime).__name__}, which does not shard experts"
            yield refusal("parallel.expert_tensor", self.expert_tensor, why)
            return
        if runtime is not None and not runtime.has_experts:
            *others, last = [each.table() for each in RuntimeOptions.kinds() if each.has_experts]
            known = f"{', '.join(others)} or {last}" if others else last
            why = f"is modelled for emulate = {known} and zsim's own stages alone"
            yield refusal(field, degree, why)
            return
        order, asked = self.dense_order, (parallel.expert, self.expert_tensor)
        if parallel.data % (self.inner or parallel.context):
            return  # another rule reports this
        if wrong := [*against_order(order, *asked)]:
            yield from wrong
            return
        if (cut := cut_axis(order, ("tensor", "context"), *asked)) is not None:
            why = f"cuts the {dict(order)[cut]} ranks of {cut}, which is not modelled"
            yield refusal(field, degree, why)
        if parallel.tensor > 1 and not self.cuts_tokens:
            # validate_args of Megatron-LM: "sequence parallelism must be used"
            yield refusal(field, degree, "needs sequence_parallel = true with several tensor ranks")
        if runtime is not None and (option := runtime.without_experts()):
            why = f"true is not modelled with {field} = {degree}"
            yield refusal(f"zero.{runtime.table()}.{option}", None, why)
        name, inner = self._inner
        if inner is not None and runtime is not None:
            yield refusal(f"zero.{name}", inner, f"is not modelled with {field} = {degree}")
        for name, value, it in (
            ("zero.secondary", self.zero.secondary, self.zero.secondary is not None),
            ("zero.tiles", self.zero.tiles, self.zero.tiles > 1),
            ("offload.optimizer", self.offload.optimizer, self.offload.moves_states),
        ):
            if it:
                yield refusal(name, value, f"is not modelled with {field} = {degree}")

    def _against_moved(self, why: str) -> Iterator[InitErrorDetails]:
        """Yield an error if the runtime moves checkpoints to the host."""
        runtime = self.zero.emulate
        if runtime is not None and runtime.moves_checkpoints:
            yield refusal(self._checkpoint_key, None, why)

    @property
    def _checkpoint_key(self) -> str:
        """The key with which the runtime moves checkpoints to the host; "" if it has none."""
        runtime = self.zero.emulate
        if runtime is None or runtime.checkpoint_option is None:
            return ""
        return f"zero.{runtime.table()}.{runtime.checkpoint_option}"

    def _against_layers_on_host(self) -> Iterator[InitErrorDetails]:
        """Yield conflicts with layers whose activations are in host memory."""
        runtime, mode = self.zero.emulate, self.activations.checkpointing
        assert runtime is not None
        option = f"zero.{runtime.table()}.{runtime.layers_option}"
        if self.parallel.pipeline > 1:
            why = f"does not go with pipeline = {self.parallel.pipeline}"
            yield refusal(option, self.layers_on_host, why)
        if mode is not Checkpointing.NONE:
            why = f"does not go with activations.checkpointing = {mode}"
            yield refusal(option, self.layers_on_host, why)

    @property
    def delays_updates(self) -> bool:
        """True if the gradients of a step are applied too late for the next one."""
        runtime = self.zero.emulate
        return self.offload.delayed_update if runtime is None else runtime.delays_updates

    @property
    def layers_on_host(self) -> int:
        """Number of first layers whose activations are in host memory until their backward."""
        return 0 if self.zero.emulate is None else self.zero.emulate.layers_on_host

    @property
    def stored_least(self) -> int:
        """Least elements of a tensor of such a layer to be moved to host memory."""
        return 0 if self.zero.emulate is None else self.zero.emulate.stored_least

    @property
    def checkpoint_tier(self) -> MemoryTier:
        """Tier of memory of checkpoints from forward until recompute."""
        runtime = self.zero.emulate
        moves = runtime is not None and runtime.moves_checkpoints
        return MemoryTier.HOST if moves else self.offload.checkpoints

    @property
    def keeps_master(self) -> bool:
        """True if each parameter has a master copy: for its dtype, or in another tier."""
        return self.train.precision.has_master or self.offload.optimizer is not MemoryTier.DEVICE

    @cached_property
    def execution(self) -> Execution:
        """Return how blocks are executed."""
        runtime = self.zero.emulate
        sharing = runtime if self.parallel.expert > 1 else None
        return Execution(
            operations=self.activations.checkpointing is Checkpointing.OPERATIONS,
            early_stop=self.activations.early_stop,
            compiled=self.train.compile,
            recipe=self.train.recipe,
            quantizer=quantizer_of(runtime),
            wide_layers=self.train.wide_layers,
            float8_gathers=runtime is not None and runtime.gathers_float8,
            float8_tokens=self.casts_tokens,
            fuses_tokens=None if runtime is None else runtime.fuses_tokens,
            overlap_methods=DEFAULT_METHODS if runtime is None else runtime.overlap_methods,
            splits_outputs=runtime is None or runtime.splits_outputs,
            context=self.parallel.context,
            exchange=self.parallel.exchange(runtime),
            expert=self.parallel.expert,
            dispatch=self._dispatch,
            whole_experts=self.parallel.tensor > 1
            and self.has_expert_order
            and self.expert_tensor == 1,
            expert_tensor=self.expert_tensor if self.parallel.expert > 1 else 1,
            own_loads=runtime is not None and not runtime.sums_loads,
            weighs_at_source=sharing is not None and sharing.weighs_at_source,
            gathers_experts=sharing is not None and sharing.gathers_experts,
            merges_micro_batches=sharing is not None and sharing.merges_micro_batches,
            overlaps_shared=sharing is not None and sharing.overlaps_shared,
            loops_experts=sharing is not None and sharing.loops_experts,
            recomputes=tuple(each for each in self.recomputes if each is not Recomputed.ATTENTION),
            cuts_latent=runtime is None or runtime.cuts_latent,
            merges=runtime is not None and runtime.merges_context,
            splits=runtime is not None and runtime.splits_backward and self.parallel.pipeline > 1,
            loss=self.train.loss,
            metrics=self.train.metrics,
            norms=self.train.norms,
            writes_rotary=runtime is not None and runtime.writes_rotary,
            repeats_keys=runtime is not None and runtime.repeats_keys,
            holds_logits=self.train.holds_logits,
            gathers_logits=self.gathers_logits,
            composes_loss=runtime is not None and runtime.composes_loss,
            replicates_embedding=runtime is not None and runtime.replicates_embedding,
            gathers_each=runtime is not None and runtime.gathers_each,
            rearranges=runtime is not None and runtime.rearranges,
            tiles=self.zero.tiles,
        )

    @property
    def recomputes(self) -> tuple[Recomputed, ...]:
        """Parts of blocks that selective checkpointing runs again in backward."""
        if self.activations.checkpointing is not Checkpointing.SELECTIVE:
            return ()
        runtime = self.zero.emulate
        return (Recomputed.ATTENTION,) if runtime is None else runtime.recomputes

    @property
    def _dispatch(self) -> TokenDispatch | None:
        """The library that exchanges tokens of experts, if expert ranks use one."""
        runtime = self.zero.emulate
        return None if runtime is None or self.parallel.expert == 1 else runtime.token_dispatch

    @property
    def ranks(self) -> int:
        """World size."""
        return self.replicas * self.parallel.tensor * self.parallel.pipeline

    @property
    def replicas(self) -> int:
        """Ranks that see different data: gradients are averaged over them."""
        return self.parallel.replicate * self.parallel.data

    @property
    def dense_order(self) -> tuple[Degree, ...]:
        """Axes of one replica of a pipeline stage and their ranks, the fastest first."""
        tensor, data = ("tensor", self.parallel.tensor), self.parallel.data
        name, ranks = ("inner", self.inner) if self.inner else ("context", self.parallel.context)
        if ranks == 1:
            return tensor, ("data", data)
        return tensor, (name, ranks), ("data", data // ranks)

    @property
    def expert_tensor(self) -> int:
        """Ranks that hold parts of the same experts."""
        return self.parallel.expert_shards(self.zero.emulate)

    @property
    def has_expert_order(self) -> bool:
        """True if ranks of experts differ from the tensor and data ranks of other layers."""
        return self.parallel.expert > 1 or self.expert_tensor != self.parallel.tensor

    @property
    def expert_data(self) -> int:
        """Ranks of a replica and stage that hold the same part of the same experts."""
        ranks = self.parallel.data * self.parallel.tensor
        return ranks // (self.parallel.expert * self.expert_tensor)

    @property
    def bucket_limit(self) -> int | None:
        """Most elements of a bucket of several parameters; None if all parameters are in one."""
        return None if self.zero.fused_buffers is FusedBuffers.MODEL else self.zero.bucket_elements

    @property
    def reduction_format(self) -> DType:
        """Format in which zsim's own stages reduce; fp32 for one buffer, as before ZeRO."""
        fuses, precision = self.zero.stage == 0 and self.bucket_limit is None, self.train.precision
        return precision.optimizer if fuses else precision.compute

    @property
    def first_bucket_limit(self) -> int | None:
        """Most elements of the bucket that backward completes first; None if all are in one."""
        first = self.zero.first_bucket_elements
        return self.bucket_limit if first is None else first

    @property
    def cuts_checkpoints(self) -> bool:
        """True if a rank keeps only its share of each checkpoint."""
        return self.activations.partition and self.parallel.tensor > 1

    @property
    def cuts_tokens(self) -> bool:
        """True if ranks of the tensor axis hold different tokens of the hidden state."""
        runtime, asked = self.zero.emulate, self.zero.sequence_parallel
        return self.parallel.tensor > 1 and (asked if runtime is None else runtime.cuts_tokens)

    @property
    def casts_tokens(self) -> bool:
        """True if such tokens are cast to float8 before linear layers gather them."""
        runtime = self.zero.emulate
        if runtime is None or not (self.cuts_tokens and runtime.gathers_float8_tokens):
            return False
        return self.train.recipe in runtime.casts_tokens_with

    @property
    def keeps_gathered(self) -> bool:
        """True if the gathered hidden state is kept for backward; never if operations recompute."""
        by_operations = self.activations.checkpointing is Checkpointing.OPERATIONS
        runtime = self.zero.emulate
        return runtime is not None and runtime.keeps_gathered and not by_operations

    @property
    def gathers_logits(self) -> bool:
        """True if ranks of the tensor axis gather the logits of the whole vocabulary."""
        runtime = self.zero.emulate
        return self.parallel.tensor > 1 and runtime is not None and runtime.gathers_logits

    @property
    def in_place_loss(self) -> bool:
        """True if the gradient of the logits overwrites their softmax, on every rank."""
        return self.zero.emulate is not None and self.zero.emulate.in_place_loss

    @property
    def moves_checkpoints(self) -> bool:
        """True if checkpoints are moved from the memory where forward wrote them."""
        full = self.activations.checkpointing is Checkpointing.FULL
        leaves = self.checkpoint_tier is not MemoryTier.DEVICE
        return full and (self.cuts_checkpoints or leaves or self.zero.contiguous)

    def rule_of(self, parameter: str) -> Optimizer:
        """Return the rule that updates the parameter of that name."""
        rules = (group.rule for group in self.train.groups if group.holds(parameter))
        return next(rules, self.train.optimizer)

    @property
    def narrow_weights(self) -> NarrowWeights:
        """How weights of linear layers with narrow GEMMs are kept between steps."""
        runtime = self.zero.emulate
        if runtime is None or not runtime.keeps_float8:
            return NarrowWeights.CAST
        # a scale along one axis does not serve the other, so both copies are made of 16 bits
        wide = self.train.float8 is Float8.MXFP8
        return NarrowWeights.CAST_FROM_SHARDS if wide else NarrowWeights.KEPT

    @property
    def kept_formats(self) -> KeptFormats:
        """Formats of the states of the optimizer, and of the gradients that it reads."""
        runtime, precision = self.zero.emulate or RuntimeOptions(), self.train.precision
        return runtime.kept_formats(
            compute=precision.compute,
            optimizer=precision.optimizer,
            moments=self.moments,
            recipe=self.train.recipe,
        )

    @property
    def keeps_plain_states(self) -> bool:
        """True if all states, and the gradients to apply, are in the optimizer's format."""
        kept = self.kept_formats
        return {kept.gradient, kept.master, *kept.moments} == {self.train.precision.optimizer}

    @property
    def moments(self) -> int:
        """Number of moments that the optimizer keeps for each parameter."""
        return self.train.optimizer.moments

    def options(self, kind: type[Options]) -> Options:
        """Return the options of the emulated runtime, which must be of type `kind`.

        Raises:
            ConfigError: another runtime is emulated, or none.
        """
        if isinstance(self.zero.emulate, kind):
            return self.zero.emulate
        name = type(self.zero.emulate).__name__
        raise ConfigError(f"zero.emulate: {name} must be {kind.__name__}")

    @property
    def inner(self) -> int | None:
        """Size of the inner part of a split data axis; None if it is not split."""
        return self._inner[1]

    @property
    def _inner(self) -> tuple[str, int | None]:
        """The option that splits the data axis, and the inner size or None."""
        if self.zero.emulate is None:
            return "secondary", self.zero.secondary
        return self.zero.emulate.inner(stage=self.zero.stage, data=self.parallel.data)

    @property
    def reduces_once(self) -> bool:
        """True if gradients are reduced only in the last micro-batch."""
        once = self.zero.reduce_once or self.train.gradient_accumulation_steps == 1
        return self.zero.stage < 2 or once
