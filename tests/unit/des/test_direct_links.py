"""Nodes whose GPUs have links to each other and no switch."""

from dataclasses import replace
from fractions import Fraction

import pytest
from drawn_clusters import NO_MODEL
from hypothesis import given
from hypothesis import strategies as st

from zsim.backend.backend import Job
from zsim.cluster.cluster import Cluster, ClusterError, Gpu, Link
from zsim.network.algorithm.activity import Collective, GroupShape
from zsim.network.link_load import Decision, LinkLoads, PathLatency, bandwidths
from zsim.schedule.builder import COMMUNICATION, COMPUTE, ScheduleBuilder
from zsim.schedule.schedule import Schedule
from zsim_des import SimBackend
from zsim_lab.fit.constants import START

GB = 10**9
SIZE = 3 * 2**28
SWITCHED = Cluster(
    name="four GPUs",
    nodes=1,
    gpus_per_node=4,
    gpu=Gpu(name="any", memory_bytes=2**40, memory_bytes_per_s=10**12, rates=()),
    switch_link=Link(bytes_per_s=450 * GB, latency_ps=0),
    nics_per_node=4,
    nic_link=Link(bytes_per_s=50 * GB, latency_ps=0),
    pcie_link=Link(bytes_per_s=63 * GB, latency_ps=0),
)
DIRECT = replace(SWITCHED, has_switch=False)
OVER_PCIE = replace(
    SWITCHED,
    over_pcie=True,
    switch_link=Link(bytes_per_s=48 * GB, latency_ps=0),
    board_link=Link(bytes_per_s=10 * GB, latency_ps=0),
)


def step_s(schedule: Schedule, cluster: Cluster) -> float:
    job = Job(schedule=schedule, model=NO_MODEL, cluster=cluster, steps=1)
    (end_ps,) = SimBackend().step_ends_ps(job)
    return end_ps / 1e12


def gathers(*axes: str, data: int, tensor: int) -> Schedule:
    """Return a schedule in which groups of these axes gather, all at once."""
    build = ScheduleBuilder.of("gathers", data=data, tensor=tensor)
    groups = {axis: build.group(axis, axis) for axis in axes}
    ranks = {"data": data, "tensor": tensor}
    for axis, stream in zip(axes, (COMPUTE, COMMUNICATION), strict=False):
        whole = build.buffer(f"{axis} whole", SIZE)
        shard = build.buffer(f"{axis} shard", SIZE // ranks[axis])
        build.step.allocate(whole, shard)
        build.step.all_gather(axis, groups[axis], shard.all, whole.all, stream=stream)
    return build.schedule()


def test_two_of_four_gpus_have_a_third_of_their_links_to_each_other() -> None:
    pair, all_four = gathers("tensor", data=2, tensor=2), gathers("tensor", data=1, tensor=4)
    assert step_s(pair, DIRECT) == pytest.approx(3 * step_s(pair, SWITCHED))
    assert step_s(all_four, DIRECT) == pytest.approx(step_s(all_four, SWITCHED))


def test_groups_of_other_pairs_have_links_of_their_own() -> None:
    """Beside a switch they share what a GPU has, which is more than two pairs need."""
    alone = step_s(gathers("tensor", data=2, tensor=2), DIRECT)
    both = gathers("tensor", "data", data=2, tensor=2)
    assert step_s(both, DIRECT) == pytest.approx(alone)
    assert step_s(both, SWITCHED) == pytest.approx(2 * alone / 3)


def test_a_message_to_another_gpu_has_the_links_between_the_two() -> None:
    build = ScheduleBuilder.of("ring", data=4)
    group = build.group("data", "data")
    there, here = build.buffer("there", SIZE), build.buffer("here", SIZE)
    build.step.allocate(there, here)
    build.step.send("send", group, there.all, 1)
    build.step.receive("receive", group, here.all, -1)
    build.step.together("shift", 2)
    schedule = build.schedule()
    assert step_s(schedule, DIRECT) == pytest.approx(3 * step_s(schedule, SWITCHED))


@given(ranks=st.integers(2, 8), gpus=st.integers(2, 8))
def test_a_group_has_the_links_to_its_others_and_no_more(ranks: int, gpus: int) -> None:
    direct = replace(DIRECT, gpus_per_node=gpus, gpus_per_pcie_switch=1)
    ranks = min(ranks, gpus)
    assert direct.link_share(ranks) == Fraction(ranks - 1, gpus - 1)
    assert direct.link_share(1) == replace(direct, has_switch=True).link_share(ranks) == 1
    links = bandwidths(direct, GroupShape(ranks=ranks, nodes=1))
    assert links.gpu == int(450 * GB * direct.link_share(ranks))


def test_nothing_is_reduced_in_a_switch_that_is_not_there() -> None:
    def algorithm(cluster: Cluster) -> str:
        loads = LinkLoads(
            cluster=cluster, decision=Decision(), latency=PathLatency(near_ps=0, far_ps=0)
        )
        found = loads.activity(Collective.ALL_REDUCE, 2**30, GroupShape(ranks=4, nodes=1))
        assert found is not None
        return found.algorithm

    reducing = START.changed(nvls=1.0, nvls_choice=0.7)
    assert algorithm(replace(SWITCHED, network=reducing)) == "nvls"
    assert algorithm(replace(DIRECT, network=reducing)) == "ring"
    assert algorithm(replace(OVER_PCIE, network=reducing)) == "ring"


def test_an_algorithm_of_the_switch_cannot_be_forced_where_there_is_none() -> None:
    shape, decision = GroupShape(ranks=4, nodes=1), Decision(algorithm="nvls")
    for cluster in (DIRECT, OVER_PCIE):
        forced, free = (
            LinkLoads(cluster=cluster, decision=each, latency=PathLatency(near_ps=0, far_ps=0))
            for each in (decision, Decision())
        )
        found = forced.activity(Collective.ALL_REDUCE, 2**30, shape)
        assert found == free.activity(Collective.ALL_REDUCE, 2**30, shape)


def test_over_pcie_a_pair_has_its_slots_and_all_share_what_joins_the_cpus() -> None:
    pair, all_four = gathers("tensor", data=2, tensor=2), gathers("tensor", data=1, tensor=4)
    assert step_s(pair, OVER_PCIE) == pytest.approx(step_s(pair, SWITCHED) * 450 / 48)
    assert step_s(all_four, OVER_PCIE) == pytest.approx(step_s(all_four, SWITCHED) * 450 / 10)


def test_pcie_alone_is_no_mesh_and_no_rack() -> None:
    for changes in ({"has_switch": False}, {"nodes_per_domain": 2, "board_link": None}):
        with pytest.raises(ClusterError, match="pcie_only: true goes without"):
            replace(OVER_PCIE, **changes)


def test_bytes_leave_such_a_node_by_pcie() -> None:
    with pytest.raises(ClusterError, match=r"nvswitch: false needs \[pcie\]"):
        replace(DIRECT, pcie_link=None)
