"""Rules of pools: how large a slot is, what may lie in a file, and what moves between places."""

from collections.abc import Mapping

from zsim.schedule.operation import Read, Write
from zsim.schedule.program import Buffer, Place, Pool, ScheduleError


def inspect_slots(pool: Pool) -> None:
    """Check that the capacity of a pool of slots is a number of them.

    Raises:
        ScheduleError: it is not, or a slot has no bytes.
    """
    if pool.slot_bytes is None:
        return
    if pool.slot_bytes < 1:
        raise ScheduleError(f"pool {pool.name}: slot_bytes {pool.slot_bytes} must be at least 1")
    if not pool.capacity_bytes or pool.capacity_bytes % pool.slot_bytes:
        raise ScheduleError(
            f"pool {pool.name}: capacity_bytes {pool.capacity_bytes} must be a number of slots of "
            f"{pool.slot_bytes} bytes"
        )


def inspect_place(where: str, buffer: Buffer, pool: Pool) -> None:
    """Check that a buffer can be in `pool`: it is one slot, and is not produced in a file.

    Raises:
        ScheduleError: it cannot.
    """
    if pool.slot_bytes not in (None, buffer.size_bytes):
        raise ScheduleError(
            f"{where}: {buffer.size_bytes} bytes, a slot of pool {pool.name} has {pool.slot_bytes}"
        )
    if buffer.produced and pool.place is Place.NVME:
        raise ScheduleError(f"{where}: autograd produces nothing in a file")


def inspect_file_transfer(
    transfer: Read | Write, by_name: Mapping[str, Buffer], pools: Mapping[str, Pool]
) -> None:
    """Check that a `Read` is from NVMe to memory, a `Write` the other way, both in one format.

    Raises:
        ScheduleError: it is not.
    """
    source, target = (by_name[each.buffer] for each in (transfer.source, transfer.target))
    if source.dtype is not target.dtype:
        raise ScheduleError(f"{transfer.id}: reads {source.dtype}, and writes {target.dtype}")
    places = [pools[each.pool].place for each in (source, target)]
    on_file = [place is Place.NVME for place in places]
    if on_file != [isinstance(transfer, Read), isinstance(transfer, Write)]:
        raise ScheduleError(
            f"{transfer.id}: a {type(transfer).__name__} from {places[0]} to {places[1]}; a Read "
            "is from nvme to device or host, a Write the other way"
        )
