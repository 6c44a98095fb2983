"""The cluster, its links coloured by how busy they are, and the sentence that names the narrow one.

A link's utilisation is what crossed it in a step over what it could have carried in that time.
"""

from zsim.analysis.summary import Summary
from zsim.backend.backend import Job
from zsim.report.page import PageTable, Section, number, words
from zsim.report.svg.cluster_drawing import draw
from zsim.trace.trace import LinkUse, Trace
from zsim.units import format_bytes

SHOWN = 30
"""Of more kinds of links the table is folded: a list of links has a kind for each."""


def network(job: Job, trace: Trace, found: Summary) -> Section:
    """Return the section of a step of `trace`, in which `found` is the time of one."""
    used = sorted(
        ((utilisation(link, found.step_time_s), link) for link in trace.links if link.bytes),
        key=lambda each: -each[0],
    )
    return Section(
        title="The network",
        sentences=(_sentence(used, found),),
        picture=draw(job.cluster, None, {link.link: share for share, link in used}),
        folded=f"{len(used):,} kinds of links, the busiest first" if len(used) > SHOWN else "",
        table=PageTable(
            columns=("links", "how many", "each carries", "in a step, each", "busy"),
            numeric=(False, True, True, True, True),
            rows=tuple(
                (
                    words(link.link.replace("->", " to ")),
                    number(f"{link.count:,}", link.count),
                    number(
                        f"{format_bytes(link.capacity_bytes_per_s)}/s", link.capacity_bytes_per_s
                    ),
                    number(format_bytes(link.bytes // link.count), link.bytes / link.count),
                    number(f"{share:.1%}", share),
                )
                for share, link in used
            ),
        ),
    )


def utilisation(link: LinkUse, step_time_s: float) -> float:
    """Return share of what the links of a class could carry in a step that they did."""
    could = link.count * link.capacity_bytes_per_s * step_time_s
    return link.bytes / could if could else 0.0


def _sentence(used: list[tuple[float, LinkUse]], found: Summary) -> str:
    if not used:
        return "Nothing crosses a link."
    share, link = used[0]
    exposed = found.exposed_communication_s / found.step_time_s if found.step_time_s else 0.0
    name = link.link.replace("->", " to ")
    busiest = (
        f"The busiest links are those from {name}" if "->" in link.link else f"Busiest: {name}"
    )
    waits = f"{exposed:.1%} of the step is communication that nothing hides"
    return (
        f"The step is bound by {found.bound_by}; {waits}. {busiest}, with "
        f"{share:.1%} of what could be carried over a step."
    )
