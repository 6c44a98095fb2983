"""Section on experts: rows of each expert, who waits for whom, and where rows are sent."""

from collections import Counter

import numpy as np

from zsim.backend.backend import Job
from zsim.report.page import PageTable, Section, number, words
from zsim.report.svg.figure import BarRows, RowBar, Series
from zsim.schedule.binding import BALANCED, CountPlace, Counts, routed
from zsim.schedule.operation import AllGather, AllToAll, ReadCounts, ReduceScatter, walk
from zsim.schedule.schedule import Schedule
from zsim.trace.trace import Trace
from zsim.units import PICOSECONDS_PER_SECOND, format_seconds

BARS = 64
"""Maximum number of bars; of more experts, neighbors share one."""
COLUMNS = ("rank", "received", "waits", "last to arrive", "to itself", "in its node", "to others")


def experts(job: Job, trace: Trace) -> Section | None:
    """Return the section on the last step of the first expert group; None without named counts."""
    if job.named is None:
        return None
    mesh, group = job.named.mesh, job.named.group_by_name[job.named.counts[0].group]
    ranks = group.members(mesh, mesh.coordinates(0))
    rows = _rows(job, job.named, trace, len(ranks))
    blocks = rows.reshape(len(ranks), len(ranks), -1).sum(2)
    nodes = np.array(ranks) // job.cluster.gpus_per_node
    near = (blocks * (nodes[:, None] == nodes)).sum(1) - blocks.diagonal()
    received, far = blocks.sum(0), blocks.sum(1) - blocks.diagonal() - near
    waits, last = _waits(job.named, trace, set(ranks))
    each = -(-rows.shape[1] // BARS)
    bars = [int(rows[:, start : start + each].sum()) for start in range(0, rows.shape[1], each)]
    table = zip(ranks, received, blocks.diagonal(), near, far, strict=True)
    text = f"Rank {ranks[received.argmax()]} receives {received.max() / received.mean():.2f} x the "
    text += "mean. A rank waits at an exchange until all have arrived. Rows are those of the first "
    layers = "all layers" if len(job.named.programs) == 1 else "the layers of the first stage"
    return Section(
        title="Experts",
        sentences=(f"{text}group, over {layers} and micro-batches of the last step.",),
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
        table=PageTable(
            columns=COLUMNS,
            numeric=(False, *[True] * 6),
            rows=tuple(
                (
                    words(f"rank {rank}", f"{rank:06}"),
                    number(f"{got:,}", int(got)),
                    number(_waited(waits, rank), waits[rank]),
                    number(f"{last[rank]} times" if rank in waits else "", last[rank]),
                    *(number(f"{sent:,}", int(sent)) for sent in row),
                )
                for rank, got, *row in table
            ),
        ),
    )


def _waited(waits: Counter[int], rank: int) -> str:
    return format_seconds(waits[rank] / PICOSECONDS_PER_SECOND) if rank in waits else ""


def _rows(job: Job, named: Schedule, trace: Trace, members: int) -> Counts:
    """Return rows by source and expert, over all places: of a real run, or of the binding."""
    count = named.counts[0]
    found = np.zeros((members, count.experts), np.int64)
    seen = [row for rank in trace.ranks for row in rank.rows if row[0] == trace.steps - 1]
    for *_, group, source, expert, rows in seen:
        found[source, expert] += rows * (group == 0)
    for each in () if seen else walk(named.programs[0].step):
        if isinstance(each, ReadCounts) and each.count == count.name:
            place = CountPlace(each.micro_batch, each.layer, 0, members)
            found += routed(job.binding or BALANCED, count, place)
    return found


def _exchanges(named: Schedule) -> set[str]:
    """Return the exchanges of copies of tokens, or the gathers and sums of all tokens."""
    step, own_axes = [*walk(named.programs[0].step)], named.contract.expert_axes
    found = {each.id for each in step if isinstance(each, AllToAll)}
    axes = {name for name in named.contract.expert_axes if named.mesh.axis_size(name) > 1}
    groups = {each.name for each in named.groups if axes <= {*each.axes} <= {*own_axes}}
    kinds = AllGather | ReduceScatter
    return found or {each.id for each in step if isinstance(each, kinds) and each.group in groups}


def _waits(named: Schedule, trace: Trace, ranks: set[int]) -> tuple[Counter[int], Counter[int]]:
    """Return the time that each rank waits for the last one, and the number of times it is last."""
    exchanges = _exchanges(named)
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
