"""Two rank orders in one mesh, against rank numbers counted out by Megatron-LM's rule."""

from collections import defaultdict
from functools import cache
from itertools import combinations, pairwise
from math import prod

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from zsim.schedule.mesh import Axis, Group, Joined, Mesh, MeshError
from zsim.schedule.rank_order import RankOrderError, refined

Sizes = dict[str, int]
"""Sizes of axes, the fastest first, as in Megatron-LM's `order` string."""
Listing = set[frozenset[int]]


def listed(sizes: Sizes, token: str) -> Listing:
    return _listed(tuple(sizes.items()), token)


@cache
def _listed(sizes: tuple[tuple[str, int], ...], token: str) -> Listing:
    """Return the groups of `token` ("tp-ep"): ranks whose other coordinates are equal."""
    groups: dict[tuple[int, ...], set[int]] = defaultdict(set)
    for rank in range(prod(size for _, size in sizes)):
        left, others = rank, []
        for name, size in sizes:
            left, place = divmod(left, size)
            if name not in token.split("-"):
                others.append(place)
        groups[tuple(others)].add(rank)
    return {frozenset(each) for each in groups.values()}


def in_mesh(mesh: Mesh, *names: str) -> Listing:
    """Return the communicators of the group along axes of a mesh."""
    axes = tuple(part for name in names for part in mesh.parts(name))
    group = Group(name="asked", axes=axes)
    found: Listing = set()
    left = set(range(mesh.size))
    while left:
        members = frozenset(group.members(mesh, mesh.coordinates(min(left))))
        assert members <= left
        found.add(members)
        left -= members
    return found


def plain(sizes: Sizes) -> tuple[Axis, ...]:
    return tuple(Axis(name=name, size=size) for name, size in reversed(sizes.items()))


small = st.sampled_from([1, 2, 3, 4])


@st.composite
def orders(draw: st.DrawFn) -> tuple[Sizes, Sizes]:
    dense = {"tp": draw(small), "cp": draw(small), "dp": draw(small), "pp": draw(st.integers(1, 2))}
    inner = dense["tp"] * dense["cp"] * dense["dp"]
    etp = draw(st.sampled_from([each for each in range(1, inner + 1) if inner % each == 0]))
    rest = inner // etp
    ep = draw(st.sampled_from([each for each in range(1, rest + 1) if rest % each == 0]))
    return dense, {"etp": etp, "ep": ep, "edp": rest // ep, "epp": dense["pp"]}


def both(dense: Sizes, experts: Sizes) -> Mesh:
    """Return the mesh of both orders, with context and data joined as in a schedule."""
    names = {"tp": "tp", "cp": "cp", "dp": "outer", "pp": "pp"}
    first = Mesh(
        axes=plain({names[name]: size for name, size in dense.items()}),
        joined=(Joined(name="data", axes=("outer", "cp")),),
    )
    return refined(first, plain(experts))


@given(orders())
def test_groups_of_a_refined_mesh_are_those_of_both_rank_orders(drawn: tuple[Sizes, Sizes]) -> None:
    dense, experts = drawn
    try:
        mesh = both(dense, experts)
    except RankOrderError:
        assume(False)
    for token, names in (
        ("tp", ["tp"]),
        ("cp", ["cp"]),
        ("dp", ["outer"]),
        ("dp-cp", ["data"]),
        ("pp", ["pp"]),
        ("tp-cp", ["cp", "tp"]),
    ):
        assert in_mesh(mesh, *names) == listed(dense, token), token
    for token, names in (
        ("etp", ["etp"]),
        ("ep", ["ep"]),
        ("edp", ["edp"]),
        ("epp", ["epp"]),
        ("etp-ep", ["ep", "etp"]),
        ("etp-ep-epp", ["epp", "ep", "etp"]),
    ):
        assert in_mesh(mesh, *names) == listed(experts, token), token
    assert in_mesh(mesh, "pp") == in_mesh(mesh, "epp")


@given(orders())
def test_coordinates_along_joined_axes_count_as_each_rank_order_does(
    drawn: tuple[Sizes, Sizes],
) -> None:
    dense, experts = drawn
    try:
        mesh = both(dense, experts)
    except RankOrderError:
        assume(False)
    renamed = {"tp": "tp", "cp": "cp", "dp": "outer", "pp": "pp"}
    for rank in range(mesh.size):
        at, left, other = mesh.coordinates(rank), rank, rank
        for name, size in dense.items():
            left, place = divmod(left, size)
            assert at[renamed[name]] == place
        for name, size in experts.items():
            other, place = divmod(other, size)
            assert at[name] == place


def divisor_chains(ranks: int) -> list[tuple[int, ...]]:
    """Return every way to cut `ranks` into nested blocks: numbers that divide the next one."""
    between = [each for each in range(2, ranks) if ranks % each == 0]
    found = [
        (1, *inner, ranks) for n in range(len(between) + 1) for inner in combinations(between, n)
    ]
    return [each for each in found if all(high % low == 0 for low, high in pairwise(each))]


def fits(chain: tuple[int, ...], sizes: Sizes) -> bool:
    """Return True if each axis of an order consists of neighbouring axes of a mesh."""
    mesh_sizes = {str(low): high // low for low, high in pairwise(chain) if high > low}
    names = list(mesh_sizes)
    runs = [
        "-".join(names[low:high])
        for low in range(len(names) + 1)
        for high in range(low + 1, len(names) + 1)
    ]
    listings = [listed(mesh_sizes, run) for run in runs]
    return all(listed(sizes, name) in listings for name, size in sizes.items() if size > 1)


@given(orders())
def test_a_mesh_exists_exactly_if_some_way_to_cut_the_ranks_has_both_orders(
    drawn: tuple[Sizes, Sizes],
) -> None:
    dense, experts = drawn
    ranks = prod(dense.values())
    assume(1 < ranks <= 24)
    exists = any(fits(chain, dense) and fits(chain, experts) for chain in divisor_chains(ranks))
    try:
        both(dense, experts)
    except RankOrderError:
        assert not exists
    else:
        assert exists


def test_experts_over_high_data_ranks_and_tensor_ranks_share_the_low_data_ranks() -> None:
    dense = Mesh(axes=plain({"tensor": 2, "data": 64, "pipeline": 4}))
    mesh = refined(dense, plain({"etp": 1, "ep": 64, "edp": 2, "epp": 4}))
    assert [(axis.name, axis.size) for axis in mesh.axes] == [
        ("pipeline", 4),
        ("data0", 2),
        ("data1", 32),
        ("tensor", 2),
        ("etp", 1),
    ]
    assert mesh.parts("ep") == ("data1", "tensor")
    assert mesh.parts("edp") == ("data0",)
    assert mesh.parts("data") == ("data0", "data1")


def test_degrees_that_do_not_nest_are_named() -> None:
    dense = Mesh(axes=plain({"tensor": 2, "context": 3, "outer": 2}))
    with pytest.raises(
        RankOrderError, match="tensor x context = 6 and ep = 4: neither divides"
    ) as e:
        refined(dense, plain({"etp": 1, "ep": 4, "edp": 3}))
    assert (e.value.conflict.ranks, e.value.conflict.other_ranks) == (6, 4)


def test_orders_of_different_worlds_are_refused() -> None:
    with pytest.raises(MeshError, match="rank orders of 8 and 4 ranks: must be equal"):
        refined(Mesh(axes=plain({"tensor": 8})), plain({"ep": 4}))


def test_names_of_both_orders_must_differ() -> None:
    with pytest.raises(MeshError, match="different names"):
        refined(Mesh(axes=plain({"ep": 4})), plain({"ep": 4}))
