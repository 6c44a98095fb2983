"""What a cluster refuses to be, what it derives, and that it survives JSON."""

import json
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from typing import cast

import pytest

from zsim.cluster.cluster import Cluster, ClusterError, Fabric, FabricEdge, Gpu, Link, Tier
from zsim.cluster.fabric_kind import EXPLICIT, FAT_TREE
from zsim.cluster.host_side import CopyRates, Cpu, Drives, Host
from zsim.schedule.json import FieldError, decode_value, encode_value

LINK = Link(bytes_per_s=10, latency_ps=3)
LEAF = Tier(name="leaf", nodes_below=2, oversubscription=Fraction(3, 2), latency_ps=5)
SPINE = Tier(name="spine", nodes_below=12, oversubscription=Fraction(2))
BARE = Cluster(
    name="bare",
    nodes=12,
    gpus_per_node=4,
    gpu=Gpu(name="gpu", memory_bytes=1, memory_bytes_per_s=1, rates=()),
    switch_link=LINK,
    nics_per_node=2,
    nic_link=LINK,
)
FULL = replace(
    BARE,
    fabric=Fabric(kind=FAT_TREE, tiers=(LEAF, SPINE)),
    nodes_per_domain=4,
    pcie_link=LINK,
    gpus_per_pcie_switch=2,
    gpus_per_root_port=4,
    copies=CopyRates(to_gpu_bytes_per_s=9, from_gpu_bytes_per_s=8, both_ways_bytes_per_s=7),
    host=Host(
        memory_bytes=5,
        memory_bytes_per_s=6,
        pinned_bytes=4,
        cpu=Cpu(
            sockets=2,
            cores_per_socket=3,
            adam_share=Fraction(2, 5),
            elementwise_share=Fraction(1, 3),
        ),
    ),
    drives=Drives(
        count=1,
        capacity_bytes=2,
        read_bytes_per_s=3,
        write_bytes_per_s=4,
        latency_ps=5,
        endurance_bytes=6,
    ),
)
BOARDS = replace(BARE, board_link=LINK)
IRREGULAR = replace(
    BARE,
    nodes=1,
    fabric=Fabric(
        kind=EXPLICIT,
        edges=(FabricEdge(source="node0", target="switch", link=LINK),),
    ),
)


@pytest.mark.parametrize("cluster", [BARE, FULL, BOARDS, IRREGULAR])
def test_a_cluster_survives_json(cluster: Cluster) -> None:
    text = json.dumps(encode_value(cluster, Cluster))
    assert decode_value(json.loads(text), Cluster) == cluster


@pytest.mark.parametrize("text", ["3:2", "1/0", 1.5, "1e99999999"])
def test_what_is_no_fraction_is_refused_with_its_path(text: object) -> None:
    data = cast("dict[str, object]", encode_value(LEAF, Tier))
    with pytest.raises(FieldError, match=r"oversubscription: .* must be a fraction such as"):
        decode_value({**data, "oversubscription": text}, Tier)


def test_each_tier_sends_up_what_oversubscription_leaves() -> None:
    assert FULL.node_bytes_per_s == 20
    assert FULL.uplink_bytes_per_s(0) == Fraction(2 * 20 * 2, 3)
    assert FULL.uplink_bytes_per_s(1) == Fraction(12 * 20, 3)


def test_the_last_domain_may_be_smaller() -> None:
    assert (BARE.domains, FULL.domains) == (12, 3)


WRONG: dict[str, tuple[Callable[[], object], str]] = {
    "no nodes below a switch": (
        lambda: replace(LEAF, nodes_below=0),
        "leaf: nodes_below 0 must be at least 1",
    ),
    "nothing goes up": (
        lambda: replace(LEAF, oversubscription=Fraction(0)),
        "leaf: oversubscription 0 must be more than 0",
    ),
    "time runs back": (
        lambda: replace(LEAF, latency_ps=-1),
        "leaf: latency_ps -1 must be at least 0",
    ),
    "tiers that do not nest": (
        lambda: Fabric(kind=FAT_TREE, tiers=(LEAF, replace(SPINE, nodes_below=3))),
        "spine: nodes_below 3 must be a multiple of 2, those of leaf",
    ),
    "tiers on one switch": (
        lambda: Fabric(tiers=(LEAF,)),
        "fabric single_switch: has no tiers, 1 given",
    ),
    "a tree without tiers": (
        lambda: Fabric(kind=FAT_TREE),
        "fabric fat_tree: needs at least one tier",
    ),
    "edges that nothing uses": (
        lambda: Fabric(edges=IRREGULAR.fabric.edges),
        "fabric single_switch: edges: 1 must be 0",
    ),
    "boards that cut a GPU": (
        lambda: replace(BOARDS, gpus_per_node=3),
        "board_link: two boards need an even number of GPUs and one node",
    ),
    "leaves that cut domains": (
        lambda: replace(FULL, nodes_per_domain=3),
        "leaf: nodes_below 2 must divide, or be a multiple of, the 3 nodes of a domain",
    ),
    "a node without an edge": (
        lambda: replace(IRREGULAR, nodes=2),
        "fabric: no edge for node1 of 2 nodes",
    ),
    "an empty domain": (
        lambda: replace(BARE, nodes_per_domain=0),
        "nodes_per_domain: 0 must be at least 1",
    ),
    "copies without PCIe": (
        lambda: replace(FULL, pcie_link=None),
        "copies: need pcie, which this node does not describe",
    ),
    "drives that answer before they are asked": (
        lambda: Drives(count=1, capacity_bytes=1, latency_ps=-1),
        "drives: latency_ps -1 must be at least 0",
    ),
    "no cores": (
        lambda: Cpu(
            sockets=1, cores_per_socket=0, adam_share=Fraction(1), elementwise_share=Fraction(1)
        ),
        "cpu: cores_per_socket 0 must be at least 1",
    ),
    "a host without memory": (
        lambda: Host(memory_bytes=0, memory_bytes_per_s=1),
        "host: memory_bytes must be more than 0",
    ),
    "no drives": (
        lambda: Drives(count=0, capacity_bytes=1, read_bytes_per_s=1, write_bytes_per_s=1),
        "drives: count must be more than 0",
    ),
}


@pytest.mark.parametrize(("make", "expected"), WRONG.values(), ids=WRONG.keys())
def test_what_cannot_exist_is_refused_in_one_line(
    make: Callable[[], object], expected: str
) -> None:
    with pytest.raises(ClusterError) as caught:
        make()
    assert str(caught.value) == expected
