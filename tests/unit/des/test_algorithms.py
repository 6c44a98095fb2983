"""Algorithms in the simulation: forced, chosen by fitted constants, beside each other."""

from dataclasses import replace

import pytest
from drawn_clusters import NO_MODEL

from zsim.backend.backend import Job
from zsim.cluster.cluster import Cluster, Gpu, Link
from zsim.dtype import DType
from zsim.network.algorithm.activity import Collective, GroupShape
from zsim.network.algorithm.algorithm import Bandwidths
from zsim.network.link_load import Decision
from zsim.network.tuner import choose
from zsim.schedule.builder import COMMUNICATION, COMPUTE, ScheduleBuilder
from zsim.schedule.schedule import Schedule
from zsim_des import SimBackend
from zsim_lab.fit.constants import START

GB = 10**9
CLUSTER = Cluster(
    name="16 per node",
    nodes=4,
    gpus_per_node=16,
    gpu=Gpu(name="any", memory_bytes=2**40, memory_bytes_per_s=10**12, rates=()),
    switch_link=Link(bytes_per_s=300 * GB, latency_ps=500_000),
    nics_per_node=16,
    nic_link=Link(bytes_per_s=12_500_000_000, latency_ps=2_000_000),
)
# The way between two nodes is 2 x 500 ns on the switches and 2 x 2,000 ns outside: 5 us, as the
# peer's 2 hops of 2,500 ns.
SIZE = 2**30


def collective(kind: Collective, ranks: int) -> Schedule:
    build = ScheduleBuilder.of("one", data=ranks)
    group = build.group("data", "data")
    count = SIZE // 4
    whole = build.buffer("whole", count, dtype=DType.FP32)
    shard = build.buffer("shard", count // ranks, dtype=DType.FP32)
    build.step.allocate(whole, shard)
    match kind:
        case Collective.ALL_GATHER:
            build.step.all_gather("it", group, shard.all, whole.all)
        case Collective.REDUCE_SCATTER:
            build.step.reduce_scatter("it", group, whole.all, shard.all)
        case _:
            build.step.all_reduce("it", group, whole.all, whole.all)
    return build.schedule()


def step_ps(schedule: Schedule, cluster: Cluster, algorithm: str | None = None) -> int:
    backend = SimBackend(decision=Decision(algorithm=algorithm, chunks=4))
    (end_ps,) = backend.step_ends_ps(
        Job(schedule=schedule, model=NO_MODEL, cluster=cluster, steps=1)
    )
    return end_ps


@pytest.mark.parametrize(
    ("kind", "nodes", "expected_ms"),
    [
        (Collective.ALL_GATHER, 4, 4.941),
        (Collective.REDUCE_SCATTER, 4, 4.942),
        (Collective.ALL_REDUCE, 4, 9.882),
        (Collective.ALL_GATHER, 64, 7.401),
    ],
)
def test_a_hierarchical_collective_takes_as_long_as_astra_sim_says(
    kind: Collective, nodes: int, expected_ms: float
) -> None:
    took_ps = step_ps(collective(kind, 16 * nodes), replace(CLUSTER, nodes=nodes), "hierarchical")
    assert took_ps / 1e9 == pytest.approx(expected_ms, rel=0.005)


@pytest.mark.parametrize("nodes", [1, 4])
def test_with_fitted_constants_a_collective_takes_what_the_tuner_says(nodes: int) -> None:
    cluster = replace(CLUSTER, nodes=nodes, network=START)
    links = Bandwidths(gpu=300 * GB, node=200 * GB, pair=25 * GB)
    shape = GroupShape(ranks=16 * nodes, nodes=nodes)
    for kind in (Collective.ALL_GATHER, Collective.REDUCE_SCATTER, Collective.ALL_REDUCE):
        chosen = choose(START, kind, SIZE, shape, links=links)
        alone_ps = chosen.time_ps(SIZE, gpu_bytes_per_s=links.gpu, node_bytes_per_s=links.node)
        assert step_ps(collective(kind, 16 * nodes), cluster) == pytest.approx(alone_ps, rel=1e-9)


def test_a_tree_is_forced_where_it_can_be_and_all_else_stays_a_ring() -> None:
    gather, reduce = (
        collective(kind, 64) for kind in (Collective.ALL_GATHER, Collective.ALL_REDUCE)
    )
    assert step_ps(gather, CLUSTER, "tree") == step_ps(gather, CLUSTER)
    assert step_ps(reduce, CLUSTER, "tree") > step_ps(reduce, CLUSTER)
    assert step_ps(reduce, CLUSTER, "ring") == step_ps(reduce, CLUSTER)


def test_a_switch_that_reduces_is_faster_than_a_ring_in_a_node() -> None:
    node = replace(CLUSTER, nodes=1)
    reduce = collective(Collective.ALL_REDUCE, 16)
    assert step_ps(reduce, node, "nvls") < 0.6 * step_ps(reduce, node)


def test_folded_and_unfolded_agree_to_the_picosecond_with_fitted_constants() -> None:
    build = ScheduleBuilder.of("two at once", data=6, tensor=4)
    groups = [build.group(axis, axis) for axis in ("data", "tensor")]
    for name, group in zip((COMPUTE, COMMUNICATION), groups, strict=True):
        whole = build.buffer(name, 2**20)
        build.step.allocate(whole)
        build.step.all_reduce(f"reduce-{name}", group, whole.all, whole.all, stream=name)
    cluster = replace(CLUSTER, nodes=6, gpus_per_node=4, nics_per_node=2, network=START)
    job = Job(schedule=build.schedule(), model=NO_MODEL, cluster=cluster, steps=2)
    for decision in (Decision(), Decision(algorithm="hierarchical")):
        folded, unfolded = (
            SimBackend(unfold=unfold, decision=decision).step_ends_ps(job)
            for unfold in (False, True)
        )
        assert folded == unfolded
