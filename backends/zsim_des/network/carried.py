"""Operations with traffic on the host side of a node: its path, and its upper rate."""

from collections.abc import Mapping
from fractions import Fraction

from msgspec import Struct

from zsim.cluster.host_links import HostFlow
from zsim.cluster.host_side import HostKernel
from zsim.compute.drive import DriveAccess
from zsim.compute.host_kernel import kernel_of
from zsim.compute.roofline import touched_bytes
from zsim.schedule.host_traffic import copied_bytes, largest_part, leaves_device, on_host_threads
from zsim.schedule.operation import Compute, Copy, Fill, Read, Write
from zsim.schedule.schedule import Place, Program, Schedule
from zsim.strategy.offload import FileAccess


class Carried(Struct, frozen=True):
    """Bytes of an operation on the host side of its node.

    A kernel on host threads is at most as fast as `kernel` on all cores, a read or write of drives
    as `access` allows. `size_bytes` is for the rank that moves most; `share` is the mean of all
    ranks as a fraction of it, and scales the load on links that ranks share.
    """

    flow: HostFlow
    size_bytes: int
    kernel: HostKernel | None = None
    access: DriveAccess | None = None
    share: Fraction = Fraction(1)


TRANSFERS = (Read, Write)
"""Operations that move bytes between memory and files."""

FILES: dict[tuple[type[Read | Write], bool], HostFlow] = {
    (Read, False): HostFlow.READ,
    (Write, False): HostFlow.WRITE,
    (Read, True): HostFlow.READ_DIRECT,
    (Write, True): HostFlow.WRITE_DIRECT,
}
"""Flows of reads and writes of files; straight to the GPU with GPUDirect Storage."""


def flow_of(
    operation: Compute | Copy | Fill, program: Program, places: Mapping[str, Place]
) -> HostFlow | None:
    """Return the host-side flow of `operation`; None if it stays on the device.

    `places` are by pool. An operation that only touches host memory runs on host threads.
    """
    if isinstance(operation, TRANSFERS):
        memory = operation.target if isinstance(operation, Read) else operation.source
        direct = places[program.by_name[memory.buffer].pool] is Place.DEVICE
        return FILES[type(operation), direct]
    if isinstance(operation, Copy):
        outward = leaves_device(operation, program, places)
        if outward is not None:
            return HostFlow.COPY_OUT if outward else HostFlow.COPY_IN
    return HostFlow.KERNEL if on_host_threads(operation, program, places) else None


def carried_by(
    operation: Compute | Copy | Fill,
    program: Program,
    schedule: Schedule,
    places: Mapping[str, Place],
    *,
    access: DriveAccess,
) -> Carried | None:
    """Return the host-side bytes of `operation`; None if it stays on the device.

    `places` are by pool of `schedule`, whose files are read and written by `access`.
    """
    flow = flow_of(operation, program, places)
    if flow is None:
        return None
    if flow is HostFlow.KERNEL:
        kernel = kernel_of(operation.action) if isinstance(operation, Compute) else HostKernel.CAST
        return Carried(flow, touched_bytes(operation, program), kernel=kernel)
    assert isinstance(operation, Copy)
    if isinstance(operation, TRANSFERS):
        return Carried(flow, copied_bytes(operation, program), access=access)
    size_bytes, share = largest_part(operation, program, schedule)
    return Carried(flow, size_bytes, share=share)


def access_of(schedule: Schedule) -> DriveAccess:
    """Return how a schedule issues its reads and writes to the drives."""
    strategy = schedule.contract.strategy
    said = FileAccess()
    if strategy is not None:
        said = (strategy.zero.emulate or strategy.offload).file_access
    return DriveAccess(
        block_bytes=said.block_bytes,
        queue_depth=said.queue_depth,
        threads=said.threads,
        waves=said.waves,
    )
