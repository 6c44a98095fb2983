"""A slow network that moves chunks one by one: what the fluid network is held against.

Every activity is a bundle of flows that go forward together, as the flows of a collective do. All
activities are cut into steps of equal progress, in bytes that a rank sends, and a flow into one
chunk per step: a flow that has half of a rank's bytes has chunks of half the size, as if the rank
spread its bytes over as many channels in every activity. A link sends one chunk at a time and takes
turns between the flows that wait at it. A chunk is stored at every hop and then sent on. No flow
injects a chunk before every flow of its activity has delivered all but the last few before it: at
least `WINDOW`, and more than the hops of the longest way, or the window itself would be the limit.
"""

import heapq
from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count

WINDOW = 8
WINDOWS = 160
"""The smallest activity has so many windows of steps: start and end, one each, are no fluid's."""


@dataclass(frozen=True, slots=True)
class Flow:
    """Bytes that take one way, a sequence of links."""

    way: tuple[Hashable, ...]
    size_bytes: float


@dataclass(frozen=True, slots=True)
class Activity:
    """Flows that go forward together while a rank sends `size_bytes`."""

    size_bytes: float
    flows: Sequence[Flow]


@dataclass(slots=True)
class Crowd:
    """An activity under way: how many chunks each of its flows has sent and delivered."""

    flows: Sequence[Flow]
    chunk_count: int
    window: int
    sent: list[int]
    delivered: list[int]


@dataclass(slots=True)
class Port:
    """A link: the chunks that wait at it, by flow, in turns."""

    waiting: dict[tuple[int, int], deque[int]] = field(
        default_factory=dict[tuple[int, int], "deque[int]"]
    )
    turns: deque[tuple[int, int]] = field(default_factory=deque[tuple[int, int]])
    busy: bool = False


class ChunkNetwork:
    """Links by name with their bytes per second, and activities that all start at time 0."""

    def __init__(self, capacities: Mapping[Hashable, float]) -> None:
        self._capacities = capacities
        self._ports = {link: Port() for link in capacities}
        self._crowds: list[Crowd] = []
        self._events: list[tuple[float, int, int, int, int]] = []
        self._order = count()
        self._now = 0.0

    def ends_s(self, activities: Sequence[Activity]) -> list[float]:
        """Seconds at which the last chunk of each activity is delivered."""
        windows = [
            max(WINDOW, 2 + max(len(flow.way) for flow in activity.flows))
            for activity in activities
        ]
        smallest = min(activity.size_bytes for activity in activities)
        step_bytes = smallest / (WINDOWS * max(windows))
        for activity, window in zip(activities, windows, strict=True):
            zeros = [0] * len(activity.flows)
            steps = round(activity.size_bytes / step_bytes)
            self._crowds.append(Crowd(activity.flows, steps, window, zeros, zeros.copy()))
        ends = [0.0] * len(activities)
        for number in range(len(activities)):
            self._inject(number)
        while self._events:
            self._now, _, crowd, flow, hop = heapq.heappop(self._events)
            self._arrive(crowd, flow, hop)
            ends[crowd] = self._now
        return ends

    def _inject(self, number: int) -> None:
        crowd = self._crowds[number]
        limit = min(crowd.chunk_count, min(crowd.delivered) + crowd.window)
        for index, sent in enumerate(crowd.sent):
            for _ in range(sent, limit):
                self._queue(number, index, 0)
            crowd.sent[index] = max(sent, limit)

    def _queue(self, crowd: int, index: int, hop: int) -> None:
        link = self._crowds[crowd].flows[index].way[hop]
        port = self._ports[link]
        key = (crowd, index)
        if key not in port.waiting:
            port.waiting[key] = deque()
            port.turns.append(key)
        port.waiting[key].append(hop)
        if not port.busy:
            self._send(link)

    def _send(self, link: Hashable) -> None:
        """The next flow in turn sends one chunk."""
        port = self._ports[link]
        port.busy = bool(port.turns)
        if not port.busy:
            return
        key = port.turns.popleft()
        hop = port.waiting[key].popleft()
        if port.waiting[key]:
            port.turns.append(key)
        else:
            del port.waiting[key]
        crowd = self._crowds[key[0]]
        chunk_bytes = crowd.flows[key[1]].size_bytes / crowd.chunk_count
        end = self._now + chunk_bytes / self._capacities[link]
        heapq.heappush(self._events, (end, next(self._order), *key, hop))

    def _arrive(self, number: int, index: int, hop: int) -> None:
        """A chunk has crossed a link: the link is free, the chunk goes on or is delivered."""
        crowd = self._crowds[number]
        way = crowd.flows[index].way
        if hop + 1 < len(way):
            self._queue(number, index, hop + 1)
        else:
            before = min(crowd.delivered)
            crowd.delivered[index] += 1
            if min(crowd.delivered) > before:
                self._inject(number)
        self._send(way[hop])
