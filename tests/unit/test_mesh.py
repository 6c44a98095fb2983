import pytest

from zsim.mesh import Axis, Group, Mesh, MeshError, Span

GRID = Mesh(axes=(Axis(name="data", size=3), Axis(name="tensor", size=2)))


def test_the_last_axis_varies_fastest() -> None:
    assert [GRID.coordinates(rank)["tensor"] for rank in range(4)] == [0, 1, 0, 1]


def test_a_group_gathers_ranks_that_differ_along_its_axes_alone() -> None:
    data = Group(name="data", axes=("data",))
    assert data.members(GRID, GRID.coordinates(3)) == (1, 3, 5)
    assert data.index(GRID, GRID.coordinates(3)) == 1


def test_a_group_over_every_axis_is_the_world() -> None:
    world = Group(name="world", axes=("data", "tensor"))
    assert world.members(GRID, GRID.coordinates(4)) == tuple(range(6))
    assert world.size(GRID) == 6


def test_a_limited_group_counts_from_its_first_member() -> None:
    late = Group(name="late", axes=("data",), where=(Span(axis="data", start=1, end=3),))
    assert late.size(GRID) == 2
    assert late.index(GRID, {"data": 1, "tensor": 0}) == 0
    assert not late.holds(GRID, {"data": 0, "tensor": 0})


def test_a_size_below_one_is_refused() -> None:
    with pytest.raises(MeshError, match="size 0 must be at least 1"):
        Axis(name="data", size=0)


def test_an_unnamed_axis_is_refused() -> None:
    with pytest.raises(MeshError, match="must not be empty"):
        Axis(name="", size=1)


def test_two_axes_of_one_name_are_refused() -> None:
    with pytest.raises(MeshError, match="different names"):
        Mesh(axes=(Axis(name="data", size=1), Axis(name="data", size=2)))


def test_an_empty_span_is_refused() -> None:
    with pytest.raises(MeshError, match="empty or negative"):
        Span(axis="data", start=1, end=1)


@pytest.mark.parametrize(
    ("box", "message"),
    [
        ((Span(axis="pipe", start=0, end=1),), "no axis 'pipe'"),
        ((Span(axis="data", start=0, end=4),), "past its size 3"),
        ((Span(axis="data", start=0, end=1), Span(axis="data", start=1, end=2)), "limited twice"),
    ],
)
def test_a_box_that_leaves_the_mesh_is_refused(box: tuple[Span, ...], message: str) -> None:
    with pytest.raises(MeshError, match=message):
        GRID.limits(box)


def test_a_rank_outside_the_mesh_has_no_coordinates() -> None:
    with pytest.raises(MeshError, match="outside 0 to 5"):
        GRID.coordinates(6)
