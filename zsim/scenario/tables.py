"""Scenario files: what one experiment trains, on what, and how it is sharded.

`zsim.scenario.toml` reads TOML text, with settings such as `zero.stage=3` on top of it. What is
wrong becomes one `ScenarioError` of one line: the field, the value, and what is allowed.
`zsim.scenario.resolve` turns a scenario into a model, a cluster and a strategy.
"""

import fractions
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    Strict,
    ValidationError,
    create_model,
)

from zsim.config_error import line, unknown, whole
from zsim.model.architecture import Activation, Attention, Norm, Positions
from zsim.network.algorithm.registry import choices
from zsim.schedule.schedule import Discipline
from zsim.strategy.execution import Float8, Loss
from zsim.strategy.learning_rate import Decay
from zsim.strategy.runtime_options import names
from zsim.strategy.strategy import (
    BUCKET_ELEMENTS,
    Checkpointing,
    FusedBuffers,
    Keep,
    Precision,
)
from zsim.units import (
    UnitError,
    parse_bandwidth,
    parse_ratio,
    parse_size,
    parse_time,
)


class ScenarioError(ValueError):
    """A scenario that cannot be used, in one line: field, value, what is allowed."""


def _algorithm(value: str | None) -> str | None:
    if value is not None and value not in choices():
        *names, last = map(repr, choices())
        raise ValueError(f"must be {', '.join(names)} or {last}")
    return value


def _stage(value: object) -> object:
    return str(value).lower() if isinstance(value, bool) else whole(value)  # true is no stage


def _size(value: object) -> object:
    if not isinstance(value, str):
        raise ValueError('must be a size with its unit, such as "32 GB"')  # noqa: TRY004 (pydantic)
    try:
        return parse_size(value)
    except UnitError:
        bits = "; bits are not accepted" if value.rstrip().endswith("b") else ""
        raise ValueError(f'must be a size such as "32 GB" or "80 GiB"{bits}') from None


def _ratio(value: object) -> object:
    try:
        return parse_ratio(value)
    except UnitError:
        raise ValueError('must be a ratio of more than 0, such as 2 or "3/2"') from None


def _bandwidth(value: object) -> object:
    try:
        return parse_bandwidth(str(value))
    except UnitError:
        raise ValueError('must be a bandwidth such as "10 GB/s"') from None


def _time(value: object) -> object:
    if value == "0" or (value == 0 and not isinstance(value, bool)):
        return 0
    try:
        return parse_time(str(value))
    except UnitError:
        raise ValueError('must be a time such as "1.5 s"') from None


LARGEST = 2**60
"""No count in a scenario is larger: a slip of the exponent is refused instead of computed."""

Whole = Annotated[int, Strict(), BeforeValidator(whole), Field(ge=0, le=LARGEST)]
Count = Annotated[int, Strict(), BeforeValidator(whole), Field(ge=1, le=LARGEST)]
Repeat = Annotated[int, Strict(), BeforeValidator(whole), Field(ge=1, le=100_000)]
Size = Annotated[int, BeforeValidator(_size), Field(ge=1)]
Bandwidth = Annotated[int, BeforeValidator(_bandwidth), Field(ge=1)]
Time = Annotated[int, BeforeValidator(_time), Field(ge=0)]
Ratio = Annotated[fractions.Fraction, BeforeValidator(_ratio)]
Flag = Annotated[bool, Strict()]
Real = Annotated[float, Strict(), Field(allow_inf_nan=False)]
NotNegative = Annotated[float, Strict(), Field(ge=0, allow_inf_nan=False)]
Positive = Annotated[float, Strict(), Field(gt=0, allow_inf_nan=False)]
Fraction = Annotated[float, Strict(), Field(ge=0, lt=1)]


class Table(BaseModel):
    """A table of a scenario file; a key that it does not have is refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class LoRATable(Table):
    """`[model.lora]`: adapters that are trained alone, as in `zsim.model.architecture`."""

    rank: Count
    targets: Annotated[tuple[str, ...], Field(min_length=1)] | None = None


class ModelTable(Table):
    """`[model]`: a shape, as in `zsim.model.architecture`, or where to read one.

    Or `parameters` alone: 32 equal units of so many together.
    """

    architecture: Literal["gpt", "llama"] = "gpt"
    hf_config: str | None = None
    layers: Repeat | None = None
    hidden_groups: Count | None = None
    hidden_size: Count | None = None
    attention_heads: Count | None = None
    sequence_length: Count | None = None
    vocab_size: Count | None = None
    tied_embeddings: Flag | None = None
    key_value_heads: Count | None = None
    head_size: Count | None = None
    intermediate_size: Count | None = None
    positions: Positions | None = None
    position_embeddings: Count | None = None
    norm: Norm | None = None
    activation: Activation | None = None
    bias: Flag | None = None
    qkv_bias: Flag | None = None
    joined_qkv: Flag | None = None
    parallel_residual: Flag | None = None
    attention: Attention | None = None
    dropout: Fraction | None = None
    fused: Flag | None = None
    frozen: Annotated[tuple[str, ...], Field(min_length=1)] | None = None
    lora: LoRATable | None = None
    parameters: Count | None = None


class ClusterTable(Table):
    """`[cluster]`: a topology by name, or a node and a fabric, and how many nodes.

    Without `nodes` there are as many as `[parallel]` asks for. `gpu_memory`, `nics_per_node` and
    `oversubscription` (of the leaves) replace what the topology says. `allocator` is how device
    memory is handed out.
    """

    topology: str | None = None
    node: str | None = None
    fabric: str | None = None
    nodes: Count | None = None
    gpu_memory: Size | None = None
    allocator: Discipline = Discipline.CACHING
    nics_per_node: Repeat | None = None
    oversubscription: Ratio | None = None


class ParallelTable(Table):
    """`[parallel]`: ranks of each axis. Without `data` it is what the other axes leave."""

    tensor: Count = 1
    context: Count = 1
    pipeline: Count = 1
    data: Count | None = None
    replicate: Count = 1


class _ZeroTable(Table):
    """`[zero]`: the stage and the knobs of the schedule, as in `zsim.strategy.strategy.Strategy`.

    With `emulate` the order is that of another runtime, whose options stand in a table of its name.
    """

    stage: Annotated[Literal[0, 1, 2, 3] | None, BeforeValidator(_stage)] = None
    bucket_elements: Count = BUCKET_ELEMENTS
    fused_buffers: FusedBuffers = FusedBuffers.CONSTANT
    contiguous: Flag = False
    prefetch_units: Whole = 1
    gathered_elements: Whole | None = None
    keep_after_forward: Keep = Keep.NOTHING
    reduce_once: Flag = False
    reductions_in_flight: Whole = 1
    host_ahead_units: Count | None = None
    secondary: Count | None = None
    emulate: str | None = None
    deepspeed_config: str | None = None


if TYPE_CHECKING:
    ZeroTable = _ZeroTable
else:  # with a table for the options of each runtime that is installed
    ZeroTable = create_model(
        "ZeroTable",
        __base__=_ZeroTable,
        emulate=(Literal[names()] | None, None),
        **dict.fromkeys(names(), (dict[str, Any] | None, None)),
    )


class ActivationsTable(Table):
    """`[activations]`: what forward keeps for backward."""

    checkpointing: Checkpointing = Checkpointing.NONE
    partition: Flag = False
    early_stop: Flag = False
    offload: Flag = False


class LossScaleTable(Table):
    """`[train.loss_scale]`: the dynamic loss scale of fp16."""

    initial: Positive = 2.0**16
    growth: Annotated[float, Strict(), Field(ge=1, allow_inf_nan=False)] = 2.0
    backoff: Annotated[float, Strict(), Field(gt=0, le=1)] = 0.5
    interval: Count = 2000
    minimum: Positive = 1.0


class LearningRatesTable(Table):
    """`[train.learning_rates]`: the learning rate of each step, `train.learning_rate` its peak."""

    decay: Decay = Decay.COSINE
    warmup_steps: Whole = 0
    decay_steps: Count | None = None
    minimum: NotNegative = 0.0


class RuleTable(Table):
    """Constants of an optimizer; what is not given is its default."""

    learning_rate: NotNegative | None = None
    beta1: Fraction | None = None
    beta2: Fraction | None = None
    epsilon: NotNegative | None = None
    weight_decay: NotNegative | None = None
    momentum: Fraction | None = None
    nesterov: Flag | None = None


class GroupTable(RuleTable):
    """`[[train.group]]`: parameters by patterns of their names, with constants of their own."""

    parameters: Annotated[tuple[str, ...], Field(min_length=1)]


class TrainTable(RuleTable):
    """`[train]`: batch sizes (two of the three say the third), precision and the optimizer."""

    micro_batch_size: Count | None = None
    gradient_accumulation_steps: Repeat | None = None
    global_batch_size: Count | None = None
    precision: Precision = Precision.FP32
    compile: Flag = False
    float8: Float8 | None = None
    loss: Loss = Loss.TORCH
    metrics: Whole = 0
    holds_logits: Flag = False
    optimizer: Literal["adam", "sgd"] = "adam"
    learning_rates: LearningRatesTable | None = None
    group: tuple[GroupTable, ...] = ()
    clip_norm: Positive | None = None
    loss_scale: LossScaleTable = LossScaleTable()
    steps: Repeat = 2  # figures are of the last step: the first one begins with nothing in flight


class ComputeTable(Table):
    """`[compute]`: the fitted constants that say what kernels cost, and how busy the host is."""

    profile: str | None = None
    in_training: Flag = True
    host_per_segment: Time | None = None


class NetworkTable(Table):
    """`[network]`: how collectives run, and the fitted constants that say what they cost."""

    algorithm: Annotated[str | None, AfterValidator(_algorithm)] = None
    chunks: Repeat = 4
    profile: str | None = None
    tensor_wait: Time | None = None


class FaultTable(Table):
    """`[[fault]]`: what is slow or dead, from `start` to `end` of the first step on.

    Which other keys there are depends on `kind`; `zsim.scenario.fault_injection` says.
    """

    kind: Literal["gpu", "switch_link", "nic", "leaf", "spine", "link", "jitter"]
    rank: Whole | None = None
    node: Whole | None = None
    nic: Whole | None = None
    group: Whole | None = None
    rail: Whole | None = None
    source: str | None = None
    target: str | None = None
    factor: Ratio | None = None
    dead: Flag = False
    deviation: Positive | None = None
    start: Time = 0
    end: Time | None = None


class NeighbourTable(Table):
    """`[[neighbour]]`: another job on the nodes from the first to the last of `nodes`."""

    nodes: tuple[Whole, Whole]
    bandwidth_per_direction: Bandwidth
    start: Time = 0
    end: Time | None = None


class Scenario(Table):
    """A scenario file, read: every key has the right type and lies in its range."""

    title: str
    model: ModelTable
    cluster: ClusterTable
    parallel: ParallelTable = ParallelTable()
    zero: ZeroTable
    activations: ActivationsTable = ActivationsTable()
    train: TrainTable
    compute: ComputeTable = ComputeTable()
    network: NetworkTable = NetworkTable()
    fault: tuple[FaultTable, ...] = ()
    neighbour: tuple[NeighbourTable, ...] = ()


def from_tables(data: Mapping[str, object]) -> Scenario:
    """The scenario in `data`, as TOML is read.

    Raises:
        ScenarioError: it cannot be used.
    """
    try:
        return Scenario.model_validate(data)
    except ValidationError as error:
        raise ScenarioError(line(error.errors(include_url=False), Scenario)) from None


def need_field(name: str) -> None:
    """Raise unless `name` (`zero.stage`) is a field of a scenario, or an option of a runtime.

    Raises:
        ScenarioError: it is not.
    """
    why = unknown(name, Scenario)
    if why is not None:
        raise ScenarioError(why)
