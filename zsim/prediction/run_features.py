"""Features of a run that determine its error: model, sharding, hardware and software."""

import re
from dataclasses import dataclass
from fractions import Fraction
from math import prod

from zsim.backend.backend import Job
from zsim.cluster.cluster import Cluster
from zsim.cluster.profile.in_training import ALONE, SHARES
from zsim.model.model import Model
from zsim.strategy.offload import MemoryTier
from zsim.strategy.strategy import Strategy
from zsim.strategy.train import Train

PICOSECONDS_PER_MS = 10**9

OWN = "zsim's own"
"""Name of the runtime of zsim's own ZeRO stages."""

NO_SHAPE = "the shape of the model is not known"
NO_STRATEGY = "the schedule does not say how it was made"

DEVICE = str(MemoryTier.DEVICE)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFeatures:
    """Features of a run; the names are columns of the table of published runs.

    Attributes:
        constants: kernel profile and its changes: "h100", or "h100, kernels as alone".
        network: True if collectives use fitted constants.
        states: slowest tier of memory with parameters or optimizer states.
        stage: ZeRO stage.
        nodes: number of nodes, or NVLink domains, that the ranks fill.
        gpu_bytes_per_s: bandwidth of a node's NICs divided by its GPUs.
        oversubscription: product over all tiers of the fabric; 0 if the fabric is a list of links.
        tokens: tokens of a micro-batch on one rank of the data axis.
        width: hidden size.
        checkpointing: kind of activation checkpointing.
        compiled: True if blocks are compiled.
        data: number of ranks of the data axis of each replica.
        layers: layers of the model.
        spans: True if a tensor group spans several NVLink domains.
    """

    runtime: str
    stage: int
    precision: str
    constants: str
    network: bool
    states: str
    tensor: int
    pipeline: int
    context: int
    replicate: int
    nodes: int
    gpu_bytes_per_s: int
    oversubscription: float
    tokens: int
    width: int
    architecture: str
    attention: str
    checkpointing: str
    compiled: bool
    data: int
    layers: int
    spans: bool

    @property
    def gpu(self) -> str:
        """Generation of the GPU, the first word of the constants: "h100"."""
        return re.split("[_,]", self.constants, maxsplit=1)[0]

    @property
    def gpus(self) -> int:
        """Number of GPUs; the data axis includes context ranks."""
        return self.tensor * self.pipeline * self.replicate * self.data


def features_of(job: Job) -> RunFeatures | str:
    """Return the features of `job`, or the reason why no published run is comparable."""
    strategy = job.schedule.contract.strategy
    if strategy is None:
        return NO_STRATEGY
    return features(strategy, job.model, job.cluster)


def _width(train: Train) -> str:
    """Return the name of the number format of narrow GEMMs."""
    return "float8" if train.float8 is not None else "float4"


def features(strategy: Strategy, model: Model, cluster: Cluster) -> RunFeatures | str:
    """Return the features of a run, or the reason why no published run is comparable."""
    shape = model.architecture
    if shape is None:
        return NO_SHAPE
    if shape.has_windows:
        return "attention windows"
    for part, has in (
        ("routed experts", shape.experts is not None),
        ("latent attention", shape.latent is not None),
        ("prediction of further tokens", shape.mtp_layers > 0),
    ):
        if has:
            return part
    if model.frozen:
        return "frozen parameters"
    parallel, train = strategy.parallel, strategy.train
    products = f" with {train.recipe} {_width(train)}" if train.recipe is not None else ""
    domain = cluster.gpus_per_node * cluster.nodes_per_domain
    return RunFeatures(
        runtime=_runtime(strategy),
        stage=strategy.zero.stage,
        precision=f"{train.precision.compute}{products}",
        constants=_constants(cluster),
        network=cluster.network is not None,
        states=_states(strategy),
        tensor=parallel.tensor,
        pipeline=parallel.pipeline,
        context=parallel.context,
        replicate=parallel.replicate,
        nodes=-(-strategy.ranks // domain),
        gpu_bytes_per_s=cluster.node_bytes_per_s // cluster.gpus_per_node,
        oversubscription=_oversubscription(cluster),
        tokens=model.tokens,
        width=shape.hidden_size,
        architecture=type(shape).__name__,
        attention=str(shape.attention),
        checkpointing=str(strategy.activations.checkpointing),
        compiled=train.compile,
        data=parallel.data,
        layers=shape.layers,
        spans=parallel.tensor > domain,
    )


def _runtime(strategy: Strategy) -> str:
    return OWN if strategy.zero.emulate is None else type(strategy.zero.emulate).__name__


def _constants(cluster: Cluster) -> str:
    kernels = cluster.gpu.kernels
    if kernels is None:
        return "none"
    words = [kernels.gpu]
    shares = [kernels.training.constant(name) for name in SHARES]
    if all(share == ALONE.constant(name) for name, share in zip(SHARES, shares, strict=True)):
        words.append("kernels as alone")
    if segment_ps := kernels.launch.segment_ps:
        words.append(f"{segment_ps / PICOSECONDS_PER_MS:g} ms of host a segment")
    if unit_ps := kernels.launch.unit_ps:
        words.append(f"{unit_ps / PICOSECONDS_PER_MS:g} ms of host a unit")
    return ", ".join(words)


def _states(strategy: Strategy) -> str:
    """Return the slowest tier with states, from zsim's own options or those of the runtime."""
    offload, runtime = strategy.offload, strategy.zero.emulate
    found = {offload.optimizer, offload.parameters}
    if runtime is not None:
        found |= set(runtime.tiers(stage=strategy.zero.stage).values())
    slowest = [tier for tier in (MemoryTier.NVME, MemoryTier.HOST) if tier in found]
    return str(slowest[0]) if slowest else DEVICE


def _oversubscription(cluster: Cluster) -> float:
    if cluster.fabric.edges:
        return 0.0
    tiers = cluster.fabric.tiers
    return float(prod((tier.oversubscription for tier in tiers), start=Fraction(1)))
