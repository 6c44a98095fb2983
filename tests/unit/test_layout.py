import pytest

from zsim.layout import Layout, LayoutError, Piece

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
    assert layout.window(4, 2, layout.segment(0, 2)) == (0, 0)
    assert layout.window(3, 2, layout.segment(0, 2)) == (3, 1)
    assert layout.window(3, 2, layout.segment(1, 2)) == (0, 1)


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
