"""Views meet where some rank has an element of both, counted rank by rank."""

from itertools import accumulate, pairwise

from hypothesis import given
from hypothesis import strategies as st

from zsim.proof.overlap import Overlap
from zsim.schedule.builder import ScheduleBuilder
from zsim.schedule.layout import Layout
from zsim.schedule.mesh import Axis, Joined, Mesh
from zsim.schedule.operation import View
from zsim.schedule.schedule import Schedule

AXES = ("outer", "inner", "data")


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    """A mesh with a joined axis; a layout cut anywhere along it, and one in equal segments."""
    outer, inner = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    mesh = Mesh(
        axes=(Axis(name="outer", size=outer), Axis(name="inner", size=inner)),
        joined=(Joined(name="data", axes=("outer", "inner")),),
    )
    ranks = outer * inner
    elements = draw(st.integers(0, 12))
    inside = draw(st.lists(st.integers(0, elements), min_size=ranks - 1, max_size=ranks - 1))
    build = ScheduleBuilder("drawn", mesh)
    cuts = (0, *sorted(inside), elements)
    build.layout(Layout(name="uneven", pieces=(), elements=elements, axis="data", cuts=cuts))
    size = draw(st.integers(0, 3)) * ranks
    build.layout(Layout(name="even", pieces=(), elements=size, axis="data"))
    parts = draw(st.lists(st.integers(0, 3), min_size=1, max_size=3))
    ends = [0, *accumulate(part * ranks for part in parts)]
    blocks = tuple(ends[:-1])
    build.layout(Layout(name="blocks", pieces=(), elements=ends[-1], axis="data", blocks=blocks))
    return build.schedule()


@st.composite
def views(draw: st.DrawFn, schedule: Schedule) -> View:
    """A view of any kind, empty ones too."""
    kind = draw(st.sampled_from(["plain", *AXES, "uneven", "even", "blocks"]))
    if kind in schedule.layout_by_name:
        elements = schedule.layout_by_name[kind].elements
        start = draw(st.integers(0, elements))
        size = draw(st.integers(0, elements - start))
        origin = None if kind == "blocks" else draw(st.sampled_from([None, None, 0, 2]))
        return View(buffer="x", start=start, size=size, layout=kind, origin=origin)
    axis = None if kind == "plain" else kind
    return View(buffer="x", start=draw(st.integers(0, 9)), size=draw(st.integers(0, 6)), axis=axis)


def meet_on_some_rank(schedule: Schedule, one: View, other: View) -> bool:
    for rank in range(schedule.mesh.size):
        where = schedule.mesh.coordinates(rank)
        (start, size), (low, length) = (schedule.extent(each, where) for each in (one, other))
        if max(start, low) < min(start + size, low + length):
            return True
    return False


def alike(one: View, other: View) -> bool:
    """Whether the answer is exact: both the same on all ranks, or of one axis or one layout."""
    kinds = {(each.axis, each.layout, each.origin is None) for each in (one, other)}
    if any(layout is not None for _, layout, _ in kinds):
        return len(kinds) == 1 and one.origin is None
    return len({axis for axis, _, _ in kinds} - {None}) < 2


@given(schedules(), st.data())
def test_views_meet_where_some_rank_has_an_element_of_both(
    schedule: Schedule, data: st.DataObject
) -> None:
    one, other = data.draw(views(schedule)), data.draw(views(schedule))
    meets, truth = Overlap(schedule).meet(one, other), meet_on_some_rank(schedule, one, other)
    assert meets >= truth
    if alike(one, other):
        assert meets == truth


@given(schedules(), st.data())
def test_a_hull_holds_what_every_rank_has(schedule: Schedule, data: st.DataObject) -> None:
    view = data.draw(views(schedule))
    low, high = Overlap(schedule).hull(view)
    for rank in range(schedule.mesh.size):
        start, size = schedule.extent(view, schedule.mesh.coordinates(rank))
        assert size == 0 or low <= start <= start + size <= high


def test_cost_does_not_grow_with_the_ranks() -> None:
    """Own parts of a billion ranks: two inequalities."""
    mesh = Mesh(axes=(Axis(name="data", size=10**9),))
    overlap = Overlap(ScheduleBuilder("many", mesh).schedule())
    slots = [View(buffer="x", start=start, size=4, axis="data") for start in (0, 3, 4)]
    assert [overlap.meet(one, other) for one, other in pairwise(slots)] == [True, True]
    assert overlap.meet(slots[0], slots[2]) is False
    far = View(buffer="x", start=4 * 10**9 - 1, size=1)
    assert overlap.meet(slots[0], far)
