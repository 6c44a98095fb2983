"""Convert Chakra execution traces to a schedule of one step, without values.

A node starts when all its `data_deps` have ended. `ctrl_deps` are ignored, as in Chakra's own
feeder (`src/feeder/et_feeder.cpp`). Nodes with the same `stream` attribute run in order. Nodes
without it run on one stream for compute, one for communication and one for the CPU, as in ASTRA-sim
(`HardwareResource.cc`). A compute node takes its recorded duration. In a trace without durations,
the GPU's roofline gives its time from `num_ops` and `tensor_size`. Collectives are simulated.

A Chakra trace does not record memory, so buffers are as large as the largest message of a stream.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from zsim.backend.document import Document, DocumentError
from zsim.backend.rank_grid import WORLD, RankGrid, RankGridError
from zsim.dtype import DType
from zsim.model.kernel import Kernel, KernelKind
from zsim.model.model import Model, Segment, Unit, Value
from zsim.schedule.builder import RoleBuilder, ScheduleBuilder
from zsim.schedule.mesh import Axis, Box, Span
from zsim.schedule.operation import Action, View
from zsim.trace.chakra_schema import ChakraNode, CommKind, NodeKind

PICOSECONDS_PER_MICROSECOND = 10**6
ELEMENT = DType.BF16
"""Element type assumed for messages; a trace has only their size in bytes."""

REFUSED = {
    CommKind.REDUCE: "REDUCE",
    CommKind.GATHER: "GATHER",
    CommKind.SCATTER: "SCATTER",
    CommKind.ALL_TO_ALL: "ALL_TO_ALL",
}
"""Collectives that schedules do not support."""

COMMUNICATES = (NodeKind.COMM_COLL, NodeKind.COMM_SEND, NodeKind.COMM_RECV)


@dataclass(frozen=True, slots=True)
class _Step:
    """A node as an operation: a kernel or a message, and the operations it waits for.

    `after` are indices into the operations of the rank.
    """

    name: str
    stream: str
    after: tuple[int, ...]
    kernel: Kernel | None = None
    collective: CommKind | None = None
    group: str = ""
    elements: int = 0
    offset: int | None = None
    sends: bool = False


Signature = tuple[_Step, ...]
"""Operations of a rank. Ranks with equal signatures share a role."""


def document_of(
    name: str, ranks: Sequence[Sequence[ChakraNode]], groups: Mapping[str, Sequence[int]]
) -> Document:
    """Return a schedule in which rank n runs the nodes `ranks[n]`.

    `groups` maps each `pg_name` to its ranks; a node without `pg_name` communicates with all ranks.
    Ranks may share one list object of nodes, which is then read once.

    Raises:
        DocumentError: nodes contradict each other or communicate in an unsupported pattern, or
            the groups are not lines of a grid of ranks.
    """
    try:
        grid = RankGrid(len(ranks), groups)
    except RankGridError as error:
        raise DocumentError(str(error)) from None
    known: dict[Signature, int] = {}
    kinds: list[int] = []
    programs: list[Signature] = []
    read: dict[int, Signature] = {}
    for rank, nodes in enumerate(ranks):
        signature = read.get(id(nodes))
        if signature is None:
            signature = _Rank(rank, grid).steps(nodes)
            if all(step.offset is None for step in signature):  # else it depends on the rank
                read[id(nodes)] = signature
        else:
            talking = [node for node in nodes if node.kind in COMMUNICATES]
            for node in {str(node.attributes.get("pg_name")): node for node in talking}.values():
                _group(grid, rank, node)
        if signature not in known:
            known[signature] = len(programs)
            programs.append(signature)
        kinds.append(known[signature])
    build = ScheduleBuilder(name, grid.mesh)
    build.group(WORLD, *(axis.name for axis in grid.mesh.axes))
    for group, axes in grid.lines.items():
        build.group(group, *axes)
    streams = dict.fromkeys(step.stream for signature in programs for step in signature)
    for stream in streams.keys() - set(build.streams):
        build.stream(stream)
    if len(programs) == 1:
        _write(build, programs[0], grid)
    else:
        for number, (box, kind) in enumerate(_boxes(grid.mesh.axes, kinds)):
            _write(build.role(f"role{number}", *box), programs[kind], grid)
    return Document(schedule=build.schedule(with_host_time=True), model=_model(name))


def _group(grid: RankGrid, rank: int, node: ChakraNode) -> tuple[str, tuple[int, ...]]:
    """Return the group that a node of `rank` communicates in, and its ranks."""
    try:
        return grid.group(rank, node.attributes.get("pg_name", ""))
    except RankGridError as error:
        raise _wrong(rank, node, str(error)) from None


class _Rank:
    """Reads the nodes of one rank."""

    def __init__(self, rank: int, grid: RankGrid) -> None:
        self._rank = rank
        self._grid = grid
        self._is_recorded = False

    def steps(self, nodes: Sequence[ChakraNode]) -> Signature:
        """Return the operations of the rank in an order in which a host can issue them."""
        self._is_recorded = any(node.duration_us for node in nodes if node.kind not in COMMUNICATES)
        found: list[_Step] = []
        ends: dict[int, frozenset[int]] = {}
        for node in self._ordered(nodes):
            waits = frozenset[int]().union(*(ends[each] for each in node.data_deps))
            step = self._step(node, tuple(sorted(waits)))
            if step is None:  # takes no time: replace it by its dependencies
                ends[node.number] = waits
            else:
                ends[node.number] = frozenset({len(found)})
                found.append(step)
        return tuple(found)

    def _ordered(self, nodes: Sequence[ChakraNode]) -> Iterable[ChakraNode]:
        """Return the nodes in topological order; among ready nodes the lowest id comes first."""
        by_number = {node.number: node for node in nodes}
        if len(by_number) < len(nodes):
            raise DocumentError(f"rank {self._rank}: two nodes have one id")
        waiting = {node.number: len(set(node.data_deps)) for node in nodes}
        behind: dict[int, list[int]] = {}
        for node in nodes:
            for each in set(node.data_deps):
                if each not in by_number:
                    raise _wrong(self._rank, node, f"data_deps: {each} is not the id of a node")
                behind.setdefault(each, []).append(node.number)
        ready = [number for number, count in waiting.items() if not count]
        heapify(ready)
        found: list[ChakraNode] = []
        while ready:
            number = heappop(ready)
            found.append(by_number[number])
            for each in behind.get(number, ()):
                waiting[each] -= 1
                if not waiting[each]:
                    heappush(ready, each)
        if len(found) < len(nodes):
            stuck = min(number for number, count in waiting.items() if count)
            raise _wrong(self._rank, by_number[stuck], "data_deps: wait for each other in a circle")
        return found

    def _step(self, node: ChakraNode, after: tuple[int, ...]) -> _Step | None:
        if node.kind in COMMUNICATES:
            return self._communication(node, after)
        is_cpu = node.attributes.get("is_cpu_op") is True
        kernel = self._kernel(node)
        if kernel is None:
            return None
        stream = _text(node, "stream") or ("cpu" if is_cpu else "compute")
        return _Step(node.name, stream, after, kernel=kernel)

    def _kernel(self, node: ChakraNode) -> Kernel | None:
        """Return the kernel of a node, or None if the node takes no time."""
        recorded_ps = node.duration_us * PICOSECONDS_PER_MICROSECOND
        flops, size = self._whole(node, "num_ops"), self._whole(node, "tensor_size")
        if node.kind in (NodeKind.METADATA, NodeKind.INVALID):
            return None
        if self._is_recorded or not (flops or size):
            if not recorded_ps:
                return None  # less than half a microsecond
        elif node.kind is not NodeKind.COMP:
            raise _wrong(self._rank, node, f"{node.kind.name} without a duration: not modelled")
        return Kernel(
            kind=KernelKind.MATMUL,
            flops=flops,
            bytes=size,
            dtype=ELEMENT,
            recorded_ps=recorded_ps,
        )

    def _communication(self, node: ChakraNode, after: tuple[int, ...]) -> _Step | None:
        group, members = _group(self._grid, self._rank, node)
        if len(members) == 1:
            return None
        stream = _text(node, "stream") or "communication"
        elements = -(-self._whole(node, "comm_size") // ELEMENT.size_bytes)
        if node.kind is not NodeKind.COMM_COLL:
            sends = node.kind is NodeKind.COMM_SEND
            peer = self._whole(node, "comm_dst" if sends else "comm_src")
            if peer not in members or peer == self._rank:
                raise _wrong(self._rank, node, f"its peer {peer} is not another rank of its group")
            offset = (members.index(peer) - members.index(self._rank)) % len(members)
            return _Step(
                node.name, stream, after, group=group, elements=max(1, elements),
                offset=offset, sends=sends,
            )  # fmt: skip
        number = self._whole(node, "comm_type")
        if number not in set(CommKind):
            raise _wrong(self._rank, node, f"comm_type: {number} is none of Chakra's")
        kind = CommKind(number)
        if kind in REFUSED:
            raise _wrong(self._rank, node, f"comm_type: {REFUSED[kind]} is not modelled")
        return _Step(node.name, stream, after, collective=kind, group=group, elements=elements)

    def _whole(self, node: ChakraNode, name: str) -> int:
        value = node.attributes.get(name, 0)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**60:
            raise _wrong(self._rank, node, f"{name}: must be a whole number of at least 0")
        return value


def _text(node: ChakraNode, name: str) -> str:
    value = node.attributes.get(name)
    return value if isinstance(value, str) else ""


def _wrong(rank: int, node: ChakraNode, why: str) -> DocumentError:
    return DocumentError(f"rank {rank}: node {node.number}: {why}")


def _boxes(axes: Sequence[Axis], kinds: Sequence[int]) -> list[tuple[Box, int]]:
    """Return boxes of ranks of one kind, each with its kind; `kinds` has the kind of each rank."""
    if len(set(kinds)) == 1:
        return [((), kinds[0])]
    axis, *inner = axes
    each = len(kinds) // axis.size
    parts = [tuple(kinds[place * each : (place + 1) * each]) for place in range(axis.size)]
    found: list[tuple[Box, int]] = []
    start = 0
    for place in range(1, axis.size + 1):
        if place < axis.size and parts[place] == parts[start]:
            continue
        span = Span(axis=axis.name, start=start, end=place)
        found += [((span, *box), kind) for box, kind in _boxes(inner, parts[start])]
        start = place
    return found


def _write(build: RoleBuilder, signature: Signature, grid: RankGrid) -> None:
    """Write the program of a role."""
    sizes: dict[str, int] = {}
    for step in signature:
        if step.kernel is None:
            whole = step.elements
            if step.collective is CommKind.ALL_GATHER:
                whole *= grid.size(step.group)
            elif step.collective is not None:
                whole = max(whole, grid.size(step.group))
            sizes[step.stream] = max(sizes.get(step.stream, 1), whole + grid.size(step.group))
    for stream, elements in sizes.items():
        for end in ("out", "in"):
            buffer = build.buffer(
                f"{stream}/{end}", elements, dtype=ELEMENT, home=stream, persistent=True
            )
            build.setup.allocate(buffer)
            build.setup.fill(f"{stream}/{end}", buffer.all, 0.0, stream=stream)
    names: list[str] = []
    for number, step in enumerate(signature):
        after = [names[each] for each in step.after]
        name = f"node{number}/{step.name}"
        if step.kernel is not None:
            made = build.step.compute(
                name, Action.FORWARD, (), stream=step.stream, after=after, kernels=(step.kernel,)
            )
        else:
            members = grid.size(step.group)
            made = _communicate(build, name, step, after=after, members=members)
        names.append(made)


def _communicate(
    build: RoleBuilder, name: str, step: _Step, *, after: Sequence[str], members: int
) -> str:
    """Add the collective, send or receive of `step` to `build`; return its operation id."""

    def out(size: int) -> View:
        return View(buffer=f"{step.stream}/out", size=size)

    def into(size: int) -> View:
        return View(buffer=f"{step.stream}/in", size=size)

    write, stream = build.step, step.stream
    if step.offset is not None:
        view = (out if step.sends else into)(step.elements)
        call = write.send if step.sends else write.receive
        return call(name, step.group, view, step.offset, stream=stream, after=after)
    match step.collective:
        case CommKind.ALL_GATHER:
            part = max(1, step.elements)
            source, target = out(part), into(part * members)
            return write.all_gather(name, step.group, source, target, stream=stream, after=after)
        case CommKind.REDUCE_SCATTER | CommKind.REDUCE_SCATTER_BLOCK:
            part = max(1, -(-step.elements // members))
            source, target = out(part * members), into(part)
            return write.reduce_scatter(
                name, step.group, source, target, stream=stream, after=after
            )
        case CommKind.BROADCAST:
            view = out(max(1, step.elements))
            return write.broadcast(name, step.group, view, view, root=0, stream=stream, after=after)
        case _:  # a sum, of one element in a barrier
            view = out(max(1, step.elements))
            return write.all_reduce(name, step.group, view, stream=stream, after=after)


def _model(name: str) -> Model:
    """Return a model of one unit without parameters, because a trace does not list parameters."""
    batch = Value(name="batch", elements=1, dtype=DType.INT64, requires_gradient=False)
    loss = Value(name="loss", elements=1, dtype=DType.FP32, requires_gradient=False)
    segment = Segment(inputs=("batch",), outputs=(loss,), saves_input=False)
    unit = Unit(name="trace", parameters=(), segments=(segment,))
    return Model(name=name, units=(unit,), batch=batch, tokens=0)
