"""The timeline of a rank: its streams as lanes, every operation a bar that names itself."""

from collections.abc import Iterator
from itertools import groupby

from zsim.analysis.summary import last_step
from zsim.backend.backend import Job
from zsim.report.lane import Bar, Sort, lanes
from zsim.report.page import Json, PageFigure, Section
from zsim.report.timeline import close_up_picture, close_ups
from zsim.trace.trace import Trace
from zsim.units import PICOSECONDS_PER_SECOND, format_seconds

MOST_BARS = 6_000
"""Of more, those of one sort that start close to each other are one, so that a page stays quick."""
SORTS_AT_ONCE = 3
"""Sorts of bars close to each other on one stream, as a rule."""


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
            f"The last step on rank {rank.rank}{like}, a lane for every stream. Drag to zoom, "
            f"double-click to see all; a bar says what it is when the pointer is on it.{joined}"
            f"{' Below it, a few units close up.' if panels else ''}",
        ),
        figure=PageFigure(
            traces=tuple(_traces(bars, begin_ps)),
            layout={
                "barmode": "overlay",
                "bargap": 0.15,
                "dragmode": "zoom",
                "xaxis": {
                    "title": {"text": "seconds since the step began"},
                    "rangeslider": {"visible": False},
                },
                "yaxis": {
                    "categoryorder": "array",
                    "categoryarray": list(bars),
                    "autorange": "reversed",
                    "fixedrange": True,
                    "automargin": True,
                },
                "hovermode": "closest",
            },
            height=110 + 52 * len(bars),
        ),
        picture=close_up_picture(panels) if panels else None,
    )


def _traces(bars: dict[str, list[Bar]], begin_ps: int) -> Iterator[Json]:
    """Yield bars of each sort: one trace of the figure."""
    for sort in Sort:
        shown = [(lane, bar) for lane, each in bars.items() for bar in each if bar.sort is sort]
        word, colour = sort.value
        if shown:
            yield {
                "type": "bar",
                "orientation": "h",
                "name": word,
                "y": [lane for lane, _ in shown],
                "base": [(bar.start_ps - begin_ps) / PICOSECONDS_PER_SECOND for _, bar in shown],
                "x": [(bar.end_ps - bar.start_ps) / PICOSECONDS_PER_SECOND for _, bar in shown],
                "customdata": [_says(bar) for _, bar in shown],
                "hovertemplate": "%{customdata}<extra></extra>",
                "marker": {"color": colour},
            }


def _says(bar: Bar) -> str:
    took = format_seconds((bar.end_ps - bar.start_ps) / PICOSECONDS_PER_SECOND)
    name = f" of {bar.names[0]}" if bar.names else ""
    return f"{bar.sort.value[0]}{name}: {took}"


def _fewer(bars: list[Bar], width_ps: int) -> list[Bar]:
    """Join what starts within `width_ps` to one bar for each sort, as long as they are together."""
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
