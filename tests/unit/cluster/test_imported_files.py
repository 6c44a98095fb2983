"""A node from NCCL's XML and a fabric from a list of links: what is read, and what is refused."""

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import zsim_topologies
from zsim.api.topology_result import read_topology
from zsim.cluster.cluster import Cluster
from zsim.cluster.fabric_kind import EXPLICIT
from zsim.cluster.files import Part, TopologyError, cluster_of
from zsim.cluster.files.edges_csv import fabric_from_edges
from zsim.cluster.files.fabric import fabric_of
from zsim.cluster.files.nccl_xml import node_from_nccl
from zsim.cluster.files.node import node_of
from zsim.files.installed import topology

GPU = """
      <pci busid="0000:1{number}:00.0" class="0x030200" vendor="0x10de" device="0x20b2"
           link_speed="16.0 GT/s PCIe" link_width="16">
        <gpu dev="{number}" sm="80" rank="{number}" gdr="1">
          <nvlink target="0000:c4:00.0" count="6" tclass="0x068000"/>
          <nvlink target="0000:c5:00.0" count="6" tclass="0x068000"/>
        </gpu>
      </pci>"""
NIC = """
      <pci busid="0000:4{number}:00.0" class="0x020700" link_speed="16.0 GT/s PCIe">
        <nic><net name="mlx5_{number}" dev="{number}" speed="200000" port="1" gdr="1"/></nic>
      </pci>"""
SLOW_NIC = '<nic><net name="eth0" speed="25000"/></nic>'


def xml() -> str:
    """Two CPUs, each with a PCIe switch that holds two GPUs and a NIC; a slow NIC aside."""
    switches = [
        '    <pci busid="0000:0{s}:00.0" class="0x060400" link_speed="16.0 GT/s PCIe">'
        f"{GPU.format(number=2 * s)}{GPU.format(number=2 * s + 1)}{NIC.format(number=s)}\n"
        "    </pci>"
        for s in range(2)
    ]
    cpus = [f'  <cpu numaid="{s}">\n{switch}\n  </cpu>' for s, switch in enumerate(switches)]
    return "\n".join(['<system version="1">', *cpus, f"  <cpu>{SLOW_NIC}</cpu>", "</system>"])


DGX = {
    **zsim_topologies.table(Part.NODE, "dgx_a100"),
    "gpu": zsim_topologies.table(Part.GPU, "a100_sxm4_80gb"),
}

LINKS = """source,target,bandwidth_per_direction,latency
# two leaves
node0,left,100 GB/s,1 us
node1,left,100 GB/s,1 us

node2,right,100 GB/s,1 us
left,right,50 GB/s,260 ns
"""


def node(tmp_path: Path, text: str, fabric: str = "single_switch", nodes: int = 1) -> Cluster:
    path = tmp_path / "dump.xml"
    path.write_text(text, "utf-8")
    return topology(str(path), fabric, nodes)


def test_nccl_s_xml_is_a_node(tmp_path: Path) -> None:
    cluster = node(tmp_path, xml(), "rail_optimized", nodes=2)
    shipped = cluster_of("a", {"node": "dgx_a100"}, 1, zsim_topologies.table)
    assert cluster.gpu == shipped.gpu
    assert (cluster.ranks, cluster.gpus_per_node, cluster.nics_per_node) == (8, 4, 2)
    assert cluster.switch_link == shipped.switch_link  # 12 links of 25 GB/s
    assert cluster.nic_link == shipped.nic_link  # 200 Gb/s
    assert cluster.gpus_per_pcie_switch == 2
    assert cluster.pcie_link is not None
    assert cluster.pcie_link.bytes_per_s == 31_510_000_000
    assert "1 slower ones left out" in dict(cluster.cites)["node"]


@pytest.mark.parametrize(
    "change", [('link_speed="16.0 GT/s PCIe"', ""), ('link_width="16"', ""), ("16.0 GT", "1.0 GT")]
)
def test_without_a_known_pcie_speed_there_is_no_pcie(
    tmp_path: Path, change: tuple[str, str]
) -> None:
    assert node(tmp_path, xml().replace(*change)).pcie_link is None


XML_WRONG = {
    "no xml": ("<system", "system", "not XML: "),
    "something else": ("system", "graphs", "<graphs>: must be <system>, as NCCL writes it"),
    "no gpu": ("gpu", "gpa", "no <gpu> below a <pci>: a dump of NCCL has them"),
    "unequal gpus": (
        'count="6" tclass="0x068000"/>\n        </gpu>',
        'count="5" tclass="0x068000"/>\n        </gpu>',
        "GPUs must be alike: nvlinks is 11 and 12; write this node as TOML",
    ),
    "two kinds of gpus": ("0x20b2", "0x20b5", "GPUs must be alike: device is 0x20b2 and 0x20b5"),
    "no number": ('count="6"', 'count="six"', "<nvlink> count='six' must be a whole number"),
    "no speed": ('speed="200000"', 'speed="0"', "<net> speed='0' must be a whole number"),
    "5,000 digits": (
        'speed="200000"',
        f'speed="{"2" * 5000}"',
        "<net> speed='22222222222222222222' must be a whole number, at least 1, of at most 9",
    ),
    "an unknown chip": ('sm="80"', 'sm="72"', "GPU sm='72' must be one of 60, 70, 75, 80, 86, 90,"),
}


@pytest.mark.parametrize(("old", "new", "why"), XML_WRONG.values(), ids=XML_WRONG.keys())
def test_xml_that_is_no_node_is_refused_in_one_line(
    tmp_path: Path, old: str, new: str, why: str
) -> None:
    times = 1 if why.startswith("GPUs must be alike") else -1
    with pytest.raises(TopologyError) as caught:
        node(tmp_path, xml().replace(old, new, times))
    assert str(caught.value).startswith(f"{tmp_path}/dump.xml: {why}")


def joined(tmp_path: Path, text: str, nodes: int) -> Cluster:
    path = tmp_path / "links.csv"
    path.write_text(text, "utf-8")
    return topology("dgx_a100", str(path), nodes)


def test_a_list_of_links_is_a_fabric(tmp_path: Path) -> None:
    cluster = joined(tmp_path, LINKS, nodes=3)
    assert cluster.fabric.kind == EXPLICIT
    edges = [(edge.source, edge.target, edge.link.bytes_per_s) for edge in cluster.fabric.edges]
    assert edges[-1] == ("left", "right", 50 * 10**9)
    assert len(edges) == 4
    assert dict(cluster.cites)["fabric"] == str(tmp_path / "links.csv")


LINKS_WRONG = {
    "no header": ("source,", "from,", "the first line must be source,target,bandwidth_per_"),
    "no links": (LINKS[LINKS.index("\n") :], "", "no edges"),
    "a column too few": ("node1,left,100 GB/s,1 us", "node1,left,1 us", "line 4: 3 columns, must"),
    "bits": (
        "node2,right,100 GB/s",
        "node2,right,100 Gb/s",
        "line 6: bandwidth_per_direction: '100 Gb/s' is not a quantity such as '450 GB/s'; bits",
    ),
    "twice": ("node1,left", "left,node0", "left to node0: must join two ends, once"),
    "itself": ("node1,left", "left,left", "left to left: must join two ends, once"),
    "in two parts": ("left,right,50", "left,middle,50", "no way from left to node2"),
}


@pytest.mark.parametrize(("old", "new", "why"), LINKS_WRONG.values(), ids=LINKS_WRONG.keys())
def test_a_list_that_is_no_fabric_is_refused_in_one_line(
    tmp_path: Path, old: str, new: str, why: str
) -> None:
    with pytest.raises(TopologyError) as caught:
        joined(tmp_path, LINKS.replace(old, new), nodes=3)
    assert str(caught.value).startswith(f"{tmp_path}/links.csv: {why}")


@given(st.data())
def test_whatever_stands_in_a_file_is_read_or_refused_in_one_line(data: st.DataObject) -> None:
    text, read = data.draw(
        st.sampled_from(
            [
                (LINKS, lambda text: fabric_from_edges("file", text)),
                (xml(), lambda text: node_from_nccl("file", text, lambda _: "a100_sxm4_80gb")),
            ]
        )
    )
    for _ in range(data.draw(st.integers(1, 3))):
        start = data.draw(st.integers(0, len(text)))
        end = data.draw(st.integers(start, min(len(text), start + 30)))
        text = text[:start] + data.draw(st.text(max_size=5)) + text[end:]
    refused = "file: "
    try:
        table = read(text)
        if "edges" in table:
            fabric_of("file", table, node_of("dgx", DGX))
        else:
            cluster_of("file", table, 1, zsim_topologies.table)
    except TopologyError as error:
        refused = str(error)
    assert refused.startswith("file: ")


def test_the_list_in_the_documentation_is_one(tmp_path: Path) -> None:
    text = (Path(__file__).parents[3] / "docs" / "topology.md").read_text("utf-8")
    found = re.search(r"```csv\n(.*?)```", text, re.DOTALL)
    assert found is not None
    assert joined(tmp_path, found.group(1), nodes=2).nodes == 2


def test_a_gpu_that_does_not_ship_is_named_beside_the_dump(tmp_path: Path) -> None:
    text = xml().replace("0x20b2", "0x9999")
    with pytest.raises(TopologyError) as caught:
        node(tmp_path, text)
    assert str(caught.value) == (
        f"PCI device 0x9999 of {tmp_path}/dump.xml: no GPU that ships; name one with cluster.gpu, "
        "or a file (zsim show gpu --template)"
    )
    named = read_topology(str(tmp_path / "dump.xml"), changes={"cluster.gpu": "h100_sxm5_80gb"})
    assert named.cluster.gpu.name == "H100-SXM5-80GB"


ALL_TO_ALL = {(one, other): 2 for one in range(4) for other in range(4) if one != other}
RING = {(one, (one + step) % 4): 3 for one in range(4) for step in (1, 3)}
PAIRS = {(0, 1): 6, (1, 0): 6, (2, 3): 6, (3, 2): 6}


def linked(links: dict[tuple[int, int], int], tag: str = "nvlink", chip: str = 'sm="80"') -> str:
    """Return the XML of four GPUs with so many links from each to others, and none to a switch."""
    text = re.sub(r"\n +<nvlink.*/>", "", xml()).replace('sm="80"', chip)
    for (one, other), count in links.items():
        start = f'<gpu dev="{one}"'
        link = f'<{tag} target="0000:1{other}:00.0" count="{count}" tclass="0x030200"/>'
        text = re.sub(f"({start}[^>]*>)", rf"\1{link}", text)
    return text


def test_gpus_with_links_to_each_other_are_a_mesh_with_all_of_them(tmp_path: Path) -> None:
    for links in (ALL_TO_ALL, RING):
        cluster = node(tmp_path, linked(links))
        assert not cluster.has_switch
        assert cluster.switch_link.bytes_per_s == 6 * 25 * 10**9
        told = "not a full mesh" in dict(cluster.cites)["node"]
        assert told is (links is RING)


def test_links_of_an_amd_gpu_are_as_fast_as_its_architecture_has_them(tmp_path: Path) -> None:
    cluster = node(tmp_path, linked(ALL_TO_ALL, "xgmi", 'sm="256" gcn="gfx942"'))
    assert not cluster.has_switch
    assert cluster.switch_link.bytes_per_s == 6 * 64 * 10**9


@pytest.mark.parametrize("links", [{}, PAIRS])
def test_gpus_without_links_to_all_others_meet_over_pcie(
    tmp_path: Path, links: dict[tuple[int, int], int]
) -> None:
    cluster = node(tmp_path, linked(links))
    assert cluster.over_pcie
    assert cluster.switch_link.bytes_per_s == 24_010_000_000  # 12 / 15.75 of a slot
    assert ("bridges" in dict(cluster.cites)["node"]) is bool(links)
    assert cluster.board_link is None  # the XML names no CPU


@pytest.mark.parametrize(
    ("cpu", "gb_per_s"),
    [
        ('vendor="GenuineIntel" familyid="6" modelid="207"', 40),
        ('vendor="GenuineIntel" familyid="6" modelid="143"', 22),
        ('vendor="GenuineIntel" familyid="6" modelid="173"', 40),
        ('vendor="GenuineIntel" familyid="6" modelid="85"', 10),
        ('vendor="AuthenticAMD" familyid="175" modelid="1"', 24),
    ],
)
def test_two_cpus_limit_what_gpus_send_over_pcie(tmp_path: Path, cpu: str, gb_per_s: int) -> None:
    cluster = node(tmp_path, linked({}).replace("<cpu numaid", f"<cpu {cpu} numaid"))
    assert cluster.board_link is not None
    assert cluster.board_link.bytes_per_s == gb_per_s * 10**9


def test_a_dump_without_a_nic_has_the_slowest_and_says_so(tmp_path: Path) -> None:
    cluster = node(tmp_path, xml().replace("net name", "nit name"))
    assert (cluster.nics_per_node, cluster.nic_link.bytes_per_s) == (1, 125_000_000)
    assert "no <net> in the dump" in dict(cluster.cites)["node"]


def test_machines_of_one_dump_are_nodes_of_one_domain(tmp_path: Path) -> None:
    text = xml()
    first, second = (
        text[text.index("  <cpu numaid") : text.rindex("  <cpu>")].replace(
            "<cpu numaid", f'<cpu host_hash="{number}" numaid'
        )
        for number in range(2)
    )
    cluster = node(tmp_path, f"<system>{first}{second}</system>", nodes=2)
    assert (cluster.gpus_per_node, cluster.nodes_per_domain, cluster.domains) == (4, 2, 1)


NUMBER_UNKNOWN = {"h100_sxm5_96gb_hbm2e"}
"""GPUs that a publication describes; the device number of none of them was found."""


def test_every_gpu_that_ships_can_be_recognised() -> None:
    tables = {
        name: zsim_topologies.table(Part.GPU, name) for name in zsim_topologies.names(Part.GPU)
    }
    assert {name for name, each in tables.items() if "pci_devices" not in each} == NUMBER_UNKNOWN
    devices = [each["pci_devices"] for each in tables.values() if "pci_devices" in each]
    flat = [device for each in devices for device in each]
    assert len(set(flat)) == len(flat) > len(devices)
