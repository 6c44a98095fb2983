"""Updates of parts of shards whose length differs by rank, some of them empty."""

import pytest
from faults.findings import left
from hypothesis import given, settings
from hypothesis import strategies as st
from runtimes_by_hand import owners

from zsim.proof import check
from zsim.proof.context import Context
from zsim.proof.values import shown

Parts = tuple[tuple[int, int], ...]

CUTS = [(0, 4, 4, 7, 8), (0, 0, 8, 8, 8), (0, 2, 4, 6, 8), (0, 1, 8)]


@pytest.mark.matrix(4)
@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize("parts", [((0, 8),), ((0, 5), (5, 3)), ((0, 1), (1, 1), (2, 6))])
def test_an_update_in_parts_of_uneven_shards_is_proved(cuts: tuple[int, ...], parts: Parts) -> None:
    assert check(owners(cuts, parts)) == ()


@pytest.mark.matrix(4)
@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize(
    "parts", [((0, 5), (6, 2)), ((0, 5), (4, 4)), ((0, 5),), ((1, 7),), ((0, 7),)]
)
def test_parts_that_leave_an_element_out_or_take_it_twice_are_found(
    cuts: tuple[int, ...], parts: Parts
) -> None:
    assert left(owners(cuts, parts)).startswith("step/send")


@pytest.mark.one_commit_in(2)
@given(
    inside=st.lists(st.integers(0, 8), min_size=4, max_size=20),
    middle=st.integers(1, 7),
    gap=st.booleans(),
)
@settings(max_examples=30)
def test_every_rank_says_what_classes_say(inside: list[int], middle: int, *, gap: bool) -> None:
    made = owners((0, *sorted(inside), 8), ((0, middle), (middle + gap, 8 - middle - gap)))
    few, every = shown(Context.of(made)), shown(Context.of(made), unfolded=True)
    assert bool(few.findings) == bool(every.findings) == gap
