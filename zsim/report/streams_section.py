"""Section with the timeline of a rank: a lane per stream, a named bar per operation."""

from itertools import groupby

from zsim.analysis.summary import last_step
from zsim.backend.backend import Job
from zsim.report.page import Section
from zsim.report.svg.figure import LaneBars
from zsim.report.svg.lane import Bar, lanes
from zsim.report.timeline import close_up_picture, close_ups
from zsim.trace.trace import Trace
from zsim.units import PICOSECONDS_PER_SECOND, format_seconds

MOST_BARS = 24_000
"""Maximum number of bars; above it, nearby bars of one sort are merged to keep the page fast."""
SORTS_AT_ONCE = 3
"""Typical number of sorts among nearby bars of one stream."""


def streams(job: Job, trace: Trace) -> Section:
    """Return the section of the last step on the first rank of `trace`, a run of `job`."""
    rank = trace.ranks[0]
    found = lanes(job.schedule, job.model, trace, rank)
    begin_ps, end_ps = last_step(trace)
    bars, joined = found.bars, ""
    panels = close_ups(bars)
    count = sum(map(len, bars.values()))
    if count > MOST_BARS:
        width_ps = (end_ps - begin_ps) * SORTS_AT_ONCE * len(bars) // MOST_BARS
        bars = {name: _fewer(lane, width_ps) for name, lane in bars.items()}
        within = format_seconds(width_ps / PICOSECONDS_PER_SECOND)
        joined = (
            f" {count:,} operations are too many to show: those of one sort that start within "
            f"{within} are one bar."
        )
    like = f" and {rank.stands_for - 1:,} like it" if rank.stands_for > 1 else ""
    return Section(
        title="Timeline",
        sentences=(
            f"The last step on rank {rank.rank}{like}, a lane for every stream. Drag over a "
            f"part to see it alone, double-click to see all; a bar says what it is when the "
            f"pointer is on it.{joined}"
            f"{' Below it, a few units close up.' if panels else ''}",
        ),
        figure=LaneBars(lanes=bars, begin_ps=begin_ps, end_ps=end_ps),
        picture=close_up_picture(panels) if panels else None,
    )


def _fewer(bars: list[Bar], width_ps: int) -> list[Bar]:
    """Merge bars that start within `width_ps` into one per sort, as long as their summed time."""
    found: list[Bar] = []
    for _, run in groupby(bars, lambda bar: bar.start_ps // width_ps):
        together = list(run)
        start = together[0].start_ps
        for sort in dict.fromkeys(bar.sort for bar in together):
            some = [bar for bar in together if bar.sort is sort]
            end = start + sum(bar.end_ps - bar.start_ps for bar in some)
            ends = [some[0].names[0], some[-1].names[0]] if all(bar.names for bar in some) else []
            name = (" to ".join(dict.fromkeys(ends)),) if ends else ()
            found.append(Bar(start, end, sort, name))
            start = end
    return found
