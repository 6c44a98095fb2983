"""Ways around dead links of a fabric that lists its links."""

from collections.abc import Sequence
from dataclasses import dataclass

from zsim.analysis.summary import summary
from zsim.backend.backend import Job
from zsim.cluster.fault import DeadEdge, Fault
from zsim.trace.trace import Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Detour:
    """A dead link, and what becomes of the bytes that it would carry.

    Attributes:
        link: the link, by its ends.
        bytes: bytes of a step that cross it, in both directions, while it works.
        busiest: the link of the fabric with the highest use while this one is dead.
        use: its use: bytes of a step, divided by the bytes that the link could carry in the step.
    """

    link: str
    bytes: int
    busiest: str
    use: float


def detours(faults: Sequence[Fault], job: Job, healthy: Trace, trace: Trace) -> tuple[Detour, ...]:
    """Return a detour for each dead link of the fabric in `faults`.

    `healthy` is the trace of `job` without faults, `trace` with them.
    """
    dead = [each for each in faults if isinstance(each, DeadEdge)]
    if not dead:
        return ()
    ways = {name for edge in job.cluster.fabric.edges for name in _ways(edge.source, edge.target)}
    before = {each.link: each.bytes for each in healthy.links}
    step_s = summary(job, trace).step_time_s
    used = [
        (each.bytes / could if could else 0.0, each.link)
        for each in trace.links
        if each.link in ways
        for could in [each.count * each.capacity_bytes_per_s * step_s]
    ]
    use, busiest = max(used, default=(0.0, ""))
    return tuple(
        Detour(
            link=f"{each.source} to {each.target}",
            bytes=sum(before.get(name, 0) for name in _ways(each.source, each.target)),
            busiest=" to ".join(busiest.split("->")),
            use=use,
        )
        for each in dead
    )


def _ways(source: str, target: str) -> tuple[str, str]:
    """Return the names of both directions of a link."""
    return f"{source}->{target}", f"{target}->{source}"
