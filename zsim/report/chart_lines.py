"""The lines of a chart: runs along an axis, one line for each combination of the other axes."""

from collections.abc import Sequence

from zsim.study.result import StudyResult
from zsim.study.row import StudyRow

LINES_MAX = 12
"""Of more combinations the fastest, the median and the slowest run are shown."""


def lines_of(result: StudyResult, rows: Sequence[StudyRow], axis: int) -> dict[str, list[StudyRow]]:
    """Return `rows`, which have figures, by what they are on the axes other than number `axis`."""
    lines: dict[str, list[StudyRow]] = {}
    for row in rows:
        lines.setdefault(_others(result, row, axis), []).append(row)
    return lines if len(lines) <= LINES_MAX else _extremes(rows, axis)


def _others(result: StudyResult, row: StudyRow, axis: int) -> str:
    """Return what a run is on the other axes."""
    pairs = zip(result.axes, row.labels, strict=True)
    return ", ".join(f"{name}={label}" for at, (name, label) in enumerate(pairs) if at != axis)


def _extremes(rows: Sequence[StudyRow], axis: int) -> dict[str, list[StudyRow]]:
    """Return the fastest run of each choice, the one in the middle, and the slowest."""
    found: dict[str, list[StudyRow]] = {"fastest": [], "median": [], "slowest": []}
    choices: dict[str, list[StudyRow]] = {}
    for row in rows:
        choices.setdefault(row.labels[axis], []).append(row)
    for each in choices.values():
        ordered = sorted(each, key=lambda row: row.step_time_s)
        for name, at in (("fastest", 0), ("median", len(ordered) // 2), ("slowest", -1)):
            found[name].append(ordered[at])
    return found
