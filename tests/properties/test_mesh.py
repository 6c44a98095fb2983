from hypothesis import given
from hypothesis import strategies as st

from zsim.schedule.mesh import Axis, Box, Group, Mesh, Span
from zsim_torch.execute.collectives import communicators

NAMES = ("data", "tensor", "pipe")


@st.composite
def meshes(draw: st.DrawFn) -> Mesh:
    count = draw(st.integers(1, 3))
    return Mesh(axes=tuple(Axis(name=name, size=draw(st.integers(1, 4))) for name in NAMES[:count]))


@st.composite
def boxes(draw: st.DrawFn, mesh: Mesh) -> Box:
    spans: list[Span] = []
    for axis in mesh.axes:
        if draw(st.booleans()):
            start = draw(st.integers(0, axis.size - 1))
            end = draw(st.integers(start + 1, axis.size))
            spans.append(Span(axis=axis.name, start=start, end=end))
    return tuple(spans)


@st.composite
def groups(draw: st.DrawFn, mesh: Mesh) -> Group:
    names = tuple(axis.name for axis in mesh.axes if draw(st.booleans()))
    return Group(name="drawn", axes=names, where=draw(boxes(mesh)))


@given(meshes())
def test_rank_and_coordinates_are_inverse(mesh: Mesh) -> None:
    assert [mesh.rank(mesh.coordinates(rank)) for rank in range(mesh.size)] == list(
        range(mesh.size)
    )


@given(meshes().flatmap(lambda mesh: st.tuples(st.just(mesh), boxes(mesh))))
def test_a_box_has_as_many_ranks_as_its_size_says(drawn: tuple[Mesh, Box]) -> None:
    mesh, box = drawn
    assert len(list(mesh.ranks(box))) == mesh.box_size(box)


@given(meshes().flatmap(lambda mesh: st.tuples(st.just(mesh), boxes(mesh), boxes(mesh))))
def test_boxes_meet_exactly_when_they_share_a_rank(drawn: tuple[Mesh, Box, Box]) -> None:
    mesh, one, other = drawn
    shared = set(mesh.ranks(one)) & set(mesh.ranks(other))
    assert mesh.boxes_meet(one, other) is bool(shared)


@given(meshes().flatmap(lambda mesh: st.tuples(st.just(mesh), groups(mesh))))
def test_communicators_partition_the_ranks_that_a_group_holds(drawn: tuple[Mesh, Group]) -> None:
    mesh, group = drawn
    held = [rank for rank in range(mesh.size) if group.holds(mesh, mesh.coordinates(rank))]
    communicators = {group.members(mesh, mesh.coordinates(rank)) for rank in held}
    assert sorted(rank for members in communicators for rank in members) == held
    assert {len(members) for members in communicators} == {group.size(mesh)}


@given(meshes().flatmap(lambda mesh: st.tuples(st.just(mesh), groups(mesh))))
def test_a_member_stands_at_its_index(drawn: tuple[Mesh, Group]) -> None:
    mesh, group = drawn
    for rank in mesh.ranks(group.where):
        coordinates = mesh.coordinates(rank)
        assert group.members(mesh, coordinates)[group.index(mesh, coordinates)] == rank


@given(meshes().flatmap(lambda mesh: st.tuples(st.just(mesh), groups(mesh))))
def test_real_ranks_list_communicators_in_the_order_of_their_first_ranks(
    drawn: tuple[Mesh, Group],
) -> None:
    mesh, group = drawn
    held = [rank for rank in range(mesh.size) if group.holds(mesh, mesh.coordinates(rank))]
    members = {group.members(mesh, mesh.coordinates(rank)) for rank in held}
    assert list(communicators(mesh, group)) == sorted(members)
