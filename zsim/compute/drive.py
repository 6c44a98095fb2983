"""Time of a read or write of NVMe drives: by blocks in flight, and by the rate of the drives.

An operation is cut into blocks; each thread has a fixed number in flight. A file is striped over
all drives, so each stripe of a block is on another drive. The time of an operation is the longer of
two bounds: the rate of the drives, and the blocks in flight. Each block takes the latency and its
own transfer (the asymptotic bounds of a closed network: Denning and Buzen 1978, "The operational
analysis of queueing network models", ACM Computing Surveys 10.3).
"""

from fractions import Fraction

from msgspec import Struct

from zsim.cluster.cluster import ClusterError
from zsim.cluster.host_side import Drives
from zsim.units import PICOSECONDS_PER_SECOND

SECONDS_PER_DAY = 86_400


class DriveAccess(Struct, frozen=True, kw_only=True):
    """How a read or write is issued; the defaults are from DeepSpeed's `aio` table.

    Attributes:
        block_bytes, queue_depth: size of the blocks into which a thread cuts its part, and number
            of them in flight.
        threads: parts into which an operation is cut, each on a separate thread.
        drives: drives that its file is striped over; None is all.
        waves: a thread waits for all blocks in flight before it issues more (`overlap_events` off).
    """

    block_bytes: int = 2**20
    queue_depth: int = 8
    threads: int = 1
    drives: int | None = None
    waves: bool = False

    def __post_init__(self) -> None:
        for name in ("block_bytes", "queue_depth", "threads", "drives"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ClusterError(f"drive access: {name} {value} must be at least 1")


def drive_bytes_per_s(drives: Drives, access: DriveAccess, *, writes: bool) -> int:
    """Return bytes per second of one rank that has the drives to itself.

    Raises:
        ClusterError: the rate of the drives is not known, or `access` needs more drives.
    """
    count = drives.count if access.drives is None else access.drives
    if count > drives.count:
        raise ClusterError(
            f"drive access: drives {count} must be at most {drives.count}, those of a node"
        )
    rate = drives.rate(writes=writes)
    in_flight = access.threads * access.queue_depth
    on_drives = min(count, -(-access.block_bytes // drives.stripe_bytes))
    busy = min(count, in_flight * on_drives)
    transfer = Fraction(access.block_bytes, on_drives * rate)
    latency = Fraction(drives.latency_ps, PICOSECONDS_PER_SECOND)
    if access.waves:
        wave_bytes = in_flight * access.block_bytes
        return int(wave_bytes / (latency + Fraction(wave_bytes, busy * rate)))
    return int(min(Fraction(busy * rate), in_flight * access.block_bytes / (latency + transfer)))


def wear_per_day(written_bytes: int, step_s: float, drives: Drives) -> float | None:
    """Return the share of all drives' endurance that a day of steps uses; None if not rated.

    `written_bytes` are the bytes that a node writes in a step of `step_s` seconds.

    Raises:
        ClusterError: `step_s` is not positive.
    """
    if step_s <= 0:
        raise ClusterError(f"drive wear: step_s {step_s} must be more than 0")
    if drives.endurance_bytes is None:
        return None
    return written_bytes * SECONDS_PER_DAY / step_s / (drives.count * drives.endurance_bytes)
