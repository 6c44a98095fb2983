"""Races and reuse of memory on streams and host threads, against reachability in a graph."""

import gc
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

import networkx as nx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zsim_record.clocks.access_history import RecordedAccess
from zsim_record.clocks.block_contract import BlockContract, TrackedBlock
from zsim_record.clocks.byte_region import ByteRegion
from zsim_record.clocks.call_stack import CallStack, CallStacks, StackFrame
from zsim_record.clocks.finding import BlockKind, HazardKind, HazardList, Site
from zsim_record.clocks.stream_clock import ClockMark, ClockTimeline, StreamClocks

STREAMS = ("compute", "copy", "reduce")


class Bench:
    """Streams and a host that touch memory, and what is found."""

    def __init__(self) -> None:
        self.clocks = StreamClocks()
        unique = count()

        def site_of(_: CallStack | None) -> Site:  # each hazard has a place of its own
            return (StackFrame("file", next(unique), "f"),)

        self.hazards = HazardList(self.clocks, site_of)
        self.contract = BlockContract(self.clocks, self.hazards)
        self.host = self.clocks.host()
        self.streams = {name: self.clocks.stream(name) for name in STREAMS}

    def allocate(self, label: str, home: str, kind: BlockKind = BlockKind.DEVICE) -> TrackedBlock:
        return self.contract.allocate(label, kind, 64, home=self.streams[home])

    def pinned(self, label: str) -> TrackedBlock:
        return self.contract.allocate(label, BlockKind.PINNED, 64)

    def touch(
        self, block: TrackedBlock, timeline: str, *, writes: bool, start: int = 0, end: int = 64
    ) -> RecordedAccess:
        if timeline == "host":
            line, tick = self.host, self.clocks.advance(self.host)
        else:
            line = self.streams[timeline]
            tick = self.clocks.launch(self.host, line)
        verb = "write" if writes else "read"
        access = RecordedAccess(line, tick, ByteRegion(start, end), writes, f"{verb} {tick.time}")
        self.contract.use(block, access)
        return access

    def follow(self, later: str, earlier: str) -> None:
        self.clocks.follow(self.line(later), self.line(earlier))

    def line(self, name: str) -> ClockTimeline:
        return self.host if name == "host" else self.streams[name]

    def drop(self, block: TrackedBlock) -> None:
        self.contract.drop(block, self.host)

    def kinds(self) -> list[HazardKind]:
        return [hazard.kind for hazard in self.hazards]


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_two_streams_without_a_wait_race(bench: Bench) -> None:
    block = bench.allocate("grad", "compute")
    bench.touch(block, "compute", writes=True)
    bench.touch(block, "copy", writes=False)
    (hazard,) = bench.hazards
    assert hazard.kind is HazardKind.RACE
    assert hazard.missing_edge == "copy must wait for write 1 on compute before read 1"


def test_a_wait_orders_them(bench: Bench) -> None:
    block = bench.allocate("grad", "compute")
    bench.touch(block, "compute", writes=True)
    bench.follow("copy", "compute")
    bench.touch(block, "copy", writes=False)
    assert bench.kinds() == []


def test_a_wait_for_an_event_recorded_too_early_does_not(bench: Bench) -> None:
    block = bench.allocate("grad", "compute")
    event = bench.clocks.mark(bench.line("compute"))
    bench.touch(block, "compute", writes=True)
    bench.clocks.wait(bench.line("copy"), event)
    bench.touch(block, "copy", writes=False)
    assert bench.kinds() == [HazardKind.RACE]


def test_a_wait_on_the_stream_itself_orders_nothing(bench: Bench) -> None:
    block = bench.allocate("slab", "compute")
    bench.touch(block, "copy", writes=False)
    bench.follow("copy", "copy")
    bench.touch(block, "compute", writes=True)
    assert bench.kinds() == [HazardKind.RACE]


def test_two_readers_need_no_order(bench: Bench) -> None:
    block = bench.allocate("weight", "compute")
    bench.touch(block, "compute", writes=False)
    bench.touch(block, "copy", writes=False)
    assert bench.kinds() == []


def test_disjoint_bytes_need_no_order(bench: Bench) -> None:
    block = bench.allocate("bucket", "compute")
    bench.touch(block, "compute", writes=True, end=32)
    bench.touch(block, "copy", writes=True, start=32)
    assert bench.kinds() == []


def test_the_host_reads_a_pinned_copy_only_after_it_waited(bench: Bench) -> None:
    block = bench.pinned("gradient")
    bench.touch(block, "copy", writes=True)
    bench.touch(block, "host", writes=False)
    (hazard,) = bench.hazards
    assert hazard.kind is HazardKind.HOST_RACE
    assert hazard.missing_edge == "the host must wait for write 1 on copy before read 1"


def test_a_host_that_waited_may_read(bench: Bench) -> None:
    block = bench.pinned("gradient")
    bench.touch(block, "copy", writes=True)
    bench.follow("host", "copy")
    bench.touch(block, "host", writes=False)
    assert bench.kinds() == []


def test_the_host_overwrites_a_pinned_slot_that_a_copy_still_reads(bench: Bench) -> None:
    block = bench.pinned("slot")
    bench.touch(block, "host", writes=True)
    bench.touch(block, "copy", writes=False)
    bench.touch(block, "host", writes=True)
    assert bench.kinds() == [HazardKind.HOST_RACE]


def test_host_threads_that_share_a_file_range_race(bench: Bench) -> None:
    file = bench.contract.allocate("moments.bin", BlockKind.FILE, 4096)
    worker = bench.clocks.host("writer")
    for line in (worker, bench.host):
        tick = bench.clocks.advance(line)
        bench.contract.use(
            file, RecordedAccess(line, tick, ByteRegion(0, 512), writes=True, operation="pwrite")
        )
    assert bench.kinds() == [HazardKind.HOST_RACE]


def test_a_block_dropped_while_another_stream_reads_it_is_reused_too_early(bench: Bench) -> None:
    old = bench.allocate("gathered", "copy")
    bench.touch(old, "copy", writes=True)
    bench.follow("compute", "copy")
    bench.touch(old, "compute", writes=False)
    bench.drop(old)
    new = bench.allocate("next", "copy")
    bench.touch(new, "copy", writes=True)
    (hazard,) = bench.hazards
    assert hazard.kind is HazardKind.REUSE
    assert hazard.former is not None
    assert hazard.former.label == "gathered"
    assert "record_stream(compute)" in hazard.missing_edge


@pytest.mark.parametrize("cure", ["record_stream", "home waits", "host waits", "other home"])
def test_reuse_is_safe_with_one_of_the_cures(bench: Bench, cure: str) -> None:
    old = bench.allocate("gathered", "copy")
    bench.touch(old, "copy", writes=True)
    bench.follow("compute", "copy")
    bench.touch(old, "compute", writes=False)
    if cure == "record_stream":
        bench.contract.record_stream(old, bench.line("compute"))
    elif cure == "home waits":
        bench.follow("copy", "compute")
    elif cure == "host waits":
        bench.follow("host", "compute")
    bench.drop(old)
    home = "reduce" if cure == "other home" else "copy"
    bench.touch(bench.allocate("next", home), home, writes=True)
    assert bench.kinds() == []


def test_memory_of_another_stream_needs_a_wait_for_that_stream(bench: Bench) -> None:
    """A buffer allocated on the compute stream and used on another: the memory may be in use."""
    old = bench.allocate("activation", "compute")
    bench.touch(old, "compute", writes=True)
    bench.drop(old)
    bench.touch(bench.allocate("bucket", "compute"), "reduce", writes=True)
    (hazard,) = bench.hazards
    assert hazard.missing_edge.startswith("reduce must wait for compute, where the memory")


def test_equal_hazards_of_one_place_are_one_finding() -> None:
    clocks = StreamClocks()
    hazards = HazardList(clocks, lambda stack: stack.frames[:1] if stack else ())
    contract = BlockContract(clocks, hazards)
    stacks = CallStacks()
    host, one, two = clocks.host(), clocks.stream("one"), clocks.stream("two")
    for _ in range(3):
        block = contract.allocate("block", BlockKind.DEVICE, 8, home=one)
        for stream in (one, two):
            tick = clocks.launch(host, stream)
            access = RecordedAccess(
                stream, tick, ByteRegion(0, 8), writes=True, operation="fill", stack=stacks.take()
            )
            contract.use(block, access)
    (hazard,) = hazards
    assert hazard.count == 3
    assert hazard.earlier.stack is not None
    assert hazard.earlier.stack.frames[0].function == (
        "test_equal_hazards_of_one_place_are_one_finding"
    )


class Dropped:
    """Something that dies with its last reference."""


def test_a_stack_keeps_nothing_of_its_callers_alive() -> None:
    stacks = CallStacks()

    def take() -> weakref.ref[Dropped]:
        held = Dropped()
        stacks.take()
        return weakref.ref(held)

    gc.disable()
    try:
        assert take()() is None
    finally:
        gc.enable()


@dataclass(frozen=True)
class Touch:
    timeline: str
    start: int
    end: int
    writes: bool


@dataclass(frozen=True)
class Record:
    timeline: str


@dataclass(frozen=True)
class WaitFor:
    timeline: str
    event: int


NAMES = st.sampled_from([*STREAMS, "host"])
ACTIONS = st.one_of(
    st.builds(
        lambda name, start, size, writes: Touch(name, start, start + size, writes),
        NAMES,
        st.integers(0, 3),
        st.integers(1, 2),
        st.booleans(),
    ),
    st.builds(Record, NAMES),
    st.builds(WaitFor, NAMES, st.integers(0, 5)),
)
Action = Touch | Record | WaitFor
Position = tuple[str, int]


class Oracle:
    """The program as a graph: one node for each action, edges for what is ordered."""

    def __init__(self, actions: Sequence[Action]) -> None:
        self.graph: nx.DiGraph[int] = nx.DiGraph()
        self.touches: dict[int, Touch] = {}
        self.node_of: dict[Position, int] = {}
        last: dict[str, int] = {}
        events: list[int] = []
        times = dict.fromkeys([*STREAMS, "host"], 0)
        for node, action in enumerate(actions):
            self.graph.add_node(node)
            name = action.timeline
            launched = isinstance(action, Touch) and name != "host" and "host" in last
            for before in [last.get(name), last["host"] if launched else None]:
                if before is not None:
                    self.graph.add_edge(before, node)
            if isinstance(action, Touch):
                times[name] += 1
                self.touches[node] = action
                self.node_of[name, times[name]] = node
            elif isinstance(action, Record):
                events.append(node)
            elif action.event < len(events):
                self.graph.add_edge(events[action.event], node)
            last[name] = node

    def races(self) -> set[tuple[int, int]]:
        closed = nx.transitive_closure_dag(self.graph)
        return {
            (one, two)
            for one, first in self.touches.items()
            for two, second in self.touches.items()
            if one < two
            and (first.writes or second.writes)
            and max(first.start, second.start) < min(first.end, second.end)
            and not closed.has_edge(one, two)
        }


@given(st.lists(ACTIONS, max_size=24))
def test_findings_are_races_and_their_edges_leave_none(actions: list[Action]) -> None:
    bench = Bench()
    block = bench.pinned("slot")
    events: list[ClockMark] = []
    for action in actions:
        if isinstance(action, Touch):
            bench.touch(
                block,
                action.timeline,
                writes=action.writes,
                start=action.start,
                end=action.end,
            )
        elif isinstance(action, Record):
            events.append(bench.clocks.mark(bench.line(action.timeline)))
        elif action.event < len(events):
            bench.clocks.wait(bench.line(action.timeline), events[action.event])
    oracle = Oracle(actions)
    races = oracle.races()
    assert bool(races) == bool(bench.hazards)
    for hazard in bench.hazards:
        pair = tuple(
            oracle.node_of[access.timeline.name, access.tick.time]
            for access in (hazard.earlier, hazard.later)
        )
        assert pair in races
        oracle.graph.add_edge(*pair)
    assert oracle.races() == set()
