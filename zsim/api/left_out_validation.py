"""Cross-validation of the predicted times of collectives: each cluster is held out of the fit."""

import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from os import PathLike
from pathlib import Path
from statistics import median

from zsim.api.answer import Answer, Progress, tell_nobody
from zsim.api.answer_text import table_text
from zsim.api.network_validation import HeldOut, held_out_object, held_out_text
from zsim.calibration.clusters_left_out import ClusterLeftOut, by_another, clusters_of, left_out
from zsim.calibration.network_verdict import SIZE_CLASSES, JudgedMeasurement, size_class
from zsim.files.installed import network_profiles
from zsim.files.measurements import measurements

LARGE, MEDIUM = SIZE_CLASSES
ACROSS: dict[bool | None, str] = {False: "one node", True: "several nodes"}
EITHER: dict[bool | None, str] = {**ACROSS, None: "any"}


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOutValidation(Answer):
    """Validation by clusters, each held out of the fit in turn.

    Attributes:
        clusters: predictions for each cluster by a fit to all others.
        others: rows that several clusters measured, predicted by the time of another cluster.
        held_out: errors of the profiles in the package, as in `NetworkValidation.held_out`.
    """

    clusters: Sequence[ClusterLeftOut]
    others: Sequence[JudgedMeasurement]
    held_out: HeldOut

    def text(self) -> str:
        """Return rows for each cluster, within a node and across nodes, then for all together."""
        rows = [
            (each.cluster[0] if first else "", each.cluster[1] if first else "", *cells)
            for each in self.clusters
            for first, cells in _numbered(_rows(each.judged))
        ]
        rows += [
            ("all" if first else "", "each left out" if first else "", *cells)
            for first, cells in _numbered(_rows(self._all, EITHER))
        ]
        rows += [
            ("", "by another cluster" if first else "", *cells)
            for first, cells in _numbered(_rows(self.others, EITHER))
        ]
        columns = ("hardware", "cluster", "across", "rows", LARGE, "rows", MEDIUM)
        alone = [each.cluster[1] for each in self.clusters if not each.judged]
        return "\n".join(
            [
                "each cluster left out, and predicted by a fit to all others; median errors:",
                table_text(columns, rows, words=range(3)),
                *([f"no other cluster has the GPU of: {', '.join(alone)}"] if alone else []),
                "by another cluster: its own time for the same collective, ranks and size",
                held_out_text(self.held_out),
            ]
        )

    def to_dict(self) -> dict[str, object]:
        """Return the object that `zsim validate network --left-out --json` prints."""
        return {
            "clusters": {"/".join(each.cluster): _object(each.judged) for each in self.clusters},
            "all": _object(self._all),
            "by_another_cluster": _object(self.others),
            "held_out": self.held_out,
        }

    @property
    def _all(self) -> list[JudgedMeasurement]:
        return [row for each in self.clusters for row in each.judged]


def validate_left_out(
    folder: str | PathLike[str], *, progress: Progress = tell_nobody
) -> LeftOutValidation:
    """Predict each cluster in the tables of collectives in `folder` by a fit to all others.

    Each fit runs in a separate process.

    Raises:
        MistakeError: there is nothing to read.
    """
    tables = measurements(Path(folder))
    rows = [row for found, _ in tables.values() for row in found]
    asked = clusters_of(rows)
    found: list[ClusterLeftOut] = []
    with ProcessPoolExecutor(min(len(asked) or 1, os.cpu_count() or 1)) as pool:
        for each in pool.map(partial(left_out, rows), asked):
            found.append(each)
            progress(len(found), len(asked))
    return LeftOutValidation(
        clusters=found, others=by_another(rows), held_out=held_out_object(network_profiles())
    )


def _of(
    found: Iterable[JudgedMeasurement], size: str, *, crosses: bool | None = None
) -> list[float]:
    """Return the errors of the rows of a size class, across nodes, within one, or both (None)."""
    return [
        each.error
        for each in found
        if size_class(each.measurement.size_bytes) == size
        and crosses in {None, each.measurement.shape.nodes > 1}
    ]


def _rows(
    found: Sequence[JudgedMeasurement], across: Mapping[bool | None, str] = ACROSS
) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for crosses, words in across.items():
        of_sizes = [_of(found, size, crosses=crosses) for size in (LARGE, MEDIUM)]
        if any(of_sizes):
            cells = (cell for errors in of_sizes for cell in _cells(errors))
            rows.append((words, *cells))
    return rows


def _cells(errors: Sequence[float]) -> tuple[str, str]:
    return (str(len(errors)), f"{median(errors):.1%}") if errors else ("-", "-")


def _numbered(rows: Iterable[tuple[str, ...]]) -> list[tuple[bool, tuple[str, ...]]]:
    """Return each of `rows` with True for the first and False for the others."""
    return [(place == 0, row) for place, row in enumerate(rows)]


def _object(found: Sequence[JudgedMeasurement]) -> dict[str, dict[str, float]]:
    return {
        size: {"rows": len(errors), "median_abs_error": median(errors)}
        for size in (LARGE, MEDIUM)
        if (errors := _of(found, size))
    }
