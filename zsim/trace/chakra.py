"""A trace as Chakra execution traces: one file per rank with the nodes of its last step.

A node is work on a stream: COMP, MEM for copies to and from the host or drives, COMM. Its
`data_deps` are all nodes that had to end first: dependencies of its operation, the previous node on
its stream, and nodes for which the host waited. Of these, `ctrl_deps` has the one on its stream.
Simulators of Chakra do not model a host, so an operation that was issued late follows a node on the
CPU.

Durations are whole microseconds, as in the schema: both ends of each are rounded, so that durations
add up. `comm_size` is the size of a rank's contribution, as ASTRA-sim 2 reads it (`Ring.cc`),
`pg_name` the number of a group in the list of `groups_json`, and `stream` the name of the stream.
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from zsim.schedule.operation import (
    Branch,
    Communication,
    Compute,
    Copy,
    Fill,
    Free,
    FreeMode,
    HostWait,
    PointToPoint,
    Previous,
    Send,
    StreamOperation,
    Together,
    View,
    walk,
)
from zsim.schedule.schedule import Place as Tier
from zsim.schedule.schedule import Program, Schedule
from zsim.trace.chakra_schema import (
    ChakraNode,
    CommKind,
    NodeKind,
    Value,
    metadata_bytes,
    node_bytes,
)
from zsim.trace.trace import Event, RankTrace, Trace

PICOSECONDS_PER_MICROSECOND = 10**6

COLLECTIVES = {
    "all_gather": CommKind.ALL_GATHER,
    "reduce_scatter": CommKind.REDUCE_SCATTER,
    "all_reduce": CommKind.ALL_REDUCE,
    "broadcast": CommKind.BROADCAST,
    "all_to_all": CommKind.ALL_TO_ALL,
}
"""Kinds of collectives, by zsim's names."""

HOST = "host of "
"""Prefix of the stream name for host time of a stream."""

MOST_NODES = 10_000_000
"""Maximum number of nodes of all ranks together: 1.3 GB."""


class TooManyNodesError(ValueError):
    """A trace has more nodes than can be written."""


@dataclass(frozen=True, slots=True)
class _Move:
    """Communication of a node; its group number and peer differ between ranks."""

    group: str
    operation: Communication | None = None
    tag: int = 0


@dataclass(slots=True)
class _Written:
    """Nodes of a role, and the communications of nodes, by node number."""

    nodes: list[ChakraNode] = field(default_factory=list[ChakraNode])
    moves: dict[int, _Move] = field(default_factory=dict[int, _Move])


@dataclass(frozen=True, slots=True)
class _Membership:
    """Membership of a rank in a communicator: its number, and the rank's index in it."""

    number: int
    index: int
    members: tuple[int, ...]


class ChakraTrace:
    """The Chakra files of a trace."""

    def __init__(self, schedule: Schedule, trace: Trace) -> None:
        self._schedule = schedule
        self._roles: dict[str, _Written] = {}
        largest: dict[str, RankTrace] = {}
        for rank in trace.ranks:  # other ranks of a role copy the one that represents most ranks
            role = schedule.role_of(rank.rank).name
            if role not in largest or rank.stands_for > largest[role].stands_for:
                largest[role] = rank
        self._likeness = {role: rank.rank for role, rank in largest.items()}
        own = {rank.rank: rank for rank in trace.ranks}
        self._own = {
            number: _written(schedule, trace, rank)
            for number, rank in own.items()
            if number in self._likeness.values() or rank.stands_for == 1
        }
        self._bytes: dict[tuple[int, int, int], bytes] = {}
        self._numbers = {
            members: number for number, members in enumerate(_communicators(schedule), 1)
        }
        counts = {role.name: role.size(schedule.mesh) for role in schedule.roles}
        total = sum(
            counts[role] * len(self._own[rank].nodes) for role, rank in self._likeness.items()
        )
        if total > MOST_NODES:
            raise TooManyNodesError(f"{total:,} nodes of all ranks must be at most {MOST_NODES:,}")

    @property
    def ranks(self) -> range:
        """Ranks; each of them has a file."""
        return range(self._schedule.mesh.size)

    def groups_json(self) -> str:
        """Return the ranks of each group by its number, as ASTRA-sim reads them."""
        numbers = {str(number): list(members) for members, number in self._numbers.items()}
        return json.dumps(numbers) + "\n"

    def rank_nodes(self, rank: int) -> Iterator[ChakraNode]:
        """Yield the nodes of a rank."""
        _, written = self._source(rank)
        places = self._places(rank)
        for node in written.nodes:
            move = written.moves.get(node.number)
            yield node if move is None else _placed(node, move, rank, places[move.group])

    def rank_bytes(self, rank: int) -> bytes:
        """Return the file of a rank."""
        source, written = self._source(rank)
        places = self._places(rank)
        parts = [metadata_bytes()]
        for node in written.nodes:
            move = written.moves.get(node.number)
            # Ranks of a role differ only in their groups and peers.
            place = None if move is None else places[move.group]
            peer = 0 if move is None or place is None else _peer(move, place)
            key = (source, node.number, 0 if place is None else place.number)
            found = None if peer else self._bytes.get(key)
            if found is None:
                made = node if move is None or place is None else _placed(node, move, rank, place)
                found = self._bytes[key] = node_bytes(made)
            parts.append(found)
        return b"".join(parts)

    def _source(self, rank: int) -> tuple[int, _Written]:
        """Return the rank whose nodes are used: the rank itself, or one that represents it."""
        if rank not in self._own:
            rank = self._likeness[self._schedule.role_of(rank).name]
        return rank, self._own[rank]

    def _places(self, rank: int) -> dict[str, _Membership]:
        """Return the membership of `rank` in each of its groups."""
        mesh = self._schedule.mesh
        coordinates = mesh.coordinates(rank)
        found: dict[str, _Membership] = {}
        for group in self._schedule.groups:
            if group.holds(mesh, coordinates):
                members = group.members(mesh, coordinates)
                index = group.index(mesh, coordinates)
                found[group.name] = _Membership(self._numbers[members], index, members)
        return found


def _peer(move: _Move, place: _Membership) -> int:
    """Return the rank that a node sends to or receives from, plus 1; 0 for a collective."""
    operation = move.operation
    if not isinstance(operation, PointToPoint):
        return 0
    return 1 + place.members[(place.index + operation.offset) % len(place.members)]


def _placed(node: ChakraNode, move: _Move, rank: int, place: _Membership) -> ChakraNode:
    """Return a node of `rank`, with its group and peer."""
    found: dict[str, Value] = {"pg_name": str(place.number)}
    if peer := _peer(move, place):
        ends = (rank, peer - 1) if isinstance(move.operation, Send) else (peer - 1, rank)
        found |= {"comm_src": ends[0], "comm_dst": ends[1], "comm_tag": move.tag}
    return replace(node, attributes={**node.attributes, **found})


def _communicators(schedule: Schedule) -> list[tuple[int, ...]]:
    """Return the ranks of every communicator once, in the order of groups and ranks."""
    mesh = schedule.mesh
    found: dict[tuple[int, ...], None] = {}
    for group in schedule.groups:
        seen: set[int] = set()
        for rank in range(mesh.size):
            coordinates = mesh.coordinates(rank)
            if rank in seen or not group.holds(mesh, coordinates):
                continue
            members = group.members(mesh, coordinates)
            seen.update(members)
            found[members] = None
    return list(found)


def _written(schedule: Schedule, trace: Trace, rank: RankTrace) -> _Written:
    """Return the nodes of the last step of `rank`."""
    last = trace.steps - 1
    begin_ps = trace.step_end_ps[last - 1] if last else 0
    events = {each.operation: each for each in rank.events if each.step == last}
    program = schedule.program_of(rank.rank)
    return _StepNodes(schedule, program, events, begin_ps).write()


class _StepNodes:
    """Writes the nodes of one step of one rank, in the order in which its host issued them."""

    def __init__(
        self, schedule: Schedule, program: Program, events: Mapping[str, Event], begin_ps: int
    ) -> None:
        self._program = program
        self._events = events
        self._begin_ps = begin_ps
        self._tiers = {pool.name: pool.place for pool in schedule.pools}
        self._streams = schedule.streams
        self._found = _Written()
        self._of: dict[str, tuple[int, ...]] = {}
        self._last: dict[str, str] = {}
        self._last_of_group: dict[str, str] = {}
        self._waited: defaultdict[str, dict[str, None]] = defaultdict(dict)
        self._tags: defaultdict[tuple[str, int, str], int] = defaultdict(int)

    def write(self) -> _Written:
        """Return the nodes."""
        for operation in walk(self._program.step):
            match operation:
                case HostWait(operation=edge):
                    self._wait(self._streams, (edge,))
                case Branch(after=after):
                    self._wait(self._streams, after)
                case Free(mode=FreeMode.HOST, uses=uses):
                    self._wait(self._streams, uses)
                case Free(mode=FreeMode.WAITED, uses=uses):
                    home = self._program.by_name[operation.buffer].home
                    self._wait((home,), uses)
                case _ if operation.id in self._events:
                    assert isinstance(operation, StreamOperation)
                    self._write(operation, self._events[operation.id])
                case _:
                    pass  # an action of the host, or in the branch that was not taken
        return self._found

    def _wait(self, streams: Iterable[str], edges: Iterable[str | Previous]) -> None:
        """Let the next operation on `streams` wait for `edges` of this step."""
        names = [edge for edge in edges if isinstance(edge, str) and edge in self._of]
        for stream in streams:
            self._waited[stream].update(dict.fromkeys(names))

    def _write(self, operation: StreamOperation, event: Event) -> None:
        stream = event.stream
        before = self._last.get(stream)
        names = dict.fromkeys([before] if before else [])
        names |= {each: None for each in operation.after if isinstance(each, str)}
        names |= self._waited.pop(stream, {})
        if isinstance(operation, Communication | Together):
            other = self._last_of_group.get(operation.group)
            names |= {other: None} if other else {}
            self._last_of_group[operation.group] = operation.id
        names = {each: None for each in names if each in self._of}
        start, end = (self._us(time) for time in (event.start_ps, event.end_ps))
        ready = max((self._us(self._events[each].end_ps) for each in names), default=0)
        deps = tuple(sorted({number for each in names for number in self._of[each]}))
        if start > ready:
            late: dict[str, Value] = {"is_cpu_op": True, "stream": f"{HOST}{stream}"}
            number = self._add("host", NodeKind.COMP, late, deps=deps, duration_us=start - ready)
            deps = (number,)
        order = tuple(each for each in (self._of[before] if before else ()) if each in deps)
        numbers: list[int] = []
        for kind, attributes, move in self._what(operation, stream):
            number = self._add(
                operation.id, kind, attributes, deps=deps, order=order, duration_us=end - start
            )
            numbers.append(number)
            if move is not None:
                self._found.moves[number] = move
        self._of[operation.id] = tuple(numbers)
        self._last[stream] = operation.id

    def _us(self, time_ps: int) -> int:
        """Return microseconds since the start of the step."""
        since_ps = max(0, time_ps - self._begin_ps)
        return (since_ps + PICOSECONDS_PER_MICROSECOND // 2) // PICOSECONDS_PER_MICROSECOND

    def _add(
        self,
        name: str,
        kind: NodeKind,
        attributes: Mapping[str, Value],
        *,
        deps: tuple[int, ...],
        order: tuple[int, ...] = (),
        duration_us: int,
    ) -> int:
        number = len(self._found.nodes)
        self._found.nodes.append(
            ChakraNode(
                number=number,
                name=name,
                kind=kind,
                data_deps=deps,
                ctrl_deps=order,
                duration_us=duration_us,
                attributes=attributes,
            )
        )
        return number

    def _what(
        self, operation: StreamOperation, stream: str
    ) -> Iterator[tuple[NodeKind, dict[str, Value], _Move | None]]:
        """Yield kind, attributes and communication of each node of an operation."""
        base: dict[str, Value] = {"is_cpu_op": False, "stream": stream}
        match operation:
            case Communication() | Together():
                for members in _collected(operation):
                    yield self._communicated(members, base)
            case Compute(kernels=kernels):
                flops, moved = (
                    sum(getattr(k, name) for k in kernels) for name in ("flops", "bytes")
                )
                yield NodeKind.COMP, {**base, "num_ops": flops, "tensor_size": moved}, None
            case Copy():
                places = [self._place(view) for view in (operation.source, operation.target)]
                kind = NodeKind.COMP
                if places[0] != places[1]:
                    leaves = places[0] is Tier.DEVICE or places[1] is Tier.NVME
                    kind = NodeKind.MEM_STORE if leaves else NodeKind.MEM_LOAD
                yield kind, {**base, "tensor_size": self._size_bytes(operation.target)}, None
            case Fill():
                size = self._size_bytes(operation.target)
                yield NodeKind.COMP, {**base, "tensor_size": size}, None

    def _communicated(
        self, members: list[Communication], base: dict[str, Value]
    ) -> tuple[NodeKind, dict[str, Value], _Move]:
        first = members[0]
        size = sum(each.brought.size * each.wire.size_bytes for each in members)
        if isinstance(first, PointToPoint):
            sends = isinstance(first, Send)
            key = (first.group, first.offset, first.name)
            tag, self._tags[key] = self._tags[key], self._tags[key] + 1
            kind = NodeKind.COMM_SEND if sends else NodeKind.COMM_RECV
            return kind, {**base, "comm_size": size}, _Move(first.group, first, tag)
        comm = {"comm_type": int(COLLECTIVES[first.name]), "comm_size": size}
        return NodeKind.COMM_COLL, {**base, **comm}, _Move(first.group)

    def _place(self, view: View) -> Tier:
        return self._tiers[self._program.by_name[view.buffer].pool]

    def _size_bytes(self, view: View) -> int:
        return view.size * self._program.by_name[view.buffer].dtype.size_bytes


def _collected(operation: Communication | Together) -> Iterator[list[Communication]]:
    """Yield the communications of each node: collectives of one kind together, others alone."""
    if not isinstance(operation, Together):
        yield [operation]
        return
    together: defaultdict[str, list[Communication]] = defaultdict(list)
    for member in operation.members:
        if isinstance(member, PointToPoint):
            yield [member]
        else:
            together[member.name].append(member)
    yield from together.values()
