"""Traffic of a rank with its host's memory, and with its files on NVMe; work of the host alone."""

from collections.abc import Mapping
from fractions import Fraction

from zsim.schedule.access import viewed
from zsim.schedule.issue_order import taken
from zsim.schedule.operation import Compute, Copy, Fill, Read, Write
from zsim.schedule.schedule import FileBytes, HostBytes, Place, Program, Schedule


def leaves_device(copy: Copy, program: Program, places: Mapping[str, Place]) -> bool | None:
    """Return whether a Copy goes from device memory to the host's; None if it does neither way.

    `places` are by pool.
    """
    by_name = program.by_name
    source = places[by_name[copy.source.buffer].pool]
    target = places[by_name[copy.target.buffer].pool]
    if source is target or Place.NVME in (source, target):
        return None
    return source is Place.DEVICE


def on_host_threads(
    operation: Compute | Copy | Fill, program: Program, places: Mapping[str, Place]
) -> bool:
    """Return whether all that `operation` touches is host memory; `places` are by pool."""
    by_name, touched = program.by_name, viewed(operation)
    return bool(touched) and all(
        places[by_name[view.buffer].pool] is Place.HOST for view in touched
    )


def copied_bytes(copy: Copy, program: Program) -> int:
    """Bytes that a Copy moves at most: its elements in the format of the source."""
    source, target = program.by_name[copy.source.buffer], program.by_name[copy.target.buffer]
    elements = min(copy.source.size, copy.target.size, source.elements, target.elements)
    return elements * source.dtype.size_bytes


def largest_part(copy: Copy, program: Program, schedule: Schedule) -> tuple[int, Fraction]:
    """Return the bytes of the rank that copies most, and the mean of all ranks as a share of it.

    They differ where a tensor lies with few of the ranks along the axis that its layout is cut by.
    """
    size_bytes = copied_bytes(copy, program)
    view = copy.source if copy.source.layout is not None else copy.target
    layout = None if view.layout is None else schedule.layout_by_name[view.layout]
    if layout is None or layout.axis is None or layout.blocks is not None:
        return size_bytes, Fraction(1)
    count = schedule.mesh.axis_size(layout.axis)
    parts = layout.parts(view.start, view.size, count)
    if not parts:
        return 0, Fraction(1)
    itemsize = program.by_name[copy.source.buffer].dtype.size_bytes
    return max(parts) * itemsize, Fraction(sum(parts), max(parts) * count)


def _own_bytes(copy: Copy, program: Program, schedule: Schedule) -> int:
    """Bytes that a Copy moves on the first rank, whose part of uneven shards is the largest."""
    if copy.source.layout is None:
        return copied_bytes(copy, program)
    first = schedule.mesh.coordinates(0)
    _, size = schedule.extent(copy.source, first)
    return size * program.by_name[copy.source.buffer].dtype.size_bytes


def host_bytes(schedule: Schedule, program: Program) -> HostBytes:
    """Return what a rank copies each way in a step; of a branch, the side that updates.

    Where ranks have more or less of a tensor, it is the one that has most.
    """
    places = {pool.name: pool.place for pool in schedule.pools}
    moved = {True: 0, False: 0}
    if len(set(places.values())) > 1:
        for operation in taken(program.step, overflows=False):
            if isinstance(operation, Copy):
                outward = leaves_device(operation, program, places)
                if outward is not None:
                    moved[outward] += _own_bytes(operation, program, schedule)
    return HostBytes(to_host=moved[True], from_host=moved[False])


def file_bytes(program: Program) -> FileBytes:
    """Return what a rank reads and writes in a step; of a branch, the side that updates."""
    step = taken(program.step, overflows=False)
    moved = [each for each in step if isinstance(each, Read | Write)]
    return FileBytes(
        read=sum(copied_bytes(each, program) for each in moved if isinstance(each, Read)),
        written=sum(copied_bytes(each, program) for each in moved if isinstance(each, Write)),
    )
