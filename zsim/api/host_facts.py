"""The host side of a node as text and JSON: memory, processors, copies, drives."""

from collections.abc import Iterator

from zsim.cluster.cluster import Cluster
from zsim.cluster.host_side import Cpu, Drives, Host, HostKernel
from zsim.compute.host_rate import node_copy_bytes_per_s
from zsim.report.svg.note import rate
from zsim.units import format_bytes


def host_facts(cluster: Cluster) -> Iterator[tuple[str, str]]:
    """Yield names and texts of the facts about the host side."""
    host, copies, drives = cluster.host, cluster.copies, cluster.drives
    if host is not None:
        memory = f"{format_bytes(host.memory_bytes)} at {rate(host.memory_bytes_per_s)}"
        yield "host", memory if host.cpu is None else f"{memory}, {_cpu_text(host, host.cpu)}"
    if copies is not None:
        alone = f"{rate(copies.to_gpu_bytes_per_s)} to a GPU, {rate(copies.from_gpu_bytes_per_s)}"
        both = f"{rate(copies.both_ways_bytes_per_s)} at once"
        every = rate(int(node_copy_bytes_per_s(cluster, outward=False)))
        yield "copies", f"{alone} back, {both}; {every} to a node"
    yield "drives", "none known" if drives is None else _drives_text(drives)


def _cpu_text(host: Host, cpu: Cpu) -> str:
    adam, other = (
        rate(int(host.memory_bytes_per_s * cpu.share(kernel)))
        for kernel in (HostKernel.ADAM, HostKernel.UNSCALE)
    )
    cores = f"{cpu.sockets} x {cpu.cores_per_socket} cores"
    return f"{cores}, Adam at {adam}, casts at {other}"


def _drives_text(drives: Drives) -> str:
    count = f"{drives.count} of {format_bytes(drives.capacity_bytes)}"
    rates = {"read": drives.read_bytes_per_s, "written": drives.write_bytes_per_s}
    known = [f"{how} at {rate(value)}" for how, value in rates.items() if value is not None]
    return f"{count}, each {' and '.join(known)}" if known else f"{count}, of unknown rates"


def host_object(cluster: Cluster) -> dict[str, object]:
    """Return the host side as `zsim topology --json` prints it."""
    host, copies, drives = cluster.host, cluster.copies, cluster.drives
    cpu = None if host is None else host.cpu
    return {
        "host": None
        if host is None
        else {
            "memory_bytes": host.memory_bytes,
            "memory_bytes_per_s": host.memory_bytes_per_s,
            "pinned_bytes": host.pinned_bytes,
            "cpu": None
            if cpu is None
            else {
                "sockets": cpu.sockets,
                "cores_per_socket": cpu.cores_per_socket,
                "adam_share": float(cpu.adam_share),
                "elementwise_share": float(cpu.elementwise_share),
            },
        },
        "copies": None
        if copies is None
        else {
            "root_ports": cluster.root_ports,
            "to_gpu_bytes_per_s": copies.to_gpu_bytes_per_s,
            "from_gpu_bytes_per_s": copies.from_gpu_bytes_per_s,
            "both_ways_bytes_per_s": copies.both_ways_bytes_per_s,
            "to_all_gpus_bytes_per_s": float(node_copy_bytes_per_s(cluster, outward=False)),
            "latency_s": copies.latency_ps / 1e12,
        },
        "drives": None
        if drives is None
        else {
            "count": drives.count,
            "capacity_bytes": drives.capacity_bytes,
            "read_bytes_per_s": drives.read_bytes_per_s,
            "write_bytes_per_s": drives.write_bytes_per_s,
            "latency_s": drives.latency_ps / 1e12,
            "stripe_bytes": drives.stripe_bytes,
            "endurance_bytes": drives.endurance_bytes,
        },
    }
