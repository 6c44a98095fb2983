"""From a scenario to what it means: every number that its tables leave open, settled."""

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction

from pydantic import ValidationError

from zsim.cluster.cluster import Cluster, ClusterError, Overheads
from zsim.cluster.files import TopologyError, UnknownTopologyError
from zsim.cluster.profile.in_training import ALONE
from zsim.cluster.profile.kernels import KernelProfile, KernelProfileError
from zsim.cluster.profile.network import NetworkProfile, ProfileError
from zsim.config_error import joined, line
from zsim.limits import limits
from zsim.model.equal_units import EQUAL_UNITS
from zsim.network.link_load import Decision
from zsim.scenario.fault_injection import TroubleError, injected
from zsim.scenario.missing_keys import need_cluster_keys, need_keys
from zsim.scenario.optimizer import groups_of, learning_rates_of, rule_of
from zsim.scenario.resolved_scenario import ResolvedScenario
from zsim.scenario.runtime_tables import emulated, stage_of
from zsim.scenario.tables import (
    ClusterTable,
    ComputeTable,
    ModelTable,
    NetworkTable,
    Scenario,
    ScenarioError,
    TrainTable,
    ZeroTable,
)
from zsim.strategy.strategy import Activations, Parallel, Strategy, ZeroKnobs
from zsim.strategy.train import TrainKnobs

Topology = Callable[[str, str | None, int], Cluster]
"""The cluster of a topology by name, or of a node on a fabric, with so many nodes."""

Constants = Callable[[str], NetworkProfile]
"""Fitted constants of a network by name."""

KernelConstants = Callable[[str], KernelProfile]
"""Fitted constants of a GPU's kernels by name."""


def _no_kernels(name: str) -> KernelProfile:
    raise KernelProfileError(f"{name!r}: none ship here")


class _Contradictions:
    """Contradictions of a scenario that do not depend on each other, told at once.

    As a context it keeps the `ScenarioError` that is raised inside until `refuse`.
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
        """Return if nothing was raised.

        Raises:
            TroubleError: some of it was one; all of it is told.
            ScenarioError: as above, without one.
        """
        if self._found:
            trouble = any(isinstance(each, TroubleError) for each in self._found)
            told = joined([str(each) for each in self._found])
            raise (TroubleError if trouble else ScenarioError)(told)


def resolve(
    scenario: Scenario,
    topology: Topology,
    constants: Constants,
    kernels: KernelConstants = _no_kernels,
) -> ResolvedScenario:
    """Settle every number of `scenario`; its model is made when it is asked for.

    Raises:
        ScenarioError: fields contradict each other, or the topology does not exist.
    """
    need_keys(scenario)
    wrong = _Contradictions()
    with wrong:
        described = _cluster(scenario, topology)
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
    tensor, data = _degrees(scenario, described)
    micro, accumulation = _batches(scenario.train, data * scenario.parallel.replicate)
    _need_bounded(scenario.model, accumulation)
    parallel = {**scenario.parallel.given(Parallel), "tensor": tensor, "data": data}
    train["gradient_accumulation_steps"] = accumulation
    with wrong:
        strategy = _strategy(parallel, zero, scenario.activations, train)
    wrong.refuse()
    cluster = replace(
        described,
        gpu=described.gpu if kernel_profile is None else described.gpu.timed_by(kernel_profile),
        network=network,
        nodes=-(-strategy.ranks // described.gpus_per_node),
    )
    with wrong:
        _need_hardware(strategy, cluster)
    with wrong:
        faults, neighbours = injected(scenario, cluster, strategy.ranks)
    wrong.refuse()
    return ResolvedScenario(
        shape=scenario.model,
        strategy=strategy,
        micro_batch_size=micro,
        allocator=scenario.cluster.allocator,
        cluster=cluster,
        steps=scenario.train.steps,
        faults=faults,
        neighbours=neighbours,
        decision=decision,
    )


def _kernel_profile(table: ComputeTable, kernels: KernelConstants) -> KernelProfile | None:
    """Return the constants of kernels that are asked for; None where none are."""
    own_ps = table.host_per_segment
    if table.profile is None:
        if own_ps is not None:
            raise ScenarioError("compute.host_per_segment: needs a profile, whose costs it adds to")
        return None
    try:
        profile = kernels(table.profile)
        if own_ps is not None:
            profile = replace(profile, launch=replace(profile.launch, segment_ps=own_ps))
        return profile if table.in_training else replace(profile, training=ALONE)
    except KernelProfileError as error:
        raise ScenarioError(f"compute.profile: {error}") from None


def _network_profile(table: NetworkTable, constants: Constants) -> NetworkProfile | None:
    """Return the constants of a network that are asked for; None where none are."""
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


def _strategy(
    parallel: dict[str, object],
    zero: dict[str, object],
    activations: Activations,
    train: dict[str, object],
) -> Strategy:
    tables = {"parallel": parallel, "zero": zero, "activations": activations, "train": train}
    try:
        return Strategy.model_validate(tables)
    except ValidationError as error:
        raise ScenarioError(line(error.errors(include_url=False), Strategy)) from None


def _need_hardware(strategy: Strategy, cluster: Cluster) -> None:
    """Check that a cluster has what a strategy uses beside its ranks."""
    precision = strategy.train.precision
    try:
        cluster.gpu.rate(precision.compute)
    except ClusterError as error:
        raise ScenarioError(f"train.precision: {precision}: {error}") from None
    if strategy.activations.offload and (cluster.host is None or cluster.pcie_link is None):
        raise ScenarioError(
            f"activations.offload: true needs a node with host memory behind PCIe, {cluster.name} "
            "describes none"
        )


def placed(scenario: Scenario, topology: Topology) -> tuple[Cluster, int]:
    """Return the cluster, and how many ranks train on different data: a global batch is over them.

    Raises:
        ScenarioError: the axes do not fit the cluster, or there is none.
    """
    need_cluster_keys(scenario)
    cluster = _cluster(scenario, topology)
    _, data = _degrees(scenario, cluster)
    return cluster, data * scenario.parallel.replicate


def _decision(table: NetworkTable) -> Decision | None:
    """Return what is asked for of collectives; None if nothing is."""
    if table.tensor_wait is not None and table.profile is None:
        raise ScenarioError("network.tensor_wait: needs a profile, whose latencies it adds to")
    if table.algorithm is None and table.tensor_wait is None:
        return None
    return Decision(
        algorithm=table.algorithm,
        chunks=table.chunks,
        tensor_wait_ps=table.tensor_wait or 0,
    )


def on_ranks(scenario: Scenario, ranks: int) -> Scenario:
    """Return `scenario` on so many ranks, on as many nodes as they need; the tensor axis stays.

    Raises:
        ScenarioError: the tensor axis does not divide them.
    """
    parallel = scenario.parallel
    others = parallel.tensor * parallel.replicate * parallel.pipeline
    if ranks < 1:
        raise ScenarioError(f"ranks: {ranks} must be at least 1")
    if ranks % others:
        last = "pipeline" if parallel.pipeline > 1 else "replicate"
        axis = "tensor" if ranks % parallel.tensor else last
        raise ScenarioError(
            f"parallel.{axis}: {getattr(parallel, axis)} must divide the {ranks} ranks"
        )
    return scenario.model_copy(
        update={
            "cluster": scenario.cluster.model_copy(update={"nodes": None}),
            "parallel": scenario.parallel.model_copy(update={"data": ranks // others}),
        }
    )


def _cluster(scenario: Scenario, topology: Topology) -> Cluster:
    """Return the cluster that `[cluster]` describes, with as many nodes as are needed."""
    table, parallel = scenario.cluster, scenario.parallel
    cluster = _nodes_of(table, topology, table.nodes or 1)
    if table.nodes is None:
        assert parallel.data is not None  # one of the two is given
        ranks = parallel.replicate * parallel.data * parallel.tensor * parallel.pipeline
        cluster = _nodes_of(table, topology, -(-ranks // cluster.gpus_per_node))
    return with_overrides(table, cluster)


def with_overrides(table: ClusterTable, cluster: Cluster) -> Cluster:
    """Return `cluster` with what `table` says in place of its topology.

    Raises:
        ScenarioError: the fabric has no leaves whose oversubscription could be changed.
    """
    if table.gpu_memory is not None:
        gpu = replace(
            cluster.gpu,
            memory_bytes=table.gpu_memory,
            visible_bytes=None,
            overheads=Overheads(),
        )
        cluster = replace(cluster, gpu=gpu)
    if table.nics_per_node is not None:
        cluster = replace(cluster, nics_per_node=table.nics_per_node)
    if table.oversubscription is not None:
        cluster = _oversubscribed(cluster, table.oversubscription)
    return cluster


def _nodes_of(table: ClusterTable, topology: Topology, nodes: int) -> Cluster:
    """Return so many nodes of the topology, or of the node on its fabric."""
    node, fabric = table.node, table.fabric
    if table.topology is not None:
        if node is not None or fabric is not None:
            key, value = ("node", node) if node is not None else ("fabric", fabric)
            raise ScenarioError(
                f"cluster.{key}: {value!r} stands without topology, which is a node on a fabric"
            )
        name, where = table.topology, "cluster.topology"
    elif node is not None and fabric is not None:
        name, where = node, "cluster"
    else:
        missing, other = ("node", "fabric") if node is None else ("fabric", "node")
        raise ScenarioError(f"cluster.{missing}: missing beside {other}")
    try:
        return topology(name, fabric, nodes)
    except UnknownTopologyError as error:
        raise ScenarioError(f"cluster.{error.part}: {error}") from None
    except (TopologyError, ClusterError) as error:
        raise ScenarioError(f"{where}: {error}") from None


def _oversubscribed(cluster: Cluster, oversubscription: Fraction) -> Cluster:
    """Return `cluster` with so much oversubscription at its leaves."""
    fabric = cluster.fabric
    if not fabric.tiers:
        raise ScenarioError(
            f"cluster.oversubscription: {oversubscription} is for a fabric with leaves, "
            f"{fabric.kind} has none"
        )
    leaf = replace(fabric.tiers[0], oversubscription=oversubscription)
    return replace(cluster, fabric=replace(fabric, tiers=(leaf, *fabric.tiers[1:])))


def _degrees(scenario: Scenario, cluster: Cluster) -> tuple[int, int]:
    """Return the ranks of the tensor and the data axis, which the cluster has."""
    parallel = scenario.parallel
    tensor, data, replicate = parallel.tensor, parallel.data, parallel.replicate
    others = tensor * replicate * parallel.pipeline
    for name, degree in (
        ("tensor", tensor),
        ("replicate", tensor * replicate),
        ("pipeline", others),
    ):
        if data is None and cluster.ranks % degree:
            of = f" {tensor} tensor ranks x {degree // tensor}" if degree > tensor else f" {tensor}"
            raise ScenarioError(
                f"parallel.{name}:{of} must divide the {cluster.ranks} ranks of the cluster"
            )
    most = cluster.ranks // others
    if data is None:
        return tensor, most
    if data > most:
        times = others // tensor
        taken = f"tensor takes {tensor} each" + (f", {times} times" if times > 1 else "")
        raise ScenarioError(
            f"parallel.data: {data} must be at most {most}: "
            f"the cluster has {cluster.ranks} ranks, {taken}"
        )
    return tensor, data


def _batches(train: TrainTable, replicas: int) -> tuple[int, int]:
    """Return sequences of a micro-batch, and micro-batches of a step.

    Two of the three batch sizes are needed; given all three, they agree.
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


LAYERS_MAX = 10_000
"""Layers of a model: a slip of an exponent is told."""


def _need_bounded(model: ModelTable, accumulation_steps: int) -> None:
    """Check that a schedule of so many layers and micro-batches can be written down."""
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
