"""Section on device memory over a step: live bytes by kind, reserved bytes, and the peak."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from zsim.analysis.memory_category import LABELS, by_category
from zsim.backend.backend import Job
from zsim.memory import Peak, peak, reservations
from zsim.report.page import PageTable, Section, number, words
from zsim.report.svg.figure import Series, SeriesMark, StackedCurves
from zsim.schedule.schedule import Kind, Place
from zsim.trace.trace import LedgerEntry, RankTrace, Reservation, Trace
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
RED = "#c81e1e"
UNITS = (("GB", 10**9), ("MB", 10**6), ("kB", 10**3), ("B", 1))
FAR = 6
"""A limit more than this factor above the curve is not drawn: it would flatten the curve."""
PLACES, FEW = 400, 110
"""Up to PLACES lines are drawn one by one; more are merged into about FEW places.

Merging keeps the peak of each run of lines, and smooths memory that rises and falls with each unit.
"""
LARGEST = 12
"""Number of buffers listed at the peak."""


@dataclass(frozen=True, slots=True)
class MemoryLine:
    """State after an entry of the memory ledger: operation, live bytes by kind, reserved bytes.

    `reserved` is None after memory ran out.
    """

    operation: str
    alive: tuple[int, ...]
    reserved: int | None


def memory(job: Job, trace: Trace) -> Section:
    """Return the section on the last step of `trace`, for the rank with the highest peak."""
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
    shown, each = highest(lines), -(-len(lines) // FEW)
    several = f" Each place of the curve is the highest of {each:,} allocations and frees."
    return Section(
        title="Memory",
        sentences=(
            f"{_sentence(found, rank, reserved)}{several if len(shown) < len(lines) else ''}",
        ),
        figure=_figure(shown, capacity),
        table=_table(found),
    )


def _course(entries: list[LedgerEntry], reserved: tuple[int, ...], step: int) -> list[MemoryLine]:
    """Return the live and reserved bytes after each ledger entry of `step`."""
    kinds = list(Kind)
    alive = [0] * len(kinds)
    found: list[MemoryLine] = []
    for at, entry in enumerate(entries):
        alive[kinds.index(entry.kind)] += entry.change_bytes
        if entry.step == step:
            total = reserved[at] if at < len(reserved) else None
            found.append(MemoryLine(entry.operation, tuple(alive), total))
    return found


def highest(lines: Sequence[MemoryLine]) -> list[MemoryLine]:
    """Merge lines until they are few enough, keeping the line with the most live bytes of each run.

    The reserved bytes are the maximum of the run.
    """
    size = 1 if len(lines) <= PLACES else -(-len(lines) // FEW)
    found: list[MemoryLine] = []
    for first in range(0, len(lines), size):
        run = lines[first : first + size]
        known = [line.reserved for line in run if line.reserved is not None]
        most = max(run, key=lambda line: sum(line.alive))
        found.append(replace(most, reserved=max(known) if known else None))
    return found


def _figure(lines: list[MemoryLine], capacity: int | None) -> StackedCurves:
    top = max((max(line.reserved or 0, sum(line.alive)) for line in lines), default=0)
    unit, size = next((each for each in UNITS if top >= each[1]), UNITS[-1])
    alive = [at for at in range(len(Kind)) if any(line.alive[at] for line in lines)]
    kinds = list(Kind)
    series = [Series(LABELS[kinds[at]], COLOURS[kinds[at]]) for at in alive]
    drawn: list[tuple[float | None, ...]] = []
    if any(line.reserved for line in lines):
        series.append(Series("reserved", RED, SeriesMark.DOTTED))
        drawn.append(
            tuple(None if line.reserved is None else line.reserved / size for line in lines)
        )
    if capacity is not None and capacity <= FAR * top:
        series.append(Series("limit", RED, SeriesMark.LINE))
        drawn.append((capacity / size,) * len(lines))
    return StackedCurves(
        series=tuple(series),
        layers=tuple(tuple(line.alive[at] / size for line in lines) for at in alive),
        lines=tuple(drawn),
        titles=tuple(map(_line_text, lines)),
        ticks=_ticks(lines),
        axis="progress of the step, by allocations and frees",
        unit=unit,
    )


def _line_text(line: MemoryLine) -> str:
    sizes = sorted(zip(line.alive, Kind, strict=True), key=lambda each: -each[0])
    kinds = ", ".join(f"{LABELS[kind]} {format_bytes(size)}" for size, kind in sizes if size)
    reserved = "" if line.reserved is None else f"; {format_bytes(line.reserved)} reserved"
    total = format_bytes(sum(line.alive))
    return f"{phase_of(line.operation)}: {total} in use ({kinds or 'nothing'}){reserved}"


def _ticks(lines: list[MemoryLine]) -> tuple[tuple[int, str], ...]:
    """Return the place where each phase of the step starts, with the name of the phase."""
    found: list[tuple[int, str]] = []
    at = 0
    for phase, run in groupby(lines, lambda line: phase_of(line.operation)):
        found.append((at, phase))
        at += len(list(run))
    if not any(phase.endswith(" mb1") for _, phase in found):  # one micro-batch: omit its number
        return tuple((place, phase.removesuffix(" mb0")) for place, phase in found)
    return tuple(found)


def phase_of(operation: str) -> str:
    """Return the phase in a path: "backward mb1" for "step/backward/mb1/unit7/reduce3"."""
    parts = operation.split("/")[1:]
    micro = parts[1] if len(parts) > 1 and parts[1][:2] == "mb" and parts[1][2:].isdecimal() else ""
    return f"{parts[0] if parts else operation} {micro}".strip()


def _in_words(phase: str) -> str:
    """Return the text of a phase: "backward of micro-batch 1" for "backward mb0"."""
    name, _, number = phase.partition(" mb")
    return f"{name} of micro-batch {int(number) + 1}" if number else name


def _sentence(found: Peak, rank: RankTrace, reserved: Reservation) -> str:
    kinds = by_category(found.by_kind)
    most = ", ".join(f"{name} {format_bytes(size)}" for name, size in kinds[:3])
    capacity = reserved.capacity_bytes
    limit = f", of {format_bytes(capacity)} usable" if capacity is not None else ""
    return (
        f"At the peak, in {_in_words(phase_of(found.operation))} of step {found.step + 1} on rank "
        f"{rank.rank}, tensors take {format_bytes(found.bytes)}: {most}. "
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
