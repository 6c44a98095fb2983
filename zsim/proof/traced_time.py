"""Earliest starts of a rank's operations by its own clock, compared with the actual starts.

An operation starts when its predecessors have ended: on its stream, on its communicator, in
`after`, and operations for which the host, or a free on the stream, waited. Setup ends with
everything drained. An operation that is fused with a predecessor may start before that ends, and
ends after it.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from zsim.proof.traced_rank import Instance, TracedRank
from zsim.schedule.fusions import Fusions
from zsim.schedule.issue_order import SETUP
from zsim.schedule.operation import (
    Branch,
    Communication,
    Edge,
    Free,
    FreeMode,
    HostWait,
    Operation,
    Previous,
    StreamOperation,
    Together,
)

LONG_AGO = -(1 << 80)
"""Earlier than any time of a trace, in picoseconds."""


@dataclass(frozen=True, slots=True)
class Floor:
    """A lower bound of start times: the end of `which`, and the reason.

    `computed_ps` is the latest end of a predecessor that is no communication. An end of a
    communication may be recorded late, when the host learns of it; others are exact.
    """

    time_ps: int
    computed_ps: int
    which: Instance | None
    why: str


NOTHING = Floor(LONG_AGO, LONG_AGO, None, "")


def _later(one: Floor, other: Floor) -> Floor:
    later = one if one.time_ps >= other.time_ps else other
    computed_ps = max(one.computed_ps, other.computed_ps)
    return Floor(later.time_ps, computed_ps, later.which, later.why)


@dataclass(frozen=True, slots=True)
class Early:
    """An operation that started before a predecessor had ended; if fused, that ended before it."""

    instance: Instance
    floor: Floor
    ended: bool = False


class Times:
    """Follows the operations that a rank issued; finds `early` starts.

    `computed_ps` holds, for each communication, the latest end of a computation before it.
    """

    def __init__(self, rank: TracedRank) -> None:
        self.early: list[Early] = []
        self.computed_ps: dict[Instance, int] = {}
        self._rank = rank
        self._fusions = Fusions.of(rank.program.step)
        self._host = NOTHING
        self._tails: dict[str, Floor] = {}
        self._groups: dict[str, Floor] = {}
        self._running: dict[str, Instance] = {}
        self._before: dict[str, Instance] = {}
        self._ended: dict[Instance, Floor] = {}
        now = SETUP
        for step, operation in rank.issued:
            if step != now:
                if now == SETUP:
                    self._drain()
                self._before |= self._running
                self._running, now = {}, step
            self._issue(step, operation)

    def _drain(self) -> None:
        for tail in self._tails.values():
            self._host = _later(self._host, _because(tail, "setup ends with all streams drained"))

    def _issue(self, step: int, operation: Operation) -> None:
        match operation:
            case HostWait(operation=edge):
                self._host_waits(step, (edge,))
            case Branch(after=after):
                self._host_waits(step, after)
            case Free(mode=FreeMode.HOST, uses=uses):
                self._host_waits(step, uses)
            case Free(mode=FreeMode.WAITED, uses=uses):
                home = self._rank.program.by_name[operation.buffer].home
                floor = self._after(step, uses, f"{operation.id} waits for it")
                self._tails[home] = _later(self._tails.get(home, NOTHING), floor)
            case _ if isinstance(operation, StreamOperation):
                self._start(step, operation)
            case _:
                pass

    def _host_waits(self, step: int, edges: Iterable[Edge]) -> None:
        floor = self._after(step, edges, "the host waited for it")
        self._host = _later(self._host, floor)

    def _start(self, step: int, operation: StreamOperation) -> None:
        instance, stream = (step, operation.id), operation.stream
        group = operation.group if isinstance(operation, Communication | Together) else None
        floor = _later(self._host, self._tails.get(stream, NOTHING))
        beside = self._fusions.overlapping(operation)
        before = [edge for edge in operation.after if edge not in beside]
        floor = _later(floor, self._after(step, before, "it is named in after"))
        if group is not None:
            floor = _later(floor, self._groups.get(group, NOTHING))
        event = self._rank.events.get(instance)
        if event is None:  # a finding of its own: successors wait for its predecessors
            ended = floor
        else:
            if event.start_ps < floor.time_ps:
                self.early.append(Early(instance, floor))
            fused = self._after(step, sorted(beside), "it is fused with it")
            if event.end_ps < fused.time_ps:
                self.early.append(Early(instance, fused, ended=True))
            exact_ps = floor.computed_ps if group else max(event.end_ps, floor.computed_ps)
            ended = Floor(event.end_ps, exact_ps, instance, "")
        if group is not None:
            self.computed_ps[instance] = floor.computed_ps
            self._groups[group] = _because(ended, f"its communicator {group} was busy with it")
        self._tails[stream] = _because(ended, f"it is earlier on stream {stream}")
        self._ended[instance] = ended
        self._running[operation.id] = instance

    def _after(self, step: int, edges: Iterable[Edge], why: str) -> Floor:
        floor = NOTHING
        for instance in self._named(step, edges):
            floor = _later(floor, _because(self._ended[instance], why))
        return floor

    def _named(self, step: int, edges: Iterable[Edge]) -> Iterator[Instance]:
        """Yield the instances of edges; none for a list not taken, or before the first step."""
        for edge in edges:
            if isinstance(edge, Previous):
                if edge.operation in self._before:
                    yield self._before[edge.operation]
            elif (step, edge) in self._ended:
                yield step, edge


def _because(floor: Floor, why: str) -> Floor:
    return Floor(floor.time_ps, floor.computed_ps, floor.which, why)
