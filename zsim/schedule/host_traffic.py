"""Traffic between the memory of a rank's device and that of its host."""

from collections.abc import Mapping

from zsim.schedule.issue_order import taken
from zsim.schedule.operation import Copy
from zsim.schedule.schedule import HostBytes, Place, Program, Schedule


def leaves_device(copy: Copy, program: Program, places: Mapping[str, Place]) -> bool | None:
    """Return whether a Copy goes from device memory to the host's; None if it stays.

    `places` are by pool.
    """
    source, target = (
        places[program.by_name[view.buffer].pool] for view in (copy.source, copy.target)
    )
    return None if source is target else source is Place.DEVICE


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
