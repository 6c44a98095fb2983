"""Systems that ship: every number has a source, and a wrong file is one line."""

import copy
from dataclasses import replace
from fractions import Fraction
from itertools import chain
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import zsim_topologies
from zsim.api.gpu_fleet import gpu_power_w
from zsim.cluster.cluster import Cluster, ClusterError
from zsim.cluster.fabric_kind import RAIL_OPTIMIZED
from zsim.cluster.files import Part, TopologyError, UnknownTopologyError, cluster_of
from zsim.cluster.files.domain import domain_share
from zsim.cluster.files.gpu import GpuTable
from zsim.cluster.foreign_profile import is_for
from zsim.dtype import BlockFormat, DType

GB = 10**9
NODES, FABRICS = zsim_topologies.names(Part.NODE), zsim_topologies.names(Part.FABRIC)


def composed(node: str, fabric: str, nodes: int = 1) -> Cluster:
    return cluster_of("made", {"node": node, "fabric": fabric}, nodes, zsim_topologies.table)


@pytest.mark.parametrize("name", zsim_topologies.names())
def test_every_system_is_a_node_on_a_fabric(name: str) -> None:
    cluster = zsim_topologies.load(name, nodes=3)
    assert (cluster.name, cluster.nodes) == (name, 3)
    table = zsim_topologies.table(Part.SYSTEM, name)
    assert cluster == replace(composed(table["node"], table["fabric"], 3), name=name)


def test_no_name_stands_for_two_things() -> None:
    every = [*chain.from_iterable(map(zsim_topologies.names, Part))]
    assert len(set(every)) == len(every)


@pytest.mark.parametrize("fabric", FABRICS)
@pytest.mark.parametrize("node", NODES)
def test_every_node_goes_on_every_fabric_and_every_table_cites(node: str, fabric: str) -> None:
    cluster = composed(node, fabric, nodes=5)
    cited = dict(cluster.cites)
    wanted = {"node", "gpu", "switch", "nic", "switch.latency", "nic.latency", "fabric"}
    for name in ("pcie", "board", "host", "drives"):
        part = getattr(cluster, f"{name}_link" if name in {"pcie", "board"} else name)
        wanted |= {"boards" if name == "board" else name} if part is not None else set[str]()
    for tier in cluster.fabric.tiers:
        wanted |= {f"fabric.{tier.name}", f"fabric.{tier.name}.latency"}
    for rate in cluster.gpu.rates:
        path = f"gpu.rates.{rate.dtype}"
        wanted |= {path, f"{path}.matmul", f"{path}.elementwise"}
        assert 0 < rate.matmul <= rate.peak
        assert rate.elementwise <= rate.peak
    assert wanted <= set(cited)
    assert all(cited.values())


@pytest.mark.parametrize("name", [*NODES, *zsim_topologies.names(Part.GPU)])
def test_every_number_in_a_file_that_ships_has_a_source(name: str) -> None:
    part = Part.NODE if name in NODES else Part.GPU
    table = zsim_topologies.table(part, name)
    tables = [each for each in table.values() if isinstance(each, dict)]
    if part is Part.GPU:
        tables = [table, *table["rates"].values()]
    assert all(each.get("source") for each in tables)
    own = {key.removesuffix("_source") for key in table if key.endswith("_source")}
    assert own <= set(table)
    if part is Part.GPU:
        assert {"link", "pcie", "power", "pci_devices"} & set(table) <= own


@pytest.mark.matrix(6)
@pytest.mark.parametrize("name", zsim_topologies.names(Part.GPU))
def test_every_gpu_that_ships_is_plausible(name: str) -> None:
    gpu = GpuTable.model_validate(zsim_topologies.table(Part.GPU, name)).gpu()
    half = max(rate.peak for rate in gpu.rates if rate.dtype in {DType.FP16, DType.BF16})
    for rate in gpu.rates:
        assert 0 < rate.matmul <= rate.peak
        assert 0 < rate.elementwise <= rate.peak
        if rate.dtype is DType.FP8:
            assert rate.peak >= half
            assert rate.peak <= 2.05 * half  # dense: with sparsity it would be four times
        if rate.dtype is BlockFormat.MXFP8:
            assert rate.peak == gpu.rate(DType.FP8).peak
        if rate.dtype is BlockFormat.NVFP4:
            # GeForce adds up 16-bit products in fp32 at half speed.
            most = 8.1 if name == "rtx_5090_32gb" else 6.1
            assert 3.9 * half <= rate.peak <= most * half
    assert 300 * GB <= gpu.memory_bytes_per_s <= 10_000 * GB
    assert 16 * GB <= gpu.memory_bytes <= 512 * GB
    assert 5 <= gpu.memory_bytes_per_s / gpu.memory_bytes <= 60  # all of it, times a second
    assert 0 < gpu.usable_bytes(2) < 1.1 * gpu.memory_bytes
    assert gpu_power_w(gpu.name) is not None


def test_gpus_that_nobody_timed_are_marked_so() -> None:
    for name in zsim_topologies.names(Part.GPU):
        table = zsim_topologies.table(Part.GPU, name)
        is_timed = any(
            is_for(kernels, table["name"]) for kernels in zsim_topologies.kernel_profiles()
        )
        if table.get("evidence") == "data sheet only":
            assert not is_timed
        else:
            assert is_timed or name in {"gb200_186gb", "rtx_4090_24gb"}  # their rates were measured


@pytest.mark.parametrize("node", NODES)
def test_every_node_says_what_its_drives_write_or_that_nobody_knows(node: str) -> None:
    cluster = composed(node, "single_switch")
    cited = dict(cluster.cites)
    if cluster.drives is None:
        assert "known" in cited["drives"]
    elif cluster.drives.write_bytes_per_s is None:
        assert "not published" in cited["drives.rates"]
    else:
        assert cluster.drives.read_bytes_per_s
        assert cited["drives.rates"]
    if cluster.copies is not None:
        assert {"pcie.copy", "pcie.copy_latency"} <= set(cited)
    if cluster.host is not None and cluster.host.cpu is not None:
        assert {"cpu", "cpu.adam", "cpu.elementwise"} <= set(cited)


def test_the_zero_paper_s_cluster_is_what_the_paper_says() -> None:
    # Rajbhandari et al. 2020, section 10.1: 25 DGX-2, 400 V100 32 GB, 800 Gb/s between nodes.
    cluster = zsim_topologies.load("dgx2_infiniband", nodes=25)
    assert cluster.ranks == 400
    assert cluster.gpu.memory_bytes == 32 * 10**9
    assert cluster.nics_per_node * cluster.nic_link.bytes_per_s * 8 == 800 * 10**9
    assert cluster.switch_link.bytes_per_s == 150 * 10**9
    assert cluster.gpu.rate(DType.FP16).peak == 125 * 10**12


@pytest.mark.parametrize(
    ("node", "gpus", "nics", "nvlink_gb_per_s", "nic_gb_per_s"),
    [
        ("dgx2", 16, 8, 150, 12.5),
        ("dgx_a100", 8, 8, 300, 25),
        ("dgx_h100", 8, 8, 450, 50),
        ("dgx_h200", 8, 8, 450, 50),
        ("h800_roce", 8, 8, 200, 12.5),
        ("hgx_b200", 8, 8, 900, 50),
        ("gb200_nvl72", 4, 4, 900, 50),
        ("gb300_nvl72", 4, 4, 900, 100),
        ("hgx_b300", 8, 8, 900, 100),
        ("hgx_h20", 8, 8, 450, 50),
        ("azure_nd_mi300x_v5", 8, 8, 448, 50),
        ("p3dn_24xlarge", 8, 1, 150, 12.5),
        ("p4d", 8, 4, 300, 12.5),
        ("p5", 8, 32, 450, 12.5),
        ("azure_nd_a100_v4", 8, 8, 300, 25),
    ],
)
def test_nodes_have_the_links_that_their_vendors_print(
    node: str, gpus: int, nics: int, nvlink_gb_per_s: int, nic_gb_per_s: float
) -> None:
    cluster = composed(node, "single_switch")
    assert (cluster.gpus_per_node, cluster.nics_per_node) == (gpus, nics)
    assert cluster.switch_link.bytes_per_s == nvlink_gb_per_s * 10**9
    assert cluster.nic_link.bytes_per_s == nic_gb_per_s * 10**9


def test_a_rack_is_one_domain_of_72_and_a_dgx_2_two_boards() -> None:
    rack = composed("gb200_nvl72", "rail_optimized", nodes=18)
    assert (rack.domains, rack.ranks) == (1, 72)
    boards = composed("dgx2", "single_switch").board_link
    assert boards is not None
    assert boards.bytes_per_s == 8 * 150 * 10**9  # 8 GPUs to 8 GPUs, none narrowed


@given(nodes=st.integers(1, 600), most=st.integers(1, 36))
def test_a_job_takes_as_many_nodes_of_each_domain_where_that_fills_half_of_them(
    nodes: int, most: int
) -> None:
    share = domain_share(nodes, most)
    even = [count for count in range(1, most + 1) if nodes % count == 0 and 2 * count >= most]
    if nodes <= most or not even:
        assert share == most
    else:
        assert share == max(even)


@pytest.mark.parametrize(("gpus", "each"), [(72, 72), (128, 64), (144, 72), (512, 64), (576, 72)])
def test_jobs_of_racks_use_as_many_gpus_of_each(gpus: int, each: int) -> None:
    rack = composed("gb200_nvl72", "rail_optimized", nodes=gpus // 4)
    assert rack.nodes_per_domain * rack.gpus_per_node == each
    assert rack.domains * each == gpus
    assert ("nodes_per_domain" in dict(rack.cites)) == (each < 72)


def test_leaves_nest_with_the_used_part_of_a_rack() -> None:
    tree = composed("gb200_nvl72", "fat_tree_3", nodes=128)
    assert [tier.nodes_below for tier in tree.fabric.tiers] == [8, 256]


@pytest.mark.parametrize(("node", "given"), [("gb200_nvl72", 19), ("dgx_h100", 2)])
def test_a_domain_has_no_more_nodes_than_its_switch_joins(node: str, given: int) -> None:
    with pytest.raises(ClusterError, match=rf"^nodes_per_domain: {given} must be at most "):
        cluster_of(
            node,
            {"node": node, "fabric": "single_switch"},
            40,
            zsim_topologies.table,
            nodes_per_domain=given,
        )


@pytest.mark.parametrize(
    ("node", "fabric", "nodes_below"),
    [
        ("dgx_h100", "single_switch", []),
        ("dgx_h100", "fat_tree_2", [4]),  # 32 ports for 8 NICs each
        ("dgx_h100", "fat_tree_3", [4, 128]),
        ("dgx_h100", "rail_optimized", [32]),  # 32 ports for one NIC each
        ("p5", "fat_tree_3", [1, 32]),
        ("gb200_nvl72", "fat_tree_3", [6, 180]),  # 8 and 256 would cut racks of 18
        ("gb200_nvl72", "rail_optimized", [18]),
        ("dgx_h100", "rail_only", []),
    ],
)
def test_how_many_nodes_a_switch_takes_follows_from_the_node(
    node: str, fabric: str, nodes_below: list[int]
) -> None:
    tiers = composed(node, fabric).fabric.tiers
    assert [tier.nodes_below for tier in tiers] == nodes_below


def test_a_fabric_may_stand_in_the_file_of_the_node() -> None:
    table = {
        **zsim_topologies.table(Part.NODE, "dgx_a100"),
        "fabric": {**zsim_topologies.table(Part.FABRIC, "rail_optimized")},
    }
    table["fabric"]["leaf"]["oversubscription"] = "3/2"
    cluster = cluster_of("mine", table, 64, zsim_topologies.table)
    assert cluster.fabric.kind == RAIL_OPTIMIZED
    assert cluster.uplink_bytes_per_s(0) * 3 == 32 * 8 * 25 * 10**9 * 2


def test_an_unknown_system_lists_those_that_exist() -> None:
    with pytest.raises(UnknownTopologyError) as caught:
        zsim_topologies.load("dgx3")
    assert str(caught.value) == (
        "'dgx3' must be one of dgx2_infiniband, dgx_a100_infiniband, dgx_h100_infiniband"
    )


def test_a_cluster_needs_a_node() -> None:
    with pytest.raises(ClusterError, match="nodes: 0 must be at least 1"):
        zsim_topologies.load("dgx2_infiniband", nodes=0)


WRONG: dict[str, tuple[str, object, str]] = {
    "unknown key": (
        "nic.latncy",
        "1 us",
        "wrong: nic.latncy: unknown key; did you mean latency? allowed: source, "
        "bandwidth_per_direction, quoted, latency, latency_source",
    ),
    "bits": (
        "nic.bandwidth_per_direction",
        "100 Gb/s",
        "wrong: nic.bandwidth_per_direction: '100 Gb/s' is not a quantity such as '450 GB/s'; "
        "bits are not accepted, write bytes",
    ),
    "a bare number": (
        "gpu.memory",
        32,
        "wrong: gpu.memory: 32 is not a quantity with its unit, in quotes",
    ),
    "no GPUs": ("node.gpus", 0, "wrong: node.gpus: 0 must be at least 1"),
    "a collective that takes more than the GPU": (
        "gpu.collective_share",
        "3/2",
        "wrong: gpu V100-SXM3-32GB: collective_share 3/2 must be at least 0 and less than 1",
    ),
    "no number": ("gpu.memory", None, "wrong: gpu.memory: missing"),
    "no link to the others": (
        "switch",
        None,
        "wrong: switch: missing; give [switch] with bandwidth_per_direction, or the GPU's link, "
        "the bandwidth of its links to other GPUs",
    ),
    "a mesh over PCIe": (
        "node",
        {"gpus": 16, "nics": 8, "nvswitch": False, "pcie_only": True},
        "wrong: pcie_only: true goes without nvswitch = false, and with one node",
    ),
    "copies in one direction alone": (
        "pcie.copy_both_ways",
        None,
        "wrong: pcie.copy_both_ways: missing beside the other copies",
    ),
    "copies that are faster than their link": (
        "pcie.copy_to_gpu",
        "16 GB/s",
        "wrong: copies: to_gpu_bytes_per_s 16000000000 must be at most 15750000000, that of pcie",
    ),
    "both directions faster than one": (
        "pcie.copy_both_ways",
        "14 GB/s",
        "wrong: copies: both_ways_bytes_per_s 14000000000 must be at most 13100000000, what one "
        "direction reaches alone",
    ),
    "a root port that cuts a switch": (
        "pcie.gpus_per_root_port",
        3,
        "wrong: gpus_per_root_port: 3 must be a multiple of gpus_per_pcie_switch, 2",
    ),
    "a kernel that is faster than memory": (
        "cpu.adam",
        1.5,
        "wrong: cpu.adam: 1.5 must be at most 1",
    ),
    "CPUs without memory": (
        "host",
        None,
        "wrong: cpu: needs [host], whose memory its kernels use",
    ),
    "drives of no size": (
        "drives.capacity",
        None,
        "wrong: drives.capacity: missing beside a count of more than 0",
    ),
    "more pinned than there is": (
        "host.pinned",
        "2 TB",
        "wrong: host: pinned_bytes 2000000000000 must be more than 0 and at most memory_bytes "
        "1500000000000",
    ),
    "a format that does not exist": (
        "gpu.rates.fp17",
        {},
        "wrong: gpu.rates: 'fp17' must be 'int8', 'fp8', 'fp16', 'bf16', 'fp32', 'fp64', 'int64', "
        "'mxfp8' or 'nvfp4'",
    ),
}


FABRIC_WRONG: dict[str, tuple[str, object, str]] = {
    "unknown key": (
        "leaf.ports",
        3,
        "wrong: fabric: leaf.ports: unknown key; did you mean ports_down? allowed: source, "
        "ports_down, oversubscription, latency, latency_source",
    ),
    "no ratio": (
        "leaf.oversubscription",
        "2:1",
        "wrong: fabric: leaf.oversubscription: '2:1' is not a ratio of more than 0, such as 2 or "
        '"3/2"',
    ),
    "a kind that is a list": (
        "kind",
        ["fat_tree"],
        "wrong: fabric: kind: \"['fat_tree']\": did you mean fat_tree? It must be one of "
        "single_switch, fat_tree, rail_optimized, rail_only, explicit, torus, dragonfly",
    ),
    "a spine without leaves": ("leaf", None, "wrong: fabric: leaf: missing below spine"),
    "a kind that does not exist": (
        "kind",
        "hypercube",
        "wrong: fabric: kind: 'hypercube' must be one of single_switch, fat_tree, rail_optimized, "
        "rail_only, explicit, torus, dragonfly",
    ),
    "tiers on one switch": (
        "kind",
        "single_switch",
        "wrong: fabric: fabric single_switch: has no tiers, 2 given",
    ),
}


def changed(table: dict[str, Any], path: str, value: object) -> dict[str, Any]:
    table = copy.deepcopy(table)
    *tables, key = path.split(".")
    inner: dict[str, Any] = table
    for part in tables:
        inner = inner[part]
    if value is None:
        del inner[key]
    else:
        inner[key] = value
    return table


def test_a_gpu_may_be_slower_beside_a_collective() -> None:
    table = zsim_topologies.table(Part.NODE, "dgx2")
    table["gpu"] = zsim_topologies.table(Part.GPU, table["gpu"])
    slower = changed(table, "gpu.collective_share", "1/5")
    assert cluster_of("slower", table, 1).gpu.collective_share == 0
    assert cluster_of("slower", slower, 1).gpu.collective_share == Fraction(1, 5)


@pytest.mark.parametrize(("path", "value", "expected"), WRONG.values(), ids=WRONG.keys())
def test_a_wrong_file_is_one_line_with_the_key(path: str, value: object, expected: str) -> None:
    table = zsim_topologies.table(Part.NODE, "dgx2")
    table["gpu"] = zsim_topologies.table(Part.GPU, table["gpu"])
    with pytest.raises(TopologyError) as caught:
        cluster_of("wrong", changed(table, path, value), 1)
    assert str(caught.value) == expected


@pytest.mark.parametrize(
    ("path", "value", "expected"), FABRIC_WRONG.values(), ids=FABRIC_WRONG.keys()
)
def test_a_wrong_fabric_is_one_line_with_the_key(path: str, value: object, expected: str) -> None:
    fabric = changed(zsim_topologies.table(Part.FABRIC, "fat_tree_3"), path, value)
    table = {**zsim_topologies.table(Part.NODE, "dgx2"), "fabric": fabric}
    with pytest.raises(TopologyError) as caught:
        cluster_of("wrong", table, 1, zsim_topologies.table)
    assert str(caught.value) == expected


def test_a_list_is_no_fabric() -> None:
    table = {**zsim_topologies.table(Part.NODE, "dgx2"), "fabric": [1]}
    with pytest.raises(TopologyError, match=r"^wrong: fabric: \[1\] must be a table$"):
        cluster_of("wrong", table, 1, zsim_topologies.table)


def test_what_stands_beside_the_name_of_a_node_is_refused() -> None:
    table = {"node": "dgx2", "nic": {}}
    with pytest.raises(TopologyError) as caught:
        cluster_of("wrong", table, 1, zsim_topologies.table)
    assert str(caught.value) == "wrong: nic: unknown key beside the name of a node"


def test_a_part_that_nobody_knows_is_named() -> None:
    with pytest.raises(UnknownTopologyError, match="node: 'dgx9' is not known here"):
        cluster_of("wrong", {"node": "dgx9"}, 1)
