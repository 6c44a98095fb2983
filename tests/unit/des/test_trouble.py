"""Slow and dead things, and neighbours: what they cost, worked out on paper."""

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

import pytest
from drawn_clusters import NO_MODEL

from zsim.backend.backend import Job, NoRouteError, RefusedError
from zsim.cluster.cluster import Cluster, Fabric, FabricEdge, Gpu, Link, Tier
from zsim.cluster.fabric_kind import (
    EXPLICIT,
    FAT_TREE,
    RAIL_ONLY,
    RAIL_OPTIMIZED,
    SINGLE_SWITCH,
    FabricKind,
)
from zsim.cluster.fault import (
    DeadEdge,
    DeadNic,
    DeadSwitchLink,
    DeadUplinks,
    Fault,
    Jitter,
    Neighbour,
    SlowEdge,
    SlowGpu,
    SlowNic,
    SlowSwitchLink,
    SlowUplinks,
    Window,
)
from zsim.schedule.builder import ScheduleBuilder
from zsim_des import SimBackend

# One byte per picosecond of memory, one per 10 ps on a GPU's link, one per 100 ps on a NIC.
CLUSTER = Cluster(
    name="round",
    nodes=4,
    gpus_per_node=2,
    gpu=Gpu(name="round", memory_bytes=10**6, memory_bytes_per_s=10**12, rates=()),
    switch_link=Link(bytes_per_s=10**11),
    nics_per_node=2,
    nic_link=Link(bytes_per_s=10**10),
)
LEAVES = (Tier(name="leaf", nodes_below=2),)


def step_ps(
    faults: Sequence[Fault] = (),
    neighbours: Sequence[Neighbour] = (),
    *,
    cluster: Cluster = CLUSTER,
    seed: int = 0,
) -> int:
    """Each rank fills 4,000 bytes, then all gather 100 bytes of each across nodes on their rail."""
    build = ScheduleBuilder.of("step", data=4, tensor=2)
    group = build.group("data", "data")
    work, shard, whole = (build.buffer(n, s) for n, s in (("w", 1000), ("x", 25), ("y", 100)))
    build.step.allocate(work, shard, whole)
    done = build.step.fill("work", work.all, 0.0)
    build.step.all_gather("gather", group, shard.all, whole.all, after=[done])
    job = Job(schedule=build.schedule(), model=NO_MODEL, cluster=cluster)
    ends = {
        unfold: SimBackend(unfold=unfold, faults=faults, neighbours=neighbours).step_ends_ps(
            job, seed=seed
        )
        for unfold in (False, True)
    }
    assert ends[False] == ends[True]
    return ends[False][0]


# Work takes 4,000 ps, and 300 bytes through each NIC 30,000.
HEALTHY_PS = 34_000


def test_without_trouble_a_step_takes_what_it_takes() -> None:
    assert step_ps() == HEALTHY_PS


def test_a_slow_gpu_keeps_its_group_waiting() -> None:
    # The other group, on the other rail, is done in time.
    assert step_ps([SlowGpu(rank=3, factor=Fraction(3, 2))]) == 6_000 + 30_000


def test_a_gpu_that_is_slow_for_a_while_loses_only_that() -> None:
    # From 1,000 to 2,000 ps at half its speed: 500 ps of work lost.
    window = Window(start_ps=1_000, end_ps=2_000)
    assert step_ps([SlowGpu(rank=3, factor=Fraction(2), window=window)]) == HEALTHY_PS + 500


def test_a_slow_nic_slows_the_rings_that_use_it() -> None:
    assert step_ps([SlowNic(node=1, nic=0, factor=Fraction(2))]) == 4_000 + 60_000


def test_a_nic_that_is_slow_for_a_while_loses_only_that() -> None:
    window = Window(start_ps=10_000, end_ps=20_000)
    slow = SlowNic(node=1, nic=0, factor=Fraction(4), window=window)
    assert step_ps([slow]) == HEALTHY_PS + 7_500


def test_a_slow_switch_link_counts_once_it_is_the_narrowest() -> None:
    assert step_ps([SlowSwitchLink(rank=0, factor=Fraction(10))]) == HEALTHY_PS
    assert step_ps([SlowSwitchLink(rank=0, factor=Fraction(20))]) == 4_000 + 60_000


@pytest.mark.parametrize("kind", [SINGLE_SWITCH, FAT_TREE, RAIL_ONLY])
def test_the_other_nic_takes_over_for_a_dead_one(kind: FabricKind) -> None:
    tiers = LEAVES if kind != SINGLE_SWITCH else ()
    cluster = replace(CLUSTER, fabric=Fabric(kind=kind, tiers=tiers))
    assert step_ps([DeadNic(node=1, nic=0)], cluster=cluster) == 4_000 + 60_000


def test_a_node_without_a_nic_is_cut_off() -> None:
    both = [DeadNic(node=1, nic=0), DeadNic(node=1, nic=1)]
    with pytest.raises(NoRouteError, match="node 1: no NIC is left"):
        step_ps(both)


def test_rails_that_have_no_rail_in_common_are_cut() -> None:
    rails = replace(CLUSTER, fabric=Fabric(kind=RAIL_ONLY))
    crossed = [DeadNic(node=1, nic=0), DeadNic(node=2, nic=1)]
    with pytest.raises(NoRouteError, match="no NIC is left"):
        step_ps(crossed, cluster=rails)
    # On one switch they find each other: each node's two rings share the NIC that works.
    assert step_ps(crossed) == 4_000 + 60_000


def test_slow_uplinks_slow_what_leaves_their_group() -> None:
    tree = replace(CLUSTER, fabric=Fabric(kind=FAT_TREE, tiers=LEAVES))
    # Two rings leave the group through what four NICs could fill.
    slow = SlowUplinks(tier=0, group=1, factor=Fraction(4))
    assert step_ps([slow], cluster=tree) == 4_000 + 60_000
    assert step_ps([replace(slow, factor=Fraction(2))], cluster=tree) == HEALTHY_PS


def test_a_nic_that_is_dead_for_a_while_is_worked_around_for_that_while() -> None:
    # From 10,000 to 20,000 ps both rings of node 1 share a NIC: 5,000 ps of theirs lost.
    window = Window(start_ps=10_000, end_ps=20_000)
    assert step_ps([DeadNic(node=1, nic=0, window=window)]) == HEALTHY_PS + 5_000
    # From the middle on, the second half takes twice as long.
    for_good = Window(start_ps=19_000)
    assert step_ps([DeadNic(node=1, nic=0, window=for_good)]) == HEALTHY_PS + 15_000


def test_a_cut_counts_only_while_something_has_to_cross_it() -> None:
    def both(window: Window) -> list[Fault]:
        return [DeadNic(node=1, nic=nic, window=window) for nic in range(2)]

    with pytest.raises(NoRouteError, match="node 1: no NIC is left"):
        step_ps(both(Window(start_ps=10_000, end_ps=10_001)))
    assert step_ps(both(Window(start_ps=HEALTHY_PS))) == HEALTHY_PS
    assert step_ps(both(Window(start_ps=1_000, end_ps=4_000))) == HEALTHY_PS


def test_of_two_nics_that_serve_a_gpu_the_other_one_carries_it_all() -> None:
    four = replace(CLUSTER, nics_per_node=4)
    assert step_ps(cluster=four) == 4_000 + 15_000
    assert step_ps([DeadNic(node=1, nic=0)], cluster=four) == 4_000 + 30_000
    both = [DeadNic(node=1, nic=0), DeadNic(node=1, nic=1)]
    assert step_ps(both, cluster=four) == 4_000 + 30_000  # both rings through two NICs


def test_without_its_link_to_the_switch_a_gpu_uses_pcie() -> None:
    dead = [DeadSwitchLink(rank=2)]
    with pytest.raises(NoRouteError, match="rank 2: without its link to the switch"):
        step_ps(dead)  # its NIC hangs on the switch
    pcie = replace(CLUSTER, pcie_link=Link(bytes_per_s=10**11), gpus_per_pcie_switch=2)
    assert step_ps(dead, cluster=pcie) == HEALTHY_PS
    # Within the node: 100 bytes at 10 ps over the switch, or over PCIe at 20.
    slow = replace(pcie, pcie_link=Link(bytes_per_s=5 * 10**10))
    assert pair_ps(cluster=slow) == 1_000
    assert pair_ps(dead, cluster=slow) == 2_000
    # Each on a PCIe switch of its own: through the NICs, at 100 ps.
    assert pair_ps(dead, cluster=replace(slow, gpus_per_pcie_switch=1)) == 10_000


def pair_ps(faults: Sequence[Fault] = (), *, cluster: Cluster) -> int:
    """The two ranks of each node gather 100 bytes of each."""
    build = ScheduleBuilder.of("pair", data=4, tensor=2)
    group = build.group("tensor", "tensor")
    shard, whole = build.buffer("x", 25), build.buffer("y", 50)
    build.step.allocate(shard, whole)
    build.step.all_gather("gather", group, shard.all, whole.all)
    job = Job(schedule=build.schedule(), model=NO_MODEL, cluster=cluster)
    (end_ps,) = SimBackend(faults=faults).step_ends_ps(job)
    return end_ps


def test_without_uplinks_rails_change_and_trees_are_cut() -> None:
    rails = replace(CLUSTER, fabric=Fabric(kind=RAIL_OPTIMIZED, tiers=LEAVES))
    tree = replace(CLUSTER, fabric=Fabric(kind=FAT_TREE, tiers=LEAVES))
    # Both rings leave the group on rail 1.
    assert step_ps([DeadUplinks(tier=0, group=1, rail=0)], cluster=rails) == 4_000 + 60_000
    assert step_ps([SlowUplinks(tier=0, group=1, rail=0, factor=Fraction(4))], cluster=rails) == (
        4_000 + 60_000  # a quarter of two NICs, for one ring
    )
    with pytest.raises(NoRouteError, match="leaf 1: no uplink is left"):
        step_ps([DeadUplinks(tier=0, group=1)], cluster=tree)
    with pytest.raises(NoRouteError, match="no NIC is left"):
        step_ps([DeadUplinks(tier=0, group=1)], cluster=rails)


def test_equal_ways_through_listed_links_share_and_take_over() -> None:
    # Each node on its leaf with 20 bytes per ns, each leaf on two spines with 10.
    edges = [(f"node{n}", f"leaf{n}", 2) for n in range(4)]
    edges += [(f"leaf{n}", spine, 1) for n in range(4) for spine in ("a", "b")]
    fabric = Fabric(
        kind=EXPLICIT,
        edges=tuple(
            FabricEdge(source=one, target=other, link=Link(bytes_per_s=width * 10**10))
            for one, other, width in edges
        ),
    )
    listed = replace(CLUSTER, fabric=fabric)
    assert step_ps(cluster=listed) == HEALTHY_PS
    dead = DeadEdge(source="a", target="leaf1")
    assert step_ps([dead], cluster=listed) == 4_000 + 60_000
    assert step_ps([SlowEdge(source="leaf1", target="a", factor=Fraction(2))], cluster=listed) == (
        4_000 + 60_000  # half of the bytes go that way, as fast as they can
    )
    alone = r"no way leads from node0 to node1: node1 \(1 of 4 nodes\) cannot"
    with pytest.raises(NoRouteError, match=alone):
        step_ps([dead, DeadEdge(source="leaf1", target="b")], cluster=listed)


def test_a_neighbour_takes_its_fair_share_and_no_more_than_it_wants() -> None:
    greedy = Neighbour(first_node=0, last_node=1, bytes_per_s=10**12)
    assert step_ps(neighbours=[greedy]) == 4_000 + 60_000
    modest = replace(greedy, bytes_per_s=25 * 10**8)
    assert step_ps(neighbours=[modest]) == 4_000 + 40_000
    # It leaves when half of its share of the time has passed: 150 bytes each, then 150 alone.
    visit = replace(greedy, window=Window(end_ps=34_000))
    assert step_ps(neighbours=[visit]) == 34_000 + 15_000


def test_jitter_repeats_with_its_seed_and_makes_all_wait_for_the_slowest() -> None:
    jitter = [Jitter(deviation=0.1)]
    one = step_ps(jitter, seed=1)
    assert one == step_ps(jitter, seed=1) != step_ps(jitter, seed=2)
    # The larger of two largest of four draws: between one deviation less and four more.
    assert 4_000 * 0.9 + 30_000 < one < 4_000 * 1.5 + 30_000


def test_faults_of_one_question_are_those_of_a_backend() -> None:
    build = ScheduleBuilder.of("question", data=8)
    x = build.buffer("x", 1000)
    build.step.allocate(x)
    build.step.fill("work", x.all, 0.0)
    job = Job(schedule=build.schedule(), model=NO_MODEL, cluster=CLUSTER)
    faults = [SlowGpu(rank=3, factor=Fraction(3, 2))]
    backend = SimBackend()
    assert backend.step_ends_ps(job) == (4_000,)
    assert backend.step_ends_ps(job, faults=faults) == (6_000,)
    assert backend.step_ends_ps(job) == (4_000,)
    assert SimBackend(faults=faults).run(job, seed=0).step_end_ps == (6_000,)


def test_a_rank_in_trouble_is_a_class_of_its_own() -> None:
    build = ScheduleBuilder.of("large", data=1000)
    group = build.group("data", "data")
    x = build.buffer("x", 1000)
    build.step.allocate(x)
    build.step.fill("work", x.all, 0.0)
    build.step.all_reduce("sum", group, x.all)
    large = replace(CLUSTER, nodes=500)
    job = Job(schedule=build.schedule(), model=NO_MODEL, cluster=large)
    trace = SimBackend(faults=[SlowGpu(rank=7, factor=Fraction(2))]).run(job, seed=0)
    assert [(rank.rank, rank.stands_for) for rank in trace.ranks] == [(0, 999), (7, 1)]


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (SlowGpu(rank=8, factor=Fraction(2)), "fault 0: rank: 8 must be 0 to 7: there are 8 ranks"),
        (DeadNic(node=4, nic=0), "fault 0: node: 4 must be 0 to 3: there are 4 nodes"),
        (DeadNic(node=0, nic=2), "fault 0: nic: 2 must be 0 to 1: there are 2 NICs of a node"),
        (
            DeadEdge(source="a", target="b"),
            "fault 0: source, target: the fabric lists no link from a to b",
        ),
        (
            SlowUplinks(tier=0, group=0, factor=Fraction(2)),
            "fault 0: tier: 0 is none: there are 0 tiers of the fabric",
        ),
    ],
)
def test_what_the_cluster_does_not_have_cannot_fail(fault: Fault, message: str) -> None:
    with pytest.raises(RefusedError) as caught:
        step_ps([fault])
    assert str(caught.value) == message
