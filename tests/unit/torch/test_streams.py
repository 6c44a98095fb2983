"""Order on the CPU: what flies, what waits for it, and what the trace says of both."""

from dataclasses import dataclass, field
from typing import cast

from hypothesis import given
from hypothesis import strategies as st

from zsim.schedule.operation import Previous
from zsim.trace.trace import Event
from zsim_torch.execute.flights import BufferAccess, PendingWork, StreamEntry
from zsim_torch.execute.streams import CpuStreams

STREAMS = ("compute", "communication", "copy")


@dataclass
class Log:
    """What ran or landed, in order."""

    names: list[str] = field(default_factory=list[str])

    def work(self, name: str) -> list[PendingWork]:
        return [cast("PendingWork", _Landing(name, self))]


@dataclass
class _Landing:
    name: str
    log: Log

    def wait(self) -> None:
        self.log.names.append(self.name)


def fly(
    streams: CpuStreams, log: Log, name: str, *, after: tuple[str, ...] = (), buffer: str = ""
) -> None:
    touches = (BufferAccess(buffer, 0, 4, writes=True),) if buffer else ()
    entry = StreamEntry(
        operation=name, stream="communication", after=after, group="data", touches=touches
    )
    streams.communicate(entry, lambda: log.work(name))


def compute(streams: CpuStreams, log: Log, name: str, *, after: tuple[str, ...] = ()) -> None:
    entry = StreamEntry(operation=name, stream="compute", after=after)
    streams.compute(entry, lambda: log.names.append(name))


def test_a_collective_flies_until_something_is_ordered_after_it() -> None:
    streams, log = CpuStreams(), Log()
    fly(streams, log, "gather")
    compute(streams, log, "elsewhere")
    compute(streams, log, "reader", after=("gather",))
    assert log.names == ["elsewhere", "gather", "reader"]


def test_what_is_earlier_on_the_stream_lands_first() -> None:
    streams, log = CpuStreams(), Log()
    fly(streams, log, "one")
    fly(streams, log, "two")
    compute(streams, log, "reader", after=("two",))
    assert log.names == ["one", "two", "reader"]


def test_collectives_in_a_row_wait_for_each_other_only_over_common_memory() -> None:
    streams, log = CpuStreams(), Log()
    fly(streams, log, "reduce", buffer="x")
    fly(streams, log, "other", buffer="y")
    assert log.names == []
    fly(streams, log, "gather", buffer="x")
    assert log.names == ["reduce"]


def test_a_free_waits_for_its_uses_and_for_its_home_streams_use_of_the_buffer() -> None:
    streams, log = CpuStreams(), Log()
    fly(streams, log, "own use", buffer="x")
    drop = lambda: log.names.append("dropped")  # noqa: E731
    streams.home_waits("compute", "y", ["elsewhere"], drop)
    assert log.names == ["dropped"]
    streams.home_waits("communication", "x", [], drop)
    assert log.names == ["dropped", "own use", "dropped"]
    fly(streams, log, "named use")
    streams.home_waits("compute", "y", ["named use"], drop)
    assert log.names[-2:] == ["named use", "dropped"]


def test_a_deferred_free_is_over_when_the_host_has_learnt_of_the_end() -> None:
    streams, log = CpuStreams(), Log()
    fly(streams, log, "use")
    over = streams.finish("compute", "x", ["use"])
    assert not over()
    streams.host_waits(["use"])
    assert over()


def test_an_edge_to_a_step_before_is_satisfied_since_steps_are_drained() -> None:
    streams, log = CpuStreams(step=0), Log()
    fly(streams, log, "gather")
    streams.host_waits([Previous("gather")])
    assert log.names == []
    streams.end_step()
    assert log.names == ["gather"]


@given(
    st.lists(
        st.tuples(
            st.booleans(),
            st.sampled_from(STREAMS),
            st.lists(st.integers(0, 30), max_size=3),
            st.sampled_from(["", "x", "y"]),
        ),
        max_size=30,
    )
)
def test_events_keep_streams_edges_and_communicators_in_order(
    drawn: list[tuple[bool, str, list[int], str]],
) -> None:
    streams, log = CpuStreams(step=0), Log()
    entries: list[tuple[StreamEntry, bool]] = []
    for number, (flies, stream, back, buffer) in enumerate(drawn):
        after = tuple(str(number - 1 - distance) for distance in back if distance < number)
        entry = StreamEntry(
            operation=str(number),
            stream=stream,
            after=after,
            group="data" if flies else "",
            touches=(BufferAccess(buffer, 0, 1, writes=True),) if flies and buffer else (),
        )
        entries.append((entry, flies))
        if flies:
            streams.communicate(entry, lambda number=number: log.work(str(number)))  # type: ignore[misc]
        else:
            streams.compute(entry, lambda: None)
    streams.drain()
    events: dict[str, Event] = {event.operation: event for event in streams.events(0)}
    assert len(events) == len(entries)
    ends: dict[str, int] = {}
    for entry, flies in entries:
        event = events[entry.operation]
        assert event.start_ps <= event.end_ps
        for line in (entry.stream, "group" if flies else entry.stream):
            assert ends.get(line, event.start_ps) <= event.start_ps
        for line in (entry.stream, "group" if flies else entry.stream):
            ends[line] = event.end_ps
        for awaited in entry.after:
            assert isinstance(awaited, str)
            assert events[awaited].end_ps <= event.start_ps
