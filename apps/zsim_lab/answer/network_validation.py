"""Compare predicted times of collectives with published measurements."""

import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from os import PathLike
from pathlib import Path

from zsim.api.answer import Progress, ignore_progress
from zsim.cluster.profile.files import Profiles
from zsim.files.installed import network_profiles
from zsim.units import format_seconds
from zsim_lab.answer.validation import Validation
from zsim_lab.rows.measurements import measurements
from zsim_lab.verdict.network_verdict import (
    SIZE_CLASSES,
    JudgedMeasurement,
    row_of,
    size_class,
    verdict,
)
from zsim_lab.verdict.verdict import Verdict

HeldOut = Mapping[str, Mapping[str, Mapping[str, float]]]
"""Median errors by hardware and size class, of rows fitted and of groups held out."""

LEFT_OUT = "each cluster left out, and predicted by a fit to all others:"
ANOTHER = "by another cluster"


def validate_network(folder: str | PathLike[str]) -> Validation:
    """Return how well the profiles that ship predict the tables of collectives in `folder`.

    Raises:
        MistakeError: there is nothing to read.
    """
    profiles = network_profiles()
    tables = measurements(Path(folder))
    found = [verdict(name, rows, left, profiles) for name, (rows, left) in tables.items()]
    return _validation({"": found})


def validate_left_out(
    folder: str | PathLike[str], *, progress: Progress = ignore_progress
) -> Validation:
    """Return how well the tables of collectives in `folder` predict each of their clusters.

    Every cluster takes a fit of all others, in a process of its own. Rows that several clusters
    measured are also predicted by the time of another one.

    Raises:
        MistakeError: there is nothing to read.
    """
    from zsim_lab.fit.clusters_left_out import by_another, clusters_of, left_out  # scipy

    tables = measurements(Path(folder))
    rows = [row for found, _ in tables.values() for row in found]
    asked = clusters_of(rows)
    clusters: dict[str, Sequence[JudgedMeasurement]] = {}
    with ProcessPoolExecutor(min(len(asked) or 1, os.cpu_count() or 1)) as pool:
        for each in pool.map(partial(left_out, rows), asked):
            clusters["/".join(each.cluster)] = each.judged
            progress(len(clusters), len(asked))
    every = [row for own in clusters.values() for row in own]
    told = [_cluster(name, own) for name, own in clusters.items() if own]
    alone = [name for name, own in clusters.items() if not own]
    return _validation(
        {LEFT_OUT: [*told, _cluster("all", every), _cluster(ANOTHER, by_another(rows))]},
        *([f"no other cluster has the GPU of: {', '.join(alone)}"] if alone else []),
        f"{ANOTHER}: its own time for the same collective, ranks and size",
    )


def _cluster(name: str, found: Sequence[JudgedMeasurement]) -> Verdict:
    """Return the rows of a cluster, within a node and across nodes."""
    return Verdict(
        name=name,
        quantity="time of a collective",
        rows=tuple(
            row_of(each, {"sizes": f"{'several nodes' if nodes > 1 else 'one node'}, {size}"})
            for each in found
            for size in (size_class(each.measurement.size_bytes),)
            for nodes in (each.measurement.shape.nodes,)
            if size in SIZE_CLASSES
        ),
        shown=format_seconds,
    )


def _validation(found: Mapping[str, Sequence[Verdict]], *notes: str) -> Validation:
    """Return verdicts with the errors of groups held out when the shipped profiles were fitted."""
    held_out = held_out_object(network_profiles())
    lines = [
        "each (file, hardware, collective, size of group) held out once when the profiles were",
        "fitted, and predicted by a fit without it; median errors:",
    ]
    for gpu, sizes in held_out.items():
        for size, medians in sizes.items():
            fitted, of_held_out = medians.values()
            of_rows = f"{of_held_out:6.1%} held out, {fitted:5.1%} of all rows fitted"
            lines.append(f"  {gpu:6} {size:17} {of_rows}")
    return Validation(verdicts=found, notes=(*notes, *lines), more={"held_out": held_out})


def held_out_object(profiles: Mapping[str, Profiles]) -> HeldOut:
    """Return by hardware and class of size the median errors on rows fitted, and on held out."""
    found: defaultdict[str, dict[str, Mapping[str, float]]] = defaultdict(dict)
    for gpu, each in sorted(profiles.items()):
        for size, name in SIZE_CLASSES.items():
            held_out = each.errors.get(f"held_out_{name}")
            if held_out is not None:
                found[gpu][size] = {
                    "fitted_median_abs_error": each.errors[f"fitted_{name}"],
                    "held_out_median_abs_error": held_out,
                }
    return found
