"""Scenario files: the model, hardware and sharding of one experiment.

`zsim.scenario.toml` reads TOML text, with settings such as `zero.stage=3` on top. All errors become
one `ScenarioError` of one line: each field, its value, and the allowed values.
`zsim.scenario.resolve` converts a scenario to a model, a cluster and a strategy.
"""

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_type_hints

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError, create_model

from zsim.config_error import ConfigError, line, refusal, refuse, unknown, wrong_fields
from zsim.dtype import Quantization
from zsim.memory.host_setup import HostSetup
from zsim.model.architecture import (
    Activation,
    Attention,
    Norm,
    NormPlacement,
    Positions,
    QKNorm,
)
from zsim.model.experts import DropRule, ExpertKernels, LoadBalancing, RouterFormat, Scores
from zsim.network.algorithm.installed_algorithms import choices
from zsim.runtimes.lookup import file_keys
from zsim.scenario.expert_counts import ExpertCountsTable
from zsim.scenario.fault_tables import FaultTable, NeighbourTable
from zsim.schedule.schedule import Discipline
from zsim.strategy.activations import Activations
from zsim.strategy.config_table import (
    Count,
    Flag,
    Fraction,
    NotNegative,
    Positive,
    Ratio,
    Repeat,
    Size,
    Table,
    Time,
    WholeNumber,
)
from zsim.strategy.learning_rate import LearningRateShape
from zsim.strategy.offload import Offload
from zsim.strategy.optimizer_rule import LEARNING_RATE, constants_of, rules
from zsim.strategy.parallel_axes import ParallelAxes
from zsim.strategy.runtime_options import names, registered
from zsim.strategy.strategy import Stage
from zsim.strategy.train import TrainKnobs
from zsim.strategy.zero_knobs import ZeroKnobs


class ScenarioError(ConfigError):
    """A scenario that cannot be used, in one line: field, value, allowed values."""


def _algorithm(value: str | None) -> str | None:
    if value is not None and value not in choices():
        *names, last = map(repr, choices())
        raise ValueError(f"must be {', '.join(names)} or {last}")
    return value


class LoRATable(Table):
    """`[model.lora]`: adapters, with all else frozen, as in `zsim.model.architecture`."""

    rank: Count
    targets: Annotated[tuple[str, ...], Field(min_length=1)] | None = None
    quantization: Quantization | None = None
    quantizes_head: Flag = False
    keeps_inputs: Flag = False
    casts_weights: Flag = False
    dropout: Fraction = 0.0


class ExpertsTable(Table):
    """`[model.experts]`: routed experts of blocks, as in `zsim.model.experts`."""

    count: Count
    top_k: Count
    intermediate_size: Count
    shared_intermediate_size: WholeNumber | None = None
    shared_gate: Flag | None = None
    dense_layers: WholeNumber | None = None
    every: Count | None = None
    scores: Scores | None = None
    score_bias: Flag | None = None
    bias_rate: Positive | None = None
    normalised: Flag | None = None
    scaling: Positive | None = None
    groups: Count | None = None
    top_groups: Count | None = None
    router_bias: Flag | None = None
    bias: Flag | None = None
    router_format: RouterFormat | None = None
    auxiliary_loss: Flag | None = None
    auxiliary_coefficient: Positive | None = None
    load_balancing_type: LoadBalancing | None = None
    z_loss: Flag | None = None
    z_coefficient: Positive | None = None
    kernels: ExpertKernels | None = None
    capacity_factor: Positive | None = None
    drop_policy: DropRule | None = None
    pads_to_capacity: Flag | None = None


class LatentTable(Table):
    """`[model.latent]`: attention with compressed keys and values, as in `zsim.model.experts`."""

    key_value_rank: Count
    query_rank: Count | None = None
    nope_size: Count | None = None
    rope_size: Count | None = None
    value_size: Count | None = None
    bias: Flag | None = None


class ModelTable(Table):
    """`[model]`: a shape, as in `zsim.model.architecture`, or a name or file with one.

    Or only `parameters`: 32 equal units with this total.
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
    output_bias: Flag | None = None
    norm_bias: Flag | None = None
    norm_weight: Flag | None = None
    head_bias: Flag | None = None
    embedding_norm: Flag | None = None
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
    experts: ExpertsTable | None = None
    latent: LatentTable | None = None
    sinks: Flag | None = None
    mtp_layers: WholeNumber | None = None
    parameters: Count | None = None


class ClusterTable(Table):
    """`[cluster]`: a topology by name, or a node and a fabric, and the number of nodes.

    Without `nodes`, there are as many as `[parallel]` needs. `gpu` replaces the node's GPU, but not
    its links. `gpu_memory`, `nics_per_node`, `host_memory` and `drives` (of a node) and
    `oversubscription` (of the leaves) replace values of the topology. `nodes_per_domain` is the
    number of nodes that the job uses of each NVSwitch domain, `--segment` of Slurm. Without
    `nvlink`, GPUs of a node communicate over their PCIe slots. `allocator` selects the device
    memory allocator.
    """

    topology: str | None = None
    node: str | None = None
    fabric: str | None = None
    nodes: Count | None = None
    gpu: str | None = None
    gpu_memory: Size | None = None
    allocator: Discipline = Discipline.CACHING
    nics_per_node: Repeat | None = None
    nodes_per_domain: Count | None = None
    nvlink: Flag = True
    host_memory: Size | None = None
    drives: Repeat | None = None
    oversubscription: Ratio | None = None


class ParallelTable(ParallelAxes):
    """`[parallel]`: ranks of each axis. By default, `data` takes the ranks that others leave."""

    data: Count | None = None


class _ZeroTable(ZeroKnobs):
    """`[zero]`: the stage and the knobs of the schedule.

    With `emulate`, operations are ordered as in another runtime, whose options are in a table of
    its name. Other keys name files of trainers, which give them in the trainer's format.
    """

    stage: Stage | None = None
    emulate: str | None = None

    @property
    def file_key(self) -> str | None:
        """The first key that names a file of a trainer; None if there is none."""
        return next((key for key in file_keys() if getattr(self, key) is not None), None)

    @property
    def is_configured(self) -> bool:
        """True if a file of another program gives the options of the runtime."""
        return self.file_key is not None


def _options(runtime: str, given: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return the given options of a runtime; raise with all invalid ones."""
    kind = registered()[runtime].options
    try:
        kind.model_validate(given or {})
    except ValidationError as error:
        wrong = wrong_fields(error.errors(include_url=False), kind)
        refuse([refusal(each.field, None, each.why) for each in wrong])
    return given


if TYPE_CHECKING:
    ZeroTable = _ZeroTable
else:  # with keys of files, and a table for the options, of each runtime that is installed
    ZeroTable = create_model(
        "ZeroTable",
        __base__=_ZeroTable,
        emulate=(Literal[names()] | None, None),
        **dict.fromkeys(file_keys(), (str | None, None)),
        **{
            name: (Annotated[dict[str, Any] | None, AfterValidator(partial(_options, name))], None)
            for name in names()
        },
    )


class _RuleTable(Table):
    """Constants of an optimizer; missing ones have their default."""

    learning_rate: NotNegative | None = None


if TYPE_CHECKING:
    RuleTable = _RuleTable
    RuleName = str
else:  # with the constants of each rule that is installed
    RuleTable = create_model(
        "RuleTable",
        __base__=_RuleTable,
        **{
            name: (get_type_hints(rule, include_extras=True)[name] | None, None)
            for rule in rules().values()
            for name in constants_of(rule)
            if name != LEARNING_RATE
        },
    )
    RuleName = Annotated[
        Literal[tuple(rules())],
        BeforeValidator(lambda word: "adam" if word == "adamw" else word),  # its decay is decoupled
    ]


class GroupTable(RuleTable):
    """`[[train.group]]`: parameters by patterns of their names, with separate constants."""

    parameters: Annotated[tuple[str, ...], Field(min_length=1)]


class TrainTable(TrainKnobs, RuleTable):
    """`[train]`: batch sizes (two of three are needed), precision and the optimizer."""

    micro_batch_size: Count | None = None
    gradient_accumulation_steps: Repeat | None = None
    global_batch_size: Count | None = None
    optimizer: RuleName = "adam"
    learning_rates: LearningRateShape | None = None
    group: tuple[GroupTable, ...] = ()
    steps: Repeat = 2  # figures are of the last step: the first one starts with nothing in flight


class ComputeTable(Table):
    """`[compute]`: the fitted constants of kernels, and additional host times."""

    profile: str | None = None
    in_training: Flag = True
    host_per_segment: Time | None = None
    host_per_unit: Time | None = None
    host_per_collective: Time | None = None


class HostKnobs(Table):
    """`[host]`: how host memory is used.

    `pinned` is the allocator of pinned memory: `caching` as in PyTorch, rounded up to powers of two
    and kept, or `exact`. `setup` is how the model is built before the first step.
    """

    pinned: Literal["caching", "exact"] = "caching"
    setup: HostSetup = HostSetup.SHARDED


class NetworkTable(Table):
    """`[network]`: how collectives run, and the fitted constants of their cost."""

    algorithm: Annotated[str | None, AfterValidator(_algorithm)] = None
    chunks: Repeat = 4
    profile: str | None = None


class Scenario(Table):
    """A parsed scenario file: every key has the right type and is in its range."""

    title: str
    model: ModelTable = ModelTable()
    cluster: ClusterTable = ClusterTable()
    parallel: ParallelTable = ParallelTable()
    experts: ExpertCountsTable = ExpertCountsTable()
    zero: ZeroTable = ZeroTable()
    activations: Activations = Activations()
    offload: Offload = Offload()
    train: TrainTable = TrainTable()
    compute: ComputeTable = ComputeTable()
    network: NetworkTable = NetworkTable()
    host: HostKnobs = HostKnobs()
    fault: tuple[FaultTable, ...] = ()
    neighbour: tuple[NeighbourTable, ...] = ()

    @property
    def alike(self) -> dict[str, object]:
        """Tables that have the same form in a file and in a `Strategy`, by name."""
        return {"activations": self.activations, "offload": self.offload}


def from_tables(data: Mapping[str, object]) -> Scenario:
    """Return the scenario in `data`, the result of reading TOML.

    Raises:
        ScenarioError: it cannot be used.
    """
    try:
        return Scenario.model_validate(data)
    except ValidationError as error:
        raise ScenarioError(line(error.errors(include_url=False), Scenario)) from None


def need_field(name: str) -> None:
    """Raise ScenarioError unless `name` (`zero.stage`) is a scenario field or a runtime option.

    Raises:
        ScenarioError: it is neither.
    """
    why = unknown(name, Scenario)
    if why is not None:
        raise ScenarioError(why)
