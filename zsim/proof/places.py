"""Places: each operation runs on a processor that has all its operands in its own memory.

Exact numbers do not depend on the place of a buffer. Segments and communication run on the device,
as NCCL requires. An update, a norm, a fill or another pass over elements runs on the device if its
stream is one of the device, and on the host's processors if it is a thread of the host. Copies
cross between device and host on streams of the device; sums do not cross. Files are read and
written on streams with no other operations, which represent I/O handles.
"""

from collections.abc import Iterator

from zsim.proof.context import Context
from zsim.proof.finding import Finding
from zsim.schedule.access import viewed
from zsim.schedule.operation import (
    OF_SEGMENTS,
    Compute,
    Copy,
    Fill,
    Read,
    StreamOperation,
    Write,
)
from zsim.schedule.schedule import Place, Program
from zsim.schedule.validate import HOST_ACTIONS

INVARIANT = "places"

TRANSFERS = (Read, Write)


def examine(context: Context) -> list[Finding]:
    """Find operations whose operands are not in the memory of their stream's processor."""
    schedule = context.schedule
    threads = frozenset(schedule.host_threads)
    place_of = {pool.name: pool.place for pool in schedule.pools}
    if set(place_of.values()) == {Place.DEVICE} and not threads:
        return []
    return [finding for each in schedule.programs for finding in _of(each, place_of, threads)]


def _of(program: Program, place_of: dict[str, Place], threads: frozenset[str]) -> Iterator[Finding]:
    everything = program.by_id.values()
    handles = {each.stream for each in everything if isinstance(each, TRANSFERS)}
    at = {buffer.name: place_of[buffer.pool] for buffer in program.buffers}
    for operation in everything:
        if isinstance(operation, HOST_ACTIONS):
            continue
        touched = viewed(operation)
        places = {at[view.buffer] for view in touched}
        on_host = operation.stream in threads
        why = _wrong(operation, places, on_host=on_host, on_handle=operation.stream in handles)
        if why:
            found: dict[Place, str] = {}
            for view in touched:
                found.setdefault(at[view.buffer], view.buffer)
            where = " and ".join(f"{name} in {place} memory" for place, name in found.items())
            yield Finding(
                invariant=INVARIANT,
                role=program.role,
                operation=operation.id,
                why=f"{why}, and touches {where}",
            )


def _wrong(
    operation: StreamOperation, places: set[Place], *, on_host: bool, on_handle: bool
) -> str:
    """Return the conflict between an operation, its stream and its places, or ""."""
    name = type(operation).__name__
    if isinstance(operation, TRANSFERS):
        return "is on a thread of the host, not on an I/O handle" if on_host else ""
    if on_handle:
        return f"is on stream {operation.stream} of an I/O handle, which reads and writes files"
    if Place.NVME in places:
        return f"is a {name}, and files are read by Read and written by Write"
    if on_host:
        if not isinstance(operation, Compute | Fill | Copy):
            return f"is a {name} on a thread of the host"
        if isinstance(operation, Compute) and operation.action in OF_SEGMENTS:
            return "runs on the device, and is on a thread of the host"
        return "runs on the host" if places - {Place.HOST} else ""
    if isinstance(operation, Copy):
        if operation.accumulate and len(places) > 1:
            return "adds up across places"
        if places == {Place.HOST}:
            return "moves within the host's memory on a stream of the device"
        return ""
    return "runs on the device" if places - {Place.DEVICE} else ""
