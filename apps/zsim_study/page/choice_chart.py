"""Step times along an axis of a study, a line for each combination of the other axes.

If a study selects a best run for each choice on an axis, the chart shows times relative to the
fastest run with the same choice. On an axis in seconds, the difference between 8 and 512 nodes
would hide the effect of the other axes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from zsim.report.svg.figure import ChoiceChart, ChoicePoint, Series, SeriesMark
from zsim.units import format_seconds
from zsim_study.study.result import StudyResult
from zsim_study.study.row import StudyRow

COLOURS = (
    *("#5b8bd0", "#e07a5f", "#6d9f71", "#f2b45c", "#8d6a9f", "#4f9da6"),
    *("#1f3f77", "#8c2f1b", "#2f5233", "#9a6b00", "#c77daf", "#7b8794"),
)

FAR = 20
"""Ratio of the largest to the smallest value above which the axis is logarithmic."""
NAMED_BY_NUMBERS = frozenset({"zero.stage"})
"""Fields whose numbers are categories, without values in between."""


@dataclass(frozen=True, slots=True)
class ChartValues:
    """Values of a chart: step times in seconds, or ratios to the fastest run of a group.

    Attributes:
        of_run: value of each run, by name.
        like: name of the axis that groups the runs; "" if the values are seconds.
    """

    of_run: dict[str, float]
    like: str = ""

    @property
    def title(self) -> str:
        """Return the title of the axis of values."""
        if self.like:
            return f"step time over that of the fastest that fits with the same {self.like}"
        return "step time"

    @property
    def are_far_apart(self) -> bool:
        """True if the values need a logarithmic axis."""
        least = min(self.of_run.values())
        return least > 0 and max(self.of_run.values()) / least > FAR


def choice_chart(result: StudyResult, rows: Sequence[StudyRow], axis: int) -> ChoiceChart:
    """Return the chart of `rows`, which all have results, along axis number `axis`."""
    lines, values = lines_of(result, rows, axis), values_of(result, rows)
    choices = tuple(dict.fromkeys(row.labels[axis] for row in result.rows))
    names, far = is_of_names(result, axis), values.are_far_apart
    bars = names and not far
    mark = SeriesMark.BOX if bars else SeriesMark.LINE
    accepted = {row.name for row in result.ranking.accepted}
    return ChoiceChart(
        series=tuple(
            Series(name or "step time", COLOURS[at % len(COLOURS)], mark)
            for at, name in enumerate(lines)
        ),
        points=tuple(
            tuple(
                _point(row, choices.index(row.labels[axis]), values, meets=row.name in accepted)
                for row in line
            )
            for line in lines.values()
        ),
        choices=choices,
        axis=result.axes[axis],
        values=values.title,
        is_bars=bars,
        is_joined=not names,
        is_logarithmic=far,
        is_seconds=not values.like,
    )


def _point(row: StudyRow, choice: int, values: ChartValues, *, meets: bool) -> ChoicePoint:
    shown, error = values.of_run[row.name], row.outcome.error
    says = f"{row.name}: {format_seconds(row.step_time_s)}"
    says += f" ± {error.half_width:.0%}" if error is not None else ""
    says += f", {shown:.3g} times the fastest" if values.like else ""
    says += "" if meets else "; does not meet the goal"
    band = 0.0 if error is None else error.half_width * shown
    return ChoicePoint(choice=choice, value=shown, band=band, meets=meets, title=says)


def values_of(result: StudyResult, rows: Sequence[StudyRow]) -> ChartValues:
    """Return the chart values of `rows`, which all have results."""
    if result.goal.axis is None:
        return ChartValues({row.name: row.step_time_s for row in rows})
    fastest_s: dict[str, float] = {}
    for row in rows:
        group = result.goal.group(row)
        fits = result.ranking.fastest.get(group)
        known_s = fastest_s.get(group, row.step_time_s)
        fastest_s[group] = min(known_s, row.step_time_s) if fits is None else fits.step_time_s
    return ChartValues(
        {row.name: row.step_time_s / (fastest_s[result.goal.group(row)] or 1.0) for row in rows},
        like=result.axes[result.goal.axis],
    )


def is_of_names(result: StudyResult, axis: int) -> bool:
    """Return True if the choices on axis number `axis` are categories rather than amounts."""
    if NAMED_BY_NUMBERS & set(result.fields[axis]):
        return True
    return not all(row.labels[axis][:1].isdigit() for row in result.rows)


LINES_MAX = 12
"""Maximum number of lines; above it, only the fastest, median and slowest runs are shown."""


def lines_of(result: StudyResult, rows: Sequence[StudyRow], axis: int) -> dict[str, list[StudyRow]]:
    """Group `rows`, which all have results, by their choices on the axes other than `axis`."""
    lines: dict[str, list[StudyRow]] = {}
    for row in rows:
        lines.setdefault(_others(result, row, axis), []).append(row)
    return lines if len(lines) <= LINES_MAX else _extremes(rows, axis)


def _others(result: StudyResult, row: StudyRow, axis: int) -> str:
    """Return the choices of a run on the other axes as text."""
    pairs = zip(result.axes, row.labels, strict=True)
    return ", ".join(f"{name}={label}" for at, (name, label) in enumerate(pairs) if at != axis)


def _extremes(rows: Sequence[StudyRow], axis: int) -> dict[str, list[StudyRow]]:
    """Return the fastest, median and slowest run of each choice."""
    found: dict[str, list[StudyRow]] = {"fastest": [], "median": [], "slowest": []}
    choices: dict[str, list[StudyRow]] = {}
    for row in rows:
        choices.setdefault(row.labels[axis], []).append(row)
    for each in choices.values():
        ordered = sorted(each, key=lambda row: row.step_time_s)
        for name, at in (("fastest", 0), ("median", len(ordered) // 2), ("slowest", -1)):
            found[name].append(ordered[at])
    return found
