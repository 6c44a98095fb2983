"""Growth of errors with the number of GPUs, from settings published on several numbers."""

import json
from collections import defaultdict
from collections.abc import Iterable
from math import prod
from statistics import median

from zsim_lab.rows.published import Published
from zsim_lab.verdict.verdict import Fact, VerdictRow

SHARED = ("tensor", "pipeline", "context")
"""Parallel axes whose degrees a setting keeps on any number of GPUs."""


def growth(found: Iterable[VerdictRow]) -> Fact | None:
    """Return the differences of signed errors between the most and the fewest GPUs of a setting.

    None if no setting was published on several numbers of them.
    """
    by_setting: defaultdict[str, dict[int, float]] = defaultdict(dict)
    for each in found:
        if isinstance(each.source, Published):
            by_setting[_setting(each.source)][_gpus(each.source)] = each.off
    several = [sizes for sizes in by_setting.values() if len(sizes) > 1]
    if not several:
        return None
    differences = [sizes[max(sizes)] - sizes[min(sizes)] for sizes in several]
    value: dict[str, float] = {
        "settings": len(several),
        "fewest_gpus": min(map(min, several)),
        "most_gpus": max(map(max, several)),
        "median": median(differences),
        "furthest": max(differences, key=abs),
    }
    line = (
        f"from the fewest to the most GPUs ({value['fewest_gpus']} to {value['most_gpus']}) errors "
        f"of {len(several)} settings change by {value['median']:+.1%} in the median, by "
        f"{value['furthest']:+.1%} at most"
    )
    return Fact(name="growth_with_gpus", value=value, lines=(line,))


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
