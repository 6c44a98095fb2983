"""An all-to-all in a simulated run: the blocks that arrive, and the time."""

from dataclasses import replace

import pytest
from drawn_clusters import NO_MODEL
from exact_training import cluster
from numbered_blocks import expected, numbered

from zsim.backend.backend import Job
from zsim.cluster.cluster import Cluster, Gpu, Link
from zsim.network.algorithm.activity import Collective, GroupShape
from zsim.network.algorithm.algorithm import Bandwidths
from zsim.network.link_load import Decision
from zsim.network.tuner import choose
from zsim.proof import check
from zsim.schedule.builder import ScheduleBuilder
from zsim.schedule.schedule import Schedule
from zsim_des import SimBackend
from zsim_des.values import Carrier, Modular
from zsim_lab.fit.constants import START

GB = 10**9
SIZE = 2**28
CLUSTER = Cluster(
    name="8 per node",
    nodes=1,
    gpus_per_node=8,
    gpu=Gpu(name="any", memory_bytes=2**40, memory_bytes_per_s=10**12, rates=()),
    switch_link=Link(bytes_per_s=400 * GB, latency_ps=500_000),
    nics_per_node=8,
    nic_link=Link(bytes_per_s=50 * GB, latency_ps=2_000_000),
)


@pytest.mark.parametrize("uneven", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_each_rank_receives_its_block_of_every_member_in_order(ranks: int, uneven: bool) -> None:
    schedule = numbered(ranks, uneven=uneven)
    assert check(schedule, compares=not uneven) == ()
    carrier = Carrier(schedule, Modular(schedule))
    job = Job(schedule=schedule, model=NO_MODEL, cluster=cluster(ranks))
    SimBackend(unfold=True, watcher=carrier).step_ends_ps(job)
    carrier.settle()
    assert carrier.faults == []
    for rank in range(ranks):
        came = carrier.memory[rank].blocks[f"came{rank}"].memory
        assert [float(each) for each in came] == expected(ranks, rank, uneven=uneven)


def one(ranks: int) -> Schedule:
    build = ScheduleBuilder.of("one", data=ranks)
    group = build.group("data", "data")
    source, target = (build.buffer(name, SIZE // 4) for name in ("source", "target"))
    build.step.allocate(source, target)
    build.step.all_to_all("it", group, source.all, target.all)
    return build.schedule()


def step_ps(nodes: int, cluster: Cluster, *, unfold: bool = False) -> int:
    job = Job(schedule=one(8 * nodes), model=NO_MODEL, cluster=replace(cluster, nodes=nodes))
    (end_ps,) = SimBackend(unfold=unfold).step_ends_ps(job)
    return end_ps


def test_within_a_node_a_rank_sends_seven_of_eight_blocks_over_its_link() -> None:
    sent_s = 7 / 8 * SIZE / (400 * GB)
    assert step_ps(1, CLUSTER) / 1e12 == pytest.approx(1e-6 + sent_s, rel=1e-6)


@pytest.mark.parametrize("nodes", [2, 4])
def test_between_nodes_the_nics_carry_the_blocks_for_other_nodes(nodes: int) -> None:
    outside_s = (nodes - 1) / nodes * SIZE / (50 * GB)
    assert step_ps(nodes, CLUSTER) / 1e12 == pytest.approx(outside_s, rel=0.01)


@pytest.mark.parametrize("nodes", [1, 2, 4])
def test_with_fitted_constants_it_takes_as_long_as_the_tuner_says(nodes: int) -> None:
    shape = GroupShape(ranks=8 * nodes, nodes=nodes)
    links = Bandwidths(gpu=400 * GB, node=400 * GB, pair=50 * GB)
    chosen = choose(START, Collective.ALL_TO_ALL, SIZE, shape, links=links)
    alone_ps = chosen.time_ps(SIZE, gpu_bytes_per_s=links.gpu, node_bytes_per_s=links.node)
    fitted = replace(CLUSTER, network=START)
    assert chosen.algorithm == "direct"
    assert step_ps(nodes, fitted) == pytest.approx(alone_ps, rel=1e-4)
    assert step_ps(nodes, fitted, unfold=True) == step_ps(nodes, fitted)


@pytest.mark.parametrize("nodes", [2, 4])
def test_a_hierarchical_exchange_pays_two_hops_and_moves_rows_of_other_nodes_twice(
    nodes: int,
) -> None:
    wide = replace(CLUSTER, nic_link=Link(bytes_per_s=400 * GB))  # the GPUs' links are the limit
    job = Job(schedule=one(8 * nodes), model=NO_MODEL, cluster=replace(wide, nodes=nodes))
    decision = Decision(algorithm="hierarchical", chunks=1)
    (end_ps,) = SimBackend(decision=decision).step_ends_ps(job)
    near_s, far_s = 7 / 8 * SIZE / (400 * GB), (nodes - 1) / nodes * SIZE / (400 * GB)
    assert end_ps / 1e12 == pytest.approx(near_s + far_s, rel=0.02)
    direct_s = (8 * nodes - 1) / (8 * nodes) * SIZE / (400 * GB)
    assert step_ps(nodes, wide) / 1e12 == pytest.approx(direct_s, rel=0.02)
