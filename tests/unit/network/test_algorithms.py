"""Algorithms of collectives: bytes and hops of each, against closed forms and published figures."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zsim.cluster.profile.network import NetworkProfile, ProfileError
from zsim.network.algorithm import direct, hierarchical
from zsim.network.algorithm.activity import Activity, Collective, GroupShape, Protocol
from zsim.network.algorithm.algorithm import Bandwidths
from zsim.network.algorithm.direct import Direct
from zsim.network.algorithm.installed_algorithms import algorithms, check
from zsim.network.algorithm.nvls import Nvls
from zsim.network.algorithm.ring import Ring
from zsim.network.algorithm.tree import Tree
from zsim.network.tuner import NoAlgorithmError, choose
from zsim_lab.fit.constants import START

GB = 10**9
H100 = Bandwidths(gpu=450 * GB, node=400 * GB, pair=50 * GB)
ONCE = (Collective.ALL_GATHER, Collective.REDUCE_SCATTER)

sizes = st.integers(1, 2**34)
shapes = st.builds(
    lambda nodes, per_node: GroupShape(ranks=nodes * per_node, nodes=nodes),
    st.integers(1, 40),
    st.integers(1, 16),
)
collectives = st.sampled_from(Collective)


def alone_ps(collective: Collective, size: int, shape: GroupShape, links: Bandwidths) -> int:
    found = choose(START, collective, size, shape, links=links)
    return found.time_ps(size, gpu_bytes_per_s=links.gpu, node_bytes_per_s=links.node)


@pytest.mark.parametrize("ranks", [2, 3, 8, 64, 1000])
def test_one_ring_takes_its_closed_form_and_an_all_reduce_twice_that(ranks: int) -> None:
    size, bandwidth, hop_ps = 2**30, 12_500_000_000, 500_000
    expected_ps = (ranks - 1) * (size * 10**12 / (ranks * bandwidth) + hop_ps)
    for collective, times in (*((each, 1) for each in ONCE), (Collective.ALL_REDUCE, 2)):
        work = Ring().link_bytes(collective, GroupShape(ranks=ranks))
        assert work is not None
        found = Activity(
            algorithm="ring",
            protocol=Protocol.SIMPLE,
            latency_ps=work.near_hops * hop_ps,
            gpu_bytes=work.gpu_bytes,
            node_bytes=work.node_bytes,
        )
        took = found.time_ps(size, gpu_bytes_per_s=bandwidth, node_bytes_per_s=1)
        assert took == pytest.approx(times * expected_ps, rel=1e-3)


# ASTRA-sim 2, analytical, 1 GiB, hierarchical rings in 4 chunks: 300 GB/s and 2 hops of 500 ns
# within a node of 16, 12.5 GB/s per GPU and 2 hops of 2,500 ns between; milliseconds.
@pytest.mark.parametrize(
    ("ranks", "per_node", "all_reduce_ms", "all_gather_ms"),
    [(64, 16, 9.882, 4.941), (400, 16, 12.979, 6.489), (1024, 16, 14.803, 7.401),
     (1024, 8, 27.977, 13.988)],
)  # fmt: skip
def test_hierarchical_rings_in_four_chunks_take_what_astra_sim_says(
    ranks: int, per_node: int, all_reduce_ms: float, all_gather_ms: float
) -> None:
    speeds = hierarchical.Speeds(
        near_bytes_per_s=300 * GB,
        near_latency_ps=1_000_000,
        far_bytes_per_s=per_node * 12_500_000_000,
        far_latency_ps=5_000_000,
    )
    shape = GroupShape(ranks=ranks, nodes=ranks // per_node)
    for collective, expected_ms in (
        (Collective.ALL_REDUCE, all_reduce_ms),
        (Collective.ALL_GATHER, all_gather_ms),
        (Collective.REDUCE_SCATTER, all_gather_ms),
    ):
        found = hierarchical.activity(collective, 2**30, shape, speeds=speeds, chunks=4)
        assert found is not None
        took = found.time_ps(
            2**30, gpu_bytes_per_s=300 * GB, node_bytes_per_s=speeds.far_bytes_per_s
        )
        assert took / 1e9 == pytest.approx(expected_ms, rel=0.005)


def test_the_switch_that_reduces_halves_the_bytes_of_large_groups() -> None:
    reduced = Nvls().link_bytes(Collective.ALL_REDUCE, GroupShape(ranks=8))
    around = Ring().link_bytes(Collective.ALL_REDUCE, GroupShape(ranks=8))
    assert reduced is not None
    assert around is not None
    assert reduced.gpu_bytes == Fraction(9, 8)
    assert around.gpu_bytes == Fraction(14, 8)


def test_a_tree_pays_for_depth_with_bytes() -> None:
    shape = GroupShape(ranks=512, nodes=64)
    shallow, long = (each.link_bytes(Collective.ALL_REDUCE, shape) for each in (Tree(), Ring()))
    assert shallow is not None
    assert long is not None
    assert (shallow.far_hops, long.far_hops) == (12, 128)
    assert shallow.node_bytes == 2
    assert shallow.node_bytes > long.node_bytes


def test_an_all_to_all_leaves_the_node_with_what_is_for_others() -> None:
    work = Direct().link_bytes(Collective.ALL_TO_ALL, GroupShape(ranks=16, nodes=2))
    assert work is not None
    assert (work.gpu_bytes, work.node_bytes) == (Fraction(15, 16), Fraction(4))


# NVIDIA/nccl, src/enqueue.cc: 32 channels are shared out among the ranks, 4 to each of 8 and 8 to
# each of 4, and doubled while a channel carries more than 16 MiB for its peer.
@pytest.mark.parametrize(
    ("ranks", "size_mib", "channels"),
    [(8, 32, 4), (8, 64, 4), (8, 128, 8), (8, 256, 16), (8, 512, 32), (4, 64, 8), (4, 256, 16),
     (2, 256, 16), (2, 1024, 32), (64, 1, 1)],
)  # fmt: skip
def test_a_send_takes_channels_as_nccl_shares_them_out(
    ranks: int, size_mib: int, channels: int
) -> None:
    shape = GroupShape(ranks=ranks)
    assert direct.channels(Collective.SEND_RECEIVE, size_mib * 2**20, shape) == channels


@given(sizes, shapes)
def test_channels_are_at_most_all_of_them_and_more_bytes_take_no_fewer(
    size: int, shape: GroupShape
) -> None:
    for collective in (Collective.SEND_RECEIVE, Collective.ALL_TO_ALL):
        found = direct.channels(collective, size, shape)
        assert (found > 0) == (shape.ranks > 1)
        assert found <= direct.channels(collective, 2 * size, shape) <= direct.CHANNELS
    for collective in (*ONCE, Collective.ALL_REDUCE, Collective.BROADCAST):
        assert direct.channels(collective, size, shape) == 0


def test_each_doubling_of_a_group_takes_as_much_from_a_direct_exchange() -> None:
    # A pair reaches `direct` of its link; 4, 8 and 16 ranks pay `spread` once, twice, three times.
    for doublings, ranks in enumerate((2, 4, 8, 16)):
        found = choose(START, Collective.ALL_TO_ALL, 2**36, GroupShape(ranks=ranks), links=H100)
        slower = 1 + doublings * START["spread"]
        assert float(found.gpu_efficiency) == pytest.approx(START["direct"] / slower, rel=0.01)


@given(st.integers(3, 72), st.integers(3, 72))
def test_a_switch_that_reduces_begins_later_the_more_owners_it_serves(one: int, other: int) -> None:
    few, many = sorted((one, other))
    later, sooner = (
        choose(
            START, Collective.ALL_REDUCE, 2**32, GroupShape(ranks=n), links=H100, forced="nvls"
        ).latency_ps
        for n in (many, few)
    )
    # The bytes of a GPU, (1 + 1/n) S, hardly change; a chunk of every owner passes first.
    assert later - sooner == pytest.approx(
        (many - few) * START["nvls_fill_s"] * 1e12, rel=0.1, abs=1e6
    )


@given(collectives, shapes)
def test_no_algorithm_moves_less_than_every_rank_must_receive(
    collective: Collective, shape: GroupShape
) -> None:
    least = {
        Collective.ALL_REDUCE: 1,  # with a switch that reduces; the result itself
        Collective.SEND_RECEIVE: 1,
        Collective.BROADCAST: 1,
        Collective.REDUCE: 1,
    }.get(collective, Fraction(shape.ranks - 1, shape.ranks))
    found = [each.link_bytes(collective, shape) for each in algorithms().values()]
    done = [work for work in found if work is not None]
    assert done
    for work in done:
        assert shape.ranks == 1 or work.gpu_bytes >= least
        assert (work.node_bytes > 0) == (shape.nodes > 1)


@given(collectives, sizes, shapes)
def test_the_choice_is_never_faster_than_the_links_and_never_faster_with_half_the_nics(
    collective: Collective, size: int, shape: GroupShape
) -> None:
    chosen = choose(START, collective, size, shape, links=H100)
    assert 0 < chosen.gpu_efficiency <= 1
    assert 0 < chosen.nic_efficiency <= 1
    half = Bandwidths(gpu=H100.gpu, node=H100.node // 2, pair=H100.pair)
    rounding = 1e-5  # efficiencies are rounded to a millionth
    full_ps, half_ps = (alone_ps(collective, size, shape, links) for links in (H100, half))
    assert full_ps <= half_ps * (1 + rounding) + 1


@given(collectives, shapes, sizes, sizes)
def test_more_bytes_never_take_less_time_unless_they_take_more_channels(
    collective: Collective, shape: GroupShape, one: int, other: int
) -> None:
    less, more = sorted((one, other))
    if direct.channels(collective, less, shape) != direct.channels(collective, more, shape):
        return
    assert alone_ps(collective, less, shape, H100) <= alone_ps(collective, more, shape, H100) * (
        1 + 1e-5
    )


def test_a_domain_of_72_beats_nodes_of_8_for_a_group_of_72() -> None:
    rack = Bandwidths(gpu=900 * GB, node=3600 * GB, pair=50 * GB)
    nodes = Bandwidths(gpu=900 * GB, node=400 * GB, pair=50 * GB)
    for collective in (*ONCE, Collective.ALL_REDUCE, Collective.ALL_TO_ALL):
        in_rack = alone_ps(collective, 2**28, GroupShape(ranks=72), rack)
        in_nodes = alone_ps(collective, 2**28, GroupShape(ranks=72, nodes=9), nodes)
        assert in_rack < in_nodes


def test_an_algorithm_that_is_forced_is_taken_or_refused_in_one_line() -> None:
    shape = GroupShape(ranks=16, nodes=2)
    for algorithm in ("ring", "tree", "nvls", "hierarchical"):
        found = choose(START, Collective.ALL_REDUCE, 2**20, shape, links=H100, forced=algorithm)
        assert found.algorithm == algorithm
    without = START.changed(nvls=0.0)
    for profile, collective in ((START, Collective.ALL_GATHER), (without, Collective.ALL_REDUCE)):
        with pytest.raises(NoAlgorithmError, match=r"nvls cannot do all_.* over 16 ranks"):
            choose(profile, collective, 2**20, shape, links=H100, forced="nvls")


def test_small_messages_take_a_protocol_of_low_latency_and_large_ones_the_simple_one() -> None:
    shape = GroupShape(ranks=8)
    small = choose(START, Collective.ALL_GATHER, 2**12, shape, links=H100)
    large = choose(START, Collective.ALL_GATHER, 2**32, shape, links=H100)
    assert small.protocol is Protocol.LL
    assert large.protocol is Protocol.SIMPLE


def test_a_group_of_one_and_no_bytes_take_no_time() -> None:
    assert alone_ps(Collective.ALL_REDUCE, 2**20, GroupShape(ranks=1), H100) == 0
    assert alone_ps(Collective.ALL_REDUCE, 0, GroupShape(ranks=8), H100) == 0


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("link", 1.2, "link: 1.2 must be at most 1, it is a share"),
        ("base_s", -1.0, "base_s: -1.0 must be more than 0"),
        ("nic", 0.0, "nic: 0.0 must be more than 0"),
    ],
)
def test_constants_that_cannot_be_are_refused(name: str, value: float, message: str) -> None:
    with pytest.raises(ProfileError, match=message):
        check(START.changed(**{name: value}))


def test_a_group_without_a_reducing_switch_never_takes_it() -> None:
    profile: NetworkProfile = START.changed(nvls=0.0)
    for size in (2**10, 2**20, 2**30):
        found = choose(profile, Collective.ALL_REDUCE, size, GroupShape(ranks=8), links=H100)
        assert found.algorithm != "nvls"


@given(st.sampled_from(ONCE), st.sampled_from([4, 8, 64]), st.floats(0.05, 0.6))
def test_what_crosses_many_nodes_takes_longer_by_a_power_of_their_number(
    collective: Collective, nodes: int, congestion: float
) -> None:
    shape = GroupShape(ranks=8 * nodes, nodes=nodes)
    free, crowded = (
        choose(START.changed(congestion=each), collective, 2**36, shape, links=H100, forced="ring")
        for each in (0.0, congestion)
    )
    slower = float(free.nic_efficiency / crowded.nic_efficiency)
    assert slower == pytest.approx((nodes / 2) ** congestion, rel=1e-3)
    assert crowded.latency_ps > free.latency_ps
    assert crowded.gpu_efficiency == free.gpu_efficiency


def test_two_nodes_are_not_congested() -> None:
    shape = GroupShape(ranks=16, nodes=2)
    found = {
        choose(START.changed(congestion=each), Collective.ALL_REDUCE, 2**28, shape, links=H100)
        for each in (0.0, 0.5)
    }
    assert len(found) == 1


@given(st.integers(2**30, 2**34), st.integers(2, 64))
def test_a_send_between_nodes_takes_the_nics_of_the_pair(size: int, nodes: int) -> None:
    profile = START.changed(congestion=0.5)
    shape = GroupShape(ranks=8 * nodes, nodes=nodes)
    sent = choose(profile, Collective.SEND_RECEIVE, size, shape, links=H100)
    took_ps = sent.time_ps(size, gpu_bytes_per_s=H100.gpu, node_bytes_per_s=H100.node)
    bytes_ps = size * 10**12 / (START["nic"] * H100.pair)
    assert took_ps - sent.latency_ps == pytest.approx(bytes_ps, rel=1e-3)
