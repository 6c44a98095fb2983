"""Under what a run was made, as far as predictions were judged under something: see `Judged`."""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import ceil, floor, prod

from zsim.backend.backend import Job
from zsim.cluster.cluster import Cluster
from zsim.cluster.profile.in_training import DEGREES, FittedSpan, Judged
from zsim.strategy.strategy import Strategy

OWN, UNKNOWN = "zsim's own", "unknown"
"""Runtimes that are none: zsim's own stages, and a schedule that does not say who wrote it."""

WORDS = {
    "tensor": "tensor degree {:,}",
    "pipeline": "{:,} stages of a pipeline",
    "context": "context degree {:,}",
    "replicate": "{:,} replicas of the shards",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Circumstance:
    """The value that a run has of each thing that `Judged` lists.

    Attributes:
        several_nodes: whether the ranks are on several nodes; on one the fabric is not used.
        listed_links: whether the fabric is a list of links, of which no oversubscription is known.
    """

    runtime: str
    precision: str
    tensor: int
    pipeline: int
    context: int
    replicate: int
    nics_per_node: int
    oversubscription: Fraction
    several_nodes: bool
    listed_links: bool


def circumstance(job: Job) -> Circumstance:
    """Return the circumstance of a run of `job`."""
    strategy, shape, cluster = job.schedule.contract.strategy, job.model.architecture, job.cluster
    degrees = {axis.name: axis.size for axis in job.schedule.mesh.axes}
    return Circumstance(
        runtime=_runtime(strategy),
        precision=_precision(strategy, job),
        tensor=degrees.get("tensor", 1),
        pipeline=degrees.get("pipeline", 1),
        context=1 if shape is None else shape.execution.context,
        replicate=degrees.get("replicate", 1),
        nics_per_node=cluster.nics_per_node,
        oversubscription=_oversubscription(cluster),
        several_nodes=cluster.nodes > 1,
        listed_links=bool(cluster.fabric.edges),
    )


def _runtime(strategy: Strategy | None) -> str:
    if strategy is None:
        return UNKNOWN
    return OWN if strategy.zero.emulate is None else type(strategy.zero.emulate).__name__


def _precision(strategy: Strategy | None, job: Job) -> str:
    if strategy is None:
        return UNKNOWN
    shape = job.model.architecture
    float8 = None if shape is None else shape.execution.float8
    return strategy.train.precision.value + (f" with {float8} float8" if float8 is not None else "")


def _oversubscription(cluster: Cluster) -> Fraction:
    """Return that of the whole way up, also where the nodes are all below one leaf."""
    return prod((tier.oversubscription for tier in cluster.fabric.tiers), start=Fraction(1))


def judged_under(found: Sequence[Circumstance]) -> Judged:
    """Return what runs of these circumstances judge; there is at least one."""

    def span(name: str) -> FittedSpan:
        values = [getattr(each, name) for each in found]
        return FittedSpan(least=floor(min(values)), most=ceil(max(values)))

    return Judged(
        runtimes=tuple(sorted({each.runtime for each in found})),
        precisions=tuple(sorted({each.precision for each in found})),
        tensor=span("tensor"),
        pipeline=span("pipeline"),
        context=span("context"),
        replicate=span("replicate"),
        nics_per_node=span("nics_per_node"),
        oversubscription=span("oversubscription"),
    )


def unlike(found: Circumstance, judged: Judged) -> list[str]:
    """Return, in words, in what no judged run was like one of this circumstance."""
    words: list[str] = []
    if found.runtime not in judged.runtimes:
        words.append(f"runtime {found.runtime}")
    if found.precision not in judged.precisions:
        words.append(f"precision {found.precision}")
    for name in DEGREES:
        degree: int = getattr(found, name)
        if degree not in getattr(judged, name):
            words.append(WORDS[name].format(degree))
    return words + _unlike_fabric(found, judged) if found.several_nodes else words


def _unlike_fabric(found: Circumstance, judged: Judged) -> list[str]:
    words: list[str] = []
    nics = found.nics_per_node
    if nics not in judged.nics_per_node:
        name = "1 NIC" if nics == 1 else f"{nics} NICs"
        words.append(f"{name} per node where rows had {judged.nics_per_node}")
    if found.listed_links:
        words.append("a fabric of listed links")
    elif found.oversubscription not in judged.oversubscription:
        words.append(f"oversubscription {float(found.oversubscription):g}")
    return words
