"""Order of operations on one rank with CUDA: a real stream for each stream of the schedule."""

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch

from zsim.schedule.operation import Edge, Previous
from zsim.trace.trace import Event
from zsim_torch.execute.flights import PendingWork, StreamEntry
from zsim_torch.execute.host_workers import PS_PER_NS, Awaitable, HostWorkers
from zsim_torch.execute.streams import Completion

PS_PER_MS = 10**9


class _Mark(NamedTuple):
    operation: str
    step: int
    stream: str
    start: torch.cuda.Event
    end: torch.cuda.Event


class CudaStreams:
    """Streams and events of CUDA. The host waits only where the schedule says so.

    A collective runs under the stream of its operation (`async_op=False`), so stream order holds
    for it as for a kernel. Memory is taken with its home stream current: the caching allocator
    gives a freed block to the next allocation on the same stream.
    """

    def __init__(
        self, device: torch.device, names: Iterable[str], workers: HostWorkers | None = None
    ) -> None:
        self.step = -1
        self.keeps_trace = True
        self.workers = workers or HostWorkers()
        self._device = device
        self._streams = {name: _new_stream(device) for name in names if not self.workers.has(name)}
        self._current: dict[str, torch.cuda.Event] = {}
        self._previous: dict[str, torch.cuda.Event] = {}
        self._marks: list[_Mark] = []
        torch.cuda.synchronize(device)
        self._reference = _new_event(timed=True)
        self._reference.record()
        self._reference.synchronize()
        self._reference_ns = time.perf_counter_ns()

    def compute(
        self,
        entry: StreamEntry,
        action: Callable[[], None],
        awaited: Sequence[Awaitable] = (),
    ) -> None:
        """Enqueue what `action` launches, after what is ordered before it; or hand it to a thread.

        A stream cannot wait for a thread. The schedule has a wait of the host there, so none of the
        jobs is still under way.
        """
        events = self._events_of(entry.after)
        on_device = map(_DeviceEvent, events)
        if self.workers.takes(entry, self.step, action, [*on_device, *awaited]):
            return
        self.workers.wait(self.workers.named(entry.after))
        stream = self._streams[entry.stream]
        for each in awaited:
            if isinstance(each, _DeviceEvent):
                events.append(each.event)
            else:
                each.wait()
        for event in events:
            stream.wait_event(event)
        with torch.cuda.stream(stream):
            if self.keeps_trace:
                start, end = _new_event(timed=True), _new_event(timed=True)
                start.record()
                action()
                end.record()
                self._marks.append(_Mark(entry.operation, self.step, entry.stream, start, end))
                self._current[entry.operation] = end
                return
            action()
            if entry.is_awaited:
                end = _new_event()
                end.record()
                self._current[entry.operation] = end

    def communicate(self, entry: StreamEntry, issue: Callable[[], list[PendingWork]]) -> None:
        """Enqueue the collective on its stream."""

        def action() -> None:
            for work in issue():
                work.wait()  # the stream waits, not the host

        self.compute(entry, action)

    def home_waits(
        self,
        home: str,
        buffer: str,
        uses: Iterable[Edge],
        drop: Callable[[], None],
        *,
        lent: bool = True,
    ) -> Sequence[Awaitable]:
        """Make the stream `home` wait for `uses`; its own uses are in order already."""
        uses = tuple(uses)
        events = self._events_of(uses)
        if self.workers.has(home):
            awaited = [_DeviceEvent(event) for event in events]
            return [self.workers.hand_over("", self.step, home, drop, after=uses, awaited=awaited)]
        self.workers.wait(self.workers.named(uses))
        for event in events:
            self._streams[home].wait_event(event)
        drop()
        if not lent:
            return ()
        here = _new_event()
        here.record(self._streams[home])
        return [_DeviceEvent(here)]

    def host_waits(self, edges: Iterable[Edge]) -> None:
        """Block the host until the operations have finished."""
        edges = tuple(edges)
        for event in self._events_of(edges):
            event.synchronize()
        self.workers.wait(self.workers.named(edges))

    def finish(self, home: str, buffer: str, uses: Iterable[Edge]) -> Completion:
        """Return whether the device, and threads, have finished all of `uses`."""
        uses = tuple(uses)
        events = self._events_of(uses)
        jobs = [*self.workers.named(uses), *self.workers.last(home)]
        return lambda: (
            all(_is_over(event) for event in events) and all(job.is_over() for job in jobs)
        )

    def on(self, stream: str) -> AbstractContextManager[None]:
        """`stream` is torch's current stream inside; a thread is none."""
        if self.workers.has(stream):
            return nullcontext()
        return torch.cuda.stream(self._streams[stream])

    def drain(self) -> None:
        """Wait until the device and all threads have finished everything."""
        self.workers.drain()
        torch.cuda.synchronize(self._device)

    def end_step(self) -> None:
        """Events of this step serve `Previous` edges from now on; the device goes on."""
        self.workers.end_step()
        self._previous.update(self._current)
        self._current.clear()

    def events(self, origin: int) -> list[Event]:
        """Everything that ran, of each stream in the order in which the host issued it."""
        offset = (self._reference_ns - origin) * PS_PER_NS
        return [
            *self.workers.events(origin),
            *(
                Event(
                    operation=mark.operation,
                    step=mark.step,
                    stream=mark.stream,
                    start_ps=offset + round(self._reference.elapsed_time(mark.start) * PS_PER_MS),
                    end_ps=offset + round(self._reference.elapsed_time(mark.end) * PS_PER_MS),
                )
                for mark in self._marks
            ),
        ]

    def forget(self) -> None:
        """Forget when operations ran; edges of the step before keep their events."""
        self.workers.forget()
        self._marks.clear()

    def follow_caller(self) -> None:
        """Make every stream wait for the caller's."""
        current = torch.cuda.current_stream(self._device)
        for stream in self._streams.values():
            stream.wait_stream(current)

    def hand_out(self, tensors: Iterable[torch.Tensor]) -> None:
        """Make the caller's stream wait for all; its reads hold the memory of `tensors`."""
        current = torch.cuda.current_stream(self._device)
        for stream in self._streams.values():
            current.wait_stream(stream)
        for tensor in tensors:
            tensor.record_stream(current)

    def now(self) -> int:
        """Nanoseconds of the host's clock, with the device idle."""
        torch.cuda.synchronize(self._device)
        return time.perf_counter_ns()

    def _events_of(self, edges: Iterable[Edge]) -> list[torch.cuda.Event]:
        found: list[torch.cuda.Event] = []
        for edge in edges:
            if isinstance(edge, Previous):
                event = self._previous.get(edge.operation)
            else:
                event = self._current.get(edge)
            if event is not None:
                found.append(event)
        return found


class _DeviceEvent(NamedTuple):
    """An event of a device, for which a thread of the host can wait."""

    event: torch.cuda.Event

    def wait(self) -> None:
        """Block the calling thread until the device has come to it."""
        self.event.synchronize()

    def is_over(self) -> bool:
        """Return whether the device has come to it."""
        return _is_over(self.event)


def _new_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _new_event(*, timed: bool = False) -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=timed)  # type: ignore[no-untyped-call]


def _is_over(event: torch.cuda.Event) -> bool:
    return bool(event.query())  # type: ignore[no-untyped-call]
