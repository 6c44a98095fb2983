"""The page of a study: the answer, all runs, a chart per axis, and effects of single changes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from zsim.analysis.run_comparison import ratio_error
from zsim.report.page import (
    Page,
    PageTable,
    Pairs,
    Section,
    TableCell,
    number,
    words,
)
from zsim.report.svg.figure import BarRows, RowBar, Series
from zsim.units import format_bytes, format_seconds
from zsim_study.page.choice_chart import choice_chart
from zsim_study.study.goal import COST
from zsim_study.study.result import StudyResult, compared
from zsim_study.study.row import StudyRow

ROWS_MAX = 1_000
"""Maximum number of rows of the table: more make the page slow. The CSV file has all rows."""

PAIRS_MAX = 200
"""Maximum number of runs to compare in pairs: the page holds an error for every pair."""


def study_page(result: StudyResult) -> Page:
    """Return the page of `result`."""
    rows = [row for row in result.rows if row.outcome.summary is not None]
    sections = [_runs(result)]
    if rows:
        vary = [at for at in range(len(result.axes)) if _varies(rows, at)]
        sections += [_axis(result, rows, at, first=at == vary[0]) for at in vary]
        sections += [*one_change(result), _pairs(result, rows)]
    facts = [("held fixed", result.held), ("runs", _counts(result))]
    return Page(
        title=result.question,
        answer=f"{result.answer[:1].upper()}{result.answer[1:]}.",
        facts=(
            *facts,
            *zip(("error", *("" for _ in result.error[1:])), result.error, strict=False),
        ),
        sections=tuple(sections),
    )


def _counts(result: StudyResult) -> str:
    text = f"{len(result.rows):,}, of which {len(result.ranking.accepted):,} meet the goal"
    return f"{text}; {result.dropped:,} combinations were dropped" if result.dropped else text


def _varies(rows: Sequence[StudyRow], axis: int) -> bool:
    return len({row.labels[axis] for row in rows}) > 1


def _runs(result: StudyResult) -> Section:
    """Return the table of all runs, best first; rejected runs show their reason."""
    why = {row.name: reason for row, reason in result.ranking.refused}
    ordered = [*result.ranking.accepted, *(row for row, _ in result.ranking.refused)]
    priced = any(row.cost_per_million_tokens is not None for row in ordered)
    columns = ["step time", "exposed communication", "MFU", "reserved", "tokens/s"]
    columns += ["cost per million tokens"] if priced else []
    left = len(ordered) - ROWS_MAX
    more = f" {left:,} more are in the CSV (--csv FILE)." if left > 0 else ""
    return Section(
        title="Runs",
        sentences=(f"Best first; click on a heading to sort.{more}",),
        table=PageTable(
            columns=(*result.axes, "GPUs", *columns, *(["why not"] if why else [])),
            numeric=(*(False for _ in result.axes), True, *(True for _ in columns), False),
            rows=tuple(
                (
                    *map(words, row.labels),
                    number(f"{row.gpus:,}" if row.gpus else "", row.gpus),
                    *_figures(row, priced=priced),
                    *([words(why.get(row.name, ""))] if why else []),
                )
                for row in ordered[:ROWS_MAX]
            ),
        ),
    )


def _figures(row: StudyRow, *, priced: bool) -> Iterator[TableCell]:
    found = row.outcome.summary
    if found is None:
        yield from (number("", 0) for _ in range(6 if priced else 5))
        return
    error = row.outcome.error
    band = f" ± {error.half_width:.0%}" if error is not None else ""
    exposed = found.exposed_communication_s / found.step_time_s if found.step_time_s else 0.0
    yield number(f"{format_seconds(found.step_time_s)}{band}", found.step_time_s)
    yield number(f"{exposed:.1%}", exposed)
    yield number(found.mfu_text, found.mfu)
    reserved = found.reserved_bytes
    yield number("" if reserved is None else format_bytes(reserved), reserved or 0)
    yield number(f"{found.tokens_per_s:,.0f}", found.tokens_per_s)
    if priced:
        cost = row.cost_per_million_tokens
        yield number("" if cost is None else f"{cost:.4g}", cost or 0)


def _axis(result: StudyResult, rows: Sequence[StudyRow], axis: int, *, first: bool) -> Section:
    """Return the chart of step time along one axis, a line for each combination of the others.

    The `first` chart of the page explains the marks.
    """
    figure = choice_chart(result, rows, axis)
    fewer = ""
    if any(series.name == "slowest" for series in figure.series):
        fewer = " Of all combinations of the others, the fastest, median and slowest."
    marks = f" {meaning_of_marks(rows)}" if first else ""
    changes = ", ".join(result.fields[axis])
    return Section(
        title=f"Along {result.axes[axis]}",
        sentences=(f"It changes {changes}.{fewer}{marks}",),
        figure=figure,
    )


def meaning_of_marks(rows: Sequence[StudyRow]) -> str:
    """Return the legend of a chart's error bars (or why there are none) and of its pale marks."""
    judged = any(row.outcome.error is not None for row in rows)
    band = (
        "Thin lines are the interval of 90 % of comparable runs, where it is known."
        if judged
        else "The error of such runs is unknown: there are no intervals."
    )
    return f"{band} Hollow dots and pale bars do not meet the goal."


@dataclass(frozen=True, slots=True)
class OneChange:
    """A run that differs from the best run in one choice, and its relative change.

    `group` is the choice on the goal's axis, where each choice has its best run; "" if the goal has
    no axis. `relative` is the change of step time or cost as a share. `counts` is True if the
    change exceeds the error, None if the error is unknown.
    """

    group: str
    axis: str
    label: str
    row: StudyRow
    relative: float
    counts: bool | None

    @property
    def name(self) -> str:
        """The changed choice and its group."""
        return f"{self.group}: {self.axis}={self.label}" if self.group else self.chosen

    @property
    def chosen(self) -> str:
        """The changed choice."""
        return f"{self.axis}={self.label}"


def changes(result: StudyResult) -> tuple[OneChange, ...]:
    """Return the effect of each single change to the best run of each group, largest first."""
    goal, found = result.goal, list[OneChange]()
    for row in result.rows:
        group = goal.group(row)
        best = result.ranking.best.get(group)
        if best is None or row.outcome.summary is None:
            continue
        apart = [at for at, label in enumerate(row.labels) if label != best.labels[at]]
        change = compared(goal, best, row) if len(apart) == 1 else None
        if change is not None:
            axis, label = result.axes[apart[0]], row.labels[apart[0]]
            found.append(OneChange(group, axis, label, row, *change))
    return tuple(sorted(found, key=lambda each: -abs(each.relative)))


def by_cost(result: StudyResult) -> bool:
    """Return True if runs are compared by cost per token, False if by step time."""
    return result.goal.minimize == COST


def one_change(result: StudyResult) -> Iterator[Section]:
    """Yield the section on single changes to the best run, if there are any."""
    found = changes(result)
    if not found:
        return
    shown, accepted = found[:20], {row.name for row in result.ranking.accepted}
    what = "the cost of a token" if by_cost(result) else "the time of a step"
    used = sorted({_sort(each) for each in shown})
    yield Section(
        title="What one change does",
        sentences=(_about(result, found, what),),
        figure=BarRows(
            series=tuple(Series(*_SERIES[sort]) for sort in used),
            rows=tuple(
                (
                    each.name,
                    (
                        RowBar(
                            start=0.0,
                            end=100 * each.relative,
                            series=used.index(_sort(each)),
                            title=f"{each.name}: {_change_text(each, found)}",
                            text=_change_text(each, found),
                            pale=each.row.name not in accepted,
                        ),
                    ),
                )
                for each in shown
            ),
            axis=f"change of {what}, %",
            is_beside=True,
        ),
    )


_SERIES = (("less", "#6d9f71"), ("more", "#e07a5f"), ("a tie: below the error", "#b8c0c9"))
"""Sorts of changes, and their colours."""


def _sort(each: OneChange) -> int:
    """Return the index in `_SERIES` of the sort of a change."""
    return 2 if each.counts is False else int(each.relative >= 0)


def _about(result: StudyResult, found: Sequence[OneChange], what: str) -> str:
    """Return sentences on the meaning of the bars, the best change and the largest change."""
    accepted = {row.name for row in result.ranking.accepted}
    meets = [each for each in found if each.row.name in accepted]
    better = min(meets, key=lambda each: each.relative, default=None)
    help_most = (
        f"What helps most and meets the goal is {better.name}: {_change_text(better, found)}."
        if better is not None and better.relative < 0
        else f"No single change that meets the goal lessens {what}."
    )
    matters = f"What matters most is {found[0].name}: {_change_text(found[0], found)}."
    if not found[0].relative:
        axes = ", ".join(sorted({each.axis for each in found}))
        matters = f"{what.capitalize()} is the same whatever is chosen on {axes}."
    each = result.goal.table.for_each
    begin = (
        f"the best run, {result.ranking.accepted[0].name}"
        if each is None
        else f"the best run for each {each}"
    )
    return (
        f"From {begin}, one {'axis' if each is None else 'other axis'} is changed at a time; "
        f"bars are the change of {what}. {help_most} {matters}"
        + " The error of these differences is unknown." * _none_judged(found)
        + " Pale bars do not meet the goal." * (len(meets) < len(found))
    )


def _none_judged(found: Sequence[OneChange]) -> bool:
    """Return True if the error of every change is unknown."""
    return all(each.counts is None for each in found)


def _change_text(each: OneChange, found: Sequence[OneChange]) -> str:
    """Return the relative change as text, marked if it is a tie or if only its error is unknown."""
    how = {
        False: ", a tie: below the error",
        None: "" if _none_judged(found) else ", of unknown error",
        True: "",
    }[each.counts]
    return f"{each.relative:+.1%}{how if each.relative else ''}"


def _pairs(result: StudyResult, rows: Sequence[StudyRow]) -> Section:
    """Return a section that compares any two runs; a script computes the difference."""
    done = {row.name for row in rows}
    ordered = [*result.ranking.accepted, *(row for row, _ in result.ranking.refused)]
    shown = [row for row in ordered if row.name in done][:PAIRS_MAX]
    left = len(rows) - len(shown)
    more = f" The best {PAIRS_MAX:,} runs can be chosen; all are in the CSV." if left else ""
    return Section(
        title="Any two runs",
        sentences=(f"Choose two; step times within the error of their ratio say so.{more}",),
        pairs=Pairs(
            figures=(
                "step time, s",
                "exposed communication, s",
                "reserved, GB",
                "MFU, %",
                "tokens/s",
                "GPUs",
            ),
            runs=tuple((row.name, _numbers(row)) for row in shown),
            errors=tuple(
                tuple(ratio_error(row.outcome.error, other.outcome.error) for other in shown[:at])
                for at, row in enumerate(shown)
            ),
        ),
    )


def _numbers(row: StudyRow) -> tuple[float | None, ...]:
    found = row.outcome.summary
    assert found is not None
    return (
        found.step_time_s,
        found.exposed_communication_s,
        None if found.reserved_bytes is None else found.reserved_bytes / 1e9,
        found.mfu * 100,
        found.tokens_per_s,
        row.gpus,
    )
