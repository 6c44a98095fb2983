"""Times that were measured: what lies between two of them, and their form in a node's file."""

import tomllib
from dataclasses import replace
from itertools import pairwise
from math import isclose

import pytest
from hypothesis import given
from hypothesis import strategies as st
from measured_times import ALONE, EXTENTS, FLOPS_PER_S, TIMES, products

from zsim.cluster.files.measured_node import MeasuredDrives, MeasuredHost, MeasuredNode
from zsim.cluster.files.node import node_of
from zsim.cluster.files.table import TopologyError
from zsim.cluster.profile.measured import MeasuredTimesError, OperationCost, TimeCurve
from zsim.dtype import DType
from zsim.model.kernel import KernelKind, matmul, streaming

extents = st.integers(EXTENTS[0], 100_000)
points = st.lists(
    st.tuples(st.floats(1, 1e12), st.floats(1e-9, 1e3)),
    min_size=1,
    max_size=6,
    unique_by=lambda p: p[0],
)


@given(points)
def test_a_curve_goes_through_its_points_and_between_them_leaves_no_corner(
    given_points: list[tuple[float, float]],
) -> None:
    ordered = sorted(given_points)
    curve = TimeCurve(
        sizes=tuple(size for size, _ in ordered), seconds=tuple(taken for _, taken in ordered)
    )
    for size, taken in ordered:
        assert isclose(curve.at(size), taken, rel_tol=1e-9)
    for (low, one), (high, other) in pairwise(ordered):
        middle = curve.at((low * high) ** 0.5)
        assert min(one, other) * (1 - 1e-9) <= middle <= max(one, other) * (1 + 1e-9)
    assert curve.at(ordered[0][0] / 2) == ordered[0][1]
    assert isclose(curve.at(ordered[-1][0] * 3), ordered[-1][1] * 3, rel_tol=1e-9)


@given(extents, extents, extents, st.integers(1, 8))
def test_products_at_one_rate_are_at_that_rate_between_the_points_and_beyond(
    m: int, n: int, k: int, batch: int
) -> None:
    taken = products(backward=False).at(batch, m, n, k)
    assert isclose(taken, 2 * batch * m * n * k / FLOPS_PER_S, rel_tol=1e-9)


def test_a_kernel_of_a_kind_or_format_that_was_not_measured_takes_that_of_another() -> None:
    elementwise = [each for each in ALONE.kernels if each.kind is KernelKind.ELEMENTWISE]
    known = replace(ALONE, kernels=tuple(elementwise))
    kernel = streaming(KernelKind.SOFTMAX, (64, 64), DType.FP32, streams=2)
    assert known.kernel_s(kernel) == known.moving_s(kernel.bytes)
    narrow, wide = (matmul(64, 64, 64, dtype) for dtype in (DType.BF16, DType.FP32))
    assert known.kernel_s(narrow) == known.kernel_s(wide)


def test_a_group_of_another_size_takes_as_much_longer_as_its_ring_passes_more() -> None:
    two, four = (ALONE.collective_s("all_gather", ranks, 2**20) for ranks in (2, 4))
    assert two is not None
    assert four is not None
    assert isclose(four, 1.5 * two)
    assert ALONE.collective_s("all_to_all", 2, 2**20) is None


NODE = MeasuredNode(
    title='a "machine"',
    source="a test",
    ranks=2,
    rank_name="rank",
    memory_bytes=10**10,
    memory_bytes_per_s=1.25e10,
    flops_per_s={DType.FP32: 5e10},
    link_bytes_per_s=1e9,
    link_latency_s=1e-4,
    collective_share=0.25,
    host=MeasuredHost(
        memory_bytes=2 * 10**10,
        memory_bytes_per_s=2.5e10,
        cores=2,
        adam_bytes_per_s=1e10,
        cast_bytes_per_s=5e9,
        copy_bytes_per_s=6e9,
    ),
    drives=MeasuredDrives(
        capacity_bytes=10**11, read_bytes_per_s=1e9, write_bytes_per_s=5e8, latency_s=1e-4
    ),
    times=TIMES,
)


def test_a_written_node_is_read_as_it_was_to_five_digits() -> None:
    read = node_of("node", tomllib.loads(NODE.text()))
    assert (read.gpus_per_node, read.gpu.memory_bytes_per_s) == (2, 12_500_000_000)
    assert read.host is not None
    assert read.host.cpu is not None
    assert float(read.host.cpu.adam_share) == 0.4
    assert read.drives is not None
    assert read.drives.write_bytes_per_s == 500_000_000
    found = read.gpu.measured
    assert found is not None
    assert (found.runs_on_host, found.host) == (TIMES.runs_on_host, TIMES.host)
    assert found.operations == TIMES.operations
    for one, other in zip(found.collectives, TIMES.collectives, strict=True):
        assert one.curve.seconds == pytest.approx(other.curve.seconds, rel=1e-4)
    for mine, theirs in zip(found.products, TIMES.products, strict=True):
        assert mine.seconds == pytest.approx(theirs.seconds, rel=1e-4)
    assert dict(read.cites)["measured"] == "a test"


def test_what_collectives_take_is_read_as_written_and_a_file_without_it_as_before() -> None:
    taking = replace(
        TIMES,
        collectives=tuple(
            replace(each, taken_s=tuple(2 * s for s in each.curve.seconds))
            for each in TIMES.collectives
        ),
    )
    found = node_of("node", tomllib.loads(replace(NODE, times=taking).text())).gpu.measured
    assert found is not None
    assert found.takes_from_host
    for one, other in zip(found.collectives, taking.collectives, strict=True):
        assert one.taken_s == pytest.approx(other.taken_s, rel=1e-4)
    text = NODE.text().replace("taken_s = []\n", "")
    assert "taken_s" not in text
    before = node_of("node", tomllib.loads(text)).gpu
    assert before.measured is not None
    assert not before.measured.takes_from_host
    assert float(before.collective_share) == 0.25


def test_what_was_not_measured_is_not_described() -> None:
    read = node_of("node", tomllib.loads(replace(NODE, drives=None, collective_share=0.0).text()))
    assert read.drives is None
    assert read.gpu.collective_share == 0


@pytest.mark.parametrize(
    ("table", "key", "value", "told"),
    [
        ("measured", "runs_on_host", 1, "measured: runs_on_host: 1 must be true or false"),
        ("measured", "operations", [], "measured: operations: other: missing"),
        ("measured", "speed", 1, "measured: speed: unknown key"),
        ("host", "stream_s", -1.0, "measured: host: stream_s: -1.0 must be at least 0"),
    ],
)
def test_a_wrong_key_is_told_in_one_line(table: str, key: str, value: object, told: str) -> None:
    file = tomllib.loads(NODE.text())
    within = file["measured"] if table == "measured" else file["measured"][table]
    within[key] = value
    with pytest.raises(TopologyError) as error:
        node_of("node.toml", file)
    assert str(error.value).startswith(f"node.toml: {told}")
    assert "\n" not in str(error.value)


def test_times_that_cannot_be_are_refused_by_name() -> None:
    with pytest.raises(MeasuredTimesError, match=r"sizes: 1\.0 must be more than 2\.0"):
        TimeCurve(sizes=(2.0, 1.0), seconds=(1.0, 1.0))
    with pytest.raises(MeasuredTimesError, match=r"seconds: 0\.0 must be more than 0"):
        TimeCurve(sizes=(1.0,), seconds=(0.0,))
    with pytest.raises(MeasuredTimesError, match="product: -1 must be at least 0"):
        OperationCost(name="other", product=-1)
