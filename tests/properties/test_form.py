"""What a form says of a view is what layouts, meshes and extents say, element by element."""

from dataclasses import dataclass
from itertools import product

from hypothesis import assume, given
from hypothesis import strategies as st

from zsim.builder import ScheduleBuilder
from zsim.check.form import Form, Forms, Shape
from zsim.layout import Layout, Piece
from zsim.mesh import Axis, Group, Joined, Mesh
from zsim.operation import View
from zsim.schedule import Buffer, Schedule

AXES = ("outer", "inner", "tensor")
JOINED = "data"


@dataclass(frozen=True)
class Case:
    """Buffers over layouts of the same tensor, whole and cut, each element a piece of its own."""

    schedule: Schedule
    forms: Forms
    buffers: tuple[Buffer, ...]

    def elements(self, view: View, rank: int) -> list[int]:
        """The elements of the tensor that `view` has on `rank`, by number."""
        coordinates = self.schedule.mesh.coordinates(rank)
        buffer = self.schedule.programs[0].by_name[view.buffer]
        assert buffer.layout is not None
        layout = self.schedule.layout_by_name[buffer.layout]
        count = 1 if layout.axis is None else self.schedule.mesh.axis_size(layout.axis)
        where = None if buffer.shard is None else coordinates[buffer.shard]
        held = {
            fragment.position + shift: int(fragment.parameter) + fragment.offset + shift
            for fragment in layout.fragments(count, where)
            for shift in range(fragment.size)
        }
        start, size = self.schedule.extent(view, coordinates)
        return [held[position] for position in range(start, start + size)]

    def everywhere(self, view: View) -> list[list[int]]:
        """The same on every rank."""
        return [self.elements(view, rank) for rank in range(self.schedule.mesh.size)]

    def gathered(self, view: View, axes: tuple[str, ...]) -> list[list[int]]:
        """What the members of a group over `axes` have together, on every rank."""
        mesh, group = self.schedule.mesh, Group(name="", axes=axes)
        return [
            [
                element
                for member in group.members(mesh, mesh.coordinates(rank))
                for element in self.elements(view, member)
            ]
            for rank in range(mesh.size)
        ]

    def said(self, form: Form, rank: int) -> list[int]:
        """The elements that `form` says."""
        mesh = self.schedule.mesh
        coordinates, number = mesh.coordinates(rank), 0
        for axis in form.axes:
            number = number * mesh.axis_size(axis) + coordinates[axis]
        numbers = range(form.bounds[0]) if form.shape is Shape.ROWS else (number,)
        return [
            run.start + each * run.stride + shift
            for each in numbers
            for run in form.runs
            for shift in range(run.size)
        ]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    sizes = draw(st.lists(st.integers(1, 3), min_size=3, max_size=3))
    mesh = Mesh(
        axes=tuple(Axis(name=name, size=size) for name, size in zip(AXES, sizes, strict=True)),
        joined=(Joined(name=JOINED, axes=("outer", "inner")),),
    )
    build = ScheduleBuilder("forms", mesh)
    unit = sizes[0] * sizes[1]
    blocks = [unit * size for size in draw(st.lists(st.integers(0, 3), min_size=1, max_size=3))]
    elements = sum(blocks)
    assume(elements > 0)
    starts = tuple(sum(blocks[:index]) for index in range(len(blocks)))
    pieces = tuple(Piece(parameter=str(start), start=start, size=1) for start in range(elements))
    for axis, cut in product((None, "outer", "inner", JOINED), (None, starts)):
        if axis is None and cut is not None:
            continue
        name = f"{axis}/{'blocks' if cut else 'plain'}"
        layout = Layout(name=name, pieces=pieces, elements=elements, axis=axis, blocks=cut)
        build.layout(layout)
        build.buffer(f"{name}/whole", elements, layout=name)
        if axis is not None:
            size = elements // mesh.axis_size(axis)
            build.buffer(f"{name}/shard", size, layout=name, shard=axis)
    schedule = build.schedule()
    (program,) = schedule.programs
    return Case(schedule, Forms(schedule, program), program.buffers)


@st.composite
def views(draw: st.DrawFn, case: Case) -> View:
    """All of a buffer, a part of it, an own slot, or a window."""
    buffer = draw(st.sampled_from(case.buffers))
    assert buffer.layout is not None
    layout, mesh = case.schedule.layout_by_name[buffer.layout], case.schedule.mesh
    kind = draw(st.sampled_from(("all", "part", "slot", "window")))
    if kind == "slot" and buffer.shard is None:
        axis = draw(st.sampled_from((*AXES, JOINED)))
        size = buffer.elements // mesh.axis_size(axis)
        size = draw(st.sampled_from((size, max(1, size // 2))))
        assume(0 < size <= buffer.elements // mesh.axis_size(axis))
        start = draw(st.sampled_from((0, buffer.elements - size * mesh.axis_size(axis))))
        return View(buffer=buffer.name, start=start, size=size, axis=axis)
    if kind == "window" and buffer.shard is not None and layout.blocks is None:
        start = draw(st.integers(0, layout.elements - 1))
        size = draw(st.integers(1, layout.elements - start))
        return View(buffer=buffer.name, start=start, size=size, layout=layout.name)
    if kind == "part":
        start = draw(st.integers(0, buffer.elements - 1))
        size = draw(st.integers(1, buffer.elements - start))
        return View(buffer=buffer.name, start=start, size=size)
    return View(buffer=buffer.name, size=buffer.elements)


def layout_of(case: Case, view: View) -> str:
    layout = view.layout or case.schedule.programs[0].by_name[view.buffer].layout
    assert layout is not None
    return layout


@given(st.data())
def test_a_form_has_the_elements_that_the_view_has_on_every_rank(data: st.DataObject) -> None:
    case = data.draw(cases())
    view = data.draw(views(case))
    form = case.forms.of(view)
    if form is None:
        return
    if form.shape in (Shape.PLAIN, Shape.CUT, Shape.ROWS):
        ranks = range(case.schedule.mesh.size)
        assert [case.said(form, rank) for rank in ranks] == case.everywhere(view)


def others(case: Case) -> list[View]:
    """All of every buffer, and the slots of every axis that fill a whole."""
    found = [View(buffer=buffer.name, size=buffer.elements) for buffer in case.buffers]
    for buffer, axis in product(case.buffers, (*AXES, JOINED)):
        size, left = divmod(buffer.elements, case.schedule.mesh.axis_size(axis))
        if buffer.shard is None and not left:
            found.append(View(buffer=buffer.name, size=size, axis=axis))
    return found


@given(st.data())
def test_forms_are_the_same_if_and_only_if_the_elements_are(data: st.DataObject) -> None:
    case = data.draw(cases())
    one = data.draw(views(case))
    form = case.forms.of(one)
    if form is None:
        return
    elements = case.everywhere(one)
    for other in (data.draw(views(case)), *others(case)):
        second = case.forms.of(other)
        if second is None:
            continue
        same = case.forms.same((layout_of(case, one), form), (layout_of(case, other), second))
        alike = elements == case.everywhere(other)
        assert alike or not same
        if not {Shape.SLICE, Shape.WINDOW} & {form.shape, second.shape}:
            assert same or not alike


@given(st.data())
def test_what_is_gathered_is_what_the_members_have(data: st.DataObject) -> None:
    case = data.draw(cases())
    one = data.draw(views(case))
    form, mesh = case.forms.of(one), case.schedule.mesh
    axes = tuple(
        name for name in AXES if mesh.axis_size(name) > 1 and data.draw(st.booleans(), label=name)
    )
    whole = case.forms.gathered(form, axes) if form is not None and axes else None
    if whole is None:
        return
    elements = case.gathered(one, axes)
    for other in (data.draw(views(case)), *others(case)):
        second = case.forms.of(other)
        if second is None:
            continue
        same = case.forms.same((layout_of(case, one), whole), (layout_of(case, other), second))
        alike = elements == case.everywhere(other)
        assert alike or not same
        if not {Shape.SLICE, Shape.SCATTERED} & {second.shape, whole.shape}:
            assert same or not alike
