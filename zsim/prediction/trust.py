"""Trust in a simulation, as a sentence: what its times rest on, and which runs judged them."""

from collections.abc import Sequence

from zsim.backend.backend import Job
from zsim.cluster.cluster import Cluster
from zsim.cluster.profile.in_training import SPANS, Evidence, FittedSpan
from zsim.cluster.profile.kernels import KernelProfile
from zsim.prediction.circumstance import circumstance, unlike

PUBLISHED = (
    "unvalidated: times come from {gpu} rates, memory bandwidth and link speeds of {cluster} as "
    "published, and have not been judged against measurements"
)
NETWORK = (
    "unvalidated: times of kernels come from {gpu} rates and memory bandwidth as published; "
    "collectives take the constants of a network profile, which zsim validate network judges where "
    "they were measured"
)
KERNELS = (
    "unvalidated: times of kernels take constants fitted to published kernels, of which rows were "
    "held out; {wires}; no run of training has been judged"
)
JUDGED = (
    "judged on {judged} held-out runs of training on {gpu}: step times {median:.1%} off in the "
    "median, {p90:.1%} at the 90th percentile; {range}; {wires}"
)
SCALED = "; constants of {gpu} are scaled from {sibling}, of it no run was judged"

MEASURED = "unvalidated: times were measured with zsim measure, and no run of training was judged"

WORDS = {
    "sequence_length": "{:,} tokens a sequence",
    "ranks": "{:,} GPUs",
    "parameters": "{:,} parameters",
}


def trust(job: Job, aside: Sequence[str] = ()) -> str:
    """Return the sentence for the simulation of `job`, with `aside` beside it."""
    cluster = job.cluster
    kernels = cluster.gpu.kernels
    if cluster.gpu.measured is not None:
        return _measured(cluster)
    if kernels is None:
        sentence = PUBLISHED if cluster.network is None else NETWORK
        return sentence.format(gpu=cluster.gpu.name, cluster=cluster.name)
    wires = "link speeds are as published"
    if cluster.network is not None:
        wires = "collectives take fitted constants too"
    evidence = kernels.training.evidence
    if evidence is None or not evidence.judged:
        return KERNELS.format(wires=wires)
    return _judged(_outside(job, evidence, aside), kernels, evidence, wires)


def _measured(cluster: Cluster) -> str:
    times = cluster.gpu.measured
    assert times is not None
    without = f"; not measured: {', '.join(times.missing)}" if times.missing else ""
    source = dict(cluster.cites).get("measured", "measured on ranks like these")
    return f"{MEASURED} ({source}){without}"


def error(job: Job, aside: Sequence[str] = ()) -> float | None:
    """Return the relative error of nine of ten held-out runs like `job`; None if unknown.

    Unknown where no run of this kind of GPU was judged, or the job is outside what was fitted.
    """
    kernels = job.cluster.gpu.kernels
    evidence = None if kernels is None else kernels.training.evidence
    if kernels is None or evidence is None or not evidence.judged:
        return None
    known = kernels.gpu == evidence.gpu and not _outside(job, evidence, aside)
    return evidence.p90 if known else None


def _judged(outside: list[str], kernels: KernelProfile, evidence: Evidence, wires: str) -> str:
    found = JUDGED.format(
        judged=evidence.judged,
        gpu=evidence.gpu,
        median=evidence.median,
        p90=evidence.p90,
        range=_range(outside),
        wires=wires,
    )
    if kernels.gpu != evidence.gpu:
        found += SCALED.format(gpu=kernels.gpu, sibling=evidence.gpu)
    return found


def _range(outside: list[str]) -> str:
    """Say whether the run is like those that were fitted and judged, and if not in what."""
    if not outside:
        return "this run is inside the range fitted"
    return f"this run is outside the range fitted: {', '.join(outside)}"


def _outside(job: Job, evidence: Evidence, aside: Sequence[str]) -> list[str]:
    """Return the ways in which the run is not like those that were fitted and judged."""
    shape = job.model.architecture
    asked = {"ranks": job.schedule.mesh.size, "parameters": job.model.parameter_count}
    if shape is not None:
        asked["sequence_length"] = shape.sequence_length
    found = [*unlike(circumstance(job), evidence.under), *aside]
    if shape is None:
        found.append("a model whose shape is not known")
    elif shape.has_windows:
        found.append("attention windows")
    if job.cluster.network is None:  # every judged run had a profile of its network
        found.append("collectives without fitted constants")
    for name in SPANS:
        span: FittedSpan = getattr(evidence, name)
        if name in asked and asked[name] not in span:
            found.append(WORDS[name].format(asked[name]))
    return found
