"""A node from what NCCL found in it: the XML that NCCL writes to NCCL_TOPO_DUMP_FILE.

    <system>
      <cpu>
        <pci class="0x060400">                                      a PCIe switch
          <pci class="0x030200" device="0x2330" link_speed="32.0 GT/s PCIe" link_width="16">
            <gpu sm="90"><nvlink target="0000:d0:00.0" count="18" tclass="0x068000"/></gpu>
          </pci>
          <pci class="0x020000"><nic><net name="mlx5_0" speed="400000"/></nic></pci>

The GPU's memory and rates are not in it: they are those of the GPU that ships under the same PCI
device. Latencies are not either: they are those of the nodes that ship.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from xml.etree.ElementTree import Element

from zsim.bounded_text import bounded_xml
from zsim.cluster.files.table import TopologyError

NVLINK_GB_PER_S = {"70": 25, "80": 25, "90": 25, "100": 50, "103": 50}
"""Per link and direction, by the GPU's compute capability. NVIDIA, datasheets: V100 6 links and
300 GB/s both ways, A100 12 and 600, H100 18 and 900, B200 and GB300 18 and 1.8 TB/s."""

PCIE_CODE = {2.5: 8 / 10, 5.0: 8 / 10, 8.0: 128 / 130, 16.0: 128 / 130, 32.0: 128 / 130}
"""Share of the bits that carry data, by GT/s. PCI-SIG, PCI Express base specification 5.0."""

DIGITS_MAX = 9
"""Digits of a number in the XML: no node has more links, lanes or Mb/s."""

BY_HAND = "write this node as TOML"
"""Advice for a node whose dump is refused."""

NVSWITCH_CLASS = "0x068000"
LATENCY_SOURCE = (
    "not in the XML; NCCL's own model, hwLat, Ring/Simple, src/graph/tuning.cc at 01afd20: a ring "
    "step takes 3.4 us over NVLink (two of the switch's), 9.6 us over the network (two of each)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Gpu:
    """A GPU of the XML: PCI device, capability, NVLinks to switches, PCIe, PCIe switch."""

    device: str
    sm: str
    nvlinks: int
    speed: str
    width: str
    switch: int


def node_from_nccl(
    name: str, text: str, gpu_by_device: Callable[[str], str | None]
) -> dict[str, Any]:
    """Return the table of the node that the XML `text` of the file `name` describes.

    `gpu_by_device` names the GPU that ships under a PCI device such as "0x2330".

    Raises:
        TopologyError: it is no such XML, or the node is not one that zsim can describe; one line.
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
    gpus = _gpus(root)
    gpu = gpus[0]
    shipped = gpu_by_device(gpu.device)
    if shipped is None:
        device = gpu.device or "(none)"
        raise TopologyError(f"GPU of PCI device {device}: no GPU that ships; {BY_HAND}")
    speed_mbit, count, others = _nics(root)
    left_out = f"; {others} slower ones left out" if others else ""
    per_link = NVLINK_GB_PER_S[gpu.sm]
    table: dict[str, Any] = {
        "title": f"{name}: {len(gpus)} GPUs, {count} NICs",
        "gpu": shipped,
        "node": {"gpus": len(gpus), "nics": count, "source": f"{name}{left_out}"},
        "switch": {
            "bandwidth_per_direction": f"{gpu.nvlinks * per_link} GB/s",
            "quoted": f"{gpu.nvlinks} NVLinks of {per_link} GB/s each way",
            "latency": "1.7 us",
            "source": f"{name}; NVIDIA, datasheet of the GPU, for one link",
            "latency_source": LATENCY_SOURCE,
        },
        "nic": {
            "bandwidth_per_direction": f"{speed_mbit / 8000} GB/s",
            "quoted": f"{speed_mbit} Mb/s each way",
            "latency": "3.1 us",
            "source": name,
            "latency_source": LATENCY_SOURCE,
        },
    }
    pcie = _pcie(name, gpus)
    return table if pcie is None else {**table, "pcie": pcie}


def _gpus(root: Element) -> list[_Gpu]:
    """All GPUs, which are alike and meet on NVSwitch."""
    found: list[_Gpu] = []
    for number, top in enumerate(root.findall("./cpu/pci")):
        for pci in top.iter("pci"):
            for gpu in pci.findall("gpu"):
                bus = pci.get("busid", "?")
                found.append(
                    _Gpu(
                        device=pci.get("device", ""),
                        sm=gpu.get("sm", ""),
                        nvlinks=_nvlinks(bus, gpu),
                        speed=pci.get("link_speed", ""),
                        width=pci.get("link_width", ""),
                        switch=number,
                    )
                )
    if not found:
        raise TopologyError("no <gpu> below a <pci>: a dump of NCCL has them, its input may not")
    for what in ("device", "sm", "nvlinks"):
        values = {str(getattr(gpu, what)) for gpu in found}
        if len(values) > 1:
            raise TopologyError(f"GPUs must be alike: {what} is {' and '.join(sorted(values))}")
    if found[0].sm not in NVLINK_GB_PER_S:
        known = ", ".join(NVLINK_GB_PER_S)
        raise TopologyError(f"GPU sm={found[0].sm!r} must be one of {known}")
    return found


def _nvlinks(bus: str, gpu: Element) -> int:
    """Links of a GPU, all to NVSwitch."""
    count = 0
    for link in gpu.findall("nvlink"):
        if link.get("tclass") != NVSWITCH_CLASS:
            target = link.get("target", "?")
            why = f"NVLink to {target} is not modelled, only to an NVSwitch; {BY_HAND}"
            raise TopologyError(f"GPU {bus}: {why}")
        count += _whole(link, "count")
    if not count:
        raise TopologyError(f"GPU {bus}: no NVLink to an NVSwitch; {BY_HAND}")
    return count


def _nics(root: Element) -> tuple[int, int, int]:
    """Speed of the fastest NICs in Mb/s, how many they are, and how many are slower."""
    speeds = Counter(_whole(net, "speed") for net in root.iter("net"))
    if not speeds:
        raise TopologyError("no <net>: the node has no NIC that NCCL found")
    fastest = max(speeds)
    return fastest, speeds[fastest], speeds.total() - speeds[fastest]


def _pcie(name: str, gpus: list[_Gpu]) -> dict[str, Any] | None:
    """Return the PCIe table, where speeds are given and each switch holds as many GPUs."""
    first = gpus[0]
    rate, _, unit = first.speed.partition(" ")
    sharing = set(Counter(gpu.switch for gpu in gpus).values())
    known = first.width.isdecimal() and len(first.width) <= DIGITS_MAX
    if not unit.startswith("GT/s") or not known or len(sharing) > 1:
        return None
    code = PCIE_CODE.get(float(rate)) if rate.replace(".", "", 1).isdecimal() else None
    if code is None:
        return None
    return {
        "bandwidth_per_direction": f"{float(rate) * code * int(first.width) / 8:.4g} GB/s",
        "quoted": f"{first.speed}, {first.width} lanes",
        "latency": "0 us",
        "gpus_per_switch": sharing.pop(),
        "source": name,
        "latency_source": "within that of the NIC, whose number is for the whole way",
    }


def _whole(element: Element, key: str) -> int:
    text = element.get(key, "")
    if not text.isdecimal() or len(text) > DIGITS_MAX or not int(text):
        raise TopologyError(
            f"<{element.tag}> {key}={text[:20]!r} must be a whole number, at least 1, of at most "
            f"{DIGITS_MAX} digits"
        )
    return int(text)
