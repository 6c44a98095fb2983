"""Exchanges of expert ranks in a simulated run: unequal blocks, and libraries in place of NCCL."""

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import product

import pytest
from drawn_clusters import NO_MODEL
from hypothesis import given, settings
from hypothesis import strategies as st

from zsim.backend.backend import Job
from zsim.cluster.cluster import Cluster, Gpu, Link, Rate
from zsim.cluster.profile.host_launch import FREE
from zsim.dtype import DType
from zsim.files.installed import fitted_kernels, network_profile
from zsim.model.expert_transport import ExpertChoice, ExpertTransport
from zsim.model.kernel import matmul
from zsim.network.algorithm.activity import GroupShape
from zsim.network.expert_library import SentTokens, library_timing
from zsim.network.link_load import bandwidths
from zsim.schedule.builder import ScheduleBuilder
from zsim.schedule.mesh import Span
from zsim.schedule.operation import Action, AllToAll, Role
from zsim.schedule.schedule import Schedule
from zsim.strategy.execution import DispatchLibrary
from zsim_des import SimBackend

GB = 10**9
BF16 = Rate(dtype=DType.BF16, peak=10**15, matmul=10**15, elementwise=10**14)
CLUSTER = Cluster(
    name="4 per node",
    nodes=2,
    gpus_per_node=4,
    gpu=Gpu(name="any", memory_bytes=2**40, memory_bytes_per_s=10**12, rates=(BF16,)),
    switch_link=Link(bytes_per_s=400 * GB),
    nics_per_node=4,
    nic_link=Link(bytes_per_s=50 * GB),
)
WIDTH, TOKENS, TOP_K = 1024, 512, 2
"""Elements of a row, rows of each rank, and copies of each row."""

Blocks = Sequence[Sequence[int]]


def unequal(blocks: Blocks) -> Schedule:
    """Return an exchange with these elements from each rank to each rank."""
    ranks = len(blocks)
    build = ScheduleBuilder("unequal", ScheduleBuilder.of("", data=ranks).mesh)
    group = build.group("data", "data")
    for rank, sends in enumerate(blocks):
        role = build.role(f"rank{rank}", Span(axis="data", start=rank, end=rank + 1))
        receives = tuple(row[rank] for row in blocks)
        sent, came = role.buffer("sent", sum(sends)), role.buffer("came", sum(receives))
        role.step.allocate(sent, came)
        role.step.add(
            AllToAll(
                id="step/exchange",
                stream="communication",
                group=group,
                source=sent.all,
                target=came.all,
                wire=sent.buffer.dtype,
                sent=tuple(sends),
                received=receives,
                kept=sends[rank],
            )
        )
    return build.schedule()


def end_s(schedule: Schedule, cluster: Cluster) -> float:
    (end_ps,) = SimBackend().step_ends_ps(Job(schedule=schedule, model=NO_MODEL, cluster=cluster))
    return end_ps / 1e12


sizes = st.integers(10**5, 10**8)


@given(blocks=st.lists(st.lists(sizes, min_size=8, max_size=8), min_size=8, max_size=8))
@settings(max_examples=10, deadline=None)
def test_unequal_blocks_take_as_long_as_the_busiest_rank_and_the_busiest_node(
    blocks: Blocks,
) -> None:
    each = range(8)
    sent = [sum(blocks[one][other] for other in each if other != one) for one in each]
    received = [sum(blocks[other][one] for other in each if other != one) for one in each]
    near = max(*sent, *received)
    pairs = [(one, other) for one, other in product(each, each) if one // 4 != other // 4]
    far = max(
        sum(blocks[one][other] for one, other in pairs if one // 4 == node) for node in (0, 1)
    )
    width = 4  # fp32
    wanted_s = max(near * width / (400 * GB), far * width / (200 * GB))
    assert end_s(unequal(blocks), CLUSTER) == pytest.approx(wanted_s, rel=1e-6)


def test_a_busy_rank_slows_its_nodes_nics_by_its_part_alone() -> None:
    plain = [[10**7] * 8 for _ in range(8)]
    hot = [[2 * size if rank == 0 else size for rank, size in enumerate(row)] for row in plain]
    times = end_s(unequal(hot), CLUSTER) / end_s(unequal(plain), CLUSTER)
    assert times == pytest.approx(5 / 4)  # its node receives 5 parts for each 4


def transport(library: DispatchLibrary, *, sms: int = 20, **marks: bool) -> ExpertTransport:
    choice = ExpertChoice(experts=32, top_k=TOP_K)
    return ExpertTransport(library=library, choice=choice, width=WIDTH, num_sms=sms, **marks)


def exchange(ranks: int, by: ExpertTransport | None, *, multiplies: bool = False) -> Schedule:
    """Return an exchange of all rows; if it `multiplies`, it overlaps the start of a product."""
    build = ScheduleBuilder.of("exchange", data=ranks)
    group = build.group("data", "data")
    size = TOKENS * TOP_K * WIDTH
    source, target, made = (build.buffer(name, size, dtype=DType.BF16) for name in ("a", "b", "c"))
    build.step.allocate(source, target, made)
    build.step.all_to_all("it", group, source.all, target.all, by=by)
    if multiplies:
        kernel = matmul(16384, 8192, 8192, DType.BF16)
        build.step.compute("it too", Action.FORWARD, [(Role.OUTPUT, made.all)], kernels=(kernel,))
    return build.schedule()


def fitted(nodes: int) -> Cluster:
    kernels = replace(fitted_kernels()["h100_2025"].constants, launch=FREE)
    gpu = replace(CLUSTER.gpu, kernels=kernels)
    return replace(CLUSTER, nodes=nodes, gpu=gpu, network=network_profile("h100"))


@pytest.mark.parametrize("returns", [False, True])
@pytest.mark.parametrize("nodes", [1, 2, 4])
@pytest.mark.parametrize("library", DispatchLibrary)
def test_a_library_takes_as_long_in_a_run_as_its_formula_says(
    library: DispatchLibrary, nodes: int, returns: bool
) -> None:
    cluster, by = fitted(nodes), transport(library, returns=returns, plans=not returns)
    shape = GroupShape(ranks=4 * nodes, nodes=nodes)
    rows = SentTokens(tokens=float(TOKENS), row_bytes=2.0 * WIDTH)
    links = bandwidths(cluster, shape)
    timing = library_timing(by, rows, shape, links=links, profile=cluster.network)
    assert end_s(exchange(4 * nodes, by), cluster) == pytest.approx(timing.seconds, rel=1e-4)


def test_weights_that_ride_with_tokens_add_only_their_bytes() -> None:
    cluster = fitted(2)
    own, rides = (transport(DispatchLibrary.DEEPEP, rides=each) for each in (False, True))
    alone_s, riding_s = (end_s(exchange(8, each), cluster) for each in (own, rides))
    assert riding_s < alone_s - 60e-6


@pytest.mark.parametrize("share", [Fraction(0), Fraction(1, 10)], ids=["B200", "H100"])
def test_a_library_takes_its_multiprocessors_from_a_product_while_it_runs(
    share: Fraction,
) -> None:
    plain = fitted(2)
    cluster = replace(plain, gpu=replace(plain.gpu, collective_share=share))
    ends = [
        end_s(exchange(8, transport(DispatchLibrary.HYBRIDEP, sms=sms), multiplies=True), cluster)
        for sms in (33, 66)
    ]
    alone_s = end_s(exchange(8, None, multiplies=True), replace(plain, gpu=plain.gpu))
    for sms, both_s in zip((33, 66), ends, strict=True):
        by = transport(DispatchLibrary.HYBRIDEP, sms=sms)
        exchanged_s = end_s(exchange(8, by), cluster)
        # a product without a quarter of the GPU has done three quarters of its work until then
        assert both_s == pytest.approx(alone_s + exchanged_s * sms / 132, rel=1e-3)
