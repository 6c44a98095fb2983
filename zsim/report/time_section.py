"""Section on the time of a step: a bar per rank, split into non-overlapping activities."""

from collections.abc import Iterator, Sequence

from zsim.analysis.exposed_time import HostSide
from zsim.analysis.summary import last_step
from zsim.analysis.time_breakdown import Breakdown, breakdown
from zsim.backend.backend import Job
from zsim.cluster.host_links import HostWork
from zsim.report.page import Section
from zsim.report.svg.figure import BarRows, RowBar, Series
from zsim.trace.trace import RankTrace, Trace
from zsim.units import PICOSECONDS_PER_SECOND, format_seconds

COMPUTE, COPY, HOST, IDLE = "#5b8bd0", "#b8c0c9", "#3e4c59", "#e9ecef"
EXPOSED = ("#e07a5f", "#f2b45c", "#b56576", "#8d6a9f", "#6d9f71", "#4f9da6")
"""Colours of the groups, in the order of their names."""

HOST_SIDE = {
    HostWork.KERNELS: "#9c89c9",
    HostWork.COPIES: "#8fa9b8",
    HostWork.FILES: "#5c7f92",
}

SHOWN = 0.03
"""Minimum share of a step whose value is printed in the bar."""

Part = tuple[str, str, int]
"""Name of an activity, its colour and its time in picoseconds."""


def split(job: Job, trace: Trace) -> Section:
    """Return the section of the last step of `trace`, a run of `job`."""
    begin_ps, end_ps = last_step(trace)
    ranks = trace.ranks
    found: list[Breakdown] = []
    for rank in ranks:
        program = job.schedule.program_of(rank.rank)
        host_side = HostSide(job.schedule, program)
        found.append(breakdown(program, rank, begin_ps, end_ps, host_side=host_side))
    groups = sorted({name for each in found for name, _ in each.exposed_ps})
    worst = max(range(len(found)), key=lambda at: found[at].communication_ps)
    return Section(
        title="Where the time goes",
        sentences=(_sentence(found[worst], ranks[worst]),),
        figure=_figure(found, ranks, groups),
    )


def _label(rank: RankTrace) -> str:
    like = f" and {rank.stands_for - 1:,} like it" if rank.stands_for > 1 else ""
    return f"rank {rank.rank}{like}"


def _short_label(rank: RankTrace) -> str:
    """Return the label of a bar; labels must be unique."""
    return f"rank {rank.rank}" + (f" (of {rank.stands_for:,})" if rank.stands_for > 1 else "")


def parts(found: Breakdown, groups: list[str], host_ps: int = 0) -> list[Part]:
    """Return all parts of a step, including empty ones; their sum is its span.

    `host_ps` is the time in which the GPU waits for the host.
    """
    exposed, on_host = dict(found.exposed_ps), dict(found.on_host_ps)
    return [
        ("compute", COMPUTE, found.compute_ps),
        *(
            (f"exposed communication, {name}", EXPOSED[at % len(EXPOSED)], exposed.get(name, 0))
            for at, name in enumerate(groups)
        ),
        *((f"waiting for {work}", HOST_SIDE[work], on_host.get(work, 0)) for work in HostWork),
        ("copies and fills alone", COPY, found.copy_ps),
        ("waiting for the host", HOST, min(host_ps, found.idle_ps)),
        ("idle", IDLE, found.idle_ps - min(host_ps, found.idle_ps)),
    ]


def _figure(found: Sequence[Breakdown], ranks: Sequence[RankTrace], groups: list[str]) -> BarRows:
    """Return a row for each rank, without the parts that are empty on all ranks."""
    hosts = [rank.host_bound_ps[-1] if rank.host_bound_ps else 0 for rank in ranks]
    every = [parts(each, groups, host) for each, host in zip(found, hosts, strict=True)]
    shown = [at for at in range(len(every[0])) if any(of_rank[at][2] for of_rank in every)]
    return BarRows(
        series=tuple(Series(*every[0][at][:2]) for at in shown),
        rows=tuple(
            (_short_label(rank), tuple(_bars([of_rank[at] for at in shown])))
            for rank, of_rank in zip(ranks, every, strict=True)
        ),
        axis="seconds of the step",
    )


def _bars(of_rank: list[Part]) -> Iterator[RowBar]:
    """Yield the bars of a rank's parts, placed end to end."""
    whole_ps, start_ps = max(sum(ps for _, _, ps in of_rank), 1), 0
    for series, (name, _, ps) in enumerate(of_rank):
        share, end_ps = ps / whole_ps, start_ps + ps
        if ps:
            took = format_seconds(ps / PICOSECONDS_PER_SECOND)
            yield RowBar(
                start=start_ps / PICOSECONDS_PER_SECOND,
                end=end_ps / PICOSECONDS_PER_SECOND,
                series=series,
                title=f"{name}: {took}, {share:.1%}",
                text=f"{share:.1%}" if share >= SHOWN else "",
            )
        start_ps = end_ps


def _sentence(found: Breakdown, rank: RankTrace) -> str:
    span = max(found.span_ps, 1)
    exposed = sorted(found.exposed_ps, key=lambda each: -each[1])
    text = f"{_label(rank).capitalize()} compute for {found.compute_ps / span:.1%} of the step"
    if rank.stands_for == 1:
        text = f"Rank {rank.rank} computes for {found.compute_ps / span:.1%} of the step"
    if exposed:
        listed = ", ".join(
            f"{format_seconds(each / PICOSECONDS_PER_SECOND)} on {name}" for name, each in exposed
        )
        share = found.communication_ps / span
        text += f"; communication that nothing hides takes {share:.1%}: {listed}"
        if exposed[1:]:
            text += " (while two are under way, the one that began first counts)"
    if found.on_host_ps:
        listed = ", ".join(
            f"{work} {format_seconds(each / PICOSECONDS_PER_SECOND)}"
            for work, each in found.on_host_ps
        )
        text += f"; it waits for its host side: {listed}"
        if found.on_host_ps[1:]:
            text += " (of several at once the first of these counts)"
    return f"{text}. Idle {found.idle_ps / span:.1%}."
