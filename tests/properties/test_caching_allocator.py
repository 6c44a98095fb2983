"""The caching allocator against a slow one, and what holds of any list of requests."""

from itertools import pairwise

from drawn_requests import CAPACITIES, SETTINGS, read, requests, written
from hypothesis import given
from list_allocator import ListAllocator
from memory_requests import Empty, Give, Request, Take, caching_allocator, replay

from zsim.memory.caching import CachingAllocator
from zsim.memory.memory_block import BlockState
from zsim.memory.settings import AllocatorSettings


def live_after(asked: list[Request], refused: tuple[str, ...]) -> dict[str, int]:
    """Bytes that were asked for and not freed."""
    live: dict[str, int] = {}
    for request in asked:
        if isinstance(request, Take) and request.name not in refused:
            live[request.name] = request.size_bytes
        elif isinstance(request, Give):
            live.pop(request.name, None)
    return live


@given(asked=requests(), settings=SETTINGS, capacity=CAPACITIES)
def test_every_figure_is_that_of_the_slow_allocator(
    asked: list[Request], settings: AllocatorSettings, capacity: int
) -> None:
    slow = ListAllocator(settings, capacity)
    slow.serve(asked)
    fast = caching_allocator(capacity_bytes=capacity, settings=settings)
    assert list(replay(asked, fast)) == slow.refused
    assert fast.figures() == slow.figures()


@given(asked=requests(), settings=SETTINGS, capacity=CAPACITIES)
def test_blocks_tile_what_is_reserved_and_hold_what_is_live(
    asked: list[Request], settings: AllocatorSettings, capacity: int
) -> None:
    allocator = caching_allocator(capacity_bytes=capacity, settings=settings)
    refused = replay(asked, allocator)
    pieces = allocator.pieces()
    for one, two in pairwise(pieces):
        assert one.address + one.size_bytes <= two.address
    assert sum(piece.size_bytes for piece in pieces) == allocator.reserved_bytes <= capacity
    for one, two in pairwise(pieces):  # free neighbours would have been joined
        neighbours = one.address + one.size_bytes == two.address
        assert not (neighbours and one.state is two.state is BlockState.FREE)
    live = live_after(asked, refused)
    held = [piece.size_bytes for piece in pieces if piece.state is BlockState.LIVE]
    assert len(held) == sum(1 for size in live.values() if size)
    assert sum(live.values()) <= sum(held)


@given(asked=requests(), settings=SETTINGS, capacity=CAPACITIES)
def test_nothing_is_left_when_everything_is_freed_and_the_cache_emptied(
    asked: list[Request], settings: AllocatorSettings, capacity: int
) -> None:
    allocator = caching_allocator(capacity_bytes=capacity, settings=settings)
    refused = replay(asked, allocator)
    replay([*map(Give, live_after(asked, refused)), Empty()], allocator)
    assert allocator.reserved_bytes == 0
    assert allocator.pieces() == ()
    assert not any(value for name, value in allocator.figures().items() if name.endswith("current"))


@given(asked=requests(), settings=SETTINGS, capacity=CAPACITIES)
def test_what_is_allocated_is_active_and_what_is_active_is_reserved(
    asked: list[Request], settings: AllocatorSettings, capacity: int
) -> None:
    allocator = caching_allocator(capacity_bytes=capacity, settings=settings)
    replay(asked, allocator)
    for moment in allocator.journal.moments():
        assert 0 <= moment.active_bytes <= moment.reserved_bytes <= capacity
    figures = allocator.figures()
    for pool in ("all", "small_pool", "large_pool"):
        for when in ("current", "peak"):
            chain = [
                figures[f"{name}_bytes.{pool}.{when}"]
                for name in ("allocated", "active", "reserved")
            ]
            assert chain == sorted(chain)


@given(asked=requests(), settings=SETTINGS, capacity=CAPACITIES)
def test_an_allocator_serves_alike_without_a_journal_which_has_its_peak(
    asked: list[Request], settings: AllocatorSettings, capacity: int
) -> None:
    noted = caching_allocator(capacity_bytes=capacity, settings=settings)
    kept = type(noted)(capacity_bytes=capacity, settings=settings, journals=False)
    assert replay(asked, noted) == replay(asked, kept)
    assert noted.pieces() == kept.pieces()
    assert noted.peak_reserved_bytes == kept.peak_reserved_bytes
    figures = noted.figures()
    for allocator in (noted, kept):
        assert allocator.allocated_bytes == figures["allocated_bytes.all.current"]
        assert allocator.peak_allocated_bytes == figures["allocated_bytes.all.peak"]


@given(requests())
def test_requests_survive_being_written_down(asked: list[Request]) -> None:
    assert read(written(asked)) == asked


def test_an_allocator_without_settings_is_the_default_one() -> None:
    assert type(caching_allocator()) is CachingAllocator
