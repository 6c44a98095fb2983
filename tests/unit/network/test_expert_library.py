"""Time of DeepEP and HybridEP: tokens cross once to a node, then once to a GPU."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zsim.files.installed import network_profile
from zsim.model.expert_transport import ExpertChoice, ExpertTransport
from zsim.network.algorithm.activity import GroupShape
from zsim.network.algorithm.algorithm import Bandwidths
from zsim.network.expert_library import LibraryTiming, SentTokens, crossed_rows, library_timing
from zsim.strategy.execution import DispatchLibrary

GB = 10**9
LINKS = Bandwidths(gpu=450 * GB, node=400 * GB, pair=50 * GB)
H100 = network_profile("h100")
CHOICE = ExpertChoice(experts=64, top_k=8)
DEEPEP = ExpertTransport(library=DispatchLibrary.DEEPEP, choice=CHOICE, width=7168, num_sms=20)
ROWS = SentTokens(tokens=4096.0, row_bytes=2 * 7168.0)


def timing(
    transport: ExpertTransport, *, nodes: int = 1, ranks: int = 8, rows: SentTokens = ROWS
) -> LibraryTiming:
    shape = GroupShape(ranks=ranks, nodes=nodes)
    return library_timing(transport, rows, shape, links=LINKS, profile=H100)


def test_rows_cross_once_to_each_node_and_once_to_each_gpu() -> None:
    """DeepSeek-V3 on 8 nodes of 8 H100, whose tokens go to at most 4 of 8 groups of experts."""
    choice = ExpertChoice(experts=256, top_k=8, groups=8, top_groups=4)
    transport = replace(DEEPEP, choice=choice)
    rows = crossed_rows(transport, 4096.0, GroupShape(ranks=64, nodes=8))
    out_mb = rows.far * 7168 * 2 / 1e6
    assert out_mb == pytest.approx(3.62 * 7 / 8 * 4096 * 7168 * 2 / 1e6, rel=0.01)
    assert out_mb < 206  # 3.5 copies of a token, if each had experts in all of its groups
    assert rows.far < 8 * 7 / 8 * 4096 / 2  # NCCL sends eight copies, seven eighths of them out
    assert rows.near == rows.received * 7 / 8


@pytest.mark.parametrize("library", DispatchLibrary)
@given(
    ranks=st.sampled_from((8, 16, 32)),
    sms=st.integers(2, 64),
    returns=st.booleans(),
    plans=st.booleans(),
)
def test_more_multiprocessors_never_slow_an_exchange(
    library: DispatchLibrary, *, ranks: int, sms: int, returns: bool, plans: bool
) -> None:
    made = replace(DEEPEP, library=library, returns=returns, plans=plans)
    some, more = (
        timing(replace(made, num_sms=each), nodes=ranks // 8, ranks=ranks)
        for each in (sms, sms + 2)
    )
    assert more.gpu_s <= some.gpu_s
    assert more.node_s == some.node_s
    assert more.latency_s == some.latency_s
    nominal = crossed_rows(made, ROWS.tokens, GroupShape(ranks=ranks, nodes=ranks // 8))
    assert more.gpu_s >= nominal.near * ROWS.row_bytes / LINKS.gpu
    assert more.node_s >= 8 * nominal.far * ROWS.row_bytes / LINKS.node


def test_small_rows_take_a_multiprocessor_as_long_as_their_fixed_time() -> None:
    few = replace(DEEPEP, num_sms=4)
    tiny = timing(few, rows=SentTokens(tokens=4096.0, row_bytes=2.0))
    rows = 4096 * CHOICE.places(8)
    assert tiny.gpu_s == pytest.approx(rows * 249e-9 / 4, rel=0.01)


def test_only_the_first_exchange_of_a_routing_plans() -> None:
    plans = timing(replace(DEEPEP, plans=True)).latency_s - timing(DEEPEP).latency_s
    assert plans == pytest.approx(74e-6)
    hybrid = replace(DEEPEP, library=DispatchLibrary.HYBRIDEP)
    near, far = (
        timing(replace(hybrid, plans=True), nodes=nodes, ranks=8 * nodes).latency_s
        - timing(hybrid, nodes=nodes, ranks=8 * nodes).latency_s
        for nodes in (1, 8)
    )
    assert 0 < near < far  # its ranks gather the routing map, over NICs too


def test_without_constants_rows_run_at_the_rate_of_links() -> None:
    shape = GroupShape(ranks=16, nodes=2)
    found = library_timing(DEEPEP, ROWS, shape, links=LINKS, profile=None)
    rows = crossed_rows(DEEPEP, ROWS.tokens, shape)
    assert found.latency_s == 0
    assert found.gpu_s == pytest.approx(rows.near * ROWS.row_bytes / LINKS.gpu)
    assert found.node_s == pytest.approx(8 * rows.far * ROWS.row_bytes / LINKS.node)
