"""Device memory over a step: what is alive by kind, what is reserved, and the peak explained."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from zsim.backend.backend import Job
from zsim.memory import Peak, peak, reservations
from zsim.report.page import Json, PageFigure, PageTable, Section, number, words
from zsim.schedule.schedule import Kind, Place
from zsim.trace.trace import BookEntry, RankTrace, Reservation, Trace
from zsim.units import format_bytes

COLOURS = {
    Kind.PARAMETER: "#5b8bd0",
    Kind.GRADIENT: "#e07a5f",
    Kind.MASTER: "#6d9f71",
    Kind.MOMENT: "#9ccc9c",
    Kind.SAVED: "#f2b45c",
    Kind.COMMUNICATION: "#8d6a9f",
    Kind.WORKSPACE: "#b8c0c9",
}
SOLID: Json = {"shape": "hv", "width": 2, "dash": "solid", "color": "#c81e1e"}
DOTTED: Json = {"shape": "hv", "width": 2, "dash": "dot", "color": "#c81e1e"}
UNITS = (("GB", 10**9), ("MB", 10**6), ("kB", 10**3), ("B", 1))
FAR = 30
"""A limit so many times as high as the curve would flatten it: it is shown when asked for."""
MOST_POINTS = 3_000
"""Lines of the book shown: of more, the largest of each run of equal length."""
WINDOWS = 100
"""So many parts of the step have one height of what is reserved each: the most there."""
LARGEST = 12
"""Buffers listed at the peak."""


@dataclass(frozen=True, slots=True)
class _Line:
    """After a line of the book: which operation, bytes alive by kind, bytes reserved.

    Nothing is known of what is reserved after memory ran out.
    """

    operation: str
    alive: tuple[int, ...]
    reserved: int | None


def memory(job: Job, trace: Trace) -> Section:
    """Return the section of the last step of `trace`, of the rank with the largest book."""
    pools = [pool.name for pool in job.schedule.pools if pool.place is Place.DEVICE]
    rank, found = max(
        ((rank, peak(rank.book, pool)) for rank in trace.ranks for pool in pools),
        key=lambda each: each[1].bytes,
    )
    program = job.schedule.program_of(rank.rank)
    reserved = next(
        each
        for each in rank.reservations or reservations(job.schedule, program, rank.book, job.cluster)
        if each.pool == found.pool
    )
    entries = [entry for entry in rank.book if entry.pool == found.pool]
    lines = _course(entries, reserved.course_bytes, trace.steps - 1)
    capacity = reserved.capacity_bytes
    return Section(
        title="Memory",
        sentences=(_sentence(found, rank, reserved),),
        figure=_figure(_shown(lines), capacity),
        table=_table(found),
    )


def _course(entries: list[BookEntry], reserved: tuple[int, ...], step: int) -> list[_Line]:
    """Return what is alive after each line of the book in `step`."""
    kinds = list(Kind)
    alive = [0] * len(kinds)
    found: list[_Line] = []
    for at, entry in enumerate(entries):
        alive[kinds.index(entry.kind)] += entry.change_bytes
        if entry.step == step:
            total = reserved[at] if at < len(reserved) else None
            found.append(_Line(entry.operation, tuple(alive), total))
    return found


def _shown(lines: list[_Line]) -> list[_Line]:
    """Return few enough lines; a peak is always among them."""
    if len(lines) <= MOST_POINTS:
        return lines
    size = -(-len(lines) // MOST_POINTS)
    runs = (lines[first : first + size] for first in range(0, len(lines), size))
    return [max(run, key=lambda line: sum(line.alive)) for run in runs]


def _figure(lines: list[_Line], capacity: int | None) -> PageFigure:
    where = list(range(len(lines)))
    names = [line.operation for line in lines]
    top = max((max(line.reserved or 0, sum(line.alive)) for line in lines), default=0)
    unit, size = next((each for each in UNITS if top >= each[1]), UNITS[-1])
    traces: list[Json] = []
    for at, kind in enumerate(Kind):
        course = [line.alive[at] / size for line in lines]
        if any(course):
            traces.append(
                {
                    "type": "scatter",
                    "mode": "lines",
                    "name": str(kind),
                    "stackgroup": "alive",
                    "x": where,
                    "y": course,
                    "customdata": names,
                    "line": {"shape": "hv", "width": 0.5, "color": COLOURS[kind]},
                    "fillcolor": COLOURS[kind],
                    "hovertemplate": f"{kind} %{{y:.3f}} {unit}<br>%{{customdata}}<extra></extra>",
                }
            )
    reserved = [None if line.reserved is None else line.reserved / size for line in lines]
    if any(reserved):
        traces.append(_level("reserved", unit, where, upper(reserved)) | {"line": DOTTED})
    if capacity is not None and lines:
        ends = [where[0], where[-1]]
        limit = _level("limit", unit, ends, [capacity / size] * 2) | {"line": SOLID}
        traces.append(limit | ({"visible": "legendonly"} if capacity > FAR * top else {}))
    return PageFigure(
        traces=tuple(traces),
        layout={
            "xaxis": {
                "title": {"text": "allocations and frees, in their order"},
                **_ticks(lines),
            },
            "yaxis": {"title": {"text": unit}, "rangemode": "tozero"},
            "hovermode": "closest",
        },
        height=400,
    )


def upper(values: Sequence[float | None]) -> list[float | None]:
    """Return the most of the values around each: what rises and falls all the time is one line."""
    found: list[float | None] = []
    size = max(len(values) // WINDOWS, 1)
    for first in range(0, len(values), size):
        window = values[first : first + size]
        known = [each for each in window if each is not None]
        found += [None if each is None else max(known) for each in window]
    return found


def _level(
    name: str, unit: str, where: list[int], values: Sequence[float | None]
) -> dict[str, object]:
    return {
        "type": "scatter",
        "mode": "lines",
        "name": name,
        "x": where,
        "y": values,
        "hovertemplate": f"{name} %{{y:.3f}} {unit}<extra></extra>",
    }


def _ticks(lines: list[_Line]) -> Json:
    """Return a tick where a phase of the step begins, with its name: the second part of a path."""
    starts: list[int] = []
    labels: list[str] = []
    at = 0
    for phase, run in groupby(lines, lambda line: phase_of(line.operation)):
        starts.append(at)
        labels.append(phase)
        at += len(list(run))
    apart = [0]
    for position in range(1, len(starts)):
        if starts[position] - starts[apart[-1]] > len(lines) // 14:
            apart.append(position)
    return {
        "tickmode": "array",
        "tickvals": [starts[each] for each in apart if starts],
        "ticktext": [labels[each] for each in apart if labels],
    }


def phase_of(operation: str) -> str:
    """Return what a path says of the phase: "backward mb1" of "step/backward/mb1/unit7/reduce3"."""
    parts = operation.split("/")[1:]
    micro = parts[1] if len(parts) > 1 and parts[1][:2] == "mb" and parts[1][2:].isdecimal() else ""
    return f"{parts[0] if parts else operation} {micro}".strip()


def _sentence(found: Peak, rank: RankTrace, reserved: Reservation) -> str:
    kinds = sorted(found.by_kind, key=lambda each: -each[1])
    most = ", ".join(f"{kind} {format_bytes(size)}" for kind, size in kinds[:3] if size)
    capacity = reserved.capacity_bytes
    limit = f", of {format_bytes(capacity)} that may be" if capacity is not None else ""
    return (
        f"At the peak, in {phase_of(found.operation)} of step {found.step + 1} on rank "
        f"{rank.rank}, {format_bytes(found.bytes)} are alive: {most}. "
        f"{_reserved(reserved)}{limit}."
    )


def _reserved(found: Reservation) -> str:
    size = format_bytes(found.peak_bytes)
    if found.shortage is None:
        return f"{size} are reserved at most"
    return f"Until memory ran out, {size} were reserved"


def _table(found: Peak) -> PageTable:
    rows = [(words(name), number(format_bytes(size), size)) for name, size in found.alive[:LARGEST]]
    rest = found.alive[LARGEST:]
    if rest:
        size = sum(each for _, each in rest)
        rows.append((words(f"{len(rest):,} others"), number(format_bytes(size), size)))
    return PageTable(columns=("alive at the peak", "size"), numeric=(False, True), rows=tuple(rows))
