"""Streams and events of the pretended accelerator: they run nothing and keep vector clocks."""

# pyright: reportPrivateUsage=false
# Private names of torch are listed in tests/unit/torch/record/test_recording.py.

import dis
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

import torch

from zsim_torch.clocks.stream_clock import ClockMark, ClockTimeline, Tick
from zsim_torch.record.tape import Tape

DEVICE_TYPE = "zsim"
ACCUMULATES = 2**62
"""Nodes that accumulate gradients have the largest number there is, not one of forward."""


class DeviceStreams:
    """The streams of a recording: the default one, those made by the script, which is current."""

    def __init__(self, tape: Tape) -> None:
        self.tape = tape
        self.default = PretendedStream.of(tape.clocks.stream("default stream"))
        self._made: list[PretendedStream] = [self.default]
        self._names: dict[str, int] = {}
        self._groups: dict[str, ClockTimeline] = {}
        self._thread = threading.local()
        self._recording_thread = threading.get_ident()
        self._of_node: dict[int, PretendedStream] = {}
        """Streams of forward by the number of the node, where it is not the default one."""
        self._nodes = _next_node()
        self._latest = self.default
        self._in_backward = False

    def make(self, name: str) -> ClockTimeline:
        """Return a new stream; a name that is taken gets a number."""
        count = self._names[name] = self._names.get(name, 0) + 1
        return self.tape.clocks.stream(name if count == 1 else f"{name} ({count})")

    def of_group(self, group: str) -> ClockTimeline:
        """Return the stream on which a communicator runs what is issued with `async_op`."""
        if group not in self._groups:
            self._groups[group] = self.tape.clocks.stream(f"stream of {group}")
        return self._groups[group]

    @property
    def current(self) -> "PretendedStream":
        """The stream that operations are enqueued on now.

        A node of autograd runs on the stream of its forward (docs.pytorch.org, "CUDA semantics",
        stream semantics of backward passes).
        """
        stack: list[PretendedStream] = getattr(self._thread, "stack", [])
        if stack:
            chosen = stack[-1]
            if self._is_recording_thread():
                self._switch(chosen, in_backward=False)
            return chosen
        node = _running_node()
        if node is None:
            if self._is_recording_thread() or not self._in_backward:
                self._switch(self.default, in_backward=False)
                return self.default
            return self._latest  # a hook between two nodes
        number = node._sequence_nr()
        known = self._latest if number >= ACCUMULATES else self.default
        stream = self._of_node.get(number, known)
        self._switch(stream, in_backward=True)
        return stream

    @current.setter
    def current(self, stream: "PretendedStream") -> None:
        stack = self._stack()
        if stack:
            stack[-1] = stream
        else:
            stack.append(stream)

    def note_nodes(self) -> None:
        """Remember the stream of nodes of autograd that were made since the last call."""
        if not self._is_recording_thread() or _running_node() is not None:
            return
        number = _next_node()
        if number != self._nodes:
            stream = self.current
            if stream is not self.default:
                self._of_node.update(dict.fromkeys(range(self._nodes, number), stream))
            self._nodes = number

    def _switch(self, stream: "PretendedStream", *, in_backward: bool) -> None:
        """Go to or from a stream of backward: the engine makes the next one wait for the last.

        It does so along the edges of the graph; here along the order of the nodes, which orders no
        less.
        """
        if (in_backward or self._in_backward) and stream.timeline is not self._latest.timeline:
            tape = self.tape
            mark = tape.clocks.record(tape.host, self._latest.timeline)
            tape.clocks.wait(stream.timeline, mark)
        self._latest = stream
        self._in_backward = in_backward

    def _is_recording_thread(self) -> bool:
        return threading.get_ident() == self._recording_thread

    @contextmanager
    def on(self, stream: "PretendedStream | None") -> Generator[None]:
        """Make `stream` current inside; None changes nothing."""
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
        """Return every stream of the device."""
        return [line for line in self.tape.clocks.timelines if not line.is_host]

    def _stack(self) -> list["PretendedStream"]:
        if not hasattr(self._thread, "stack"):
            self._thread.stack = []
        stack: list[PretendedStream] = self._thread.stack
        return stack


class _Recording:
    """The streams that classes of the device module work on."""

    streams: DeviceStreams | None = None


def active_streams() -> DeviceStreams:
    """Return the streams of the recording that is under way."""
    if _Recording.streams is None:
        raise RuntimeError("streams of the pretended device are for recordings; none is under way")
    return _Recording.streams


def set_active(streams: DeviceStreams | None) -> None:
    """Let the device module serve `streams`."""
    _Recording.streams = streams


class PretendedEvent:
    """An event: what its stream had been given when it was recorded."""

    def __init__(self, *_: object, **__: object) -> None:
        self._mark: ClockMark | None = None

    def record(self, stream: "PretendedStream | None" = None) -> None:
        """Remember what `stream`, or the current one, was given so far."""
        streams = active_streams()
        timeline = (stream or streams.current).timeline
        self._mark = streams.tape.clocks.record(streams.tape.host, timeline)

    def wait(self, stream: "PretendedStream | None" = None) -> None:
        """Make `stream`, or the current one, wait; for an event not recorded there is no wait."""
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
        """Return whether the host knows that the event was reached."""
        tape = active_streams().tape
        return self._mark is None or all(
            tape.host.is_after(Tick(number, time))
            for number, time in enumerate(self._mark.clock)
            if not tape.clocks.timelines[number].is_host
        )

    def elapsed_time(self, end: "PretendedEvent") -> float:
        """Return 1 ms, whatever it was."""
        del end
        active_streams().tape.invent("Event.elapsed_time() = 1 ms")
        return 1.0


class PretendedStream:
    """A stream: a timeline under the methods of `torch.cuda.Stream`."""

    def __init__(self, *_: object, **__: object) -> None:
        frame = sys._getframe(1)
        self.timeline = active_streams().make(_assigned_name(frame) or "stream")

    @classmethod
    def of(cls, timeline: ClockTimeline) -> "PretendedStream":
        """Return the stream that is `timeline`."""
        stream = cls.__new__(cls)
        stream.timeline = timeline
        return stream

    @property
    def device(self) -> torch.device:
        """The pretended device."""
        return torch.device(DEVICE_TYPE, 0)

    @property
    def stream_id(self) -> int:
        """A number of its own."""
        return self.timeline.number

    cuda_stream = stream_id
    priority = 0

    def record_event(self, event: PretendedEvent | None = None) -> PretendedEvent:
        """Return an event recorded here."""
        found = event if event is not None else PretendedEvent()
        found.record(self)
        return found

    def wait_event(self, event: PretendedEvent) -> None:
        """Let what is enqueued here from now on wait for `event`."""
        event.wait(self)

    def wait_stream(self, stream: "PretendedStream") -> None:
        """Let what is enqueued here from now on wait for all that `stream` was given."""
        self.wait_event(stream.record_event())

    def synchronize(self) -> None:
        """Block the host until everything here is done."""
        self.record_event().synchronize()

    def query(self) -> bool:
        """Return whether the host knows that everything here is done."""
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
    """Return whether this thread runs a node of autograd."""
    return _running_node() is not None


def _running_node() -> torch.autograd.graph.Node | None:
    """Return the node of autograd whose backward this thread is in."""
    return torch._C._current_autograd_node()


def _next_node() -> int:
    """Return the number that the next node of autograd made by this thread will have."""
    autograd: Any = torch._C
    number: int = autograd._autograd._get_sequence_nr()
    return number


def _assigned_name(frame: FrameType) -> str | None:
    """Return the name that the call under way in `frame` is assigned to, if that is plain."""
    after_call = (
        each for each in dis.get_instructions(frame.f_code) if each.offset > frame.f_lasti
    )
    for _, instruction in zip(range(4), after_call, strict=False):
        if instruction.opname.startswith("STORE_"):
            return str(instruction.argval)
        if not instruction.opname.startswith(("LOAD_", "CACHE", "EXTENDED_ARG")):
            return None
    return None
