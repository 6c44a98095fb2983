"""Growth of errors with the number of GPUs, from settings published on several numbers."""

import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from statistics import median

from zsim.calibration.published import Published
from zsim.calibration.training_verdict import PredictedRun

SHARED = ("tensor", "pipeline", "context")
"""Parallel axes whose degrees a setting keeps on any number of GPUs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorGrowth:
    """Differences of signed errors between the most and the fewest GPUs of a setting.

    Attributes:
        settings: number of settings published on several numbers of GPUs.
        median, furthest: median and largest of the differences, as fractions.
        fewest, most: smallest and largest number of GPUs.
    """

    settings: int
    median: float
    furthest: float
    fewest: int
    most: int


def growth(found: Iterable[PredictedRun]) -> ErrorGrowth | None:
    """Return the growth of errors with GPUs; None if no setting has several numbers of GPUs."""
    by_setting: defaultdict[str, dict[int, float]] = defaultdict(dict)
    for each in found:
        by_setting[_setting(each.run)][_gpus(each.run)] = each.off
    several = [sizes for sizes in by_setting.values() if len(sizes) > 1]
    if not several:
        return None
    differences = [sizes[max(sizes)] - sizes[min(sizes)] for sizes in several]
    return ErrorGrowth(
        settings=len(several),
        median=median(differences),
        furthest=max(differences, key=abs),
        fewest=min(map(min, several)),
        most=max(map(max, several)),
    )


def _gpus(run: Published) -> int:
    return prod(_parallel(run).values())


def _setting(run: Published) -> str:
    """Return all values of a run except the numbers of replicas and shards."""
    parallel = _parallel(run)
    kept = {name: parallel.get(name, 1) for name in SHARED}
    kept["replicated"] = parallel.get("replicate", 1) > 1
    return json.dumps({**run.scenario, "parallel": kept, "zero": _zero(run)}, sort_keys=True)


def _zero(run: Published) -> object:
    """Return the ZeRO settings without the bucket size, which may depend on the shard."""
    zero = run.scenario.get("zero")
    if not isinstance(zero, dict):
        return zero
    return {name: value for name, value in zero.items() if name != "bucket_elements"}


def _parallel(run: Published) -> dict[str, int]:
    found = run.scenario["parallel"]
    assert isinstance(found, dict)
    return found
