"""Traffic of a rank with host memory and with its files on NVMe; operations that the host runs."""

from collections.abc import Mapping
from fractions import Fraction

from zsim.schedule.access import viewed
from zsim.schedule.issue_order import taken
from zsim.schedule.operation import Compute, Copy, Fill, Read, Write
from zsim.schedule.schedule import FileBytes, HostBytes, Place, Program, Schedule


def leaves_device(copy: Copy, program: Program, places: Mapping[str, Place]) -> bool | None:
    """Return True for a Copy from device to host memory, False for the reverse, None for others.

    `places` maps each pool to its place.
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
    """Return True if `operation` touches only host memory; `places` maps each pool to its place."""
    by_name, touched = program.by_name, viewed(operation)
    return bool(touched) and all(
        places[by_name[view.buffer].pool] is Place.HOST for view in touched
    )


def copied_bytes(copy: Copy, program: Program) -> int:
    """Return the maximum bytes that a Copy moves: its elements in the format of the source."""
    source, target = program.by_name[copy.source.buffer], program.by_name[copy.target.buffer]
    elements = min(copy.source.size, copy.target.size, source.elements, target.elements)
    return elements * source.dtype.size_bytes


def largest_part(copy: Copy, program: Program, schedule: Schedule) -> tuple[int, Fraction]:
    """Return the most bytes that any rank copies, and the mean over ranks as a share of it.

    They differ if only some of the ranks along the layout's axis hold the tensor.
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
    """Return the bytes that a Copy moves on the first rank, which has the largest uneven shard."""
    if copy.source.layout is None:
        return copied_bytes(copy, program)
    first = schedule.mesh.coordinates(0)
    _, size = schedule.extent(copy.source, first)
    return size * program.by_name[copy.source.buffer].dtype.size_bytes


def host_bytes(schedule: Schedule, program: Program) -> HostBytes:
    """Return the bytes that a rank copies to and from the host in a step.

    A branch counts with the list that updates. If shards differ, the count is of the largest.
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
    """Return the bytes that a rank reads and writes in a step; a branch counts with its update."""
    step = taken(program.step, overflows=False)
    moved = [each for each in step if isinstance(each, Read | Write)]
    return FileBytes(
        read=sum(copied_bytes(each, program) for each in moved if isinstance(each, Read)),
        written=sum(copied_bytes(each, program) for each in moved if isinstance(each, Write)),
    )
