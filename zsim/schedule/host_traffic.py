"""Traffic of a rank with its host's memory, and with its files on NVMe; work of the host alone."""

from collections.abc import Mapping

from zsim.schedule.access import accesses
from zsim.schedule.issue_order import taken
from zsim.schedule.operation import Compute, Copy, Fill, Read, Write
from zsim.schedule.schedule import FileBytes, HostBytes, Place, Program, Schedule


def leaves_device(copy: Copy, program: Program, places: Mapping[str, Place]) -> bool | None:
    """Return whether a Copy goes from device memory to the host's; None if it does neither way.

    `places` are by pool.
    """
    source, target = (
        places[program.by_name[view.buffer].pool] for view in (copy.source, copy.target)
    )
    if {source, target} != {Place.DEVICE, Place.HOST}:
        return None
    return source is Place.DEVICE


def on_host_threads(
    operation: Compute | Copy | Fill, program: Program, places: Mapping[str, Place]
) -> bool:
    """Return whether all that `operation` touches is host memory; `places` are by pool."""
    pools = {program.by_name[each.view.buffer].pool for each in accesses(operation)}
    return {places[pool] for pool in pools} == {Place.HOST}


def copied_bytes(copy: Copy, program: Program) -> int:
    """Bytes that a Copy moves: its elements in the format of the source."""
    width = program.by_name[copy.source.buffer].dtype.size_bytes
    return min(copy.source.size, copy.target.size) * width


def host_bytes(schedule: Schedule, program: Program) -> HostBytes:
    """Return what a rank copies each way in a step; of a branch, the side that updates."""
    places = {pool.name: pool.place for pool in schedule.pools}
    moved = {True: 0, False: 0}
    if len(set(places.values())) > 1:
        for operation in taken(program.step, overflows=False):
            if isinstance(operation, Copy):
                outward = leaves_device(operation, program, places)
                if outward is not None:
                    moved[outward] += copied_bytes(operation, program)
    return HostBytes(to_host=moved[True], from_host=moved[False])


def file_bytes(program: Program) -> FileBytes:
    """Return what a rank reads and writes in a step; of a branch, the side that updates."""
    step = taken(program.step, overflows=False)
    moved = [each for each in step if isinstance(each, Read | Write)]
    return FileBytes(
        read=sum(copied_bytes(each, program) for each in moved if isinstance(each, Read)),
        written=sum(copied_bytes(each, program) for each in moved if isinstance(each, Write)),
    )
