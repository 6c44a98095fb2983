"""The caching allocator, rule by rule: what PyTorch's manual and source say of each."""

from collections.abc import Callable
from functools import partial

import pytest
from memory_requests import caching_allocator

from zsim.memory.caching import CachingAllocator
from zsim.memory.memory_block import BlockState
from zsim.memory.settings import AllocatorError, AllocatorSettings, rounded

MIB = 1024 * 1024


EXPANDABLE = AllocatorSettings(expandable_segments=True)


def allocator(
    capacity: int | None = None, settings: AllocatorSettings | None = None
) -> CachingAllocator:
    return caching_allocator(capacity_bytes=capacity, settings=settings)


def sizes(subject: CachingAllocator) -> list[tuple[str, int]]:
    return [(piece.state, piece.size_bytes) for piece in subject.pieces()]


@pytest.mark.parametrize(
    ("asked", "divisions", "block"),
    [
        (1, 0, 512),
        (512, 0, 512),
        (513, 0, 1024),
        (1200, 4, 1536),  # too small for divisions: more than 4 blocks of 512 are needed
        (4 * MIB + 1, 4, 5 * MIB),  # 4, 5, 6 and 7 MiB between the powers 4 and 8
        (7 * MIB + 1, 4, 8 * MIB),
        (8 * MIB, 4, 8 * MIB),
    ],
)
def test_requests_are_rounded_up(asked: int, divisions: int, block: int) -> None:
    assert rounded(asked, divisions) == block


@pytest.mark.parametrize(
    ("asked", "segment"),
    [
        (1, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 1, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB),
        (10 * MIB + 1, 12 * MIB),
        (33 * MIB, 34 * MIB),
    ],
)
def test_the_device_is_asked_for_2_or_20_mib_or_for_as_much_as_is_needed(
    asked: int, segment: int
) -> None:
    subject = allocator()
    assert subject.allocate("a", asked, "s")
    assert subject.reserved_bytes == segment


def test_a_small_block_is_split_down_to_512_bytes() -> None:
    subject = allocator()
    subject.allocate("a", MIB, "s")
    subject.allocate("b", MIB - 512, "s")
    subject.allocate("c", 512, "s")
    assert sizes(subject) == [("live", MIB), ("live", MIB - 512), ("live", 512)]


def test_a_large_block_is_split_only_if_more_than_1_mib_is_left() -> None:
    subject = allocator()
    subject.allocate("a", 13 * MIB, "s")  # of a segment of 14: 1 is left over and stays with it
    assert sizes(subject) == [("live", 14 * MIB)]
    subject.free("a")
    subject.allocate("b", 13 * MIB - 512, "s")
    assert sizes(subject) == [("live", 13 * MIB - 512), ("free", MIB + 512)]


def test_a_request_takes_the_smallest_free_block_that_is_large_enough() -> None:
    subject = allocator()
    for name, size in (("a", 40), ("b", 30), ("c", 50)):
        subject.allocate(name, size * MIB, "s")
    for name in "abc":
        subject.free(name)
    subject.allocate("d", 31 * MIB, "s")
    assert sizes(subject)[:2] == [("live", 31 * MIB), ("free", 9 * MIB)]  # split off the first one
    assert subject.reserved_bytes == 120 * MIB


def test_free_neighbours_are_joined() -> None:
    subject = allocator()
    for name in "abc":
        subject.allocate(name, 4 * MIB, "s")
    subject.free("a")
    subject.free("c")  # with the 8 MiB behind it
    assert sizes(subject) == [("free", 4 * MIB), ("live", 4 * MIB), ("free", 12 * MIB)]
    subject.free("b")
    assert sizes(subject) == [("free", 20 * MIB)]


def test_a_block_is_reused_on_its_own_stream_only() -> None:
    subject = allocator()
    subject.allocate("a", 30 * MIB, "compute")
    subject.free("a")
    subject.allocate("b", 30 * MIB, "communication")
    assert subject.reserved_bytes == 60 * MIB
    subject.allocate("c", 30 * MIB, "compute")
    assert subject.reserved_bytes == 60 * MIB


def test_a_block_that_another_stream_uses_is_free_at_the_request_after_that_stream_came_to_it() -> (
    None
):
    subject = allocator()
    subject.allocate("a", 30 * MIB, "compute")
    subject.use("a", "communication")
    subject.free("a")
    assert sizes(subject) == [("waiting", 30 * MIB)]
    subject.finish("communication")
    assert sizes(subject) == [("waiting", 30 * MIB)]
    subject.allocate("b", 30 * MIB, "compute")
    assert sizes(subject) == [("live", 30 * MIB)]
    figures = subject.figures()
    # Active until it was free, but allocated only until its free.
    assert figures["active_bytes.all.peak"] == 30 * MIB
    assert figures["allocated_bytes.all.current"] == 30 * MIB


def test_a_use_on_its_own_stream_defers_nothing() -> None:
    subject = allocator()
    subject.allocate("a", 30 * MIB, "compute")
    subject.use("a", "compute")
    subject.free("a")
    assert sizes(subject) == [("free", 30 * MIB)]


def test_the_cache_is_given_back_before_memory_runs_out() -> None:
    subject = allocator(60 * MIB)
    subject.allocate("a", 40 * MIB, "s")
    subject.use("a", "t")
    subject.free("a")  # waits for t: the host waits with it, since there is no other memory
    assert subject.allocate("b", 50 * MIB, "s")
    assert (subject.retries, subject.ooms, subject.synchronizations) == (1, 0, 1)
    assert sizes(subject) == [("live", 50 * MIB)]
    assert not subject.allocate("c", 20 * MIB, "s")
    assert (subject.retries, subject.ooms) == (2, 1)
    assert subject.peak_reserved_bytes == 50 * MIB


def test_a_segment_that_is_partly_in_use_is_not_given_back() -> None:
    subject = allocator(60 * MIB)
    subject.allocate("a", 39 * MIB, "s")
    subject.free("a")
    subject.allocate("b", 2 * MIB, "s")  # 38 MiB behind it are free and split
    assert not subject.allocate("c", 40 * MIB, "s")
    assert subject.figures()["inactive_split_bytes.all.current"] == 38 * MIB


def test_blocks_above_the_limit_are_neither_split_nor_given_to_smaller_requests() -> None:
    subject = allocator(200 * MIB, AllocatorSettings(max_split_bytes=32 * MIB))
    subject.allocate("a", 64 * MIB, "s")
    subject.free("a")
    subject.allocate("b", 31 * MIB, "s")
    assert subject.reserved_bytes == 96 * MIB  # 64, and 32 for b
    subject.allocate("c", 45 * MIB, "s")  # 19 MiB less: served whole
    assert ("live", 64 * MIB) in sizes(subject)
    subject.free("c")
    subject.allocate("d", 40 * MIB, "s")  # 24 MiB less is too much
    assert subject.reserved_bytes == 136 * MIB


def test_expandable_segments_lose_nothing_between_blocks() -> None:
    plain, expandable = allocator(), allocator(settings=EXPANDABLE)
    for subject in (plain, expandable):
        for size in (30, 40, 50):  # each time too large for what was freed before
            subject.allocate("a", size * MIB, "s")
            subject.free("a")
    assert plain.reserved_bytes == 120 * MIB
    assert expandable.reserved_bytes == 60 * MIB  # three pages of 20 MiB


def test_pages_of_expandable_segments_that_are_free_go_back_one_by_one() -> None:
    subject = allocator(100 * MIB, EXPANDABLE)
    subject.allocate("a", 25 * MIB, "s")
    subject.allocate("b", 50 * MIB, "s")
    subject.free("b")  # 25 to 80: the second page is half in use
    assert subject.allocate("c", 58 * MIB, "t")
    # 40 MiB of s were returned, 60 mapped for t.
    assert subject.reserved_bytes == 100 * MIB
    assert (subject.retries, subject.device_frees) == (1, 1)


def test_segments_that_were_long_free_are_collected_above_the_threshold() -> None:
    subject = allocator(200 * MIB, AllocatorSettings(garbage_collection_threshold=0.4))
    for size in (30, 40, 50):
        subject.allocate("a", size * MIB, "s")
        subject.free("a")
    # At the fourth, 120 MiB are reserved, 40 above the threshold of 80: those of 30 and 40 MiB are
    # not younger than the average, and suffice.
    subject.allocate("a", 60 * MIB, "s")
    assert sizes(subject) == [("free", 50 * MIB), ("live", 60 * MIB)]


def test_nothing_is_taken_for_0_bytes() -> None:
    subject = allocator()
    assert subject.allocate("a", 0, "s")
    subject.use("a", "t")
    subject.free("a")
    assert subject.reserved_bytes == 0
    assert subject.figures()["allocation.all.peak"] == 0


def test_requests_that_make_no_sense_are_refused() -> None:
    subject = allocator()
    subject.allocate("a", 1, "s")
    with pytest.raises(AllocatorError, match="a: is live already"):
        subject.allocate("a", 1, "s")
    with pytest.raises(AllocatorError, match="b: -1 bytes must be at least 0"):
        subject.allocate("b", -1, "s")
    with pytest.raises(KeyError):
        subject.free("b")


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        (
            partial(AllocatorSettings, max_split_bytes=19 * MIB),
            "max_split_bytes: 19922944 must be at least 20971520",
        ),
        (
            partial(AllocatorSettings, max_non_split_rounding_bytes=MIB),
            "max_non_split_rounding_bytes: 1048576 must be",
        ),
        (
            partial(AllocatorSettings, roundup_power2_divisions=3),
            "roundup_power2_divisions: 3 must be a power of two",
        ),
        (
            partial(AllocatorSettings, garbage_collection_threshold=1.0),
            "garbage_collection_threshold: 1.0 must be",
        ),
        (
            partial(AllocatorSettings, max_split_bytes=20 * MIB, expandable_segments=True),
            "max_split_bytes: is not simulated together",
        ),
    ],
)
def test_settings_that_pytorch_refuses_are_refused(
    settings: Callable[[], AllocatorSettings], why: str
) -> None:
    with pytest.raises(AllocatorError, match=why):
        settings()


def test_the_journal_has_the_course_of_fragmentation() -> None:
    subject = allocator()
    subject.allocate("a", 4 * MIB, "s")
    subject.allocate("b", 4 * MIB, "s")
    subject.free("a")
    # A segment of 20 MiB comes first; then what of it is in use.
    moments = [(m.reserved_bytes // MIB, m.active_bytes // MIB) for m in subject.journal.moments()]
    assert moments == [(20, 0), (20, 4), (20, 8), (20, 4)]
    assert [piece.state for piece in subject.pieces()] == [
        BlockState.FREE,
        BlockState.LIVE,
        BlockState.FREE,
    ]
