"""A node as described by its TOML file: GPUs, NVSwitch, PCIe, NICs, host, CPUs, drives.

    title = "DGX-2: 16 V100 on NVSwitch"
    gpu = "v100_sxm3_32gb"              # a GPU that ships, a file, or a table [gpu]
    words = ["v100"]                    # names of its GPU for which --gpus takes this node
    comes_first = false                 # true: a form selects its GPU at first

    [node]
    gpus = 16
    nics = 8

    [switch]
    bandwidth_per_direction = "150 GB/s"

    [nic]
    bandwidth_per_direction = "12.5 GB/s"

    [pcie]
    bandwidth_per_direction = "15.75 GB/s"

Those five numbers are enough. Bandwidths are per direction, and their keys end so; `quoted` keeps
a vendor's bidirectional number. In packaged files every table has its source in `source`; a number
from elsewhere has its own in `KEY_source`. The package with the files reads them.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

from zsim.cluster.cluster import Cluster, ClusterError, Link
from zsim.cluster.files.gpu import RULE, GpuTable
from zsim.cluster.files.host_tables import CpuTable, DrivesTable, HostTable, PcieTable
from zsim.cluster.files.table import (
    Count,
    FileTable,
    LinkTable,
    Plain,
    Time,
    TopologyError,
    cites,
    read,
)
from zsim.cluster.profile.measured import MeasuredTimes
from zsim.schedule.json import FieldError, decode_value

NVLINK_LATENCY_PS: Final = 1_700_000
PCIE_LATENCY_PS: Final = 2_850_000
NIC_LATENCY_PS: Final = 3_100_000
LATENCY_RULE: Final = (
    f"{RULE}: NCCL's own model, hwLat, Ring/Simple, src/graph/tuning.cc at 01afd20: a ring step "
    "takes 3.4 us over NVLink or 5.7 over PCIe (two of the switch's), 9.6 us over the network (two "
    "of each)"
)


class _NicTable(LinkTable):
    """`[nic]`."""

    latency: Time = NIC_LATENCY_PS


class _CountsTable(FileTable):
    """`[node]`."""

    gpus: Count
    nics: Count
    nodes_per_domain: Count = 1
    nodes_per_domain_source: str | None = None
    nvswitch: bool = True
    nvswitch_source: str | None = None
    pcie_only: bool = False
    pcie_only_source: str | None = None


class NodeFile(Plain):
    """The whole file."""

    title: str = ""
    words: tuple[str, ...] = ()
    comes_first: bool = False
    node: _CountsTable
    gpu: GpuTable
    switch: LinkTable | None = None
    nic: _NicTable
    pcie: PcieTable | None = None
    boards: LinkTable | None = None
    host: HostTable | None = None
    cpu: CpuTable | None = None
    drives: DrivesTable | None = None
    measured: dict[str, Any] | None = None

    def switch_link(self) -> Link | None:
        """Return the sum of a GPU's links to the others: from the node, else from the GPU."""
        latency_ps = PCIE_LATENCY_PS if self.node.pcie_only else NVLINK_LATENCY_PS
        if self.switch is None:
            found = self.gpu.pcie if self.node.pcie_only else self.gpu.link
            return None if found is None else Link(bytes_per_s=found, latency_ps=latency_ps)
        if self._switch_latency_is_stated:
            return self.switch.link()
        return replace(self.switch.link(), latency_ps=latency_ps)

    @property
    def _switch_latency_is_stated(self) -> bool:
        return self.switch is not None and "latency" in self.switch.model_fields_set

    def pcie_link(self) -> Link | None:
        """Return a GPU's PCIe link; without a switch, bytes leave through the slot of the GPU."""
        if self.pcie is not None:
            return self.pcie.link()
        needs_slot = self.node.pcie_only or not self.node.nvswitch
        return Link(bytes_per_s=self.gpu.pcie) if needs_slot and self.gpu.pcie else None

    def rules(self) -> Iterator[tuple[str, str]]:
        """Yield key and rule of the numbers that follow from rules."""
        yield from self.gpu.rules(is_measured=self.measured is not None)
        if self.switch is None:
            yield "switch", f"{self.gpu.name}, its {'pcie' if self.node.pcie_only else 'link'}"
        if self.pcie is None and self.pcie_link() is not None:
            yield "pcie", f"{self.gpu.name}, its pcie"
        if not self._switch_latency_is_stated:
            yield "switch.latency", LATENCY_RULE
        if "latency" not in self.nic.model_fields_set:
            yield "nic.latency", LATENCY_RULE


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
    """Return one node as described by `table`, read from TOML, with its GPU as a table inside.

    Raises:
        TopologyError: a key is unknown, missing or has a wrong value; one line.
    """
    file = read(NodeFile, name, table)
    if file.cpu is not None and file.host is None:
        raise TopologyError(f"{name}: cpu: needs [host], whose memory its kernels use")
    times = None if file.measured is None else measured_of(name, file.measured)
    switch = file.switch_link()
    if switch is None:
        key, other = ("pcie", "slot") if file.node.pcie_only else ("link", "links to other GPUs")
        raise TopologyError(
            f"{name}: switch: missing; give [switch] with bandwidth_per_direction, or the GPU's "
            f"{key}, the bandwidth of its {other}"
        )
    try:
        return replace(_node(name, file, switch, times), cites=(*cites(table), *file.rules()))
    except ClusterError as error:
        raise TopologyError(f"{name}: {error}") from None


def _node(name: str, file: NodeFile, switch: Link, times: MeasuredTimes | None) -> Cluster:
    pcie, host, drives = file.pcie, file.host, file.drives
    return Cluster(
        name=name,
        nodes=1,
        gpus_per_node=file.node.gpus,
        gpu=replace(file.gpu.gpu(is_measured=times is not None), measured=times),
        switch_link=switch,
        nics_per_node=file.node.nics,
        nic_link=file.nic.link(),
        nodes_per_domain=file.node.nodes_per_domain,
        pcie_link=file.pcie_link(),
        gpus_per_pcie_switch=pcie.gpus_per_switch if pcie else 1,
        gpus_per_root_port=pcie.gpus_per_root_port if pcie else None,
        copies=pcie.copies() if pcie else None,
        host=host.host(file.cpu) if host else None,
        drives=drives.drives() if drives else None,
        board_link=file.boards.link() if file.boards else None,
        has_switch=file.node.nvswitch,
        over_pcie=file.node.pcie_only,
    )
