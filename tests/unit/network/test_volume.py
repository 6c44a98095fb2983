"""Ring-equivalent bytes of each collective, against the closed forms of the ring."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zsim.dtype import DType
from zsim.network.volume import element_count, is_scalar, ring_equivalent_bytes
from zsim.schedule.operation import (
    AllGather,
    AllReduce,
    Broadcast,
    Communication,
    Receive,
    ReduceScatter,
    Send,
    View,
)


def view(size: int) -> View:
    return View(buffer="x", size=size)


def gather(shard: int, count: int, wire: DType = DType.FP16) -> AllGather:
    return AllGather(
        id="g", stream="s", group="data", source=view(shard), target=view(shard * count), wire=wire
    )


def scatter(shard: int, count: int) -> ReduceScatter:
    return ReduceScatter(
        id="r",
        stream="s",
        group="data",
        source=view(shard * count),
        target=view(shard),
        wire=DType.FP16,
        accumulate=DType.FP32,
    )


def all_reduce(size: int) -> AllReduce:
    return AllReduce(
        id="a",
        stream="s",
        group="data",
        source=view(size),
        target=view(size),
        wire=DType.FP16,
        accumulate=DType.FP16,
    )


def broadcast(size: int) -> Broadcast:
    return Broadcast(
        id="b",
        stream="s",
        group="data",
        source=view(size),
        target=view(size),
        root=0,
        wire=DType.FP16,
    )


def send(size: int) -> Send:
    return Send(id="s", stream="s", group="data", offset=1, source=view(size), wire=DType.FP16)


def receive(size: int) -> Receive:
    return Receive(id="r", stream="s", group="data", offset=-1, target=view(size), wire=DType.FP16)


@pytest.mark.parametrize(
    ("operation", "expected"),
    [
        # 4 ranks, shards of 10 elements of 2 bytes: 3 of the 4 shards pass each rank.
        (gather(10, 4), 3 * 10 * 2),
        (scatter(10, 4), 3 * 10 * 2),
        # 10 elements in chunks of ceil(10 / 4) = 3; reduce-scatter and all-gather of 3 chunks.
        (all_reduce(10), 2 * 3 * 3 * 2),
        (broadcast(10), 3 * 3 * 2),
        (send(10), 20),
        (receive(10), 0),
    ],
)
def test_a_rank_of_four_sends(operation: Communication, expected: int) -> None:
    assert ring_equivalent_bytes(operation, 4) == expected


@given(st.integers(1, 50), st.integers(2, 50))
def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather(shard: int, count: int) -> None:
    parts: tuple[Communication, ...] = (scatter(shard, count), gather(shard, count))
    whole = sum(ring_equivalent_bytes(part, count) for part in parts)
    assert ring_equivalent_bytes(all_reduce(shard * count), count) == whole


@pytest.mark.parametrize("operation", [gather(3, 1), scatter(3, 1), all_reduce(3), broadcast(3)])
def test_a_group_of_one_sends_nothing(operation: Communication) -> None:
    assert ring_equivalent_bytes(operation, 1) == 0


def test_a_tensor_of_one_element_is_a_scalar_and_one_element_per_rank_is_not() -> None:
    assert is_scalar(all_reduce(1))
    assert is_scalar(send(1))
    assert not is_scalar(gather(1, 8))
    assert not is_scalar(scatter(1, 8))
    assert element_count(scatter(1, 8)) == 8
