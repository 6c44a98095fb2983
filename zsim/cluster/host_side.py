"""The host side of a node: memory, processors, copies to and from GPUs, and local drives."""

from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction

from zsim.cluster.cluster_error import ClusterError


class HostKernel(StrEnum):
    """Kernels that run on host threads."""

    ADAM = "adam"
    UNSCALE = "unscale"
    CAST = "cast"
    NORM = "norm"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cpu:
    """The processors of a node, and the fraction of memory bandwidth that their kernels reach.

    Attributes:
        adam_share: Adam in one pass over all states (DeepSpeed's CPU Adam), with all cores.
        elementwise_share: one simple operation over a tensor (unscale, cast, norm), with all cores.
    """

    sockets: int
    cores_per_socket: int
    adam_share: Fraction
    elementwise_share: Fraction

    def __post_init__(self) -> None:
        for name in ("sockets", "cores_per_socket"):
            if getattr(self, name) < 1:
                raise ClusterError(f"cpu: {name} {getattr(self, name)} must be at least 1")
        for name in ("adam_share", "elementwise_share"):
            if not 0 < getattr(self, name) <= 1:
                share = getattr(self, name)
                raise ClusterError(f"cpu: {name} {share} must be more than 0 and at most 1")

    def share(self, kernel: HostKernel) -> Fraction:
        """Return the fraction of the host memory's bandwidth that `kernel` reaches on all cores."""
        return self.adam_share if kernel is HostKernel.ADAM else self.elementwise_share


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """The memory of a node's CPUs, its bandwidth, and the maximum of pinned memory.

    Without `pinned_bytes` all memory may be pinned; without `cpu` nothing runs on host threads.
    """

    memory_bytes: int
    memory_bytes_per_s: int
    pinned_bytes: int | None = None
    cpu: Cpu | None = None

    def __post_init__(self) -> None:
        for name in ("memory_bytes", "memory_bytes_per_s"):
            if getattr(self, name) < 1:
                raise ClusterError(f"host: {name} must be more than 0")
        pinned = self.pinned_bytes
        if pinned is not None and not 0 < pinned <= self.memory_bytes:
            raise ClusterError(
                f"host: pinned_bytes {pinned} must be more than 0 and at most memory_bytes "
                f"{self.memory_bytes}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyRates:
    """Measured copies between pinned host memory and GPUs behind one root port.

    Attributes:
        to_gpu_bytes_per_s, from_gpu_bytes_per_s: one direction while the other is idle.
        both_ways_bytes_per_s: each direction while both are busy.
        latency_ps: time of a copy in addition to its bytes.
    """

    to_gpu_bytes_per_s: int
    from_gpu_bytes_per_s: int
    both_ways_bytes_per_s: int
    latency_ps: int = 0

    def __post_init__(self) -> None:
        for name in ("to_gpu_bytes_per_s", "from_gpu_bytes_per_s", "both_ways_bytes_per_s"):
            if getattr(self, name) < 1:
                raise ClusterError(f"copies: {name} must be more than 0")
        if self.latency_ps < 0:
            raise ClusterError(f"copies: latency_ps {self.latency_ps} must be at least 0")
        alone = max(self.to_gpu_bytes_per_s, self.from_gpu_bytes_per_s)
        if self.both_ways_bytes_per_s > alone:
            raise ClusterError(
                f"copies: both_ways_bytes_per_s {self.both_ways_bytes_per_s} must be at most "
                f"{alone}, what one direction reaches alone"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Drives:
    """The equal local NVMe drives of a node; numbers are for one drive.

    Attributes:
        latency_ps: latency of one small read, from the request to the data.
        stripe_bytes: contiguous bytes on one drive, if files are striped over all (RAID 0).
        endurance_bytes: bytes that may be written to a drive in its life, as rated by the vendor.
    """

    count: int
    capacity_bytes: int
    read_bytes_per_s: int | None = None
    write_bytes_per_s: int | None = None
    latency_ps: int = 0
    stripe_bytes: int = 2**19
    endurance_bytes: int | None = None

    def __post_init__(self) -> None:
        for name in (
            "count",
            "capacity_bytes",
            "read_bytes_per_s",
            "write_bytes_per_s",
            "stripe_bytes",
            "endurance_bytes",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ClusterError(f"drives: {name} must be more than 0")
        if self.latency_ps < 0:
            raise ClusterError(f"drives: latency_ps {self.latency_ps} must be at least 0")

    @property
    def total_bytes(self) -> int:
        """Capacity of all drives together."""
        return self.count * self.capacity_bytes

    def rate(self, *, writes: bool) -> int:
        """Return bytes per second of one drive.

        Raises:
            ClusterError: the rate was not published.
        """
        found = self.write_bytes_per_s if writes else self.read_bytes_per_s
        if found is None:
            name = "write_bandwidth" if writes else "read_bandwidth"
            raise ClusterError(f"drives: {name}: not known of this node, needed to use NVMe")
        return found
