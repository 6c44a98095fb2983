import pytest
from hypothesis import given
from hypothesis import strategies as st

from zsim.schedule.layout import Fragment, Layout, LayoutError, Piece

WHOLE = (Piece(parameter="w", start=0, size=6),)


def test_equal_segments_follow_the_coordinate() -> None:
    layout = Layout(name="b", pieces=WHOLE, elements=8, axis="data")
    assert [layout.segment(index, 4) for index in range(4)] == [(0, 2), (2, 2), (4, 2), (6, 2)]


def test_a_layout_without_axis_is_whole_on_every_rank() -> None:
    layout = Layout(name="b", pieces=WHOLE, elements=6)
    assert layout.segment(3, 4) == (0, 6)


def test_elements_that_the_ranks_do_not_divide_are_refused() -> None:
    layout = Layout(name="b", pieces=WHOLE, elements=6, axis="data")
    with pytest.raises(LayoutError, match="6 elements in 4 equal segments"):
        layout.segment(0, 4)


def test_cuts_may_leave_a_rank_with_nothing() -> None:
    layout = Layout(name="b", pieces=WHOLE, elements=6, axis="data", cuts=(0, 4, 4, 6))
    assert [layout.segment(index, 3)[1] for index in range(3)] == [4, 0, 2]


def test_a_window_past_a_segment_is_empty() -> None:
    layout = Layout(name="b", pieces=WHOLE, elements=6, axis="data", cuts=(0, 4, 6))
    assert layout.window(4, 2, 0, 2) == (0, 0)
    assert layout.window(3, 2, 0, 2) == (3, 1)
    assert layout.window(3, 2, 1, 2) == (0, 1)


def test_cuts_for_another_number_of_ranks_are_refused() -> None:
    layout = Layout(name="b", pieces=WHOLE, elements=6, axis="data", cuts=(0, 4, 6))
    with pytest.raises(LayoutError, match="3 cuts for 3 ranks, 4 needed"):
        layout.segment(0, 3)


@pytest.mark.parametrize("cuts", [(0, 4, 2), (0,)])
def test_cuts_that_do_not_ascend_are_refused(cuts: tuple[int, ...]) -> None:
    with pytest.raises(LayoutError, match="must ascend"):
        Layout(name="b", pieces=WHOLE, elements=6, axis="data", cuts=cuts)


def test_cuts_without_an_axis_are_refused() -> None:
    with pytest.raises(LayoutError, match="cuts need an axis"):
        Layout(name="b", pieces=WHOLE, elements=6, cuts=(0, 6))


def test_negative_sizes_are_refused() -> None:
    with pytest.raises(LayoutError, match="elements -1"):
        Layout(name="b", pieces=(), elements=-1)
    with pytest.raises(LayoutError, match="negative start or size"):
        Layout(name="b", pieces=(Piece(parameter="w", start=0, size=-1),), elements=1)


PADDED = Layout(
    name="b",
    pieces=(Piece(parameter="w", start=0, size=3), Piece(parameter="v", start=4, size=2)),
    elements=6,
    axis="data",
    blocks=(0, 4),
)
"""Two parameters for two ranks, the first one padded."""


def test_a_rank_owns_its_part_of_every_block() -> None:
    assert list(PADDED.fragments(2, 0)) == [Fragment("w", 0, 0, 2), Fragment("v", 0, 2, 1)]
    assert list(PADDED.fragments(2, 1)) == [Fragment("w", 2, 0, 1), Fragment("v", 1, 2, 1)]


def test_the_whole_has_the_segments_one_after_the_other() -> None:
    assert [PADDED.segment(rank, 2) for rank in range(2)] == [(0, 3), (3, 3)]
    assert sorted(PADDED.fragments(2), key=lambda each: each.position) == [
        Fragment("w", 0, 0, 2),
        Fragment("v", 0, 2, 1),
        Fragment("w", 2, 3, 1),
        Fragment("v", 1, 5, 1),
    ]


@pytest.mark.parametrize("blocks", [(), (1,), (0, 4, 2), (0, 7)])
def test_blocks_that_do_not_ascend_from_0_to_the_end_are_refused(blocks: tuple[int, ...]) -> None:
    with pytest.raises(LayoutError, match="must ascend from 0 to 6"):
        Layout(name="b", pieces=WHOLE, elements=6, axis="data", blocks=blocks)


def test_blocks_need_an_axis_and_no_cuts() -> None:
    with pytest.raises(LayoutError, match="blocks need an axis, and no cuts"):
        Layout(name="b", pieces=WHOLE, elements=6, blocks=(0,))
    with pytest.raises(LayoutError, match="blocks need an axis, and no cuts"):
        Layout(name="b", pieces=WHOLE, elements=6, axis="data", cuts=(0, 6), blocks=(0,))


def test_a_block_that_the_ranks_do_not_divide_is_refused_although_they_divide_the_whole() -> None:
    layout = Layout(name="b", pieces=(), elements=6, axis="data", blocks=(0, 3))
    with pytest.raises(LayoutError, match="3 elements in 2 equal segments"):
        layout.segment(0, 2)


@given(st.data())
def test_parts_of_a_window_are_what_its_owners_have_of_it(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 6))
    cuts = data.draw(
        st.none() | st.lists(st.integers(0, 20), min_size=count + 1, max_size=count + 1)
    )
    if cuts is None:
        layout = Layout(
            name="b", pieces=(), elements=count * data.draw(st.integers(0, 5)), axis="data"
        )
    else:
        cuts = [0, *sorted(cuts)[1:]]
        layout = Layout(name="b", pieces=(), elements=cuts[-1], axis="data", cuts=tuple(cuts))
    start = data.draw(st.integers(0, layout.elements))
    size = data.draw(st.integers(0, layout.elements - start))
    every = [layout.window(start, size, rank, count)[1] for rank in range(count)]
    assert layout.parts(start, size, count) == [part for part in every if part]
