import pytest

from zsim.schedule.mesh import Axis, Group, Joined, Mesh, MeshError, Span

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


def test_a_group_of_every_second_rank_counts_those_alone() -> None:
    ends = Group(name="ends", axes=("data",), where=(Span(axis="data", start=0, end=3, step=2),))
    assert ends.size(GRID) == 2
    assert ends.members(GRID, {"data": 2, "tensor": 1}) == (1, 5)
    assert ends.index(GRID, {"data": 2, "tensor": 1}) == 1
    assert not ends.holds(GRID, {"data": 1, "tensor": 0})


def test_a_step_below_one_is_refused() -> None:
    with pytest.raises(MeshError, match="step 0 must be at least 1"):
        Span(axis="data", start=0, end=2, step=0)


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


SPLIT = Mesh(
    axes=(
        Axis(name="far", size=2),
        Axis(name="near", size=3),
        Axis(name="tensor", size=2),
    ),
    joined=(Joined(name="data", axes=("far", "near")),),
)


def test_a_joined_axis_is_as_long_as_its_parts_together() -> None:
    assert SPLIT.axis_size("data") == 6
    assert SPLIT.parts("data") == ("far", "near")
    assert SPLIT.parts("near") == ("near",)
    assert SPLIT.coordinates(9) == {"far": 1, "near": 1, "tensor": 1, "data": 4}


def test_joined_axes_add_no_ranks() -> None:
    assert SPLIT.size == 12
    assert [SPLIT.rank(SPLIT.coordinates(rank)) for rank in range(12)] == list(range(12))


def test_a_part_of_a_joined_axis_has_a_group_of_its_own() -> None:
    near = Group(name="near", axes=("near",))
    assert near.members(SPLIT, SPLIT.coordinates(9)) == (7, 9, 11)
    both = Group(name="data", axes=("far", "near"))
    assert both.members(SPLIT, SPLIT.coordinates(9)) == (1, 3, 5, 7, 9, 11)
    assert both.index(SPLIT, SPLIT.coordinates(9)) == SPLIT.coordinates(9)["data"]


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ((), "joined axis data: nothing must be neighbours among far, near, tensor"),
        (("near", "far"), "near, far must be neighbours among far, near, tensor, in this order"),
        (("far", "tensor"), "far, tensor must be neighbours"),
        (("pipe",), "pipe must be neighbours"),
    ],
)
def test_axes_that_are_no_neighbours_cannot_be_joined(axes: tuple[str, ...], message: str) -> None:
    with pytest.raises(MeshError, match=message):
        Mesh(axes=SPLIT.axes, joined=(Joined(name="data", axes=axes),))


def test_a_joined_axis_has_a_name_of_its_own() -> None:
    with pytest.raises(MeshError, match="different names, got far, near, tensor, near"):
        Mesh(axes=SPLIT.axes, joined=(Joined(name="near", axes=("far", "near")),))


def test_an_axis_that_is_not_there_is_refused_with_those_that_are() -> None:
    with pytest.raises(MeshError, match="no axis 'pipe'; the mesh has far, near, tensor, data"):
        SPLIT.axis_size("pipe")


def test_a_box_names_parts_and_no_joined_axis() -> None:
    with pytest.raises(MeshError, match="no axis 'data'; the mesh has far, near, tensor"):
        SPLIT.limits((Span(axis="data", start=0, end=1),))
