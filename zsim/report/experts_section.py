"""Section on experts: rows of each expert, who waits for whom, and where rows are sent."""

from collections import Counter
from collections.abc import Iterator, Sequence, Set
from typing import NamedTuple

import numpy as np

from zsim.backend.backend import Job
from zsim.report.page import PageTable, Section, TableCell, number, words
from zsim.report.svg.dispatch_drawing import draw
from zsim.report.svg.figure import BarRows, RowBar, Series
from zsim.schedule.binding import BALANCED, CountPlace, Counts, by_member, routed
from zsim.schedule.counts import NamedCount
from zsim.schedule.operation import (
    AllGather,
    AllToAll,
    Operation,
    ReadCounts,
    ReduceScatter,
    walk,
)
from zsim.schedule.schedule import Schedule
from zsim.trace.trace import Trace
from zsim.units import PICOSECONDS_PER_SECOND, format_seconds

BARS = 64
"""Maximum number of bars; of more experts, neighbors share one."""
COLUMNS = ("rank", "received", "waits", "last to arrive", "to itself", "in its node", "to others")


class _Stage(NamedTuple):
    """The first group of experts of a pipeline stage, with its rows by source and expert.

    `role` is empty without a pipeline. `waits` is the time that each rank waits for the last one,
    and `last` how often it is last.
    """

    role: str
    ranks: tuple[int, ...]
    rows: Counts
    waits: Counter[int]
    last: Counter[int]

    @property
    def blocks(self) -> Counts:
        """The rows from each rank to each other one."""
        return by_member(self.rows, len(self.ranks))

    @property
    def excess(self) -> float:
        """The rows of the busiest rank, in multiples of the mean."""
        received = self.blocks.sum(0)
        return float(received.max() / received.mean()) if received.any() else 0.0


def experts(job: Job, trace: Trace) -> Section | None:
    """Return the section on the first group of each stage in the last step; None without counts."""
    if job.named is None:
        return None
    named, count = job.named, job.named.counts[0]
    stages = [each for each in _stages(job, named, trace) if each is not None]
    if not stages:
        return None
    busiest = max(stages, key=lambda each: each.excess)
    top = busiest.ranks[busiest.blocks.sum(0).argmax()]
    alike = any(rank.stands_for > 1 for rank in trace.ranks)
    over = "in one layer and micro-batch" if count.padded else "over all layers and micro-batches"
    whose = "the first group of each stage" if busiest.role else "the first group"
    text = (
        f"Rank {top} receives {busiest.excess:.2f} x the mean. A rank waits at an exchange until "
        f"all have arrived. Rows are those of {whose}, {over} of the last step."
    )
    rows = sum((stage.rows.sum(0) for stage in stages), np.zeros(count.experts, np.int64))
    each = -(-count.experts // BARS)
    bars = [int(rows[start : start + each].sum()) for start in range(0, count.experts, each)]
    per_node = job.cluster.gpus_per_node
    return Section(
        title="Experts",
        sentences=(text, "Of ranks that are alike, one shows its waits.") if alike else (text,),
        figure=BarRows(
            series=(
                Series(name=f"rows of {each} experts" if each > 1 else "rows", colour="#5b8bd0"),
            ),
            rows=tuple(
                (f"expert {place * each}", (RowBar(start=0, end=bar, series=0, title=f"{bar:,}"),))
                for place, bar in enumerate(bars)
            ),
            axis="rows",
        ),
        picture=draw(busiest.blocks, busiest.ranks, per_node, busiest.role),
        table=PageTable(
            columns=COLUMNS,
            numeric=(False, *[True] * 6),
            rows=tuple(row for stage in stages for row in _table_rows(stage, per_node)),
        ),
    )


def _table_rows(stage: _Stage, per_node: int) -> Iterator[tuple[TableCell, ...]]:
    """Yield the row of each rank: its rows, its waits, and where it sends rows."""
    ranks, waits, last, blocks = stage.ranks, stage.waits, stage.last, stage.blocks
    nodes = np.array(ranks) // per_node
    near = (blocks * (nodes[:, None] == nodes)).sum(1) - blocks.diagonal()
    far = blocks.sum(1) - blocks.diagonal() - near
    columns = (blocks.sum(0), blocks.diagonal(), near, far)
    for rank, got, *row in zip(ranks, *columns, strict=True):
        name = f"rank {rank}, {stage.role}" if stage.role else f"rank {rank}"
        yield (
            words(name, f"{rank:06}"),
            number(f"{got:,}", int(got)),
            number(_waited(waits, rank), waits[rank]),
            number(f"{last[rank]} times" if rank in waits else "", last[rank]),
            *(number(f"{sent:,}", int(sent)) for sent in row),
        )


def _waited(waits: Counter[int], rank: int) -> str:
    return format_seconds(waits[rank] / PICOSECONDS_PER_SECOND) if rank in waits else ""


def _stages(job: Job, named: Schedule, trace: Trace) -> Iterator[_Stage | None]:
    """Yield the first group of experts of each program; None for one without experts."""
    mesh, group = named.mesh, named.group_by_name[named.counts[0].group]
    groups = dict[tuple[int, ...], int]()
    firsts = dict[str, int]()
    for rank in range(mesh.size):
        groups.setdefault(group.members(mesh, mesh.coordinates(rank)), len(groups))
        firsts.setdefault(named.program_of(rank).role, rank)
    for program in named.programs:
        ranks = group.members(mesh, mesh.coordinates(firsts[program.role]))
        operations = [*walk(program.step)]
        exchanges = _exchanges(named, operations)
        if not exchanges:
            yield None
            continue
        places = [
            CountPlace(each.micro_batch, each.layer, groups[ranks], len(ranks))
            for each in operations
            if isinstance(each, ReadCounts)
        ]
        rows = _rows(job, named.counts[0], trace, places or [CountPlace(0, 0, 0, len(ranks))])
        role = program.role if len(named.programs) > 1 else ""
        yield _Stage(role, ranks, rows, *_waits(exchanges, trace, set(ranks)))


def _rows(job: Job, count: NamedCount, trace: Trace, places: Sequence[CountPlace]) -> Counts:
    """Return rows by source and expert in all places: of a real run, or of the binding."""
    found = np.zeros((places[0].members, count.experts), np.int64)
    here = {(each.group, each.layer) for each in places}
    seen = [row for rank in trace.ranks for row in rank.rows if row[0] == trace.steps - 1]
    for _, _, layer, group, source, expert, rows in seen:
        found[source, expert] += rows * ((group, layer) in here)
    for place in () if seen else places:
        found += routed(BALANCED if count.padded else job.binding or BALANCED, count, place)
    return found


def _exchanges(named: Schedule, operations: Sequence[Operation]) -> set[str]:
    """Return the exchanges of copies of tokens, or the gathers and sums of all tokens."""
    own_axes = named.contract.expert_axes
    found = {each.id for each in operations if isinstance(each, AllToAll)}
    axes = {name for name in own_axes if named.mesh.axis_size(name) > 1}
    groups = {each.name for each in named.groups if axes <= {*each.axes} <= {*own_axes}}
    return found or {
        each.id
        for each in operations
        if isinstance(each, AllGather | ReduceScatter) and each.group in groups
    }


def _waits(exchanges: Set[str], trace: Trace, ranks: Set[int]) -> tuple[Counter[int], Counter[int]]:
    """Return the time that each rank waits for the last one, and the number of times it is last."""
    arrived: dict[str, dict[int, int]] = {}
    for rank in trace.ranks:
        for event in rank.events if rank.rank in ranks else ():
            if event.step == trace.steps - 1 and event.operation in exchanges:
                arrived.setdefault(event.operation, {})[rank.rank] = event.start_ps
    waits, last = Counter[int](), Counter[int]()
    for starts in arrived.values():
        first, latest = min(starts.values()), max(starts.values())
        waits.update({rank: latest - start for rank, start in starts.items()})
        last.update(rank for rank, start in starts.items() if first < start == latest)
    return waits, last
