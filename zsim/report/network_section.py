"""Section on the network: the cluster with links coloured by utilisation, and the busiest links.

The utilisation of a link is the bytes that crossed it in a step, divided by the bytes that it could
carry in that time.
"""

from zsim.analysis.summary import Summary
from zsim.backend.backend import Job
from zsim.cluster.cluster import Cluster
from zsim.cluster.links import link_classes
from zsim.report.page import PageTable, Section, number, words
from zsim.report.svg.cluster_drawing import draw
from zsim.trace.trace import LinkUse, Trace
from zsim.units import format_bytes

SHOWN = 30
"""Maximum number of rows of an expanded table; clusters given link by link have a row per link."""


def network(job: Job, trace: Trace, found: Summary) -> Section:
    """Return the section on the network; `found` holds the step time."""
    shares = link_shares(trace, found.step_time_s)
    names = _joined(job.cluster)
    once = {names.get(each.link, each.link): each for each in reversed(trace.links) if each.bytes}
    used = sorted(
        ((shares[link.link], name.replace("->", " to "), link) for name, link in once.items()),
        key=lambda each: (-each[0], each[1]),
    )
    return Section(
        title="The network",
        sentences=(_sentence([(share, name) for share, name, _ in used], found),),
        picture=draw(job.cluster, None, shares),
        folded=f"{len(used):,} kinds of links, the busiest first" if len(used) > SHOWN else "",
        table=PageTable(
            columns=("links", "how many", "each carries", "in a step, each", "busy"),
            numeric=(False, True, True, True, True),
            rows=tuple(
                (
                    words(name),
                    number(f"{link.count:,}", link.count),
                    number(
                        f"{format_bytes(link.capacity_bytes_per_s)}/s", link.capacity_bytes_per_s
                    ),
                    number(format_bytes(link.bytes // link.count), link.bytes / link.count),
                    number(f"{share:.1%}", share),
                )
                for share, name, link in used
            ),
        ),
    )


def link_shares(trace: Trace, step_time_s: float) -> dict[str, float]:
    """Return the utilisation of each link in use, as a share between 0 and 1."""
    return {each.link: utilisation(each, step_time_s) for each in trace.links if each.bytes}


def utilisation(link: LinkUse, step_time_s: float) -> float:
    """Return the utilisation of the links of a class; 0 if their capacity is 0."""
    could = link.count * link.capacity_bytes_per_s * step_time_s
    return link.bytes / could if could else 0.0


def _joined(cluster: Cluster) -> dict[str, str]:
    """Return the display name of each link; hops that limit traffic together share one name.

    Links of a fabric that is given link by link keep their names and are not in the result.
    """
    own = {(each.source, each.target) for each in cluster.fabric.edges}
    found: dict[str, str] = {}
    for each in link_classes(cluster):
        ends = ((each.source, each.target), (each.target, each.source))
        for hops, (source, target) in zip(each.hops, ends, strict=False):
            found |= {hop: f"{source}->{target}" for hop in hops if not _is_given(hop, own)}
    return found


def _is_given(hop: str, edges: set[tuple[str, str]]) -> bool:
    source, _, target = hop.partition("->")
    return (source, target) in edges or (target, source) in edges


def _sentence(used: list[tuple[float, str]], found: Summary) -> str:
    if not used:
        return "Nothing crosses a link."
    share, name = used[0]
    exposed = found.exposed_communication_s / found.step_time_s if found.step_time_s else 0.0
    busiest = f"The busiest links are those from {name}" if " to " in name else f"Busiest: {name}"
    waits = f"{exposed:.1%} of the step is communication that nothing hides"
    return (
        f"The step is bound by {found.bound_by}; {waits}. {busiest}, with "
        f"{share:.1%} of what could be carried over a step."
    )
