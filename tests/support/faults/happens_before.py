"""Which accesses to one place of memory have no order: by brute force, on every rank, unrolled.

A second implementation of happens-before, as unlike the checker's as can be: a graph of all
operations of setup and three steps on all ranks, and its closure as bits of whole numbers. Blocks
are those that the carrier of values takes. If no two conflicting accesses are without an order,
what one run computes is what every run computes.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from zsim.network.volume import communications
from zsim.schedule.access import accesses
from zsim.schedule.issue_order import SETUP, taken
from zsim.schedule.mesh import Coordinates
from zsim.schedule.operation import (
    Allocate,
    Branch,
    Communication,
    Edge,
    Free,
    FreeMode,
    HostWait,
    Operation,
    Previous,
    Receive,
    Send,
    SetScalar,
)
from zsim.schedule.schedule import Program, Schedule
from zsim_des.values import Modular
from zsim_des.values.field import Numbers
from zsim_des.values.value_memory import BlockMemory, MemoryBlock

STEPS = 3
Name = tuple[int, int, str]
"""Rank, step and operation."""


class StuckError(Exception):
    """Operations wait for ever."""


@dataclass(eq=False)
class Node:
    """An operation of a stream, a point at which a host stops, or a free that waits for nothing.

    Such a free comes behind `tail`, what its home stream holds when the host issues it, and before
    what the same host issues later and has to wait for `tail`: no entry of a stream shows that.
    """

    name: Name
    before: list["Node"]
    is_free: bool = False
    tail: "Node | None" = None
    meetings: list[list["Node"]] = field(default_factory=list[list["Node"]])
    number: int = 0
    begun: int = 0
    done: int = 0


@dataclass(frozen=True)
class Touch:
    """A range of a block that a node reads or writes."""

    node: Node
    low: int
    high: int
    writes: bool


@dataclass(frozen=True)
class Race:
    """Two operations that touch one place in no order, and what must be over before each begins."""

    one: Name
    other: Name
    before_one: frozenset[Name]
    before_other: frozenset[Name]


class _Host:
    """One rank's host, which issues its program into the graph."""

    def __init__(self, graph: "Graph", rank: int) -> None:
        self.graph = graph
        self.rank = rank
        self.at: Coordinates = graph.schedule.mesh.coordinates(rank)
        self.program: Program = graph.schedule.program_of(rank)
        self.knows: list[Node] = []
        self.tails: dict[str, Node] = {}
        self.groups: dict[str, Node] = {}
        self.here: dict[str, Node] = {}
        self.latest: dict[str, Node] = {}
        self.memory = BlockMemory(Modular(graph.schedule))
        self.touched: dict[int, list[Touch]] = {}
        self.blocks: list[MemoryBlock[Numbers]] = []

    def issue(self, step: int, operations: Iterable[Operation], *, overflows: bool) -> None:
        self.latest |= self.here
        self.here = {}
        for operation in taken(operations, overflows=overflows):
            self._issue((self.rank, step, operation.id), operation)

    def _issue(self, name: Name, operation: Operation) -> None:
        match operation:
            case Allocate(buffer=buffer):
                self.memory.allocate(self.program.by_name[buffer])
            case Free():
                self._free(name, operation)
            case HostWait():
                self._stop(name, self._edges((operation.operation,)))
            case Branch(after=after):
                self._touch(self._stop(name, self._edges(after)), operation)
            case SetScalar():
                pass
            case _:
                before = self._edges(operation.after)
                members = communications(operation)
                for group in {member.group for member in members}:
                    if group in self.groups:
                        before.append(self.groups[group])
                node = self._put(name, operation.stream, before)
                for member in members:
                    self.groups[member.group] = node
                    self.graph.seat(node, member, self.rank, self.at)
                self._touch(node, operation)

    def _edges(self, edges: Iterable[Edge]) -> list[Node]:
        found: list[Node] = []
        for edge in edges:
            if isinstance(edge, Previous):
                node = self.latest.get(edge.operation)
            else:
                node = self.here.get(edge)
            if node is not None:
                found.append(node)
        return found

    def _put(self, name: Name, stream: str, before: list[Node]) -> Node:
        if stream in self.tails:
            before.append(self.tails[stream])
        node = self.graph.node(name, before + self.knows)
        self.tails[stream] = self.here[name[2]] = node
        return node

    def _stop(self, name: Name, before: list[Node]) -> Node:
        node = self.graph.node(name, before + self.knows)
        self.knows = [node]
        return node

    def _free(self, name: Name, free: Free) -> None:
        buffer = self.program.by_name[free.buffer]
        uses = self._edges(free.uses)
        block = self.memory.blocks.pop(free.buffer, None)
        if free.mode is FreeMode.WAITED and free.uses:
            node = self._put(name, buffer.home, uses)
        else:
            if free.mode is FreeMode.HOST:
                self._stop(name, uses)
            tail = self.tails.get(buffer.home)
            before = [*self.knows, *uses, *([] if tail is None else [tail])]
            node = self.graph.node(name, before)
            node.is_free, node.tail = free.mode is not FreeMode.DEFERRED, tail
        if block is not None:
            self._touch_block(node, block, (0, block.elements), writes=True)
            if free.mode is not FreeMode.DEFERRED:
                self.memory.give_back(buffer, block)

    def _touch(self, node: Node, operation: Operation) -> None:
        for view, reads, writes in accesses(operation):
            start, size = self.graph.schedule.extent(view, self.at)
            block = self.memory.blocks.get(view.buffer)
            if block is not None and size and (reads or writes):
                self._touch_block(node, block, (start, start + size), writes=writes)

    def _touch_block(
        self, node: Node, block: MemoryBlock[Numbers], span: tuple[int, int], *, writes: bool
    ) -> None:
        touch = Touch(node, *span, writes)
        self.touched.setdefault(id(block), []).append(touch)
        self.blocks.append(block)  # an identity counts as long as its block lives


class Graph:
    """All operations of all ranks, and what must be over when each begins.

    Raises:
        StuckError: some can never begin.
    """

    def __init__(self, schedule: Schedule, overflow_steps: frozenset[int]) -> None:
        self.schedule = schedule
        self.nodes: list[Node] = []
        self._meetings: dict[tuple[object, ...], list[Node]] = {}
        self._counts: dict[tuple[object, ...], int] = {}
        self._needed: dict[int, int] = {}
        self.hosts = [_Host(self, rank) for rank in range(schedule.mesh.size)]
        for host in self.hosts:
            host.issue(SETUP, host.program.setup, overflows=False)
        drained = self.node((0, SETUP, ""), list(self.nodes))
        for host in self.hosts:
            host.knows = [drained]
        for step in range(STEPS):
            for host in self.hosts:
                host.issue(step, host.program.step, overflows=step in overflow_steps)
        self._close()

    def node(self, name: Name, before: list[Node]) -> Node:
        made = Node(name, before, number=len(self.nodes))
        self.nodes.append(made)
        return made

    def seat(self, node: Node, member: Communication, rank: int, at: Coordinates) -> None:
        """`node` has `member`, which meets others by how many its rank issued before."""
        group = self.schedule.group_by_name[member.group]
        ranks = group.members(self.schedule.mesh, at)
        own, needed = ranks.index(rank), len(ranks)
        spot: tuple[object, ...] = (ranks, member.group)
        if isinstance(member, Send | Receive):
            peer = (own + member.offset) % len(ranks)
            pair = (own, peer) if isinstance(member, Send) else (peer, own)
            spot, needed = (*spot, *pair), 2
        counter = (*spot, rank, isinstance(member, Send))
        count = self._counts[counter] = self._counts.get(counter, 0) + 1
        meeting = self._meetings.setdefault((*spot, count), [])
        meeting.append(node)
        self._needed[id(meeting)] = needed
        node.meetings.append(meeting)

    def _close(self) -> None:
        """Operations become ready one after the other; members of meetings are done together."""
        waits = [len(node.before) for node in self.nodes]
        behind: list[list[Node]] = [[] for _ in self.nodes]
        for node in self.nodes:
            for before in node.before:
                behind[before.number].append(node)
        ready = [node for node in self.nodes if not node.before]
        begun: set[int] = set()
        finished = 0
        while ready:
            node = ready.pop()
            for before in node.before:
                node.begun |= before.done
            begun.add(node.number)
            for one in self._finished(node, begun):
                finished += 1
                for after in behind[one.number]:
                    waits[after.number] -= 1
                    if not waits[after.number]:
                        ready.append(after)
        if finished < len(self.nodes):
            raise StuckError

    def _finished(self, node: Node, begun: set[int]) -> list[Node]:
        """What is done now that `node` has begun: itself, and everyone that it meets, or nobody."""
        party, seen = [node], {node.number}
        for one in party:
            for meeting in one.meetings:
                if len(meeting) < self._needed[id(meeting)]:
                    return []
                for other in meeting:
                    if other.number not in seen:
                        seen.add(other.number)
                        party.append(other)
        if any(one.number not in begun for one in party):
            return []
        done = 0
        for one in party:
            done |= one.begun | 1 << one.number
        for one in party:
            one.done = done
        return party

    def races(self) -> Iterator[Race]:
        """Pairs of accesses without an order, on one rank of each role: of each pair the last."""
        seen: set[str] = set()
        found: dict[tuple[str, str], tuple[Node, Node]] = {}
        for host in self.hosts:
            if host.program.role in seen:
                continue
            seen.add(host.program.role)
            for touches in host.touched.values():
                for one, other in _unordered(touches):
                    found[one.name[2], other.name[2]] = one, other
        for one, other in found.values():
            yield Race(one.name, other.name, self._names(one.begun), self._names(other.begun))

    def _names(self, bits: int) -> frozenset[Name]:
        return frozenset(node.name for node in self.nodes if bits >> node.number & 1)


def _unordered(touches: list[Touch]) -> Iterator[tuple[Node, Node]]:
    """Pairs of nodes that touch one place, one of them writing, in no order."""
    ranges: dict[tuple[int, int], tuple[int, int]] = {}
    nodes: dict[int, Node] = {}
    for touch in touches:
        node = touch.node
        against = 0
        for (low, high), (reads, writes) in ranges.items():
            if low < touch.high and touch.low < high:
                against |= writes | reads if touch.writes else writes
        against &= ~node.begun & ~(1 << node.number)
        while against:
            number = (against & -against).bit_length() - 1
            against &= against - 1
            before = nodes[number]
            behind = before.is_free and (
                before.tail is None or node.begun >> before.tail.number & 1
            )
            if not behind and not before.begun >> node.number & 1:
                yield before, node
        nodes[node.number] = node
        reads, writes = ranges.get((touch.low, touch.high), (0, 0))
        bit = 1 << node.number
        ranges[touch.low, touch.high] = (
            (reads, writes | bit) if touch.writes else (reads | bit, writes)
        )
