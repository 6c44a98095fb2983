"""From a scenario to what it means: a model, a cluster, a strategy, and a number of steps."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction

from zsim.cluster.cluster import Cluster, ClusterError, Overheads
from zsim.cluster.fault import Fault, Neighbour
from zsim.cluster.files import TopologyError, UnknownTopologyError
from zsim.cluster.profile.in_training import ALONE
from zsim.cluster.profile.kernels import KernelProfile, KernelProfileError
from zsim.cluster.profile.network import NetworkProfile, ProfileError
from zsim.model.equal_units import EQUAL_UNITS
from zsim.model.model import Model
from zsim.network.link_load import Decision
from zsim.scenario.fault_injection import faults, neighbours
from zsim.scenario.missing_keys import need_cluster_keys, need_keys
from zsim.scenario.optimizer import groups_of, learning_rates_of, rule_of
from zsim.scenario.outline import Batches, Outline, model_of, with_table
from zsim.scenario.runtime_options import emulated, stage_of
from zsim.scenario.tables import (
    ClusterTable,
    ModelTable,
    NetworkTable,
    Scenario,
    ScenarioError,
    TrainTable,
)
from zsim.schedule.schedule import Discipline
from zsim.strategy.execution import Execution
from zsim.strategy.strategy import Checkpointing, LossScale, Strategy, StrategyError

Topology = Callable[[str, str | None, int], Cluster]
"""The cluster of a topology by name, or of a node on a fabric, with so many nodes."""

Constants = Callable[[str], NetworkProfile]
"""Fitted constants of a network by name."""

KernelConstants = Callable[[str], KernelProfile]
"""Fitted constants of a GPU's kernels by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """What a scenario says, every number settled."""

    model: Model
    cluster: Cluster
    strategy: Strategy
    steps: int
    allocator: Discipline = Discipline.CACHING
    faults: tuple[Fault, ...] = ()
    neighbours: tuple[Neighbour, ...] = ()
    decision: Decision | None = None


def _no_kernels(name: str) -> KernelProfile:
    raise KernelProfileError(f"{name!r}: none ship here")


def resolve(
    scenario: Scenario,
    topology: Topology,
    constants: Constants,
    kernels: KernelConstants = _no_kernels,
) -> Resolved:
    """Settle every number of `scenario`.

    Raises:
        ScenarioError: two fields contradict each other, or the topology does not exist.
    """
    found = outline(scenario, topology, constants, kernels)
    return Resolved(
        model=model_of(found),
        cluster=found.cluster,
        strategy=found.strategy,
        steps=found.steps,
        allocator=found.allocator,
        faults=found.faults,
        neighbours=found.neighbours,
        decision=found.decision,
    )


def outline(
    scenario: Scenario,
    topology: Topology,
    constants: Constants,
    kernels: KernelConstants = _no_kernels,
) -> Outline:
    """Settle every number of `scenario` but those of its model.

    Raises:
        ScenarioError: two fields contradict each other, or the topology does not exist.
    """
    need_keys(scenario)
    cluster = _cluster(scenario, topology)
    if scenario.compute.profile is not None:
        try:
            profile, own_ps = kernels(scenario.compute.profile), scenario.compute.host_per_segment
            if own_ps is not None:
                launch = replace(profile.launch, segment_ps=own_ps)
                profile = replace(profile, launch=launch)
            if not scenario.compute.in_training:
                profile = replace(profile, training=ALONE)
            gpu = cluster.gpu.timed_by(profile)
        except KernelProfileError as error:
            raise ScenarioError(f"compute.profile: {error}") from None
        cluster = replace(cluster, gpu=gpu)
    elif scenario.compute.host_per_segment is not None:
        raise ScenarioError("compute.host_per_segment: needs a profile, whose costs it adds to")
    if scenario.network.profile is not None:
        try:
            cluster = replace(cluster, network=constants(scenario.network.profile))
        except ProfileError as error:
            raise ScenarioError(f"network.profile: {error}") from None
    tensor, data = _degrees(scenario, cluster)
    batches = _batches(scenario.train, data * scenario.parallel.replicate)
    _need_bounded(scenario.model, batches)
    try:
        strategy = _strategy(scenario, tensor, data, batches)
    except StrategyError as error:
        raise ScenarioError(with_table(str(error))) from None
    try:
        cluster.gpu.rate(strategy.precision.compute)
    except ClusterError as error:
        raise ScenarioError(f"train.precision: {strategy.precision}: {error}") from None
    if strategy.offload_checkpoints and (cluster.host is None or cluster.pcie_link is None):
        raise ScenarioError(
            f"activations.offload: true needs a node with host memory behind PCIe, {cluster.name} "
            "describes none"
        )
    cluster = replace(cluster, nodes=-(-strategy.ranks // cluster.gpus_per_node))
    return Outline(
        model=scenario.model,
        cluster=cluster,
        strategy=strategy,
        batches=batches,
        steps=scenario.train.steps,
        allocator=scenario.cluster.allocator,
        faults=faults(scenario, cluster, strategy.ranks),
        neighbours=neighbours(scenario, cluster),
        decision=_decision(scenario.network),
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
    """What is asked for of collectives; None if nothing is."""
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
    """`scenario` on so many ranks, on as many nodes as they need; the tensor axis stays as it is.

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
    """The cluster that `[cluster]` describes, with its overrides; nodes as many as are needed."""
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
    """So many nodes of the topology, or of the node on its fabric: one or the other is given."""
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
    """`cluster` with so much oversubscription at its leaves."""
    fabric = cluster.fabric
    if not fabric.tiers:
        raise ScenarioError(
            f"cluster.oversubscription: {oversubscription} is for a fabric with leaves, "
            f"{fabric.kind} has none"
        )
    leaf = replace(fabric.tiers[0], oversubscription=oversubscription)
    return replace(cluster, fabric=replace(fabric, tiers=(leaf, *fabric.tiers[1:])))


def _degrees(scenario: Scenario, cluster: Cluster) -> tuple[int, int]:
    """Ranks of the tensor and the data axis, which the cluster has."""
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


def _batches(train: TrainTable, data: int) -> Batches:
    """The two of three batch sizes that are needed; given all three, they agree."""
    micro, steps, total = (
        train.micro_batch_size,
        train.gradient_accumulation_steps,
        train.global_batch_size,
    )
    if total is None:
        assert micro is not None  # two of the three are given
        assert steps is not None
        return Batches(micro_batch_size=micro, accumulation_steps=steps)
    known = (micro or 1) * (steps or 1) * data
    if total % known or (micro and steps and total != known):
        parts = [f"{micro} a micro-batch"] if micro else []
        parts += [f"{steps} accumulation steps"] if steps else []
        must = f"must be {known}" if micro and steps else f"must be a multiple of {known}"
        shown = " x ".join([*parts, f"{data} replicas"])
        raise ScenarioError(f"train.global_batch_size: {total} {must}: {shown}")
    rest = total // known
    return Batches(micro_batch_size=micro or rest, accumulation_steps=steps or rest)


LAYERS_MAX = 10_000
VISITS_MAX = 100_000
"""Layers of a model, and layers times micro-batches of a step: a slip of an exponent is told."""


def _need_bounded(model: ModelTable, batches: Batches) -> None:
    """Return if a schedule of so many layers and micro-batches can be written down."""
    layers = model.layers or EQUAL_UNITS
    if layers > LAYERS_MAX:
        raise ScenarioError(f"model.layers: {layers} must be at most {LAYERS_MAX}")
    most = VISITS_MAX // layers
    if batches.accumulation_steps > most:
        raise ScenarioError(
            f"train.gradient_accumulation_steps: {batches.accumulation_steps} must be at most "
            f"{most} with {layers} layers"
        )


def _strategy(scenario: Scenario, tensor: int, data: int, batches: Batches) -> Strategy:
    zero, train, activations = scenario.zero, scenario.train, scenario.activations
    runtime = emulated(zero)
    return Strategy(
        stage=stage_of(zero, runtime),
        data=data,
        tensor=tensor,
        pipeline=scenario.parallel.pipeline,
        replicate=scenario.parallel.replicate,
        emulate=runtime,
        secondary=zero.secondary,
        gradient_accumulation_steps=batches.accumulation_steps,
        precision=train.precision,
        optimizer=rule_of(train),
        learning_rates=learning_rates_of(train),
        groups=groups_of(train),
        clip_norm=train.clip_norm,
        loss_scale=LossScale(**train.loss_scale.model_dump()),
        bucket_elements=zero.bucket_elements,
        fused_buffers=zero.fused_buffers,
        contiguous=zero.contiguous,
        prefetch_units=zero.prefetch_units,
        gathered_elements=zero.gathered_elements,
        keep_after_forward=zero.keep_after_forward,
        reduce_once=zero.reduce_once,
        reductions_in_flight=zero.reductions_in_flight,
        host_ahead_units=zero.host_ahead_units,
        checkpointing=activations.checkpointing,
        execution=Execution(
            operations=activations.checkpointing is Checkpointing.OPERATIONS,
            early_stop=activations.early_stop,
            compiled=train.compile,
            float8=train.float8,
            context=scenario.parallel.context,
            loss=train.loss,
            metrics=train.metrics,
            holds_logits=train.holds_logits,
        ),
        partition_checkpoints=activations.partition,
        offload_checkpoints=activations.offload,
    )
