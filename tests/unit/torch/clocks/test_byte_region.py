"""Bytes of a view, against an enumeration of its elements."""

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from zsim_record.clocks.byte_region import ByteRegion, region_of_view

ITEM = st.sampled_from([1, 2, 4])
DIMENSION = st.tuples(st.integers(1, 4), st.integers(0, 9))
VIEW = st.tuples(st.integers(0, 12), st.lists(DIMENSION, max_size=3), ITEM)
View = tuple[int, list[tuple[int, int]], int]


def region(view: View) -> ByteRegion:
    offset, dims, item = view
    found = region_of_view(
        offset, tuple(size for size, _ in dims), tuple(stride for _, stride in dims), item
    )
    assert found is not None
    return found


def bytes_of(view: View) -> set[int]:
    offset, dims, item = view
    elements = {
        offset + sum(index * stride for index, (_, stride) in zip(indices, dims, strict=True))
        for indices in product(*(range(size) for size, _ in dims))
    }
    return {element * item + byte for element in elements for byte in range(item)}


@given(VIEW, VIEW)
def test_views_that_share_a_byte_overlap(one: View, other: View) -> None:
    if bytes_of(one) & bytes_of(other):
        assert region(one).overlaps(region(other))
        assert region(other).overlaps(region(one))


@given(VIEW)
def test_a_region_spans_the_first_and_the_last_byte_of_its_view(view: View) -> None:
    assert (region(view).start, region(view).end) == (
        min(bytes_of(view)),
        max(bytes_of(view)) + 1,
    )


@given(VIEW, VIEW)
def test_a_region_contains_another_only_if_all_its_bytes_do(one: View, other: View) -> None:
    if region(one).contains(region(other)):
        assert bytes_of(other) <= set(range(region(one).start, region(one).end))
        assert not region(one).runs or bytes_of(one) >= bytes_of(other)


def test_columns_of_one_matrix_do_not_overlap() -> None:
    left = region_of_view(0, (8, 2), (4, 1), 4)
    right = region_of_view(2, (8, 2), (4, 1), 4)
    assert left is not None
    assert right is not None
    assert not left.overlaps(right)


def test_an_empty_view_has_no_bytes() -> None:
    assert region_of_view(3, (0, 4), (4, 1), 4) is None
