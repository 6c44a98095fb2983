"""Layouts of any kind hold every element of every parameter once; copies by parameter keep them."""

from collections import Counter
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zsim.schedule.builder import BufferHandle, ScheduleBuilder
from zsim.schedule.layout import Fragment, Layout, LayoutError, Piece
from zsim.schedule.mesh import Axis, Joined, Mesh, Span
from zsim.schedule.operation import Copy, View
from zsim.schedule.parameter_copy import rearrangement
from zsim.schedule.schedule import Schedule

Element = tuple[str, int]


@st.composite
def plain(draw: st.DrawFn, name: str = "plain", axis: str | None = "data") -> Layout:
    """Parameters one after the other with gaps, for up to four ranks."""
    count = draw(st.integers(0, 4))
    gaps = draw(st.lists(st.integers(0, 2), min_size=count, max_size=count))
    sizes = draw(st.lists(st.integers(0, 9), min_size=count, max_size=count))
    ends = list(accumulate(gap + size for gap, size in zip(gaps, sizes, strict=True)))
    pieces = tuple(
        Piece(parameter=f"p{index}", start=end - size, size=size)
        for index, (end, size) in enumerate(zip(ends, sizes, strict=True))
    )
    end = ends[-1] if ends else 0
    return Layout(name=name, pieces=pieces, elements=-(-end // 12) * 12, axis=axis)


@st.composite
def blocked(draw: st.DrawFn, ranks: int, name: str = "blocked") -> Layout:
    """Each parameter padded alone to a multiple of `ranks`; now and then two share a block."""
    sizes = draw(st.lists(st.integers(0, 9), min_size=1, max_size=4))
    pieces: list[Piece] = []
    blocks, end = [0], 0
    for index, size in enumerate(sizes):
        pieces.append(Piece(parameter=f"p{index}", start=end, size=size))
        end += size
        if index == len(sizes) - 1 or draw(st.booleans()):
            end = -(-end // ranks) * ranks
            blocks.append(end)
    return Layout(
        name=name, pieces=tuple(pieces), elements=end, axis="data", blocks=tuple(blocks[:-1])
    )


@st.composite
def cut(draw: st.DrawFn, ranks: int) -> Layout:
    """Uneven cuts, some of them empty."""
    layout = draw(plain())
    inner = draw(st.lists(st.integers(0, layout.elements), min_size=ranks - 1, max_size=ranks - 1))
    cuts = (0, *sorted(inner), layout.elements)
    return Layout(
        name="cut", pieces=layout.pieces, elements=layout.elements, axis="data", cuts=cuts
    )


@st.composite
def cases(draw: st.DrawFn) -> tuple[Layout, int]:
    ranks = draw(st.integers(1, 4))
    return draw(st.one_of(plain(), blocked(ranks), cut(ranks))), ranks


def elements(fragments: list[Fragment]) -> dict[int, Element]:
    """What lies at each place of a buffer."""
    return {
        each.position + step: (each.parameter, each.offset + step)
        for each in fragments
        for step in range(each.size)
    }


@given(cases())
def test_every_element_of_every_parameter_is_owned_by_exactly_one_rank(
    case: tuple[Layout, int],
) -> None:
    layout, ranks = case
    owned: Counter[Element] = Counter()
    for rank in range(ranks):
        fragments = list(layout.fragments(ranks, rank))
        assert sum(each.size for each in fragments) == len(elements(fragments))
        owned.update(elements(fragments).values())
    wanted = {
        (piece.parameter, element) for piece in layout.pieces for element in range(piece.size)
    }
    assert owned == dict.fromkeys(wanted, 1)


@given(cases())
def test_the_whole_buffer_is_the_segments_one_after_the_other(case: tuple[Layout, int]) -> None:
    layout, ranks = case
    end, joined = 0, dict[int, Element]()
    for rank in range(ranks):
        start, size = layout.segment(rank, ranks)
        assert start == end
        end = start + size
        own = elements(list(layout.fragments(ranks, rank)))
        assert not own or max(own) < size
        joined |= {start + place: element for place, element in own.items()}
    assert end == layout.elements
    assert joined == elements(list(layout.fragments(ranks)))


@given(plain(), st.integers(1, 4))
def test_a_layout_without_blocks_holds_parameters_where_its_pieces_say(
    layout: Layout, ranks: int
) -> None:
    for fragment, piece in zip(
        layout.fragments(ranks), [each for each in layout.pieces if each.size], strict=True
    ):
        assert fragment == (piece.parameter, 0, piece.start, piece.size)


@given(st.integers(1, 4).flatmap(lambda ranks: st.tuples(blocked(ranks), st.just(ranks))))
def test_a_rank_owns_an_equal_part_of_every_block(case: tuple[Layout, int]) -> None:
    layout, ranks = case
    assert layout.blocks is not None
    places = {
        (piece.parameter, element): piece.start + element
        for piece in layout.pieces
        for element in range(piece.size)
    }
    ends = (*layout.blocks[1:], layout.elements)
    for rank in range(ranks):
        for element in elements(list(layout.fragments(ranks, rank))).values():
            place = places[element]
            # Of blocks that begin at one place all but the last are empty.
            start, end = max(
                (start, end)
                for start, end in zip(layout.blocks, ends, strict=True)
                if start <= place
            )
            part = (end - start) // ranks
            assert (place - start) // part == rank


@given(st.integers(2, 4).flatmap(lambda ranks: st.tuples(blocked(ranks), st.just(ranks))))
def test_one_block_is_cut_as_none(case: tuple[Layout, int]) -> None:
    layout, ranks = case
    one = Layout(
        name="one", pieces=layout.pieces, elements=layout.elements, axis="data", blocks=(0,)
    )
    none = Layout(name="none", pieces=layout.pieces, elements=layout.elements, axis="data")
    for rank in (None, *range(ranks)):
        assert elements(list(one.fragments(ranks, rank))) == elements(
            list(none.fragments(ranks, rank))
        )


@given(st.integers(2, 9), st.integers(1, 99))
def test_blocks_that_the_ranks_do_not_divide_are_refused(ranks: int, size: int) -> None:
    total = (size + 1) * ranks
    layout = Layout(name="b", pieces=(), elements=total, axis="data", blocks=(0, 1))
    with pytest.raises(LayoutError, match=f"1 elements in {ranks} equal segments"):
        layout.segment(0, ranks)


def between(ranks: int, source: Layout, target: Layout, shards: tuple[bool, bool]) -> Schedule:
    """A schedule with one copy by parameter; a shard or the whole of each layout."""
    build = ScheduleBuilder.of("copy", data=ranks)
    named: list[BufferHandle] = []
    for layout, sharded, name in zip((source, target), shards, ("source", "target"), strict=True):
        build.layout(layout)
        size = layout.elements
        if sharded:
            size = max(layout.segment(rank, ranks)[1] for rank in range(ranks))
        shard = layout.axis if sharded else None
        named.append(build.buffer(name, size, layout=layout.name, shard=shard))
    build.step.allocate(*named)
    build.step.copy("copy", named[0].all, named[1].all, by_parameter=True)
    build.step.free(*named)
    return build.schedule()


@st.composite
def copies(draw: st.DrawFn) -> Schedule:
    ranks = draw(st.integers(1, 4))
    whole = plain("whole", axis=None)
    first = draw(st.one_of(plain(), blocked(ranks), cut(ranks), whole))
    second = draw(st.one_of(plain("target"), blocked(ranks, "target"), plain("target", axis=None)))
    shards = draw(st.tuples(st.booleans(), st.booleans()))
    return between(
        ranks,
        first,
        second,
        (shards[0] and first.axis is not None, shards[1] and second.axis is not None),
    )


@given(copies())
def test_a_copy_by_parameter_moves_each_element_that_both_hold_and_clears_padding(
    schedule: Schedule,
) -> None:
    (program,) = schedule.programs
    copy = program.by_id["step/copy"]
    assert isinstance(copy, Copy)
    ranks = schedule.mesh.size
    for rank in range(ranks):
        lies: list[dict[int, Element]] = []
        for name in ("source", "target"):
            buffer = program.by_name[name]
            layout = schedule.layout_by_name[buffer.layout or ""]
            lies.append(elements(list(layout.fragments(ranks, rank if buffer.shard else None))))
        source = {element: place for place, element in lies[0].items()}
        wanted = {place: source[element] for place, element in lies[1].items() if element in source}
        found = rearrangement(schedule, program, copy, {"data": rank})
        moved = [
            (
                each.target + row * each.target_step + step,
                each.source + row * each.source_step + step,
            )
            for each in found.moves
            for row in range(each.rows)
            for step in range(each.size)
        ]
        assert len(dict(moved)) == len(moved)
        assert dict(moved) == wanted
        cleared = [start + step for start, size in found.padding for step in range(size)]
        assert sorted([*cleared, *lies[1]]) == list(range(program.by_name["target"].elements))


@given(st.integers(1, 40), st.integers(2, 5), st.integers(1, 6))
def test_a_gathered_parameter_is_copied_in_one_move(columns: int, ranks: int, others: int) -> None:
    """Of equal segments of a parameter each is as far from the one before."""
    size = columns * ranks
    pieces = tuple(
        Piece(parameter=f"p{index}", start=index * size, size=size) for index in range(1 + others)
    )
    gathered = Layout(
        name="gathered",
        pieces=pieces,
        elements=size * len(pieces),
        axis="data",
        blocks=tuple(piece.start for piece in pieces),
    )
    whole = Layout(name="whole", pieces=pieces, elements=size * len(pieces))
    schedule = between(ranks, gathered, whole, (False, False))
    (program,) = schedule.programs
    copy = program.by_id["step/copy"]
    assert isinstance(copy, Copy)
    found = rearrangement(schedule, program, copy, {"data": 0})
    assert len(found.moves) == len(pieces)
    assert found.padding == ()


@given(cases(), st.data())
def test_a_window_is_what_a_segment_has_of_it(
    case: tuple[Layout, int], data: st.DataObject
) -> None:
    layout, ranks = case
    start = data.draw(st.integers(0, layout.elements))
    size = data.draw(st.integers(0, layout.elements - start))
    places = {piece.parameter: piece.start for piece in layout.pieces}
    for rank in range(ranks):
        first, length = layout.window(start, size, rank, ranks)
        assert 0 <= first <= first + length <= layout.segment(rank, ranks)[1]
        for position, (parameter, element) in elements(list(layout.fragments(ranks, rank))).items():
            is_in = start <= places[parameter] + element < start + size
            assert is_in == (first <= position < first + length)
    lengths = [layout.window(start, size, rank, ranks)[1] for rank in range(ranks)]
    assert sum(lengths) == size


@given(
    st.integers(1, 4), st.integers(1, 9), st.integers(0, 36), st.integers(0, 36), st.integers(0, 5)
)
def test_a_window_with_an_origin_lies_where_the_buffer_has_the_rank_s_part_of_it(
    ranks: int, part: int, start: int, size: int, origin: int
) -> None:
    total = ranks * part
    start = min(start, total)
    size = min(size, total - start)
    build = ScheduleBuilder.of("window", data=ranks)
    build.layout(Layout(name="flat", pieces=(), elements=total, axis="data"))
    held = build.buffer("held", origin + size)
    view = held.window("flat", size, start, origin=origin)
    build.step.allocate(held)
    build.step.fill("fill", view, 0.0)
    build.step.free(held)
    schedule = build.schedule()
    seen: list[int] = []
    for rank in range(ranks):
        first, length = schedule.extent(view, {"data": rank})
        places = range(first, first + length)
        seen += places
        for place in places:
            assert (start + place - origin) // part == rank
    assert seen == list(range(origin, origin + size))


@given(st.lists(st.integers(1, 3), min_size=2, max_size=4), st.data())
def test_the_coordinate_along_a_joined_axis_counts_its_parts(
    sizes: list[int], data: st.DataObject
) -> None:
    names = tuple(f"axis{index}" for index in range(len(sizes)))
    start = data.draw(st.integers(0, len(sizes) - 1))
    end = data.draw(st.integers(start + 1, len(sizes)))
    axes = tuple(Axis(name=name, size=size) for name, size in zip(names, sizes, strict=True))
    mesh = Mesh(axes=axes, joined=(Joined(name="both", axes=names[start:end]),))
    single = Mesh(axes=axes)
    seen: Counter[int] = Counter()
    for rank in range(mesh.size):
        coordinates = mesh.coordinates(rank)
        number = 0
        for axis in axes[start:end]:
            number = number * axis.size + coordinates[axis.name]
        assert coordinates == {**single.coordinates(rank), "both": number}
        assert mesh.rank(coordinates) == rank
        assert mesh.completed(single.coordinates(rank)) == coordinates
        seen[number] += 1
    assert mesh.axis_size("both") == len(seen)
    assert set(seen.values()) == {mesh.size // len(seen)}
    assert mesh.size == single.size


@given(st.integers(1, 5), st.integers(1, 5))
def test_a_view_along_a_joined_axis_is_the_rank_s_own(outer: int, inner: int) -> None:
    mesh = Mesh(
        axes=(Axis(name="outer", size=outer), Axis(name="inner", size=inner)),
        joined=(Joined(name="data", axes=("outer", "inner")),),
    )
    build = ScheduleBuilder("joined", mesh)
    held = build.buffer("held", 3 * mesh.size)
    build.step.allocate(held)
    build.step.fill("fill", held.own("data", 3), 0.0)
    build.step.free(held)
    schedule = build.schedule()
    view = View(buffer="held", size=3, axis="data")
    for rank in range(mesh.size):
        assert schedule.extent(view, mesh.coordinates(rank)) == (3 * rank, 3)
    assert mesh.limits((Span(axis="inner", start=0, end=1),))["outer"] == range(outer)
