"""A node from the XML file that NCCL writes to NCCL_TOPO_DUMP_FILE.

    <system>
      <cpu>
        <pci class="0x060400">                                      a PCIe switch
          <pci class="0x030200" device="0x2330" link_speed="32.0 GT/s PCIe" link_width="16">
            <gpu sm="90"><nvlink target="0000:d0:00.0" count="18" tclass="0x068000"/></gpu>
          </pci>
          <pci class="0x020000"><nic><net name="mlx5_0" speed="400000"/></nic></pci>

RCCL writes the same with <xgmi> for <nvlink>. The XML lacks the GPU's memory and rates: zsim uses
those of the packaged GPU with the same PCI device, or of a GPU named by the user. It also lacks
latencies: zsim uses the latencies of packaged nodes.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any
from xml.etree.ElementTree import Element

from zsim.bounded_text import bounded_xml
from zsim.cluster.files.nccl_gpus import (
    DIGITS_MAX,
    DumpedGpu,
    JoinedBy,
    Joints,
    dumped_gpus,
    joints_of,
    whole,
)
from zsim.cluster.files.table import TopologyError

PCIE_CODE = {2.5: 8 / 10, 5.0: 8 / 10, 8.0: 128 / 130, 16.0: 128 / 130, 32.0: 128 / 130}
"""Fraction of the bits that carry data, by GT/s. PCI-SIG, PCI Express base specification 5.0."""

PCIE_SHARE = 12 / 15.75
"""Fraction of a slot's bandwidth that GPUs reach to each other, for all PCIe generations.

NCCL's own model, src/graph/topo.h at 069a3d4, PCI_BW: 12 GB/s for PCIe 3 with 16 lanes.
"""

BETWEEN_CPUS = "NCCL's own model of links between CPUs, src/graph/topo.h at 069a3d4"
INTEL_GB_PER_S = ((0xCF, 40), (0x8F, 22), (0x55, 10), (0, 6))
"""Bandwidth from this model of family 6 on: Emerald and Sapphire Rapids, Skylake, Broadwell."""
NEWER_THAN_THEIR_NUMBER = (0xAD, 0xAE, 0xAF)
"""Granite Rapids and Sierra Forest, with the bandwidth of Emerald Rapids."""
AMD_GB_PER_S = {143: 16, 23: 16, 175: 24, 25: 24, 191: 32, 26: 32}
"""Bandwidth by family, in the number that NCCL writes or in decimal: Zen 1 and 2, 3 and 4, 5."""

NO_NIC_MBIT = 1000
NO_NIC = "no <net> in the dump; the slowest Ethernet that a server has stands for it"

UNKNOWN_DEVICE = "PCI device "
"""Prefix of the name of an unknown GPU."""

LATENCY_SOURCE = (
    "not in the XML; NCCL's own model, hwLat, Ring/Simple, src/graph/tuning.cc at 01afd20: a ring "
    "step takes 3.4 us over NVLink, 5.7 over PCIe (two of the switch's), 9.6 us over the network "
    "(two of each)"
)


def node_from_nccl(
    name: str, text: str, gpu_by_device: Callable[[str], str | None]
) -> dict[str, Any]:
    """Return the table of the node that the XML `text` of the file `name` describes.

    `gpu_by_device` returns the packaged GPU of a PCI device such as "0x2330".

    Raises:
        TopologyError: it is not such XML, or zsim cannot describe the node; one line.
    """
    try:
        root = bounded_xml(text)
    except ValueError as error:
        raise TopologyError(f"{name}: not XML: {error}") from None
    if root.tag != "system":
        raise TopologyError(f"{name}: <{root.tag}>: must be <system>, as NCCL writes it")
    try:
        return _node(name, root, gpu_by_device)
    except TopologyError as error:
        raise TopologyError(f"{name}: {error}") from None


def _node(name: str, root: Element, gpu_by_device: Callable[[str], str | None]) -> dict[str, Any]:
    cpus, hosts = _first_host(root)
    gpus = dumped_gpus(cpus)
    joints = joints_of(gpus)
    device = gpus[0].device or "(none)"
    speed_mbit, count, notes = _nics(cpus)
    if joints.left_out:
        notes.append(joints.left_out)
    node: dict[str, Any] = {"gpus": len(gpus), "nics": count, "source": "; ".join([name, *notes])}
    if joints.how is JoinedBy.MESH:
        node |= {"nvswitch": False, "nvswitch_source": name}
    elif joints.how is JoinedBy.PCIE:
        node |= {"pcie_only": True, "pcie_only_source": name}
    elif hosts > 1:
        node |= {"nodes_per_domain": hosts, "nodes_per_domain_source": name}
    table: dict[str, Any] = {
        "title": f"{name}: {len(gpus)} GPUs, {count} NICs",
        "gpu": gpu_by_device(device) or f"{UNKNOWN_DEVICE}{device} of {name}",
        "node": node,
        "nic": {
            "bandwidth_per_direction": f"{speed_mbit / 8000} GB/s",
            "quoted": f"{speed_mbit} Mb/s each way",
            "latency": "3.1 us",
            "source": name,
            "latency_source": LATENCY_SOURCE,
        },
        "switch": _switch(name, joints, gpus),
        "pcie": _pcie(name, gpus),
        "boards": _boards(name, joints, gpus, cpus),
    }
    return {key: value for key, value in table.items() if value is not None}


def _first_host(root: Element) -> tuple[list[Element], int]:
    """Return the CPUs of the first machine, and the number of machines with GPUs."""
    cpus = root.findall("./cpu")
    hosts = dict.fromkeys(
        cpu.get("host_hash", "") for cpu in cpus if cpu.find(".//gpu") is not None
    )
    if len(hosts) < 2:
        return cpus, 1
    alike = {
        sum(1 for cpu in cpus if cpu.get("host_hash", "") == host for _ in cpu.iter("gpu"))
        for host in hosts
    }
    if len(alike) > 1:
        told = " and ".join(map(str, sorted(alike)))
        raise TopologyError(f"machines must be alike: they have {told} GPUs")
    first = next(iter(hosts))
    return [cpu for cpu in cpus if cpu.get("host_hash", "") == first], len(hosts)


def _switch(name: str, joints: Joints, gpus: Sequence[DumpedGpu]) -> dict[str, Any] | None:
    """Return the links of a GPU to the others; None for a PCIe slot of unknown speed."""
    if joints.how is JoinedBy.PCIE:
        slot = _slot_gb_per_s(gpus[0])
        if slot is None:
            return None
        return {
            "bandwidth_per_direction": f"{slot * PCIE_SHARE:.4g} GB/s",
            "quoted": f"{gpus[0].speed}, {gpus[0].width} lanes",
            "latency": "2.85 us",
            "source": f"{name}; NCCL's own model, src/graph/topo.h at 069a3d4: 12 GB/s of PCIe 3",
            "latency_source": LATENCY_SOURCE,
        }
    return {
        "bandwidth_per_direction": f"{joints.links * joints.per_link:g} GB/s",
        "quoted": f"{joints.links} links of {joints.per_link:g} GB/s each way",
        "latency": "1.7 us",
        "source": f"{name}; datasheet of the GPU, for one link",
        "latency_source": LATENCY_SOURCE,
    }


def _nics(cpus: Sequence[Element]) -> tuple[int, int, list[str]]:
    """Return the speed of the fastest NICs in Mb/s, their number, and notes about others."""
    speeds = Counter(whole(net, "speed") for cpu in cpus for net in cpu.iter("net"))
    if not speeds:
        return NO_NIC_MBIT, 1, [NO_NIC]
    fastest = max(speeds)
    others = speeds.total() - speeds[fastest]
    return fastest, speeds[fastest], [f"{others} slower ones left out"] if others else []


def _slot_gb_per_s(gpu: DumpedGpu) -> float | None:
    """Return the GB/s of a GPU's slot in each direction; None if the XML lacks it."""
    rate, _, unit = gpu.speed.partition(" ")
    is_known = gpu.width.isdecimal() and 0 < len(gpu.width) <= DIGITS_MAX and int(gpu.width) > 0
    if not unit.startswith("GT/s") or not is_known:
        return None
    code = PCIE_CODE.get(float(rate)) if rate.replace(".", "", 1).isdecimal() else None
    return None if code is None else float(rate) * code * int(gpu.width) / 8


def _pcie(name: str, gpus: Sequence[DumpedGpu]) -> dict[str, Any] | None:
    """Return the PCIe table; None if the speed is unknown or switches differ in GPUs."""
    slot = _slot_gb_per_s(gpus[0])
    sharing = set(Counter(gpu.switch for gpu in gpus).values())
    if slot is None or len(sharing) > 1:
        return None
    return {
        "bandwidth_per_direction": f"{slot:.4g} GB/s",
        "quoted": f"{gpus[0].speed}, {gpus[0].width} lanes",
        "latency": "0 us",
        "gpus_per_switch": sharing.pop(),
        "source": name,
        "latency_source": "within that of the NIC, whose number is for the whole way",
    }


def _boards(
    name: str, joints: Joints, gpus: Sequence[DumpedGpu], cpus: Sequence[Element]
) -> dict[str, Any] | None:
    """Return the link between two CPUs with half of the GPUs each, if GPUs are joined by PCIe."""
    sides = Counter(gpu.cpu for gpu in gpus)
    if joints.how is not JoinedBy.PCIE or len(sides) != 2 or len(set(sides.values())) > 1:
        return None
    bandwidth = _between_cpus(cpus[gpus[0].cpu])
    if bandwidth is None:
        return None
    return {
        "bandwidth_per_direction": f"{bandwidth} GB/s",
        "quoted": "no figure in the XML",
        "latency": "0 us",
        "source": f"{name}; {BETWEEN_CPUS}",
        "latency_source": "within that of PCIe, whose number is for the whole way",
    }


def _between_cpus(cpu: Element) -> int | None:
    vendor, model, family = cpu.get("vendor"), cpu.get("modelid", ""), cpu.get("familyid", "")
    if vendor == "AuthenticAMD":
        known = {str(number): bandwidth for number, bandwidth in AMD_GB_PER_S.items()}
        return known.get(family)
    if vendor != "GenuineIntel" or not model.isdecimal() or len(model) > DIGITS_MAX:
        return None
    if int(model) in NEWER_THAN_THEIR_NUMBER:
        return INTEL_GB_PER_S[0][1]
    return next(found for first, found in INTEL_GB_PER_S if int(model) >= first)
