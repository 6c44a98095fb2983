"""How a model is sharded and trained: zsim's own ZeRO stages, or those of another runtime."""

from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import TypeVar

from zsim.dtype import DType
from zsim.strategy.execution import PLAIN, Execution, Loss
from zsim.strategy.learning_rate import LearningRates
from zsim.strategy.optimizer_rule import Adam, Optimizer, ParameterGroup
from zsim.strategy.runtime_options import RuntimeOptions


class StrategyError(ValueError):
    """A knob outside what is allowed; the message starts with the name of the field."""


class Precision(StrEnum):
    """Format of parameters and gradients in forward and backward.

    FP16 and BF16 keep fp32 master weights (Micikevicius et al. 2018, section 3.1); FP32 and FP64
    train the parameters themselves. FP64 is for tests.
    """

    FP16 = "fp16"
    BF16 = "bf16"
    FP32 = "fp32"
    FP64 = "fp64"

    @property
    def compute(self) -> DType:
        """Format of parameters, gradients and activations."""
        return _COMPUTE[self]

    @property
    def optimizer(self) -> DType:
        """Format of master weights and moments."""
        return _OPTIMIZER[self]

    @property
    def has_master(self) -> bool:
        """Whether the optimizer keeps its own copy of the parameters."""
        return self.compute is not self.optimizer


_COMPUTE = {precision: DType(precision.value) for precision in Precision}
_OPTIMIZER = {
    precision: DType.FP64 if precision is Precision.FP64 else DType.FP32 for precision in Precision
}


class Keep(StrEnum):
    """What stays gathered between forward and backward in stage 3."""

    NOTHING = "nothing"
    EVERYTHING = "everything"


class FusedBuffers(StrEnum):
    """How large buffers are in which gradients are fused for one collective and one update.

    CONSTANT: at most `bucket_elements`, however large the model (ZeRO-R CB, Rajbhandari et al.
    2020, section 6.2). MODEL: all gradients in one, and all of their fp32 copy, as trainers had it
    before.
    """

    CONSTANT = "constant"
    MODEL = "model"


class Checkpointing(StrEnum):
    """Which activations are kept for backward.

    FULL: of a block, its input alone. SELECTIVE: all but the softmax of plain attention's scores,
    which the module itself makes again (Korthikanti et al. 2022, section 5): the schedule runs
    nothing twice. OPERATIONS: results of attention and of every second matrix product; the module
    makes the rest again.
    """

    NONE = "none"
    SELECTIVE = "selective"
    OPERATIONS = "operations"
    FULL = "full"


@dataclass(frozen=True, slots=True, kw_only=True)
class LossScale:
    """Dynamic loss scale (Micikevicius et al. 2018, section 3.2), used with fp16.

    On overflow the step is skipped and the scale multiplied by `backoff`, down to `minimum`; after
    `interval` steps without one it is multiplied by `growth`.
    """

    initial: float = 2.0**16
    growth: float = 2.0
    backoff: float = 0.5
    interval: int = 2000
    minimum: float = 1.0

    def __post_init__(self) -> None:
        if self.initial < self.minimum or self.minimum <= 0:
            raise StrategyError(
                f"loss_scale.initial: {self.initial} must be at least minimum {self.minimum} > 0"
            )
        if self.growth < 1 or not 0 < self.backoff <= 1 or self.interval < 1:
            raise StrategyError("loss_scale: growth >= 1, 0 < backoff <= 1 and interval >= 1")


Options = TypeVar("Options", bound=RuntimeOptions)

STAGES = (0, 1, 2, 3)
"""The ZeRO stages of zsim's own."""

BUCKET_ELEMENTS = 500_000_000
"""DeepSpeed's default of `reduce_bucket_size`."""

OWN_KNOBS = (
    "bucket_elements",
    "fused_buffers",
    "contiguous",
    "offload_checkpoints",
    "prefetch_units",
    "gathered_elements",
    "keep_after_forward",
    "reduce_once",
    "reductions_in_flight",
    "host_ahead_units",
    "secondary",
)
"""Fields that say something of zsim's own stages alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """Degrees of parallelism, ZeRO stage, precision and the knobs of the schedule.

    Attributes:
        stage: ZeRO stage (Rajbhandari et al. 2020, section 5): 0 replicates everything, 1 shards
            optimizer state, 2 gradients as well, 3 parameters as well.
        data: ranks of the data axis, over which model states are sharded.
        replicate: replicas of the sharded model states, each with other data: gradients are reduced
            over the data axis, then over the replicas (hybrid sharding, Zhao et al. 2023, section
            3.2.2; MiCS, Zhang et al. 2022).
        tensor: ranks of the tensor axis, inside units (Shoeybi et al. 2019, section 3).
        pipeline: stages that the units are split over, each on ranks of its own (Narayanan et al.
            2021, section 2.2).
        gradient_accumulation_steps: micro-batches per optimizer step.
        precision: format of forward and backward.
        optimizer: the rule of the update, with its constants.
        learning_rates: what is given as the learning rate of each step, where the optimizer reads
            it from the host; None leaves it to the caller.
        groups: parameters that are updated by rules of their own; the first that holds one counts.
        clip_norm: largest global gradient norm; None does not clip.
        loss_scale: used with fp16 alone.
        bucket_elements: parameters are gathered and gradients reduced in buckets of at most so many
            elements (a larger parameter is a bucket of its own).
        fused_buffers: stages 0 to 2: whether buckets are of a constant size, or one for all.
        contiguous: gradients and checkpoints are moved into memory that set-up allocates, where
            they lie in a row for good (ZeRO-R MD, section 6.3).
        prefetch_units: stage 3: units whose gather is issued ahead of the one that computes.
        gathered_elements: stage 3: a gather is not issued ahead while more elements than these
            would be gathered at once; None does not limit. What the unit at hand needs is always
            gathered.
        keep_after_forward: stage 3: parameters that stay gathered from forward to backward.
        reduce_once: stages 2 and 3: accumulate whole gradients and reduce in the last micro-batch,
            instead of in each. Stages 0 and 1 always do.
        reductions_in_flight: gradient buckets whose reduction may be unfinished while backward goes
            on; at 0 compute waits for each reduction.
        host_ahead_units: units that the host may issue ahead of the device, in forward and
            backward; None does not limit.
        secondary: stage 3: after the first forward of a step parameters stay sharded over so many
            neighbouring ranks of the data axis, where later gathers find them (hpZ, Wang et al.
            2023, section 3.2); None keeps no secondary shards.
        emulate: the runtime whose order is taken, instead of zsim's own.
        checkpointing: which activations are kept.
        execution: how blocks are executed.
        partition_checkpoints: keep a rank's share of each checkpoint and gather it over the tensor
            axis before recompute (ZeRO-R Pa, section 6.1).
        offload_checkpoints: move checkpoints to host memory after forward and back before recompute
            (ZeRO-R Pa+cpu, section 6.1).
    """

    stage: int
    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    replicate: int = 1
    gradient_accumulation_steps: int = 1
    precision: Precision = Precision.FP32
    optimizer: Optimizer = field(default_factory=Adam)
    learning_rates: LearningRates | None = None
    groups: tuple[ParameterGroup, ...] = ()
    clip_norm: float | None = None
    loss_scale: LossScale = field(default_factory=LossScale)
    bucket_elements: int = BUCKET_ELEMENTS
    fused_buffers: FusedBuffers = FusedBuffers.CONSTANT
    contiguous: bool = False
    prefetch_units: int = 1
    gathered_elements: int | None = None
    keep_after_forward: Keep = Keep.NOTHING
    reduce_once: bool = False
    reductions_in_flight: int = 1
    host_ahead_units: int | None = None
    secondary: int | None = None
    emulate: RuntimeOptions | None = None
    checkpointing: Checkpointing = Checkpointing.NONE
    execution: Execution = PLAIN
    partition_checkpoints: bool = False
    offload_checkpoints: bool = False

    def __post_init__(self) -> None:
        if self.stage not in STAGES:
            raise StrategyError(f"stage: {self.stage} must be 0, 1, 2 or 3")
        for name in (
            "data",
            "tensor",
            "pipeline",
            "replicate",
            "gradient_accumulation_steps",
            "bucket_elements",
        ):
            if getattr(self, name) < 1:
                raise StrategyError(f"{name}: {getattr(self, name)} must be at least 1")
        for name in ("prefetch_units", "reductions_in_flight"):
            if getattr(self, name) < 0:
                raise StrategyError(f"{name}: {getattr(self, name)} must be at least 0")
        if self.host_ahead_units is not None and self.host_ahead_units < 1:
            raise StrategyError(f"host_ahead_units: {self.host_ahead_units} must be at least 1")
        if self.gathered_elements is not None and self.gathered_elements < 0:
            raise StrategyError(f"gathered_elements: {self.gathered_elements} must be at least 0")
        self._inspect_optimizer()
        if self.pipeline > 1:
            self._inspect_pipeline()
        if self.emulate is not None:
            self._inspect_emulated(self.emulate)
        if self.secondary is not None and self.stage != 3:
            raise StrategyError(f"secondary: {self.secondary} is for stage 3, not {self.stage}")
        name, inner = self._inner
        if inner is not None and (inner < 1 or self.data % inner):
            raise StrategyError(f"{name}: {inner} must divide data = {self.data}")
        for name in ("partition_checkpoints", "offload_checkpoints"):
            if getattr(self, name) and self.checkpointing is not Checkpointing.FULL:
                raise StrategyError(f"{name}: true needs checkpointing = full")
        if self.fused_buffers is FusedBuffers.MODEL:
            self._inspect_fused()
        asked = self.execution
        if asked.loss is Loss.CHUNKED_HEAD and (asked.holds_logits or asked.metrics):
            name, value = ("metrics", asked.metrics) if asked.metrics else ("holds_logits", "true")
            raise StrategyError(f"{name}: {value} needs whole logits, which chunked_head has not")

    def _inspect_optimizer(self) -> None:
        if self.clip_norm is not None and self.clip_norm <= 0:
            raise StrategyError(f"clip_norm: {self.clip_norm} must be more than 0")
        rate = self.optimizer.learning_rate
        if self.learning_rates is not None and not isinstance(rate, str):
            raise StrategyError(f"learning_rates: the optimizer has a constant rate, {rate}")
        for group in self.groups:
            if type(group.rule) is not type(self.optimizer) or group.rule.moments != self.moments:
                raise StrategyError(f"groups: {group.rule} keeps other moments than the optimizer")

    def _inspect_pipeline(self) -> None:
        if self.emulate is None or not self.emulate.has_pipeline:
            raise StrategyError(
                f"pipeline: {self.pipeline} is modelled for emulate = nanotron alone"
            )
        if self.partition_checkpoints:
            raise StrategyError(
                f"partition_checkpoints: true is not modelled for pipeline = {self.pipeline}"
            )

    def _inspect_fused(self) -> None:
        if self.stage == 3:
            raise StrategyError("fused_buffers: model is for stages 0 to 2, stage 3 gathers units")
        if self.bucket_elements != BUCKET_ELEMENTS:
            raise StrategyError(
                f"bucket_elements: {self.bucket_elements} is for fused_buffers = constant"
            )

    def _inspect_emulated(self, runtime: RuntimeOptions) -> None:
        if self.stage not in runtime.stages:
            allowed = " or ".join(map(str, runtime.stages))
            raise StrategyError(
                f"stage: {self.stage} must be {allowed} for {type(runtime).__name__}"
            )
        if runtime.in_place_loss and self.execution.loss is not Loss.TORCH:
            name = type(runtime).__name__
            raise StrategyError(f"loss: {self.execution.loss} must be torch for {name}")
        if not runtime.has_replicas and self.replicate > 1:
            name = type(runtime).__name__
            raise StrategyError(f"replicate: {self.replicate} is not modelled for {name}")
        if self.cuts_tokens and self.partition_checkpoints:
            raise StrategyError(
                "partition_checkpoints: true cuts what tp_mode = reduce_scatter has cut"
            )
        for knob in fields(self):
            value = getattr(self, knob.name)
            if knob.name in OWN_KNOBS and value != knob.default:
                given, kept = (
                    str(each).lower() if isinstance(each, bool) else each
                    for each in (value, knob.default)
                )
                raise StrategyError(
                    f"{knob.name}: {given} is for zsim's own stages; "
                    f"with emulate it stays at {kept}"
                )

    @property
    def ranks(self) -> int:
        """World size."""
        return self.replicas * self.tensor * self.pipeline

    @property
    def replicas(self) -> int:
        """Ranks that see different data: what gradients are averaged over."""
        return self.replicate * self.data

    @property
    def bucket_limit(self) -> int | None:
        """Most elements of a bucket of several parameters; None if all are in one."""
        return None if self.fused_buffers is FusedBuffers.MODEL else self.bucket_elements

    @property
    def cuts_checkpoints(self) -> bool:
        """Whether a rank keeps a share of each checkpoint alone."""
        return self.partition_checkpoints and self.tensor > 1

    @property
    def cuts_tokens(self) -> bool:
        """Whether ranks of the tensor axis hold different tokens of the hidden state."""
        return self.emulate is not None and self.emulate.cuts_tokens

    @property
    def keeps_whole(self) -> bool:
        """Whether what was gathered of such a state is kept for backward."""
        return self.emulate is not None and self.emulate.keeps_whole

    @property
    def in_place_loss(self) -> bool:
        """Whether the gradient of the logits takes the place of their softmax, on any rank."""
        return self.emulate is not None and self.emulate.in_place_loss

    @property
    def moves_checkpoints(self) -> bool:
        """Whether checkpoints do not stay where forward made them."""
        full = self.checkpointing is Checkpointing.FULL
        return full and (self.cuts_checkpoints or self.offload_checkpoints or self.contiguous)

    def rule_of(self, parameter: str) -> Optimizer:
        """Return the rule by which the parameter of that name is updated."""
        rules = (group.rule for group in self.groups if group.holds(parameter))
        return next(rules, self.optimizer)

    @property
    def moments(self) -> int:
        """Numbers that the optimizer keeps for each parameter."""
        return self.optimizer.moments

    def options(self, kind: type[Options]) -> Options:
        """Return the options of the runtime that is emulated, which is of a kind.

        Raises:
            StrategyError: it is another one, or none.
        """
        if isinstance(self.emulate, kind):
            return self.emulate
        name = type(self.emulate).__name__
        raise StrategyError(f"emulate: {name} must be {kind.__name__}")

    @property
    def inner(self) -> int | None:
        """Inner ranks of a data axis that is split in two; None if it is not."""
        return self._inner[1]

    @property
    def _inner(self) -> tuple[str, int | None]:
        """The same with the field that says so."""
        if self.emulate is None:
            return "secondary", self.secondary
        return self.emulate.inner(stage=self.stage, data=self.data)

    @property
    def reduces_once(self) -> bool:
        """Whether gradients are reduced in the last micro-batch alone."""
        return self.stage < 2 or self.reduce_once or self.gradient_accumulation_steps == 1
