"""Shared links of the host side of a node: for copies, kernels on host threads, and drives.

They are in addition to the PCIe links of `zsim.cluster.links`: measured copy rates of each root
port, the bandwidth of host memory, the cores of the CPUs, and the drives. A link shared by both
directions, or by several kinds of traffic, has one number for all of them.
"""

from collections.abc import Iterator
from enum import StrEnum
from fractions import Fraction

from zsim.cluster.cluster import Cluster, ClusterError, Link
from zsim.cluster.host_side import Drives, Host
from zsim.cluster.links import (
    FROM_HOST,
    FROM_HOST_TO_ROOT,
    FROM_PCIE,
    FROM_ROOT,
    FROM_ROOT_TO_HOST,
    TO_HOST,
    TO_PCIE,
    TO_ROOT,
    LinkClass,
)

COPIES_FROM_GPU, COPIES_TO_GPU = "copies from GPU", "copies to GPU"
COPIES_BOTH_WAYS = "copies both ways"
HOST_MEMORY = "host memory"
CPU_CORES = "CPU cores"
FROM_DRIVES, TO_DRIVES = "drives->host", "host->drives"
DRIVES_BUSY = "drives"
IO_REQUESTS = "I/O requests"


class HostWork(StrEnum):
    """Work of offloading on the host side of a node."""

    KERNELS = "kernels on the host"
    COPIES = "copies to and from the host"
    FILES = "reads and writes of files"


class HostFlow(StrEnum):
    """Kinds of traffic on the host side of a node."""

    COPY_OUT = "to host"
    COPY_IN = "from host"
    KERNEL = "host kernel"
    READ = "drives to host"
    WRITE = "host to drives"
    READ_DIRECT = "drives to GPU"
    WRITE_DIRECT = "GPU to drives"

    @property
    def work(self) -> HostWork:
        """Kind of work of this traffic."""
        if self in (HostFlow.COPY_OUT, HostFlow.COPY_IN):
            return HostWork.COPIES
        return HostWork.KERNELS if self is HostFlow.KERNEL else HostWork.FILES

    @property
    def writes_drives(self) -> bool:
        """True if the traffic writes to drives."""
        return self in {HostFlow.WRITE, HostFlow.WRITE_DIRECT}


class Level(StrEnum):
    """Places that have links of their own."""

    RANK = "rank"
    PCIE_SWITCH = "PCIe switch"
    ROOT_PORT = "root port"
    NODE = "node"


Hop = tuple[str, Level]
"""Name of a link on a path, and the place that it belongs to."""


def host_links(cluster: Cluster) -> Iterator[LinkClass]:
    """Yield the classes of shared links of the host side, each with one hop."""
    nodes = cluster.nodes
    ports = nodes * cluster.root_ports
    if (copies := cluster.copies) is not None:
        yield _link("root port", COPIES_FROM_GPU, ports, copies.from_gpu_bytes_per_s)
        yield _link("root port", COPIES_TO_GPU, ports, copies.to_gpu_bytes_per_s)
        yield _link("root port", COPIES_BOTH_WAYS, ports, 2 * copies.both_ways_bytes_per_s)
    if (host := cluster.host) is not None:
        yield _link("CPUs", HOST_MEMORY, nodes, host.memory_bytes_per_s)
        if host.cpu is not None:
            yield _link("CPUs", CPU_CORES, nodes, host.memory_bytes_per_s, carries_bytes=False)
    drives = cluster.drives
    if drives is None or drives.read_bytes_per_s is None:
        return
    yield _link("drives", FROM_DRIVES, nodes, drives.count * drives.read_bytes_per_s)
    if drives.write_bytes_per_s is not None:
        yield _link("drives", TO_DRIVES, nodes, drives.count * drives.write_bytes_per_s)
    for name, count in ((DRIVES_BUSY, nodes), (IO_REQUESTS, cluster.ranks)):
        speed = drives.count * drives.read_bytes_per_s
        yield _link("drives", name, count, speed, carries_bytes=False)


def _link(
    source: str, name: str, count: int, bytes_per_s: int, *, carries_bytes: bool = True
) -> LinkClass:
    return LinkClass(
        source=source,
        target=name,
        count=count,
        link=Link(bytes_per_s=bytes_per_s),
        bytes_per_s=Fraction(bytes_per_s),
        hops=((name,),),
        loads=count,
        carries_bytes=carries_bytes,
    )


def path(cluster: Cluster, flow: HostFlow) -> tuple[Hop, ...]:
    """Return the links on the path of `flow` of a rank; empty for copies without known PCIe.

    Raises:
        ClusterError: the node has no hardware for the flow.
    """
    match flow:
        case HostFlow.COPY_OUT | HostFlow.COPY_IN:
            return tuple(_copy(cluster, outward=flow is HostFlow.COPY_OUT))
        case HostFlow.KERNEL:
            need_cpu(cluster)
            return (HOST_MEMORY, Level.NODE), (CPU_CORES, Level.NODE)
        case HostFlow.READ | HostFlow.WRITE:
            memory = ((HOST_MEMORY, Level.NODE),) if cluster.host is not None else ()
            return *_drives(cluster, flow), *memory
        case HostFlow.READ_DIRECT | HostFlow.WRITE_DIRECT:
            if cluster.pcie_link is None:
                raise ClusterError(f"pcie: {cluster.name} describes none, {flow} needs it")
            name = TO_PCIE if flow.writes_drives else FROM_PCIE
            return *_drives(cluster, flow), (name, Level.RANK)


def _copy(cluster: Cluster, *, outward: bool) -> Iterator[Hop]:
    if cluster.pcie_link is None:
        return
    yield TO_PCIE if outward else FROM_PCIE, Level.RANK
    if cluster.gpus_per_root_port is None:
        yield TO_HOST if outward else FROM_HOST, Level.PCIE_SWITCH
    else:
        yield TO_ROOT if outward else FROM_ROOT, Level.PCIE_SWITCH
        yield FROM_ROOT_TO_HOST if outward else FROM_HOST_TO_ROOT, Level.ROOT_PORT
    if cluster.copies is not None:
        yield COPIES_FROM_GPU if outward else COPIES_TO_GPU, Level.ROOT_PORT
        yield COPIES_BOTH_WAYS, Level.ROOT_PORT
    if cluster.host is not None:
        yield HOST_MEMORY, Level.NODE


def _drives(cluster: Cluster, flow: HostFlow) -> tuple[Hop, ...]:
    drives = need_drives(cluster)
    drives.rate(writes=False)  # this rate is the unit of drive time
    drives.rate(writes=flow.writes_drives)
    way = TO_DRIVES if flow.writes_drives else FROM_DRIVES
    return (way, Level.NODE), (DRIVES_BUSY, Level.NODE), (IO_REQUESTS, Level.RANK)


def load_of(cluster: Cluster, flow: HostFlow, link: str) -> Fraction:
    """Return the bandwidth of `link` that a byte of `flow` uses, in bytes.

    A written byte keeps a drive busy longer than a read one, by the ratio of read to write
    bandwidth, and reads and writes do not overlap: in ZeRO-Infinity (arXiv 2104.07857), figure
    5c, steps that overlap both take the sum of their times.
    """
    if link == DRIVES_BUSY and flow.writes_drives:
        drives = need_drives(cluster)
        return Fraction(drives.rate(writes=False), drives.rate(writes=True))
    return Fraction(1)


def need_cpu(cluster: Cluster) -> Host:
    """Return the host of a node with known CPUs.

    Raises:
        ClusterError: the host or its CPUs are unknown.
    """
    host = cluster.host
    if host is None or host.cpu is None:
        lacks = "host" if host is None else "cpu"
        raise ClusterError(
            f"{lacks}: {cluster.name} describes none, kernels on host threads need it"
        )
    return host


def need_drives(cluster: Cluster) -> Drives:
    """Return the drives of a node.

    Raises:
        ClusterError: the node has no drives.
    """
    if cluster.drives is None:
        raise ClusterError(f"drives: {cluster.name} describes none, NVMe needs them")
    return cluster.drives
