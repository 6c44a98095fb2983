"""Time of a rank in which every moment is one thing, so that the parts sum up to the whole.

A moment in which a GPU computes is computing, whatever travels beside it. Else communication is
exposed, then work of the host side, then copies.
"""

from collections.abc import Iterable

from zsim.cluster.host_links import HostWork

COMPUTE = "compute"
COMMUNICATION = "communication"
ON_HOST = "host side"
COPY = "copy, fill"

RANKING = (COMPUTE, COMMUNICATION, ON_HOST, COPY)
"""Of several things at once, the moment is that of the first."""

WORK: dict[str, int] = {work: place for place, work in enumerate(HostWork)}

Span = tuple[int, int, str, str]
"""From when to when, in picoseconds; what it is, and of which group or work of the host side."""


def exclusive_ps(spans: Iterable[Span]) -> dict[tuple[str, str], int]:
    """Return picoseconds by what they are, each moment once.

    Of two groups at once the moment is that of the one that began first; of several kinds of work
    of the host side, that of the first in the order of `HostWork`.
    """
    bounds: list[tuple[int, bool, int]] = []
    kinds: list[tuple[int, str, str]] = []
    for start, end, kind, name in spans:
        if start < end:
            bounds += [(start, True, len(kinds)), (end, False, len(kinds))]
            kinds.append((start, kind, name))
    found: dict[tuple[str, str], int] = {}
    running: set[int] = set()
    last = 0
    for time, starts, number in sorted(bounds):
        if running and time > last:
            first = _first(kinds[each] for each in running)
            found[first] = found.get(first, 0) + time - last
        last = time
        if starts:
            running.add(number)
        else:
            running.remove(number)
    return found


def _first(running: Iterable[tuple[int, str, str]]) -> tuple[str, str]:
    _, _, kind, name = min(
        (RANKING.index(kind), WORK[name] if kind == ON_HOST else start, kind, name)
        for start, kind, name in running
    )
    return kind, name
