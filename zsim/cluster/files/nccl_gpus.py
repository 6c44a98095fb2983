"""GPUs of an NCCL or RCCL dump, and how they are joined: a switch, direct links, or PCIe."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from xml.etree.ElementTree import Element

from zsim.cluster.files.table import TopologyError

NVLINK_GB_PER_S = {
    "60": 20,
    "70": 25,
    "75": 25,
    "80": 25,
    "86": 14.0625,
    "90": 25,
    "100": 50,
    "103": 50,
}
"""GB/s per link and direction, by the GPU's compute capability. NVIDIA data sheets: P100 4 links
and 160 GB/s in both directions, V100 6 and 300, A100 12 and 600, RTX 3090 and A40 4 and 112.5, H100
18 and 900, B200 and GB300 18 and 1.8 TB/s; GeForce RTX 2080 Ti, 2 and 100 of NVLink 2."""

XGMI_GB_PER_S = {"gfx908": 23, "gfx90a": 50, "gfx942": 64, "gfx950": 76.5}
"""GB/s per link and direction, by the GPU's architecture. AMD's microarchitecture pages in the
ROCm documentation: MI100 23 GT/s, MI250 50 GB/s; AMD's product pages: MI300X 128 GB/s and MI355X
153 GB/s per link, in both directions together."""

DIGITS_MAX = 9
"""Maximum digits of a number in the XML: no node has more links, lanes or Mb/s."""

BY_HAND = "write this node as TOML (zsim show node --template)"
"""Advice for a node whose dump is refused."""

SWITCH_CLASS = "0x068000"

BRIDGES = (
    "links between some GPUs alone (bridges) are left out: a ring over all is limited by PCIe; "
    "groups of bridged GPUs are faster than said here"
)
PARTIAL_MESH = (
    "not a full mesh: described as one with as many links a GPU, equal parts of which lead to each "
    "other GPU; groups of a few GPUs may be faster or slower"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DumpedGpu:
    """A GPU of the XML: PCI device, address, chip, links by target, PCIe, PCIe switch and CPU."""

    device: str
    bus: str
    chip: str
    to_switches: int
    to_gpus: tuple[tuple[str, int], ...]
    speed: str
    width: str
    switch: int
    cpu: int

    @property
    def links(self) -> int:
        """Number of links to other GPUs."""
        return sum(count for _, count in self.to_gpus)


class JoinedBy(StrEnum):
    """Kind of connection between the GPUs of a node."""

    SWITCH = "NVSwitch"
    MESH = "links to each other"
    PCIE = "PCIe"


@dataclass(frozen=True, slots=True, kw_only=True)
class Joints:
    """How GPUs are joined: kind, links of each GPU, GB/s of a link, note on ignored links."""

    how: JoinedBy
    links: int = 0
    per_link: float = 0.0
    left_out: str = ""


def dumped_gpus(cpus: Sequence[Element]) -> list[DumpedGpu]:
    """Return all GPUs below `cpus`, which must be equal.

    Raises:
        TopologyError: there are no GPUs, or they differ.
    """
    found = [gpu for number, cpu in enumerate(cpus) for gpu in _below(cpu, number)]
    if not found:
        raise TopologyError("no <gpu> below a <pci>: a dump of NCCL has them, its input may not")
    for what in ("device", "chip"):
        values = {str(getattr(gpu, what)) for gpu in found}
        if len(values) > 1:
            raise TopologyError(f"GPUs must be alike: {what} is {' and '.join(sorted(values))}")
    return found


def _below(cpu: Element, number: int) -> Iterator[DumpedGpu]:
    for switch, top in enumerate(cpu.findall("pci")):
        for pci in top.iter("pci"):
            for gpu in pci.findall("gpu"):
                links = [*gpu.findall("nvlink"), *gpu.findall("xgmi")]
                to_switches = [each for each in links if each.get("tclass") == SWITCH_CLASS]
                yield DumpedGpu(
                    device=pci.get("device", ""),
                    bus=pci.get("busid", "?").lower(),
                    chip=_chip(gpu),
                    to_switches=sum(whole(each, "count") for each in to_switches),
                    to_gpus=tuple(
                        (each.get("target", "?").lower(), whole(each, "count"))
                        for each in links
                        if each.get("tclass") != SWITCH_CLASS
                    ),
                    speed=pci.get("link_speed", ""),
                    width=pci.get("link_width", ""),
                    switch=number * 65536 + switch,
                    cpu=number,
                )


def _chip(gpu: Element) -> str:
    """Return the compute capability, or the architecture that RCCL writes, such as gfx942."""
    gcn = gpu.get("gcn")
    if gcn is None:
        return gpu.get("sm", "")
    return gcn if gcn.startswith("gfx") else f"gfx{gcn}"


def joints_of(gpus: Sequence[DumpedGpu]) -> Joints:
    """Return how the GPUs are joined, or the closest description that zsim supports.

    Raises:
        TopologyError: the links of the chip are unknown, or not all GPUs have a switch.
    """
    known = {gpu.bus for gpu in gpus}
    counts = {gpu.to_switches for gpu in gpus}
    if counts != {0}:
        if len(counts) > 1:
            told = " and ".join(map(str, sorted(counts)))
            raise TopologyError(f"GPUs must be alike: nvlinks is {told}; {BY_HAND}")
        return Joints(how=JoinedBy.SWITCH, links=counts.pop(), per_link=_per_link(gpus[0]))
    peers = {
        gpu.bus: Counter(
            {
                target: sum(count for other, count in gpu.to_gpus if other == target)
                for target, _ in gpu.to_gpus
                if target in known and target != gpu.bus
            }
        )
        for gpu in gpus
    }
    if not any(peers.values()):
        return Joints(how=JoinedBy.PCIE)
    if not _are_joined(peers):
        return Joints(
            how=JoinedBy.PCIE,
            left_out=BRIDGES,
        )
    least = min(each.total() for each in peers.values())
    alike = {count for each in peers.values() for count in each.values()}
    is_full = len(alike) == 1 and all(len(each) == len(gpus) - 1 for each in peers.values())
    return Joints(
        how=JoinedBy.MESH,
        links=least,
        per_link=_per_link(gpus[0]),
        left_out="" if is_full else PARTIAL_MESH,
    )


def _are_joined(peers: dict[str, Counter[str]]) -> bool:
    """Return True if every GPU reaches every other over links, perhaps through others."""
    seen, todo = set[str](), [next(iter(peers))]
    while todo:
        bus = todo.pop()
        if bus not in seen:
            seen.add(bus)
            todo += peers[bus]
    return len(seen) == len(peers)


def _per_link(gpu: DumpedGpu) -> float:
    known = {**NVLINK_GB_PER_S, **XGMI_GB_PER_S}
    if gpu.chip not in known:
        raise TopologyError(f"GPU sm={gpu.chip!r} must be one of {', '.join(known)}; {BY_HAND}")
    return known[gpu.chip]


def whole(element: Element, key: str) -> int:
    """Return the number in an attribute.

    Raises:
        TopologyError: it is not a whole number, or too large.
    """
    text = element.get(key, "")
    if not text.isdecimal() or len(text) > DIGITS_MAX or not int(text):
        raise TopologyError(
            f"<{element.tag}> {key}={text[:20]!r} must be a whole number, at least 1, of at most "
            f"{DIGITS_MAX} digits"
        )
    return int(text)
