"""What a planner asks first: fewer NICs, a wider spine, a rack of NVLink, rails."""

from dataclasses import replace
from fractions import Fraction

import pytest
from drawn_clusters import NO_MODEL

from zsim.backend.backend import Job
from zsim.cluster.cluster import Cluster, Fabric, FabricEdge, Gpu, Link, Tier
from zsim.cluster.fabric_kind import EXPLICIT, FAT_TREE, RAIL_ONLY, RAIL_OPTIMIZED, FabricKind
from zsim.schedule.builder import ScheduleBuilder
from zsim.schedule.schedule import Place, Pool
from zsim_des import SimBackend

NODE = Cluster(
    name="8 GPUs and 8 NICs",
    nodes=9,
    gpus_per_node=8,
    gpu=Gpu(name="any", memory_bytes=10**12, memory_bytes_per_s=10**12, rates=()),
    switch_link=Link(bytes_per_s=450 * 10**9, latency_ps=500_000),
    nics_per_node=8,
    nic_link=Link(bytes_per_s=50 * 10**9, latency_ps=2_500_000),
)


def tree(kind: FabricKind, oversubscription: int, nodes_below: int = 3) -> Fabric:
    narrow = Fraction(oversubscription)
    leaf = Tier(name="leaf", nodes_below=nodes_below, oversubscription=narrow, latency_ps=1000)
    return Fabric(kind=kind, tiers=(leaf,))


FABRICS = [
    Fabric(),
    *(
        tree(kind, oversubscription)
        for kind in (FAT_TREE, RAIL_OPTIMIZED, RAIL_ONLY)
        for oversubscription in (1, 4)
    ),
]


def gather_ps(cluster: Cluster, data: int, tensor: int, axis: str) -> int:
    """Picoseconds of an all-gather of 64 MiB shards in every group of an axis at once."""
    build = ScheduleBuilder.of("gather", data=data, tensor=tensor)
    group = build.group("group", axis)
    size = {"data": data, "tensor": tensor}[axis]
    shard, whole = build.buffer("shard", 2**24), build.buffer("whole", 2**24 * size)
    build.step.allocate(shard, whole)
    build.step.all_gather("gather", group, shard.all, whole.all)
    job = Job(schedule=build.schedule(), model=NO_MODEL, cluster=cluster)
    (end_ps,) = SimBackend().run(job, seed=0).step_end_ps
    return end_ps


@pytest.mark.parametrize("fabric", FABRICS, ids=lambda fabric: str(fabric.kind))
@pytest.mark.parametrize(("data", "tensor"), [(72, 1), (9, 8), (36, 2)])
def test_half_the_nics_never_helps(fabric: Fabric, data: int, tensor: int) -> None:
    whole = replace(NODE, fabric=fabric)
    half = replace(whole, nics_per_node=4)
    assert gather_ps(half, data, tensor, "data") >= gather_ps(whole, data, tensor, "data")


def test_half_the_nics_halve_a_group_that_needs_them_all() -> None:
    half = replace(NODE, nics_per_node=4)
    ratio = gather_ps(half, 9, 8, "data") / gather_ps(NODE, 9, 8, "data")
    assert ratio == pytest.approx(2, abs=0.02)


def test_twice_the_spine_helps_only_when_it_was_narrow() -> None:
    # 8 data groups leave every leaf at once, one NIC each of the 24 below it: 3 to 1 is enough.
    times = {
        narrow: gather_ps(replace(NODE, fabric=tree(FAT_TREE, narrow)), 9, 8, "data")
        for narrow in (1, 3, 6, 12)
    }
    assert times[1] == times[3]
    assert times[6] / times[3] == pytest.approx(2, abs=0.02)
    assert times[12] / times[6] == pytest.approx(2, abs=0.02)


def test_a_rack_of_nvlink_beats_nodes_of_eight_for_72_ranks_that_split_tensors() -> None:
    rack = replace(NODE, nodes=18, gpus_per_node=4, nics_per_node=4, nodes_per_domain=18)
    assert gather_ps(rack, 1, 72, "tensor") < gather_ps(NODE, 1, 72, "tensor")
    # 71 shards at 450 GB/s, 71 steps of two hops.
    assert gather_ps(rack, 1, 72, "tensor") == -(-71 * 2**26 * 10**3 // 450) + 71 * 10**6


@pytest.mark.parametrize("narrow", [1, 4])
def test_rails_equal_a_fat_tree_when_traffic_stays_on_rails(narrow: int) -> None:
    rails, only, fat = (
        gather_ps(replace(NODE, fabric=tree(kind, narrow)), 9, 8, "data")
        for kind in (RAIL_OPTIMIZED, RAIL_ONLY, FAT_TREE)
    )
    assert rails == only == fat


def test_pcie_narrower_than_the_nics_limits_what_leaves_a_node() -> None:
    slow = replace(NODE, pcie_link=Link(bytes_per_s=25 * 10**9))
    ratio = gather_ps(slow, 9, 8, "data") / gather_ps(NODE, 9, 8, "data")
    assert ratio == pytest.approx(2, abs=0.02)
    wide = replace(NODE, pcie_link=Link(bytes_per_s=64 * 10**9))
    assert gather_ps(wide, 9, 8, "data") == gather_ps(NODE, 9, 8, "data")


def test_boards_limit_what_crosses_them() -> None:
    boards = replace(NODE, nodes=1, board_link=Link(bytes_per_s=50 * 10**9))
    # A ring of 8 crosses once each way, at a ninth of a GPU's link.
    ratio = gather_ps(boards, 1, 8, "tensor") / gather_ps(replace(NODE, nodes=1), 1, 8, "tensor")
    assert ratio == pytest.approx(9, rel=0.01)
    # Four rings over 0 and 4, 1 and 5, ... share the link; within a board nothing crosses it.
    whole = replace(NODE, nodes=1)
    ratio = gather_ps(boards, 2, 4, "data") / gather_ps(whole, 2, 4, "data")
    assert ratio == pytest.approx(36, rel=0.01)
    assert gather_ps(boards, 2, 4, "tensor") == gather_ps(whole, 2, 4, "tensor")


def test_changing_rails_costs_the_links_of_the_gpus_that_relay() -> None:
    """A ring over whole nodes enters at the next GPU: on rails the byte changes rails before."""
    fast = Link(bytes_per_s=4000 * 10**9)
    node = replace(NODE, nic_link=fast, pcie_link=fast, gpus_per_node=2, nics_per_node=2)
    rails, fat = (
        gather_ps(replace(node, fabric=tree(kind, 1)), 18, 1, "data")
        for kind in (RAIL_OPTIMIZED, FAT_TREE)
    )
    # Of two halves one stays in the node; the other passes its links too, if it is relayed.
    assert rails / fat == pytest.approx(2, abs=0.05)


def copy_ps(cluster: Cluster, *, gathers: bool = False) -> int:
    """Every rank copies 64 MiB to the host; perhaps while it gathers as much from 9 nodes."""
    build = ScheduleBuilder.of("copy", data=9, tensor=8)
    build.pools.append(Pool(name="host", place=Place.HOST))
    here, there = build.buffer("here", 2**24), build.buffer("there", 2**24, pool="host")
    shard, whole = build.buffer("shard", 2**24), build.buffer("whole", 2**24 * 9)
    build.step.allocate(here, there, shard, whole)
    build.step.copy("copy", here.all, there.all)
    if gathers:
        build.step.all_gather("gather", build.group("data", "data"), shard.all, whole.all)
    job = Job(schedule=build.schedule(), model=NO_MODEL, cluster=cluster)
    ends = {unfold: SimBackend(unfold=unfold).step_ends_ps(job) for unfold in (False, True)}
    assert ends[False] == ends[True]
    return ends[False][0]


def test_copies_to_the_host_share_pcie() -> None:
    own = replace(NODE, pcie_link=Link(bytes_per_s=2**35), gpus_per_pcie_switch=1)
    assert copy_ps(own) == 2**26 * 10**12 // 2**35
    # Of a PCIe switch with two GPUs the way to the host is as wide as that of one.
    assert copy_ps(replace(own, gpus_per_pcie_switch=2)) == 2 * copy_ps(own)
    # What leaves for other nodes takes the GPU's way to the PCIe switch too: 1 + 8 parts.
    both = copy_ps(replace(own, nic_link=Link(bytes_per_s=2**40)), gathers=True)
    assert both / copy_ps(own) == pytest.approx(9, rel=0.01)
    # Without PCIe a copy takes what device memory does: as much to read as to write.
    assert copy_ps(NODE) == 2 * 2**26


def test_an_explicit_fabric_is_as_fast_as_its_narrowest_link_on_the_ring() -> None:
    # A star of 9 nodes; node 0 hangs on 100 GB/s, a quarter of its NICs, the others on 400.
    edges = tuple(
        FabricEdge(
            source=f"node{node}",
            target="switch",
            link=Link(bytes_per_s=(400 if node else 100) * 10**9, latency_ps=7),
        )
        for node in range(9)
    )
    star = replace(NODE, fabric=Fabric(kind=EXPLICIT, edges=edges))
    ratio = gather_ps(star, 9, 8, "data") / gather_ps(NODE, 9, 8, "data")
    assert ratio == pytest.approx(4, abs=0.04)
    even = replace(star.fabric, edges=(*edges[1:], replace(edges[0], link=edges[1].link)))
    # Nine steps of the ring go up and down the star.
    expected_ps = gather_ps(NODE, 9, 8, "data") + 9 * 2 * 7
    assert gather_ps(replace(NODE, fabric=even), 9, 8, "data") == expected_ps
