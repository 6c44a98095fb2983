"""Streams and events of the pretended accelerator, which run nothing and keep vector clocks."""

# pyright: reportPrivateUsage=false
# Private names of torch are listed in tests/unit/torch/record/test_recording.py.

import dis
import sys
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

import torch

from zsim_record.clocks.stream_clock import ClockMark, ClockTimeline, Tick
from zsim_record.record.device_guard import take_caught
from zsim_record.record.tape import Tape

DEVICE_TYPE = "zsim"
ACCUMULATES = 2**62
"""Sequence numbers from here on belong to nodes that accumulate gradients."""

POOL_STREAMS = 32
"""Streams per priority in torch's pool (torch 2.13, `CUDAStream.cpp`)."""


class DeviceStreams:
    """The streams of a recording: the default stream, those of the script, and the current one."""

    def __init__(self, tape: Tape) -> None:
        self.tape = tape
        self.default = PretendedStream.of(tape.clocks.stream("default stream"))
        self._made: list[PretendedStream] = [self.default]
        self._names: dict[str, int] = {}
        self._groups: dict[str, ClockTimeline] = {}
        self._pool: list[PretendedStream] = []
        self._thread = threading.local()
        self._recording_thread = threading.get_ident()
        self._of_node: dict[int, PretendedStream] = {}
        """Streams of forward nodes by sequence number, if not the default stream."""
        self._nodes = _next_node()
        self.backward: BackwardRun | None = None
        """The innermost running backward."""

    def make(self, name: str) -> ClockTimeline:
        """Return a new stream; if the name is taken, a number is appended."""
        count = self._names[name] = self._names.get(name, 0) + 1
        return self.tape.clocks.stream(name if count == 1 else f"{name} ({count})")

    def of_group(self, group: str) -> ClockTimeline:
        """Return the stream of a communicator for collectives with `async_op`."""
        if group not in self._groups:
            self._groups[group] = self.tape.clocks.stream(f"stream of {group}")
        return self._groups[group]

    def of_pool(self) -> "PretendedStream":
        """Return the next stream of torch's pool, in rotation."""
        if len(self._pool) < POOL_STREAMS:
            self._pool.append(PretendedStream.of(self.make("callback of a future")))
            return self._pool[-1]
        self._pool.append(self._pool.pop(0))
        return self._pool[-1]

    @property
    def current(self) -> "PretendedStream":
        """Return the stream that operations are currently enqueued on.

        An autograd node runs on the stream of its forward (docs.pytorch.org, "CUDA semantics",
        stream semantics of backward passes); a CPU node keeps the caller's stream.
        """
        stack: list[PretendedStream] = getattr(self._thread, "stack", [])
        if stack:
            return stack[-1]
        run, node = self.backward, _running_node()
        if run is None:
            return self.default
        if node is None:  # a hook between two nodes, or a final callback
            return self.default if self._is_recording_thread() else run.latest
        number = node._sequence_nr()
        known = run.latest if number >= ACCUMULATES else self.default
        stream = self._of_node.get(number, known)
        run.go_to(stream)
        return stream

    @current.setter
    def current(self, stream: "PretendedStream") -> None:
        stack = self._stack()
        if stack:
            stack[-1] = stream
        else:
            stack.append(stream)

    def note_nodes(self) -> None:
        """Record the current stream for autograd nodes created since the last call."""
        if not self._is_recording_thread() or _running_node() is not None:
            return
        number = _next_node()
        if number != self._nodes:
            stream = self.current
            if stream is not self.default:
                self._of_node.update(dict.fromkeys(range(self._nodes, number), stream))
            self._nodes = number

    def _is_recording_thread(self) -> bool:
        return threading.get_ident() == self._recording_thread

    @contextmanager
    def on(self, stream: "PretendedStream | None") -> Generator[None]:
        """Return a context in which `stream` is current; None changes nothing."""
        if stream is None:
            yield
            return
        stack = self._stack()
        stack.append(stream)
        try:
            yield
        finally:
            stack.pop()

    def all(self) -> list[ClockTimeline]:
        """Return all streams of the device."""
        return [line for line in self.tape.clocks.timelines if not line.is_host]

    def _stack(self) -> list["PretendedStream"]:
        if not hasattr(self._thread, "stack"):
            self._thread.stack = []
        stack: list[PretendedStream] = self._thread.stack
        return stack


class BackwardRun:
    """A call of backward; at its end, the engine makes the caller's current stream wait.

    No other stream waits (docs.pytorch.org, "CUDA semantics", stream semantics of backward passes).
    Inside, the engine orders nodes along the edges of the graph. Here each stream waits for the
    previous node, which implies at least that order.
    """

    def __init__(self, streams: DeviceStreams) -> None:
        self._tape = streams.tape
        self.caller = streams.current
        self.latest = self.caller
        self._used: set[PretendedStream] = set()

    def go_to(self, stream: "PretendedStream") -> None:
        """Run the next node on `stream`, after the previous one."""
        if stream is not self.latest:
            self._order(stream, self.latest)
        self._used.add(stream)
        self.latest = stream

    def end(self) -> None:
        """Order the caller's stream after all nodes; final callbacks run on it."""
        for stream in self._used:
            self._order(self.caller, stream)
        self._used.clear()
        self.latest = self.caller

    def _order(self, later: "PretendedStream", earlier: "PretendedStream") -> None:
        if later.timeline is not earlier.timeline:
            clocks = self._tape.clocks
            clocks.wait(later.timeline, clocks.record(self._tape.host, earlier.timeline))


class RecordedEngine:
    """Wraps the autograd engine to record the stream order of each backward."""

    def __init__(self, engine: Any, streams: DeviceStreams) -> None:
        self._engine = engine
        self._streams = streams

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def run_backward(self, *args: Any, **kwargs: Any) -> Any:
        """Run backward on the recorded streams."""
        streams = self._streams
        outer, run = streams.backward, BackwardRun(streams)
        streams.backward = run
        take_caught()
        try:
            return self._engine.run_backward(*args, **kwargs)
        except SystemError as error:  # torch lost the exception of a hook
            raise take_caught() or error from None
        finally:
            run.end()
            streams.backward = outer

    def queue_callback(self, callback: Callable[[], object]) -> None:
        """Call `callback` at the end of the running backward, on its caller's stream."""
        streams, run = self._streams, self._streams.backward

        def call_at_end() -> None:
            if run is None:
                callback()
                return
            run.end()
            with streams.on(run.caller):
                callback()

        self._engine.queue_callback(call_at_end)


class _Recording:
    """Holds the streams that the classes of the device module use."""

    streams: DeviceStreams | None = None


def active_streams() -> DeviceStreams:
    """Return the streams of the active recording."""
    if _Recording.streams is None:
        raise RuntimeError("streams of the pretended device are for recordings; none is under way")
    return _Recording.streams


def set_active(streams: DeviceStreams | None) -> None:
    """Make the device module use `streams`."""
    _Recording.streams = streams


class PretendedEvent:
    """An event: a mark of its stream's position when it was recorded."""

    def __init__(self, *_: object, **__: object) -> None:
        self._mark: ClockMark | None = None

    def record(self, stream: "PretendedStream | None" = None) -> None:
        """Record the current position of `stream`, by default the current one."""
        streams = active_streams()
        timeline = (stream or streams.current).timeline
        self._mark = streams.tape.clocks.record(streams.tape.host, timeline)

    def wait(self, stream: "PretendedStream | None" = None) -> None:
        """Make `stream`, by default the current one, wait; a no-op if nothing was recorded."""
        streams = active_streams()
        if self._mark is not None:
            timeline = (stream or streams.current).timeline
            streams.tape.clocks.wait(timeline, self._mark, streams.tape.stack())

    def synchronize(self) -> None:
        """Block the host until the event is reached."""
        tape = active_streams().tape
        if self._mark is not None:
            tape.clocks.wait(tape.host, self._mark, tape.stack())

    def query(self) -> bool:
        """Return True if the host has seen the event reached."""
        tape = active_streams().tape
        return self._mark is None or all(
            tape.host.is_after(Tick(number, time))
            for number, time in enumerate(self._mark.clock)
            if not tape.clocks.timelines[number].is_host
        )

    def elapsed_time(self, end: "PretendedEvent") -> float:
        """Return 1 ms, a made-up value."""
        del end
        active_streams().tape.invent("Event.elapsed_time() = 1 ms")
        return 1.0


class PretendedStream:
    """A timeline with the methods of `torch.cuda.Stream`."""

    def __init__(self, *_: object, **__: object) -> None:
        frame = sys._getframe(1)
        self.timeline = active_streams().make(_assigned_name(frame) or "stream")

    @classmethod
    def of(cls, timeline: ClockTimeline) -> "PretendedStream":
        """Return a stream for `timeline`."""
        stream = cls.__new__(cls)
        stream.timeline = timeline
        return stream

    @property
    def device(self) -> torch.device:
        """Return the pretended device."""
        return torch.device(DEVICE_TYPE, 0)

    @property
    def stream_id(self) -> int:
        """Return a number that is unique per stream."""
        return self.timeline.number

    cuda_stream = stream_id
    priority = 0

    def record_event(self, event: PretendedEvent | None = None) -> PretendedEvent:
        """Record an event on this stream and return it."""
        found = event if event is not None else PretendedEvent()
        found.record(self)
        return found

    def wait_event(self, event: PretendedEvent) -> None:
        """Make later operations on this stream wait for `event`."""
        event.wait(self)

    def wait_stream(self, stream: "PretendedStream") -> None:
        """Make later operations on this stream wait for all operations so far on `stream`."""
        self.wait_event(stream.record_event())

    def synchronize(self) -> None:
        """Block the host until all operations on this stream are done."""
        self.record_event().synchronize()

    def query(self) -> bool:
        """Return True if the host has seen all operations on this stream finish."""
        return self.record_event().query()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PretendedStream) and other.timeline is self.timeline

    def __hash__(self) -> int:
        return hash(self.timeline.number)

    def __repr__(self) -> str:
        return f"<{self.timeline.name}>"

    def __enter__(self) -> "PretendedStream":
        self._entered = active_streams().on(self)
        self._entered.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._entered.__exit__(kind, error, trace)


def in_backward() -> bool:
    """Return True if this thread runs an autograd node."""
    return _running_node() is not None


def _running_node() -> torch.autograd.graph.Node | None:
    """Return the autograd node that this thread runs in backward, or None."""
    return torch._C._current_autograd_node()


def _next_node() -> int:
    """Return the sequence number of this thread's next autograd node."""
    autograd: Any = torch._C
    number: int = autograd._autograd._get_sequence_nr()
    return number


def _assigned_name(frame: FrameType) -> str | None:
    """Return the variable to which the call in `frame` is assigned, if it is a plain name."""
    after_call = (
        each for each in dis.get_instructions(frame.f_code) if each.offset > frame.f_lasti
    )
    for _, instruction in zip(range(4), after_call, strict=False):
        if instruction.opname.startswith("STORE_"):
            return str(instruction.argval)
        if not instruction.opname.startswith(("LOAD_", "CACHE", "EXTENDED_ARG")):
            return None
    return None
