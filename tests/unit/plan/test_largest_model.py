"""The search for the largest size, and what an operation's id says."""

from hypothesis import given
from hypothesis import strategies as st

from zsim.analysis.memory_footprint import Footprint, MemoryShortage
from zsim.schedule.describe_operation import moment
from zsim.schedule.schedule import Kind
from zsim_plan.answer.largest_model import Tried, largest

MOST = 1000


@given(
    fixed=st.integers(0, 500),
    each=st.integers(1, 40),
    bend=st.integers(0, 3),
    usable=st.integers(1, 60_000),
    start=st.integers(1, MOST),
)
def test_the_search_ends_at_the_limit_however_memory_grows(
    fixed: int, each: int, bend: int, usable: int, start: int
) -> None:
    tries: list[int] = []

    def taken(size: int) -> int:
        return fixed + each * size + bend * size * size // 64

    def tried(size: int) -> Tried:
        tries.append(size)
        size_bytes = taken(size)
        shortage = MemoryShortage(
            operation="",
            needed_bytes=size_bytes,
            capacity_bytes=usable,
            alive_bytes=((Kind.SAVED, size_bytes),),
            largest_buffer="all",
            largest_buffer_bytes=size_bytes,
        )
        footprint = Footprint(
            allocated_bytes=size_bytes,
            needed_bytes=size_bytes,
            reserved_bytes=size_bytes,
            usable_bytes=usable,
            shortage=shortage if size_bytes > usable else None,
        )
        return Tried(size=size, parameters=size, footprint=footprint)

    found = largest(tried, start=start, smallest=1, most=MOST, digits=None)
    expected = max((size for size in range(1, MOST + 1) if taken(size) <= usable), default=0)
    assert (found.fits.size if found.fits else 0) == expected
    assert (found.refused.size if found.refused else MOST + 1) == expected + 1
    assert len(tries) == len(set(tries)) <= 24


def test_an_id_is_said_in_words() -> None:
    said = {
        "setup/bucket3/allocate/bucket3/moment1": "setup, taking bucket3/moment1",
        "step/backward/mb1/block7/allocate/block7/sum/again": (
            "backward of block7, micro-batch 1, taking block7/sum/again"
        ),
        "step/forward/mb0/allocate/batch": "forward, micro-batch 0, taking batch",
        "step/update/allocate2/norm": "update, taking norm",
        "step/forward/mb0/block0/compute": "forward of block0/compute, micro-batch 0",
        "by hand": "by hand",
    }
    assert {each: moment(each) for each in said} == said
