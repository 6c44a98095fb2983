"""Host order: if a device needs a result of the host, the host has waited for that result before.

A stream of a GPU can wait for another stream, and a thread of the host can wait for the event of a
stream. The reverse does not exist: a kernel or a copy that needs the result of a host thread or an
I/O handle may be issued only once the result exists. So each edge from an operation of the device
to one of a thread or a handle needs a `HostWait` (or a branch, or a free that the host waits for)
between the two. FSDP2 and Megatron-LM lacked such waits (pytorch #180666, Megatron-LM #7398).

Proved for every role, any number of steps and every path through the branches, by the host's
clocks when it issues (`zsim.schedule.happens_before`).

Cost: linear in the number of edges; nothing for schedules without threads and files.
"""

from collections.abc import Iterator, Sequence
from functools import partial

from zsim.proof.context import Context, NumberedProgram
from zsim.proof.finding import Finding
from zsim.schedule.happens_before import BranchPath, Clock, Timeline
from zsim.schedule.operation import Free, FreeMode, Read, Write
from zsim.schedule.program_index import HOST

INVARIANT = "host_order"
TRANSFERS = (Read, Write)


def examine(context: Context) -> list[Finding]:
    """Find operations of the device that depend on the host without a wait of the host."""
    found: dict[tuple[str, str], Finding] = {}
    threads = context.schedule.host_threads
    for each in context.programs:
        away = _away(each, threads)
        if not away or each.crowded:
            continue
        examine_part = partial(_examine_part, each, away)
        for finding in (*examine_part(each.setup_order), *each.proved(examine_part)):
            found.setdefault((finding.role, finding.operation), finding)
    return list(found.values())


def _examine_part(each: NumberedProgram, away: frozenset[int], order: Timeline) -> list[Finding]:
    """Find them in setup or in a step, on any path through its branches."""
    return [finding for path in order.paths for finding in _of(each, path, away, order.paths)]


def _away(each: NumberedProgram, threads: tuple[str, ...]) -> frozenset[int]:
    """Return the numbers of streams that are threads of the host or I/O handles."""
    names = set(threads)
    for operation in each.program.patterns:
        if isinstance(operation, TRANSFERS):
            names.add(operation.stream)
    return frozenset(number for number, name in enumerate(each.step.streams) if name in names)


def _of(
    each: NumberedProgram, path: BranchPath, away: frozenset[int], paths: Sequence[BranchPath]
) -> Iterator[Finding]:
    numbered = path.numbered
    operations, edges, previous = numbered.operations, numbered.edges, numbered.previous
    host: Clock | None = None
    for number in range(path.since, len(operations)):  # an earlier path has the same start
        known = path.known[number]
        if known is None:
            continue
        operation, stream = operations[number], numbered.stream[number]
        if stream == HOST:
            if not isinstance(operation, Free) or operation.mode is FreeMode.HOST:
                host = known
                continue
            if operation.mode is FreeMode.DEFERRED:
                continue
            stream = numbered.home[operation.buffer]
        if stream in away or not (edges[number] or number in previous):
            continue
        for awaited, position, name in _awaited(path, number, paths):
            if awaited in away and (host is None or host[awaited] < position):
                yield Finding(
                    invariant=INVARIANT,
                    role=each.program.role,
                    operation=operation.id,
                    why=f"waits on stream {numbered.streams[stream]} for {name} on "
                    f"{numbered.streams[awaited]}, and the host has not waited for it",
                    witness=(f"a HostWait for {name} is missing before it",),
                )


def _awaited(
    path: BranchPath, number: int, paths: Sequence[BranchPath]
) -> Iterator[tuple[int, int, str]]:
    """Yield stream, position and name of each operation for which an edge waits.

    Excluded are operations that do not run on this path, and previous instances that the host
    knows to have ended whenever a step ends.
    """
    numbered = path.numbered
    for edge in numbered.edges[number]:
        if path.known[edge] is None:
            continue
        name = numbered.operations[edge].id
        yield numbered.stream[edge], numbered.position[edge], name
    for name in numbered.previous.get(number, ()):
        latest = numbered.index.get(name)
        if latest is not None and not _is_known(latest, paths):
            stream = numbered.stream[latest]
            before = numbered.position[latest] - len(numbered.entries[stream])
            yield stream, before, f"the previous {name}"


def _is_known(number: int, paths: Sequence[BranchPath]) -> bool:
    """Return True if the host knows at the end of each step that an operation has finished."""
    return all(
        path.left.host[path.numbered.stream[number]] >= path.numbered.position[number]
        for path in paths
        if path.known[number] is not None
    )
