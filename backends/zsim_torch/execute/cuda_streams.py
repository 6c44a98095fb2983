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
    """Streams and events of CUDA. The host blocks only where the schedule says so.

    A collective is issued on the stream of its operation (`async_op=False`), so stream order holds
    for it as for a kernel. Memory is allocated with its home stream current, because the caching
    allocator reuses a freed block for later allocations on the same stream.
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
        """Enqueue the kernels of `action` after its dependencies, or pass it to a host thread.

        A stream cannot wait for a host thread. The schedule has a host wait there, so the job of
        the thread has already finished.
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
        """Make the stream `home` wait for `uses`; its own uses are already in order."""
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
        """Return a function that returns True once the device and threads have finished `uses`."""
        uses = tuple(uses)
        events = self._events_of(uses)
        jobs = [*self.workers.named(uses), *self.workers.last(home)]
        return lambda: (
            all(_is_over(event) for event in events) and all(job.is_over() for job in jobs)
        )

    def on(self, stream: str) -> AbstractContextManager[None]:
        """Return a context manager that makes `stream` current; a no-op for a host thread."""
        if self.workers.has(stream):
            return nullcontext()
        return torch.cuda.stream(self._streams[stream])

    def drain(self) -> None:
        """Wait until the device and all threads have finished everything."""
        self.workers.drain()
        torch.cuda.synchronize(self._device)

    def end_step(self) -> None:
        """Make the events of this step the targets of `Previous` edges; does not synchronize."""
        self.workers.end_step()
        self._previous.update(self._current)
        self._current.clear()

    def events(self, origin: int) -> list[Event]:
        """Return all events of the trace; per stream in the order of issue on the host."""
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
        """Forget the recorded events; `Previous` edges keep theirs."""
        self.workers.forget()
        self._marks.clear()

    def follow_caller(self) -> None:
        """Make every stream wait for the caller's current stream."""
        current = torch.cuda.current_stream(self._device)
        for stream in self._streams.values():
            stream.wait_stream(current)

    def hand_out(self, tensors: Iterable[torch.Tensor]) -> None:
        """Make the caller's stream wait for all streams, and record its use of `tensors`."""
        current = torch.cuda.current_stream(self._device)
        for stream in self._streams.values():
            current.wait_stream(stream)
        for tensor in tensors:
            tensor.record_stream(current)

    def now(self) -> int:
        """Return the host's clock in nanoseconds, after synchronizing the device."""
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
    """A CUDA event that a host thread can wait for."""

    event: torch.cuda.Event

    def wait(self) -> None:
        """Block the calling thread until the device has reached the event."""
        self.event.synchronize()

    def is_over(self) -> bool:
        """Return True if the device has reached the event."""
        return _is_over(self.event)


def _new_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _new_event(*, timed: bool = False) -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=timed)  # type: ignore[no-untyped-call]


def _is_over(event: torch.cuda.Event) -> bool:
    return bool(event.query())  # type: ignore[no-untyped-call]
