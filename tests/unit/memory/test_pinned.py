"""Pinned host memory as PyTorch's caching host allocator hands it out."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zsim.memory import handed_out, is_pinned, reserve
from zsim.memory.ledger import memory_ledger
from zsim.memory.pinned import PinnedAllocator
from zsim.memory.settings import AllocatorError, PinnedSettings, pinned_bytes
from zsim.schedule.builder import ScheduleBuilder
from zsim.schedule.schedule import Discipline, Place, Pool, Schedule

GIB = 2**30
DEFAULT = PinnedSettings()


def test_a_request_of_2_25_gib_takes_4() -> None:
    # github.com/pytorch/pytorch/issues/95823: pinned memory is up to twice what was asked for.
    assert pinned_bytes(9 * GIB // 4, DEFAULT) == 4 * GIB


@given(st.integers(1, 2**45))
def test_blocks_are_the_next_power_of_two(size: int) -> None:
    found = pinned_bytes(size, DEFAULT)
    assert found.bit_count() == 1
    assert size <= found < 2 * size


@given(st.integers(1, 2**40), st.integers(1, 2**40), st.booleans())
def test_requests_above_a_threshold_are_exact(size: int, limit: int, cached: bool) -> None:
    settings = (
        PinnedSettings(max_cached_bytes=limit)
        if cached
        else PinnedSettings(max_round_threshold_bytes=limit)
    )
    exact = size > limit
    assert pinned_bytes(size, settings) == (size if exact else pinned_bytes(size, DEFAULT))


def test_a_freed_block_serves_its_own_size_alone() -> None:
    host = PinnedAllocator()
    assert host.allocate("first", 3 * GIB, "copies")
    host.free("first")
    assert host.allocate("again", 4 * GIB, "another stream")
    assert host.reserved_bytes == 4 * GIB
    host.free("again")
    assert host.allocate("small", GIB, "copies")  # of a block of 4 nothing is split off
    assert host.reserved_bytes == 5 * GIB


def test_a_block_that_a_stream_copies_is_not_taken_again_before_it_has_ended() -> None:
    host = PinnedAllocator()
    host.allocate("sent", GIB, "copies")
    host.use("sent", "copies")
    host.free("sent")
    host.allocate("next", GIB, "copies")
    assert host.reserved_bytes == 2 * GIB
    host.finish("copies")
    host.allocate("third", GIB, "copies")
    assert host.reserved_bytes == 2 * GIB


def test_what_is_too_large_to_be_cached_goes_back_at_once() -> None:
    host = PinnedAllocator(settings=PinnedSettings(max_cached_bytes=GIB))
    host.allocate("large", 3 * GIB, "copies")
    host.free("large")
    assert host.reserved_bytes == 0


def test_nothing_is_given_back_to_serve_a_request() -> None:
    host = PinnedAllocator(capacity_bytes=3 * GIB)
    host.allocate("kept", 2 * GIB, "copies")
    host.free("kept")
    assert host.allocate("one", GIB, "copies")
    assert not host.allocate("another", GIB, "copies")


@pytest.mark.parametrize("size", [0, -1])
def test_settings_that_pytorch_refuses_are_refused(size: int) -> None:
    with pytest.raises(AllocatorError, match=f"max_cached_bytes: {size} must be at least 1"):
        PinnedSettings(max_cached_bytes=size)


SIZES = st.lists(st.tuples(st.integers(1, 64), st.integers(0, 3)), max_size=20)


@given(SIZES)
def test_reserved_is_the_most_blocks_of_each_size_that_were_live_at_once(
    requests: list[tuple[int, int]],
) -> None:
    # Blocks of one size are alike and are never given back: so many were needed at a time.
    host, live = PinnedAllocator(), list[str]()
    held: Counter[int] = Counter()
    most: Counter[int] = Counter()
    sizes: dict[str, int] = {}
    for number, (size, frees) in enumerate(requests):
        for _ in range(min(frees, len(live))):
            gone = live.pop(0)
            host.free(gone)
            held[pinned_bytes(sizes[gone], DEFAULT)] -= 1
        name = str(number)
        host.allocate(name, size, "copies")
        live.append(name)
        sizes[name] = size
        block = pinned_bytes(size, DEFAULT)
        held[block] += 1
        most[block] = max(most[block], held[block])
    assert host.reserved_bytes == sum(block * count for block, count in most.items())


def on_host(*sizes: int, name: str = "host") -> Schedule:
    """Buffers in host memory, one after the other, each freed before the next."""
    build = ScheduleBuilder.of("pinned", data=1)
    build.pools.append(Pool(name=name, place=Place.HOST))
    for number, size in enumerate(sizes):
        buffer = build.buffer(f"b{number}", size, pool=name)
        build.step.allocate(buffer)
        build.step.free(buffer)
    return build.schedule()


def test_a_pool_of_host_memory_reserves_rounded_blocks_and_a_pageable_one_does_not() -> None:
    schedule = handed_out(on_host(3, 5, 3), Discipline.EXACT, Discipline.CACHING)
    pool = next(pool for pool in schedule.pools if pool.place is Place.HOST)
    program = schedule.programs[0]
    assert is_pinned(pool)
    assert (
        reserve(program, memory_ledger(program, 2), pool).peak_bytes == 16 + 32
    )  # 12 and 20 bytes
    pageable = handed_out(on_host(3, name="pageable"), Discipline.EXACT, Discipline.CACHING)
    assert {each.discipline for each in pageable.pools} == {Discipline.EXACT}


def test_slots_are_taken_whole_and_not_rounded_one_by_one() -> None:
    build = ScheduleBuilder.of("slots", data=1)
    build.pools.append(Pool(name="slots", place=Place.HOST, slot_bytes=12, capacity_bytes=24))
    buffers = [build.buffer(f"b{number}", 3, pool="slots") for number in range(2)]
    build.step.allocate(*buffers)
    schedule = handed_out(build.schedule(), Discipline.EXACT, Discipline.CACHING)
    pool = next(pool for pool in schedule.pools if pool.place is Place.HOST)
    program = schedule.programs[0]
    assert reserve(program, memory_ledger(program, 1), pool).peak_bytes == 24
