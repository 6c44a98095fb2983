"""A study as text: the answer in a sentence, then a table of runs, best first."""

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from zsim.api.answer_text import facts_text, table_text
from zsim.units import format_bytes, format_seconds
from zsim_study.study.outcome import Status
from zsim_study.study.result import StudyResult, difference
from zsim_study.study.row import StudyRow

ROWS_MAX = 20
"""Maximum number of runs in the table; the rest are counted."""

ERRORS_SHOWN = 5
"""Maximum lines about errors: there may be one for each number of GPUs."""

BELOW, UNJUDGED = "({})", "{} ?"
"""Formats of differences within the error of the ratio, and of those with unknown error."""

Cell = Callable[[StudyRow], str]


def sweep_text(result: StudyResult, store: Path | None) -> str:
    """Return the answer, a table of runs, and notes on it."""
    groups = list(dict.fromkeys(map(result.goal.group, result.rows)))
    accepted = sorted(result.ranking.accepted, key=lambda row: groups.index(result.goal.group(row)))
    rows = [*accepted, *(row for row, _ in result.ranking.refused)]
    lines = [result.question, result.answer, "", _table(result, rows[:ROWS_MAX])]
    if rows[ROWS_MAX:]:
        lines.append(f"and {len(rows) - ROWS_MAX:,} more: all with --csv FILE")
    return "\n".join([*lines, "", facts_text(_facts(result, store))])


def _facts(result: StudyResult, store: Path | None) -> list[tuple[str, str]]:
    counts = Counter(row.outcome.status for row in result.rows)
    not_done = [
        f"{count:,} {status.value.replace('does', 'do') if count > 1 else status.value}"
        for status, count in counts.items()
        if status is not Status.DONE
    ]
    runs = f"{len(result.rows):,}"
    if result.dropped:
        runs += f", and {result.dropped:,} combinations dropped"
    lines = [("runs", f"{runs}{'; ' if not_done else ''}{', '.join(not_done)}")]
    lines += _reasons(result)
    lines += [("held fixed", result.held)]
    marks = {_to_best(result, row)[-1:] for row in result.rows}
    if ")" in marks:
        lines.append(("in brackets", "differences within the error of the ratio of two step times"))
    if "?" in marks:
        lines.append(("with ?", "differences whose error is unknown"))
    shown = result.error[:ERRORS_SHOWN]
    lines += [("" if index else "error", line) for index, line in enumerate(shown)]
    if result.error[ERRORS_SHOWN:]:
        lines.append(("", f"and {len(result.error) - ERRORS_SHOWN} more lines like it: --json"))
    return lines if store is None else [*lines, ("kept in", str(store))]


def _reasons(result: StudyResult) -> list[tuple[str, str]]:
    """Return the reason of the first run for each status without an answer."""
    found: dict[str, list[StudyRow]] = {}
    for row in result.rows:
        if row.outcome.reason:
            found.setdefault(row.outcome.status.value, []).append(row)
    return [
        (
            status,
            f"{rows[0].name}: {rows[0].outcome.reason}"
            + (f"; --csv FILE has the reason of all {len(rows):,}" if rows[1:] else ""),
        )
        for status, rows in found.items()
    ]


def _table(result: StudyResult, rows: Sequence[StudyRow]) -> str:
    why = {row.name: reason for row, reason in result.ranking.refused}
    cells = {name: cell for name, cell in _cells(result).items() if any(map(cell, rows))}
    if why:  # reasons are in the facts below
        cells["why not"] = lambda row: why.get(row.name, "").partition(": ")[0]
    columns = (*result.axes, *cells)
    words = [*range(len(result.axes)), *([len(columns) - 1] if why else [])]
    lines = [(*row.labels, *(cell(row) for cell in cells.values())) for row in rows]
    return table_text(columns, lines, words=words, ruled=True, width=None)


def _cells(result: StudyResult) -> dict[str, Cell]:
    """Return the columns of figures; GPUs and batches only if they differ."""
    done = [row for row in result.rows if row.gpus]
    found: dict[str, Cell] = {}
    if len({row.gpus for row in done}) > 1:
        found["GPUs"] = lambda row: f"{row.gpus:,}" if row.gpus else ""
    if len({(row.micro_batch_size, row.accumulation_steps) for row in done}) > 1:
        found["batch"] = lambda row: (
            f"{row.micro_batch_size} x {row.accumulation_steps}" if row.gpus else ""
        )
    found["step"] = _of(lambda summary: format_seconds(summary.step_time_s))
    found["to best"] = lambda row: _to_best(result, row)
    found["exposed communication"] = _of(
        lambda summary: f"{summary.exposed_communication_s / summary.step_time_s:.1%}"
    )
    found["MFU"] = _of(lambda summary: summary.mfu_text)
    found["reserved"] = _of(
        lambda summary: (
            "" if summary.reserved_bytes is None else format_bytes(summary.reserved_bytes)
        )
    )
    tokens = {
        round(summary.tokens_per_s * summary.step_time_s)
        for summary in (row.outcome.summary for row in result.rows)
        if summary is not None
    }
    if len(tokens) > 1:  # else it is proportional to the step time
        found["tokens/s"] = _of(lambda summary: f"{summary.tokens_per_s:,.0f}")
    found["drives last"] = _of(
        lambda summary: "" if summary.drive_life is None else summary.drive_life.lasts
    )
    found["cost/M tokens"] = lambda row: (
        "" if row.cost_per_million_tokens is None else f"{row.cost_per_million_tokens:.4g}"
    )
    return found


def _of(text: Callable[[Any], str]) -> Cell:
    """Return a cell computed from a run's summary; empty if it has none."""
    return lambda row: "" if row.outcome.summary is None else text(row.outcome.summary)


def _to_best(result: StudyResult, row: StudyRow) -> str:
    """Return by how much a step is longer than that of the best run of the group.

    In brackets if that is within the error of the ratio, with ? if the error is unknown.
    """
    best = result.ranking.best.get(result.goal.group(row))
    if best is None or row.outcome.summary is None:
        return ""
    if row is best:
        return "best"
    longer, counts = difference(best, row)
    form = UNJUDGED if counts is None else "{}" if counts else BELOW
    return form.format(f"{longer:+.1%}")
