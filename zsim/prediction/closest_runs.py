"""Find the published runs that are closest to a run. They name the evidence, not the error.

The distance is the sum of the squared logarithms (base 2) of the ratios of sizes, and `OTHER` for
each kind that differs.
"""

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cache
from math import log2
from statistics import median

from zsim.cluster.cluster import Cluster
from zsim.prediction.evidence import JudgedRun, judged_runs
from zsim.prediction.run_features import RunFeatures

SIZES = ("tensor", "pipeline", "context", "replicate", "nodes", "tokens", "width")
KINDS = ("runtime", "constants", "precision", "states")
LESSER_KINDS = ("architecture", "attention", "checkpointing", "compiled")

OTHER = 4.0
"""Distance of another runtime, GPU, format or tier of states, equal to a size times four."""

SHOWN = 5
"""Number of closest runs to list."""

FACTOR = 4
"""Largest ratio of sizes among the runs whose slowdown ranks settings."""

NEAREST = 29
"""Maximum runs of one publication that rank settings."""

FEWEST = 9
"""Minimum runs that rank settings."""

FULLY_SHARDED = 3
"""ZeRO stage that shards parameters."""


@dataclass(frozen=True, slots=True)
class ClosestRuns:
    """The publication of the closest run, its GPU, and the number of its runs on that GPU."""

    publication: str
    gpu: str
    count: int

    def text(self) -> str:
        """Return the publication, GPU and number of runs as text."""
        runs = "1 run" if self.count == 1 else f"{self.count:,} runs"
        on = f" on {self.gpu.upper()}"
        return f"{self.publication.removesuffix(on)}{on}, {runs}"


def closest(asked: RunFeatures, runs: Sequence[JudgedRun]) -> list[JudgedRun]:
    """Return `runs`, the closest first."""
    return sorted(runs, key=lambda run: distance(asked, run.features))


def closest_of(asked: RunFeatures, runs: Sequence[JudgedRun]) -> ClosestRuns | None:
    """Return the publication of the closest run; None if there are no runs."""
    nearest = min(runs, key=lambda run: distance(asked, run.features), default=None)
    if nearest is None:
        return None
    publication, gpu = nearest.publication, nearest.features.gpu
    own = [run for run in runs if (run.publication, run.features.gpu) == (publication, gpu)]
    return ClosestRuns(publication, gpu, len(own))


def distance(asked: RunFeatures, there: RunFeatures) -> float:
    """Return the distance between two runs."""
    sizes: float = sum(step * step for step in _steps(asked, there))
    kinds = sum(bool(getattr(asked, name) != getattr(there, name)) for name in KINDS)
    lesser = sum(bool(getattr(asked, name) != getattr(there, name)) for name in LESSER_KINDS)
    return sizes + OTHER * kinds + lesser


@cache
def _of_kind(kind: Hashable) -> tuple[JudgedRun, ...]:
    """Return the published runs of a kind, which includes the runtime."""
    return tuple(run for run in judged_runs() if _kind(run.features) == kind)


def slower_of(cluster: Cluster, asked: RunFeatures | str) -> float:
    """Return `slower` of a run on a cluster with fitted constants; 1 without them or features."""
    gpu = cluster.gpu
    if gpu.measured is not None or gpu.kernels is None or isinstance(asked, str):
        return 1.0
    return slower(asked, _of_kind(_kind(asked)))


def slower(asked: RunFeatures, runs: Sequence[JudgedRun]) -> float:
    """Return the median ratio of published to predicted times of similar runs.

    It is at least 1, and 1 with too few runs. It ranks settings and is not an error.
    """
    near = [
        (distance(asked, run.features), number, run)
        for number, run in enumerate(runs)
        if _kind(run.features) == _kind(asked) and max(_steps(asked, run.features)) <= log2(FACTOR)
    ]
    counted: Counter[str] = Counter()
    ratios: list[float] = []
    for _, _, run in sorted(near, key=lambda each: each[:2]):
        if counted[run.publication] < NEAREST:
            counted[run.publication] += 1
            ratios.append(run.step_s / run.predicted_step_s)
    return max(1.0, median(ratios)) if len(ratios) >= FEWEST else 1.0


def _steps(asked: RunFeatures, there: RunFeatures) -> list[float]:
    """Return the absolute logarithms (base 2) of the ratios of sizes."""
    pairs = [(getattr(asked, name), getattr(there, name)) for name in SIZES]
    if min(asked.nodes, there.nodes) > 1 and asked.oversubscription and there.oversubscription:
        pairs.append((asked.gpu_bytes_per_s, there.gpu_bytes_per_s))
        pairs.append((asked.oversubscription, there.oversubscription))
    return [abs(log2(one) - log2(other)) for one, other in pairs]


def _kind(run: RunFeatures) -> tuple[object, ...]:
    is_16_bits = run.precision in {"fp16", "bf16"}
    several = run.nodes > 1
    return (
        run.runtime,
        "16 bits" if is_16_bits else run.precision,
        run.states,
        run.stage == FULLY_SHARDED,
        *(getattr(run, axis) > 1 for axis in ("tensor", "pipeline", "context", "replicate")),
        *(run.constants, several, run.network, several and not run.oversubscription),
    )
