"""Scenario files: what one experiment trains, on what, and how it is sharded.

`zsim.scenario.toml` reads TOML text, with settings such as `zero.stage=3` on top of it. What is
wrong becomes one `ScenarioError` of one line: each field, its value, and what is allowed.
`zsim.scenario.resolve` turns a scenario into a model, a cluster and a strategy.
"""

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, Field, ValidationError, create_model

from zsim.config_error import ConfigError, line, refusal, refuse, unknown, wrong_fields
from zsim.memory.host_setup import HostSetup
from zsim.model.architecture import (
    Activation,
    Attention,
    Norm,
    NormPlacement,
    Positions,
    QKNorm,
)
from zsim.network.algorithm.installed_algorithms import choices
from zsim.scenario.fault_tables import FaultTable, NeighbourTable
from zsim.schedule.schedule import Discipline
from zsim.strategy.activations import Activations
from zsim.strategy.config_table import (
    Count,
    Flag,
    Fraction,
    NotNegative,
    Ratio,
    Repeat,
    Size,
    Table,
    Time,
)
from zsim.strategy.learning_rate import LearningRateShape
from zsim.strategy.offload import Offload
from zsim.strategy.parallel_axes import ParallelAxes
from zsim.strategy.runtime_options import names, registered
from zsim.strategy.strategy import Stage
from zsim.strategy.train import TrainKnobs
from zsim.strategy.zero_knobs import ZeroKnobs


class ScenarioError(ConfigError):
    """A scenario that cannot be used, in one line: field, value, what is allowed."""


def _algorithm(value: str | None) -> str | None:
    if value is not None and value not in choices():
        *names, last = map(repr, choices())
        raise ValueError(f"must be {', '.join(names)} or {last}")
    return value


class LoRATable(Table):
    """`[model.lora]`: adapters that are trained alone, as in `zsim.model.architecture`."""

    rank: Count
    targets: Annotated[tuple[str, ...], Field(min_length=1)] | None = None


class ModelTable(Table):
    """`[model]`: a shape, as in `zsim.model.architecture`, or where to read one.

    Or `parameters` alone: 32 equal units of so many together.
    """

    architecture: Literal["gpt", "llama"] = "gpt"
    name: str | None = None
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
    norm_bias: Flag | None = None
    norm_weight: Flag | None = None
    head_bias: Flag | None = None
    norm_placement: NormPlacement | None = None
    qk_norm: QKNorm | None = None
    joined_qkv: Flag | None = None
    parallel_residual: Flag | None = None
    shared_norm: Flag | None = None
    window: Count | None = None
    global_every: Count | None = None
    attention: Attention | None = None
    dropout: Fraction | None = None
    fused: Flag | None = None
    frozen: Annotated[tuple[str, ...], Field(min_length=1)] | None = None
    lora: LoRATable | None = None
    parameters: Count | None = None


class ClusterTable(Table):
    """`[cluster]`: a topology by name, or a node and a fabric, and how many nodes.

    Without `nodes` there are as many as `[parallel]` asks for. `gpu` names another GPU than that of
    the node, whose links stay. `gpu_memory`, `nics_per_node`,
    `host_memory` and `drives` (of a node) and `oversubscription` (of the leaves) replace what the
    topology says; without `nvlink` GPUs of a node meet over their PCIe slots. `allocator` is how
    device memory is handed out.
    """

    topology: str | None = None
    node: str | None = None
    fabric: str | None = None
    nodes: Count | None = None
    gpu: str | None = None
    gpu_memory: Size | None = None
    allocator: Discipline = Discipline.CACHING
    nics_per_node: Repeat | None = None
    nvlink: Flag = True
    host_memory: Size | None = None
    drives: Repeat | None = None
    oversubscription: Ratio | None = None


class ParallelTable(ParallelAxes):
    """`[parallel]`: ranks of each axis. Without `data` it is what the other axes leave."""

    data: Count | None = None


TRAINER_FILES = (
    "accelerate_config",  # it may name a file of DeepSpeed
    "deepspeed_config",
    "megatron_arguments",
    "nemo_config",
    "torchtitan_config",
)
"""Keys of `[zero]` that are files of trainers, in the order in which they are read."""


class _ZeroTable(ZeroKnobs):
    """`[zero]`: the stage and the knobs of the schedule.

    With `emulate` the order is that of another runtime, whose options stand in a table of its name.
    The keys of `TRAINER_FILES` are files that say them in the trainer's own words.
    """

    stage: Stage | None = None
    emulate: str | None = None
    accelerate_config: str | None = None
    deepspeed_config: str | None = None
    megatron_arguments: str | None = None
    nemo_config: str | None = None
    torchtitan_config: str | None = None

    @property
    def is_configured(self) -> bool:
        """True if a file of another program says the options of the runtime."""
        return any(getattr(self, key) is not None for key in TRAINER_FILES)


def _options(runtime: str, given: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return the options that are given of a runtime, if there are any; all wrong ones are told."""
    kind = registered()[runtime].options
    try:
        kind.model_validate(given or {})
    except ValidationError as error:
        wrong = wrong_fields(error.errors(include_url=False), kind)
        refuse([refusal(each.field, None, each.why) for each in wrong])
    return given


if TYPE_CHECKING:
    ZeroTable = _ZeroTable
else:  # with a table for the options of each runtime that is installed
    ZeroTable = create_model(
        "ZeroTable",
        __base__=_ZeroTable,
        emulate=(Literal[names()] | None, None),
        **{
            name: (Annotated[dict[str, Any] | None, AfterValidator(partial(_options, name))], None)
            for name in names()
        },
    )


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


class TrainTable(TrainKnobs, RuleTable):
    """`[train]`: batch sizes (two of the three say the third), precision and the optimizer."""

    micro_batch_size: Count | None = None
    gradient_accumulation_steps: Repeat | None = None
    global_batch_size: Count | None = None
    optimizer: Literal["adam", "sgd"] = "adam"
    learning_rates: LearningRateShape | None = None
    group: tuple[GroupTable, ...] = ()
    steps: Repeat = 2  # figures are of the last step: the first one begins with nothing in flight


class ComputeTable(Table):
    """`[compute]`: the fitted constants that say what kernels cost, and how busy the host is."""

    profile: str | None = None
    in_training: Flag = True
    host_per_segment: Time | None = None
    host_per_unit: Time | None = None
    host_per_collective: Time | None = None
    host_per_message: Time | None = None


class HostKnobs(Table):
    """`[host]`: how host memory is used.

    `pinned` is how pinned memory is handed out: `caching` as PyTorch does, rounded up to powers of
    two and kept, or `exact`. `setup` is how the model is built before the first step.
    """

    pinned: Literal["caching", "exact"] = "caching"
    setup: HostSetup = HostSetup.SHARDED


class NetworkTable(Table):
    """`[network]`: how collectives run, and the fitted constants that say what they cost."""

    algorithm: Annotated[str | None, AfterValidator(_algorithm)] = None
    chunks: Repeat = 4
    profile: str | None = None


class Scenario(Table):
    """A scenario file, read: every key has the right type and lies in its range."""

    title: str
    model: ModelTable
    cluster: ClusterTable
    parallel: ParallelTable = ParallelTable()
    zero: ZeroTable
    activations: Activations = Activations()
    offload: Offload = Offload()
    train: TrainTable
    compute: ComputeTable = ComputeTable()
    network: NetworkTable = NetworkTable()
    host: HostKnobs = HostKnobs()
    fault: tuple[FaultTable, ...] = ()
    neighbour: tuple[NeighbourTable, ...] = ()

    @property
    def alike(self) -> dict[str, object]:
        """Tables that a file and a `Strategy` write alike, by name."""
        return {"activations": self.activations, "offload": self.offload}


def from_tables(data: Mapping[str, object]) -> Scenario:
    """Return the scenario in `data`, as TOML is read.

    Raises:
        ScenarioError: it cannot be used.
    """
    try:
        return Scenario.model_validate(data)
    except ValidationError as error:
        raise ScenarioError(line(error.errors(include_url=False), Scenario)) from None


def need_field(name: str) -> None:
    """Check that `name` (`zero.stage`) is a field of a scenario, or an option of a runtime.

    Raises:
        ScenarioError: it is not.
    """
    why = unknown(name, Scenario)
    if why is not None:
        raise ScenarioError(why)
