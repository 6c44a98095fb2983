"""Assign every moment of a rank to exactly one activity, so that the parts add up to the whole.

If several activities overlap, the moment belongs to the first of: computation, communication (then
it is exposed), host-side work, copies.
"""

from collections.abc import Iterable

from zsim.cluster.host_links import HostWork

COMPUTE = "compute"
COMMUNICATION = "communication"
ON_HOST = "host side"
COPY = "copy, fill"

RANKING = (COMPUTE, COMMUNICATION, ON_HOST, COPY)
"""Priority of the activities: a moment with several belongs to the first."""

PLACE = {kind: place for place, kind in enumerate(RANKING)}
WORK: dict[str, int] = {work: place for place, work in enumerate(HostWork)}

Span = tuple[int, int, str, str]
"""Start and end in picoseconds, activity, and the name of its group or host-side work."""


def exclusive_ps(spans: Iterable[Span]) -> dict[tuple[str, str], int]:
    """Return picoseconds by activity and name, counting each moment once.

    If two groups communicate at once, the moment belongs to the one that started first. Several
    kinds of host-side work are ranked in the order of `HostWork`.
    """
    bounds: list[tuple[int, bool, int]] = []
    ranks: list[tuple[int, int, str, str]] = []
    for start, end, kind, name in spans:
        if start < end:
            bounds += [(start, True, len(ranks)), (end, False, len(ranks))]
            second = WORK[name] if kind == ON_HOST else start
            ranks.append((PLACE[kind], second, kind, name))
    found: dict[tuple[str, str], int] = {}
    running: set[int] = set()
    last = 0
    bounds.sort()
    for time, starts, number in bounds:
        if running and time > last:
            _, _, kind, name = min([ranks[each] for each in running])
            found[kind, name] = found.get((kind, name), 0) + time - last
        last = time
        if starts:
            running.add(number)
        else:
            running.remove(number)
    return found
