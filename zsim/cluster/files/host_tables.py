"""Tables of a node's file about its host side: PCIe, host memory, CPUs, drives.

[pcie]
bandwidth_per_direction = "15.75 GB/s"
gpus_per_switch = 2
gpus_per_root_port = 4          # if PCIe switches share a link to the CPUs
copy_to_gpu = "12 GB/s"         # measured rates of pinned copies over one such link:
copy_from_gpu = "13.1 GB/s"     # one direction alone,
copy_both_ways = "9.3 GB/s"     # and each direction while both are busy
copy_latency = "17 us"
copy_source = "..."

[cpu]
sockets = 2
cores_per_socket = 24
adam = 0.42                     # share of host memory bandwidth that kernels reach on all cores
elementwise = 0.28
source = "..."
adam_source = "..."
elementwise_source = "..."
"""

from fractions import Fraction
from typing import Annotated, Self

from pydantic import BeforeValidator, Field, model_validator

from zsim.cluster.files.table import Bandwidth, Count, FileTable, LinkTable, Size, Time
from zsim.cluster.host_side import CopyRates, Cpu, Drives, Host
from zsim.config_error import refusal, refuse
from zsim.units import parse_ratio

Share = Annotated[Fraction, BeforeValidator(parse_ratio), Field(le=1)]


class PcieTable(LinkTable):
    """`[pcie]`: from a GPU to the PCIe switch that it shares with its NIC, and on to the CPUs."""

    gpus_per_switch: Count = 1
    gpus_per_switch_source: str | None = None
    gpus_per_root_port: Count | None = None
    gpus_per_root_port_source: str | None = None
    copy_to_gpu: Bandwidth | None = None
    copy_from_gpu: Bandwidth | None = None
    copy_both_ways: Bandwidth | None = None
    copy_latency: Time = 0
    copy_source: str | None = None
    copy_latency_source: str | None = None

    @model_validator(mode="after")
    def _copies_are_whole(self) -> Self:
        names = ("copy_to_gpu", "copy_from_gpu", "copy_both_ways")
        missing = [name for name in names if getattr(self, name) is None]
        if len(missing) < len(names):
            refuse([refusal(name, None, "missing beside the other copies") for name in missing])
        return self

    def copies(self) -> CopyRates | None:
        """Return the measured rates of copies; None if the table has none."""
        to_gpu, from_gpu, both = self.copy_to_gpu, self.copy_from_gpu, self.copy_both_ways
        if to_gpu is None or from_gpu is None or both is None:
            return None
        return CopyRates(
            to_gpu_bytes_per_s=to_gpu,
            from_gpu_bytes_per_s=from_gpu,
            both_ways_bytes_per_s=both,
            latency_ps=self.copy_latency,
        )


class CpuTable(FileTable):
    """`[cpu]`: all CPUs of a node, and the bandwidth of kernels on their threads."""

    sockets: Count
    cores_per_socket: Count
    adam: Share
    elementwise: Share
    adam_source: str | None = None
    elementwise_source: str | None = None

    def cpu(self) -> Cpu:
        """Return the CPUs that the table describes."""
        return Cpu(
            sockets=self.sockets,
            cores_per_socket=self.cores_per_socket,
            adam_share=self.adam,
            elementwise_share=self.elementwise,
        )


class HostTable(FileTable):
    """`[host]`: all CPU memory of a node; `pinned` is the maximum that may be pinned."""

    memory: Size
    memory_bandwidth: Bandwidth
    memory_bandwidth_source: str | None = None
    pinned: Size | None = None
    pinned_source: str | None = None

    def host(self, cpu: CpuTable | None) -> Host:
        """Return the host that the table describes, with its CPUs."""
        return Host(
            memory_bytes=self.memory,
            memory_bytes_per_s=self.memory_bandwidth,
            pinned_bytes=self.pinned,
            cpu=None if cpu is None else cpu.cpu(),
        )


class DrivesTable(FileTable):
    """`[drives]`: equal NVMe drives of a node, with numbers of one drive; `count` 0 means none."""

    count: Annotated[int, Field(ge=0, le=65536, strict=True)]
    capacity: Size | None = None
    read_bandwidth: Bandwidth | None = None
    write_bandwidth: Bandwidth | None = None
    rates_source: str | None = None
    latency: Time = 0
    latency_source: str | None = None
    stripe: Size = 2**19
    stripe_source: str | None = None
    endurance: Size | None = None
    endurance_source: str | None = None

    @model_validator(mode="after")
    def _drives_hold_something(self) -> Self:
        if self.count and self.capacity is None:
            refuse([refusal("capacity", None, "missing beside a count of more than 0")])
        return self

    def drives(self) -> Drives | None:
        """Return the drives that the table describes; None if the node has none."""
        if self.count == 0 or self.capacity is None:
            return None
        return Drives(
            count=self.count,
            capacity_bytes=self.capacity,
            read_bytes_per_s=self.read_bandwidth,
            write_bytes_per_s=self.write_bandwidth,
            latency_ps=self.latency,
            stripe_bytes=self.stripe,
            endurance_bytes=self.endurance,
        )
