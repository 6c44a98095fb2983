"""Resolves a scenario: determines every number that its tables leave open."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from pydantic import ValidationError

from zsim.cluster.cluster import Cluster, ClusterError, Gpu
from zsim.cluster.profile.in_training import ALONE
from zsim.cluster.profile.kernels import KernelProfile, KernelProfileError
from zsim.cluster.profile.network import NetworkProfile, ProfileError
from zsim.config_error import ConfigError, line
from zsim.limits import limits
from zsim.model.equal_units import EQUAL_UNITS
from zsim.model.narrow_products import format_of
from zsim.network.link_load import Decision
from zsim.runtimes.host_costs import PLAIN
from zsim.runtimes.lookup import host_costs_of
from zsim.scenario.expert_counts import ExpertCounts, ExpertCountsTable
from zsim.scenario.fault_injection import AbsentHardwareError, flaky_of, injected
from zsim.scenario.missing_keys import need_keys
from zsim.scenario.optimizer import groups_of, learning_rates_of, rule_of
from zsim.scenario.resolved_scenario import ResolvedScenario
from zsim.scenario.runtime_tables import emulated, stage_of
from zsim.scenario.sized_cluster import Topology, cluster_of, degrees, on_ranks, readers
from zsim.scenario.tables import (
    ComputeTable,
    ModelTable,
    NetworkTable,
    Scenario,
    ScenarioError,
    TrainTable,
    ZeroTable,
)
from zsim.schedule.schedule import Discipline
from zsim.strategy.offload import MemoryTier
from zsim.strategy.runtime_options import RuntimeOptions
from zsim.strategy.strategy import Parallel, Strategy
from zsim.strategy.train import Train, TrainKnobs
from zsim.strategy.zero_knobs import ZeroKnobs

Constants = Callable[[str], NetworkProfile]
"""Returns the fitted constants of a network by name."""

KernelConstants = Callable[[str], KernelProfile]
"""Returns the fitted constants of a GPU's kernels by name."""


def _no_kernels(name: str) -> KernelProfile:
    raise KernelProfileError(f"{name!r}: none ship here")


class _Contradictions:
    """Collects independent errors of a scenario, to report them together.

    As a context manager it keeps a `ScenarioError` that is raised inside until `refuse`.
    """

    def __init__(self) -> None:
        self._found: list[ScenarioError] = []

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> bool | None:
        if isinstance(error, ScenarioError):
            self._found.append(error)
            return True
        return None

    def refuse(self) -> None:
        """Raise an error with all collected lines, if there are any.

        Raises:
            AbsentHardwareError: at least one collected error is an AbsentHardwareError.
            ScenarioError: other errors were collected.
        """
        if self._found:
            absent = any(isinstance(each, AbsentHardwareError) for each in self._found)
            told = [line for each in self._found for line in each.args]
            raise (AbsentHardwareError if absent else ScenarioError)(*told)


def resolve(
    scenario: Scenario,
    topology: Topology,
    constants: Constants,
    kernels: KernelConstants = _no_kernels,
    *,
    ranks: int | None = None,
) -> ResolvedScenario:
    """Determine every number of `scenario`, on `ranks` ranks if given; do not build its model.

    Raises:
        ScenarioError: fields contradict each other, or the topology does not exist.
    """
    scenario = scenario if ranks is None else on_ranks(scenario, ranks)
    need_keys(scenario)
    wrong = _Contradictions()
    with wrong:
        described = cluster_of(scenario.cluster, scenario.parallel, topology)
    with wrong:
        kernel_profile = _kernel_profile(scenario.compute, kernels)
    with wrong:
        network = _network_profile(scenario.network, constants)
    with wrong:
        decision = _decision(scenario.network)
    with wrong:
        train = _train(scenario.train)
    with wrong:
        zero = _zero(scenario.zero)
    wrong.refuse()
    tensor, data = degrees(scenario.parallel, described)
    micro, accumulation = _batches(scenario.train, readers(scenario.parallel, data))
    _need_bounded(scenario.model, accumulation)
    parallel = {**scenario.parallel.given(Parallel), "tensor": tensor, "data": data}
    train["gradient_accumulation_steps"] = accumulation
    with wrong:
        strategy = _strategy({**scenario.alike, "parallel": parallel, "zero": zero, "train": train})
    wrong.refuse()
    nodes = -(-strategy.ranks // described.gpus_per_node)
    timed = _timed(described.gpu, kernel_profile, scenario.compute, strategy.zero.emulate)
    cluster = replace(described, network=network, nodes=nodes, gpu=timed)
    with wrong:
        _need_hardware(strategy, cluster)
    with wrong:
        faults, neighbours = injected(scenario.fault, scenario.neighbour, cluster, strategy.ranks)
    wrong.refuse()
    return ResolvedScenario(
        shape=scenario.model,
        strategy=strategy,
        micro_batch_size=micro,
        allocator=scenario.cluster.allocator,
        pinned=Discipline(scenario.host.pinned),
        setup=scenario.host.setup,
        cluster=cluster,
        steps=scenario.train.steps,
        faults=faults,
        neighbours=neighbours,
        flaky=flaky_of(scenario.fault, scenario.neighbour),
        decision=decision,
        experts=_counts_of(scenario.experts, strategy),
    )


def _counts_of(table: ExpertCountsTable, strategy: Strategy) -> ExpertCounts:
    """Return the numbers of copies of tokens for experts.

    Raises:
        ScenarioError: keys contradict each other, or no tokens are exchanged.
    """
    if table.given_key is not None and strategy.parallel.expert == 1:
        value = getattr(table, table.given_key)
        shown = f"{value:g} " if isinstance(value, int | float) else ""
        raise ScenarioError(f"experts.{table.given_key}: {shown}needs parallel.expert above 1")
    try:
        return table.settled
    except ConfigError as error:
        raise ScenarioError(str(error)) from None


HOST_TIMES = ("host_per_segment", "host_per_unit", "host_per_collective")
"""Keys of `[compute]` that add to the host times of a profile."""


def _kernel_profile(table: ComputeTable, kernels: KernelConstants) -> KernelProfile | None:
    """Return the kernel constants that the scenario names; None if it names none."""
    if table.profile is None:
        for name in HOST_TIMES:
            if getattr(table, name) is not None:
                raise ScenarioError(f"compute.{name}: needs a profile, whose costs it adds to")
        return None
    try:
        return kernels(table.profile)
    except KernelProfileError as error:
        raise ScenarioError(f"compute.profile: {error}") from None


def _timed(
    gpu: Gpu, profile: KernelProfile | None, table: ComputeTable, runtime: RuntimeOptions | None
) -> Gpu:
    """Return `gpu` with `profile`; the trainer gives costs that the scenario does not."""
    if profile is None:
        return gpu
    trainer = PLAIN if runtime is None else host_costs_of(runtime.table())
    own = {"segment_ps": table.host_per_segment, "unit_ps": table.host_per_unit}
    costs: dict[str, Any] = {
        name: getattr(trainer, name) if given is None else given for name, given in own.items()
    }
    collective_ps = table.host_per_collective
    if collective_ps is None:
        collective_ps = trainer.collective_ps
    if collective_ps is not None:
        costs["collective_ps"] = collective_ps
    launch = replace(profile.launch, **costs)
    training = profile.training if table.in_training else ALONE
    return gpu.timed_by(replace(profile, launch=launch, training=training))


def _network_profile(table: NetworkTable, constants: Constants) -> NetworkProfile | None:
    """Return the network constants that the scenario names; None if it names none."""
    try:
        return None if table.profile is None else constants(table.profile)
    except ProfileError as error:
        raise ScenarioError(f"network.profile: {error}") from None


def _zero(table: ZeroTable) -> dict[str, object]:
    """Return the fields of `Zero` that `[zero]` gives."""
    runtime = emulated(table)
    return {**table.given(ZeroKnobs), "stage": stage_of(table, runtime), "emulate": runtime}


def _train(table: TrainTable) -> dict[str, object]:
    """Return the fields of `Train` that `[train]` gives; batches need the cluster."""
    return {
        **table.given(TrainKnobs),
        "optimizer": rule_of(table),
        "learning_rates": learning_rates_of(table),
        "groups": groups_of(table),
    }


def _strategy(tables: dict[str, object]) -> Strategy:
    try:
        return Strategy.model_validate(tables)
    except ValidationError as error:
        raise ScenarioError(line(error.errors(include_url=False), Strategy)) from None


def _need_hardware(strategy: Strategy, cluster: Cluster) -> None:
    """Raise ScenarioError unless the cluster has the formats and tiers that a strategy uses."""
    precision = strategy.train.precision
    try:
        cluster.gpu.rate(precision.compute)
    except ClusterError as error:
        raise ScenarioError(f"train.precision: {precision}: {error}") from None
    _need_products(strategy.train, cluster.gpu)
    offload = strategy.offload
    has_host = cluster.host is not None and cluster.pcie_link is not None
    wanted = {
        "offload.optimizer": offload.optimizer,
        "offload.parameters": offload.parameters,
        "offload.checkpoints": offload.checkpoints,
    }
    runtime = strategy.zero.emulate
    if runtime is not None:
        table = runtime.table()
        tiers = runtime.tiers(stage=strategy.zero.stage)
        wanted |= {f"zero.{table}.{option}": tier for option, tier in tiers.items()}
        if runtime.moves_checkpoints:
            wanted[f"zero.{table}.{runtime.checkpoint_option}"] = MemoryTier.HOST
        if runtime.layers_on_host:
            wanted[f"zero.{table}.{runtime.layers_option}"] = MemoryTier.HOST
    for name, tier in wanted.items():
        for missing, what in (
            (tier != MemoryTier.DEVICE and not has_host, "host memory behind PCIe"),
            (tier == MemoryTier.NVME and cluster.drives is None, "drives"),
        ):
            if missing:
                why = (
                    f"{tier} needs {what}, which {cluster.name} does not describe; use another "
                    "node, or a file of it with [host] and [cpu] or [drives]"
                )
                raise ScenarioError(f"{name}: {why}")


def _need_products(train: Train, gpu: Gpu) -> None:
    """Raise ScenarioError unless the GPU multiplies in the format of narrow GEMMs."""
    if train.recipe is None:
        return
    try:
        gpu.rate(format_of(train.recipe))
    except ClusterError as error:
        key = "float8" if train.float8 else "float4"
        why = f"{error}; remove it or take another GPU"
        raise ScenarioError(f"train.{key}: {train.recipe}: {why}") from None


def _decision(table: NetworkTable) -> Decision | None:
    """Return the forced algorithm and settings of collectives; None if nothing is set."""
    if table.algorithm is None:
        return None
    return Decision(algorithm=table.algorithm, chunks=table.chunks)


def _batches(train: TrainTable, replicas: int) -> tuple[int, int]:
    """Return the number of sequences per micro-batch, and of micro-batches per step.

    Two of the three batch sizes are required; if all three are given, they must agree.
    """
    micro, steps, total = (
        train.micro_batch_size,
        train.gradient_accumulation_steps,
        train.global_batch_size,
    )
    if total is None:
        assert micro is not None  # two of the three are given
        assert steps is not None
        return micro, steps
    known = (micro or 1) * (steps or 1) * replicas
    if total % known or (micro and steps and total != known):
        parts = [f"{micro} a micro-batch"] if micro else []
        parts += [f"{steps} accumulation steps"] if steps else []
        must = f"must be {known}" if micro and steps else f"must be a multiple of {known}"
        shown = " x ".join([*parts, f"{replicas} replicas"])
        raise ScenarioError(f"train.global_batch_size: {total} {must}: {shown}")
    rest = total // known
    return micro or rest, steps or rest


LAYERS_MAX = 4_000
"""Maximum number of layers; a schedule of more of them usually has too many operations."""


def _need_bounded(model: ModelTable, accumulation_steps: int) -> None:
    """Raise ScenarioError if a schedule of this many layers and micro-batches is too large."""
    layers = model.layers or EQUAL_UNITS
    visits = limits().visits
    if layers > min(LAYERS_MAX, visits):
        raise ScenarioError(f"model.layers: {layers} must be at most {min(LAYERS_MAX, visits)}")
    most = visits // layers
    if accumulation_steps > most:
        raise ScenarioError(
            f"train.gradient_accumulation_steps: {accumulation_steps} must be at most "
            f"{most} with {layers} layers"
        )
