"""The allocator that serves a segment in one loop, against the one that serves each request."""

from drawn_requests import CAPACITIES, MIB, requests
from hypothesis import given
from hypothesis import strategies as st
from memory_requests import Empty, Finish, Give, Request, Take, Use

from zsim.memory.caching import CachingAllocator
from zsim.memory.memory_block import Block, BlockPiece, BlockState
from zsim.memory.named_blocks import NamedBlocks
from zsim.memory.quick_caching import QuickAllocator, turn

BUFFERS = 3
SIZES = st.one_of(
    st.sampled_from([1, 512, MIB, MIB + 1, 20 * MIB]), st.integers(1, 4 * MIB), st.integers(1, 9999)
)
TENSORS = st.tuples(st.integers(0, BUFFERS - 1), st.integers(0, 3))
SEGMENTS = st.lists(
    st.tuples(
        st.lists(st.tuples(TENSORS, st.one_of(SIZES, st.just(0), st.just(-1))), max_size=25),
        st.sampled_from("01"),
    ),
    min_size=1,
    max_size=5,
)


def figures(allocator: CachingAllocator) -> tuple[int, ...]:
    return (
        allocator.reserved_bytes,
        allocator.peak_reserved_bytes,
        allocator.allocated_bytes,
        allocator.peak_allocated_bytes,
        allocator.device_allocations,
        allocator.device_frees,
        allocator.synchronizations,
        allocator.retries,
        allocator.ooms,
    )


def not_live(allocator: CachingAllocator) -> list[BlockPiece]:
    return [piece for piece in allocator.pieces() if piece.state is not BlockState.LIVE]


class Both:
    """Both allocators, asked the same."""

    def __init__(self, capacity_bytes: int) -> None:
        self.named = CachingAllocator(capacity_bytes=capacity_bytes)
        self.quick = QuickAllocator(capacity_bytes=capacity_bytes)
        self.blocks: dict[str, Block] = {}
        self.used: dict[str, str] = {}

    def ask(self, request: Request) -> None:
        """Ask both; what is taken and cannot be used any more is gone."""
        match request:
            case Take(name, size, stream):
                if not size:
                    return
                block = self.quick.take(size, stream)
                assert self.named.allocate(name, size, stream) == (block is not None)
                if block is not None:
                    self.blocks[name] = block
            case Use(name, stream):
                if name in self.blocks and self.blocks[name][2].stream != stream:
                    self.used[name] = stream
                    self.named.use(name, stream)
            case Give(name):
                if name in self.blocks:
                    self.give(name)
            case Finish(stream):
                self.named.finish(stream)
                self.quick.finish(stream)
            case Empty():
                self.named.empty_cache()
                self.quick.empty_cache()

    def give(self, name: str) -> None:
        """Free a block, when the stream that uses it is there if one does."""
        block, stream = self.blocks.pop(name), self.used.pop(name, None)
        self.named.free(name)
        if stream is None:
            self.quick.give(block)
        else:
            self.quick.hold(block, stream)


@given(asked=requests(), capacity=CAPACITIES)
def test_each_request_has_the_same_answer(asked: list[Request], capacity: int) -> None:
    both = Both(capacity)
    for request in asked:
        both.ask(request)
        assert figures(both.quick) == figures(both.named)
        assert not_live(both.quick) == not_live(both.named)


@given(segments=SEGMENTS, capacity=CAPACITIES)
def test_a_segment_is_served_as_its_requests_are(
    segments: list[tuple[list[tuple[tuple[int, int], int]], str]], capacity: int
) -> None:
    named = CachingAllocator(capacity_bytes=capacity, journals=False)
    quick = QuickAllocator(capacity_bytes=capacity)
    numbers: list[dict[int, int]] = [{} for _ in range(BUFFERS)]
    blocks: list[dict[int, Block]] = [{} for _ in range(BUFFERS)]
    by_number = NamedBlocks(named)
    for tensors, stream in segments:
        turns = [turn(number, key, size) for (number, key), size in tensors]
        refused = quick.serve(turns, blocks, stream)
        assert refused == by_number.serve(turns, numbers, stream)
        assert [list(each) for each in blocks] == [list(each) for each in numbers]
        assert figures(quick) == figures(named)
        assert not_live(quick) == not_live(named)
