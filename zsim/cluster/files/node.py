"""A node as its TOML file describes it: GPUs, NVSwitch, PCIe, NICs, host, CPUs, drives.

    title = "DGX-2: 16 V100 on NVSwitch"
    gpu = "v100_sxm3_32gb"              # a GPU that ships, or a table [gpu]

    [node]
    gpus = 16
    nics = 8
    source = "NVIDIA, DGX-2 datasheet"

    [nic]
    bandwidth_per_direction = "12.5 GB/s"
    quoted = "EDR, 100 Gb/s each way"
    ...

Every table says where its numbers come from in `source`; a number from elsewhere has its own, in
`KEY_source`. Bandwidths are per direction and say so; a vendor's two-way figure stands beside as
`quoted`. Reading the file is for the package that ships it.
"""

from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction
from typing import Annotated, Any

from pydantic import BeforeValidator

from zsim.cluster.cluster import Cluster, ClusterError, Gpu, Overheads, Rate
from zsim.cluster.files.host_tables import CpuTable, DrivesTable, HostTable, PcieTable
from zsim.cluster.files.table import (
    Bandwidth,
    Count,
    FileTable,
    FlopRate,
    LinkTable,
    Plain,
    Power,
    Size,
    Time,
    TopologyError,
    cites,
    read,
)
from zsim.cluster.profile.host_launch import LaunchCosts
from zsim.cluster.profile.measured import MeasuredTimes
from zsim.dtype import DType
from zsim.schedule.json import FieldError, decode_value
from zsim.units import parse_ratio


class _Rates(FileTable):
    """`[gpu.rates.FORMAT]`: the vendor's peak, and what kernels are predicted to reach."""

    peak: FlopRate
    matmul: FlopRate
    elementwise: FlopRate
    matmul_source: str
    elementwise_source: str
    multiple: Count = 1
    multiple_source: str | None = None


class _GpuTable(FileTable):
    """`[gpu]`. `pci_devices` are the device numbers under which machines report it.

    `power` is what the GPU draws at most; no time depends on it.
    """

    name: str
    memory: Size
    memory_bandwidth: Bandwidth
    memory_bandwidth_source: str | None = None
    power: Power | None = None
    power_source: str | None = None
    launch: Time = 0
    launch_source: str | None = None
    collective_share: Annotated[Fraction, BeforeValidator(parse_ratio)] = Fraction(0)
    collective_share_source: str | None = None
    visible_memory: Size | None = None
    visible_memory_source: str | None = None
    context: Size = 0
    context_source: str | None = None
    workspace: Size = 0
    workspace_source: str | None = None
    communicator: Size = 0
    communicator_source: str | None = None
    pci_devices: tuple[str, ...] = ()
    pci_devices_source: str | None = None
    rates: dict[DType, _Rates]

    def gpu(self) -> Gpu:
        """Return the GPU that the table describes."""
        return Gpu(
            name=self.name,
            memory_bytes=self.memory,
            memory_bytes_per_s=self.memory_bandwidth,
            rates=tuple(
                Rate(
                    dtype=dtype,
                    peak=rate.peak,
                    matmul=rate.matmul,
                    elementwise=rate.elementwise,
                    multiple=rate.multiple,
                )
                for dtype, rate in self.rates.items()
            ),
            launch=LaunchCosts(
                forward_ps=self.launch, backward_ps=self.launch, operation_ps=self.launch
            ),
            collective_share=self.collective_share,
            visible_bytes=self.visible_memory,
            overheads=Overheads(
                context_bytes=self.context,
                workspace_bytes=self.workspace,
                communicator_bytes=self.communicator,
            ),
        )


class _CountsTable(FileTable):
    """`[node]`."""

    gpus: Count
    nics: Count
    nodes_per_domain: Count = 1
    nodes_per_domain_source: str | None = None
    nvswitch: bool = True
    nvswitch_source: str | None = None


class NodeFile(Plain):
    """The whole file."""

    title: str
    node: _CountsTable
    gpu: _GpuTable
    switch: LinkTable
    nic: LinkTable
    pcie: PcieTable | None = None
    boards: LinkTable | None = None
    host: HostTable | None = None
    cpu: CpuTable | None = None
    drives: DrivesTable | None = None
    measured: dict[str, Any] | None = None


def measured_of(name: str, table: Mapping[str, object]) -> MeasuredTimes:
    """Return the times in `[measured]`, without its source.

    Raises:
        TopologyError: a key is unknown, missing or has a wrong value; one line.
    """
    try:
        times = {key: value for key, value in table.items() if key != "source"}
        found = decode_value(times, MeasuredTimes)
    except FieldError as error:
        raise TopologyError(f"{name}: measured: {error}") from None
    assert isinstance(found, MeasuredTimes)
    return found


def node_of(name: str, table: dict[str, Any]) -> Cluster:
    """One node of those that `table`, read from TOML, describes; its GPU stands inside.

    Raises:
        TopologyError: a key is unknown, missing or has a wrong value; one line.
    """
    file = read(NodeFile, name, table)
    if file.cpu is not None and file.host is None:
        raise TopologyError(f"{name}: cpu: needs [host], whose memory its kernels use")
    pcie, host, drives = file.pcie, file.host, file.drives
    times = None if file.measured is None else measured_of(name, file.measured)
    try:
        return Cluster(
            name=name,
            nodes=1,
            gpus_per_node=file.node.gpus,
            gpu=replace(file.gpu.gpu(), measured=times),
            switch_link=file.switch.link(),
            nics_per_node=file.node.nics,
            nic_link=file.nic.link(),
            cites=tuple(cites(table)),
            nodes_per_domain=file.node.nodes_per_domain,
            pcie_link=pcie.link() if pcie else None,
            gpus_per_pcie_switch=pcie.gpus_per_switch if pcie else 1,
            gpus_per_root_port=pcie.gpus_per_root_port if pcie else None,
            copies=pcie.copies() if pcie else None,
            host=host.host(file.cpu) if host else None,
            drives=drives.drives() if drives else None,
            board_link=file.boards.link() if file.boards else None,
            has_switch=file.node.nvswitch,
        )
    except ClusterError as error:
        raise TopologyError(f"{name}: {error}") from None
