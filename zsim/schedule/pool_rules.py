"""Rules of pools: sizes of slots, buffers allowed in files, and transfers between places."""

from collections.abc import Mapping

from zsim.schedule.operation import Read, Write
from zsim.schedule.program import Buffer, Place, Pool, ScheduleError


def inspect_slots(pool: Pool) -> None:
    """Raise ScheduleError unless a pool of slots has a whole number of non-empty slots.

    Raises:
        ScheduleError: it does not, or a slot has no bytes.
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
    """Raise ScheduleError unless `pool` can hold a buffer.

    Raises:
        ScheduleError: the buffer has not the size of a slot, or is produced in a file.
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
    """Raise ScheduleError unless a `Read` is from NVMe to memory and a `Write` the reverse.

    Raises:
        ScheduleError: it is not, or source and target differ in format.
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
