"""Which part of which tensor a view is: where layouts say so, two views can be told apart.

Elements are counted as if the blocks of a layout stood whole, one after the other. A form is one of

* plain: the same elements on all ranks;
* cut: on rank r along the axes, of each run the elements from start + r x stride on;
* rows: the cuts of a number of ranks, one after the other;
* window: what the rank's segment has of a window;
* slice: elements of rows, counted as they stand in the buffer, own slots along the axes;
* scattered: the cuts of some of the ranks, as no view has them.
"""

from bisect import bisect_left, bisect_right
from enum import StrEnum
from itertools import accumulate, islice, pairwise
from operator import attrgetter
from typing import NamedTuple, assert_never

from zsim.layout import Layout, Piece
from zsim.mesh import Mesh
from zsim.operation import View
from zsim.schedule import Buffer, Program, Schedule


class Shape(StrEnum):
    """How the elements of a view lie in the tensor."""

    PLAIN = "plain"
    CUT = "cut"
    ROWS = "rows"
    WINDOW = "window"
    SLICE = "slice"
    SCATTERED = "scattered"


class Run(NamedTuple):
    """`size` elements from `start` on, and `stride` further on for each next rank."""

    start: int
    stride: int
    size: int


class Form(NamedTuple):
    """The part of a tensor that a view is; `axes` are single ones, of more than one rank.

    `bounds` are the cuts of a window's layout, the number of ranks in rows, both that and the
    blocks of a slice's layout.
    """

    shape: Shape
    axes: tuple[str, ...]
    runs: tuple[Run, ...]
    bounds: tuple[int, ...] = ()

    def __str__(self) -> str:
        over, first, last = " x ".join(self.axes), self.runs[0], self.runs[-1]
        blocks = f" in {len(self.runs)} blocks" if len(self.runs) > 1 else ""
        match self.shape:
            case Shape.PLAIN:
                return f"elements {first.start} to {first.start + first.size}"
            case Shape.WINDOW:
                return f"the own part over {over} of {first.start} to {first.start + first.size}"
            case Shape.SLICE:
                return f"{first.size} elements from {first.start} on of what ranks have in turn"
            case Shape.CUT:
                return f"the own part over {over}{blocks}, {first.start} to {last.start}"
            case Shape.ROWS:
                return f"the parts of {self.bounds[0]} ranks in turn{blocks}"
            case Shape.SCATTERED:
                return f"the parts of ranks over {over} in turn"
            case _:
                assert_never(self.shape)


STARTS = attrgetter("start", "size")
"""The order of pieces in memory."""


def _low(block: tuple[int, int]) -> int:
    return block[0]


def plain(start: int, size: int) -> Form:
    """The same elements on all ranks."""
    return Form(Shape.PLAIN, (), (Run(start, 0, size),))


class Forms:
    """The forms of the views of one program."""

    def __init__(self, schedule: Schedule, program: Program) -> None:
        self.program = program
        self.mesh: Mesh = schedule.mesh
        self.layouts = schedule.layout_by_name
        self._bounds: dict[str, list[tuple[int, int]]] = {}
        self._parts: dict[str, tuple[str, ...]] = {}
        self._known: dict[int, Form | None] = {}
        self._ascending: dict[str, tuple[list[int], list[int], list[Piece]]] = {}
        self._contents: dict[tuple[str, Form], tuple[tuple[str, int, int, int], ...]] = {}

    def of(self, view: View) -> Form | None:
        """What `view` is a part of, or nothing where no layout can say."""
        key = id(view)
        if key not in self._known:
            self._known[key] = self._form(view)
        return self._known[key]

    def window_fits(self, view: View) -> bool:
        """Whether a buffer has at the origin of a window what the window's layout says is there."""
        buffer = self.program.by_name[view.buffer]
        if view.layout is None or view.origin is None or buffer.layout is None:
            return True
        held = self._form(View(buffer=buffer.name, start=view.origin, size=view.size))
        window = plain(view.start, view.size)
        return held is None or self.same((buffer.layout, held), (view.layout, window))

    def gathered(self, form: Form, axes: tuple[str, ...]) -> Form | None:
        """What ranks along `axes` have together, one after the other; nothing if they have one."""
        if form.shape is not Shape.CUT or not set(axes) <= set(form.axes):
            return None
        count = 1
        for axis in axes:
            count *= self.mesh.axis_size(axis)
        if axes == form.axes:
            return _rows(form.runs, count)
        rest, whole = form.axes[: -len(axes)], all(run.stride == run.size for run in form.runs)
        if form.axes[-len(axes) :] == axes and whole and len(form.runs) == 1:
            ((start, stride, size),) = form.runs
            return Form(Shape.CUT, rest, (Run(start, stride * count, size * count),))
        return Form(Shape.SCATTERED, axes, form.runs)

    def scattered(self, form: Form, axes: tuple[str, ...], size: int) -> Form | None:
        """What ranks along `axes` have of a form that falls in parts of `size`, one for each."""
        if form.shape is not Shape.PLAIN or not axes:
            return None
        return Form(Shape.CUT, axes, (Run(form.runs[0].start, size, size),))

    def same(self, one: tuple[str, Form], other: tuple[str, Form]) -> bool:
        """Whether two forms, each of its layout or of another tensor, are of the same elements."""
        if one[0] not in self.layouts or other[0] not in self.layouts:
            return one == other
        first, second = self.layouts[one[0]], self.layouts[other[0]]
        if one[0] == other[0] or first.pieces == second.pieces:
            return one[1] == other[1]
        if one[1].shape is not Shape.PLAIN or other[1].shape is not Shape.PLAIN:
            return False
        return self._content(*one) == self._content(*other)

    def elements(self, name: str, form: Form) -> list[tuple[int, int]] | None:
        """What all ranks together have of a tensor in `form`; nothing where it cannot be said."""
        count = 1
        for axis in form.axes:
            count *= self.mesh.axis_size(axis)
        match form.shape:
            case Shape.PLAIN | Shape.WINDOW:
                return [(run.start, run.start + run.size) for run in form.runs]
            case Shape.CUT:
                found: list[tuple[int, int]] = []
                for run in form.runs:
                    if run.stride == run.size:
                        found.append((run.start, run.start + count * run.size))
                    else:
                        found += [
                            (low, low + run.size)
                            for low in (run.start + rank * run.stride for rank in range(count))
                        ]
                return found
            case Shape.ROWS:
                return [(0, self.layouts[name].elements)]
            case Shape.SLICE | Shape.SCATTERED:
                return None
            case _:
                assert_never(form.shape)

    def own_part(self, layout: Layout, piece: Piece) -> tuple[object, ...]:
        """What says which elements of a parameter each rank owns."""
        axis = None if layout.axis is None else self.parts(layout.axis)
        if layout.cuts is not None:
            return (axis, *(cut - piece.start for cut in layout.cuts))
        low, high = self._block(layout, piece)
        return (axis, low - piece.start, (high - low) // self._count(layout))

    def slot(self, source: Layout, taken: Piece, target: Layout, piece: Piece) -> tuple[int, int]:
        """Start and size of the own part of a whole into which that of a parameter falls."""
        count = self._count(source)
        if target.axis == source.axis and len(self._blocks(target)) > 1:
            return 0, target.elements // count
        low, high = self._block(source, taken)
        return piece.start + low - taken.start, (high - low) // count

    def parts(self, axis: str) -> tuple[str, ...]:
        """The single axes of more than one rank that `axis` consists of."""
        if axis not in self._parts:
            parts = self.mesh.parts(axis)
            self._parts[axis] = tuple(part for part in parts if self.mesh.axis_size(part) > 1)
        return self._parts[axis]

    def _content(self, name: str, form: Form) -> tuple[tuple[str, int, int, int], ...]:
        """Which parameters lie where, in a plain form."""
        if (name, form) not in self._contents:
            ((start, _, size),) = form.runs
            self._contents[name, form] = tuple(
                (piece.parameter, low - piece.start, low - start, high - low)
                for piece in self._pieces(name, start, start + size)
                for low, high in [(max(piece.start, start), min(piece.end, start + size))]
                if low < high
            )
        return self._contents[name, form]

    def _pieces(self, name: str, start: int, end: int) -> list[Piece]:
        """Pieces of a layout that may lie in [start, end), in ascending order."""
        if name not in self._ascending:
            pieces = sorted(self.layouts[name].pieces, key=STARTS)
            ends = list(accumulate((piece.end for piece in pieces), max))
            self._ascending[name] = [piece.start for piece in pieces], ends, pieces
        starts, ends, pieces = self._ascending[name]
        return pieces[bisect_right(ends, start) : bisect_left(starts, end)]

    def _form(self, view: View) -> Form | None:
        buffer = self.program.by_name[view.buffer]
        name = view.layout or buffer.layout
        if name is None or view.size == 0:
            return None
        layout = self.layouts[name]
        parts = () if layout.axis is None else self.parts(layout.axis)
        if view.layout is not None:
            if layout.cuts is None and view.size == layout.elements:
                return self._cut(layout, parts, 0, layout.elements // self._count(layout))
            runs = (Run(view.start, 0, view.size),)
            return Form(Shape.WINDOW, parts, runs, layout.cuts or ())
        if buffer.shard is not None:
            return self._of_shard(view, buffer, layout, parts)
        along = () if view.axis is None else self.parts(view.axis)
        stride = view.size if along else 0
        if not parts or len(self._blocks(layout)) <= 1:
            shape = Shape.CUT if along else Shape.PLAIN
            return Form(shape, along, (Run(view.start, stride, view.size),))
        count = self._count(layout)
        cut = self._cut(layout, parts, 0, layout.elements // count)
        if not along and view.size == layout.elements:
            return _rows(cut.runs, count)
        if along == parts and (view.start, view.size * count) == (0, layout.elements):
            return cut
        bounds = (count, *(layout.blocks or ()))
        return Form(Shape.SLICE, along, (Run(view.start, stride, view.size),), bounds)

    def _of_shard(
        self, view: View, buffer: Buffer, layout: Layout, parts: tuple[str, ...]
    ) -> Form | None:
        if view.axis is not None:
            return None
        if layout.cuts is None:
            return self._cut(layout, parts, view.start, view.size)
        if view.size != buffer.elements:
            return None
        return Form(Shape.WINDOW, parts, (Run(0, 0, layout.elements),), layout.cuts)

    def _blocks(self, layout: Layout) -> list[tuple[int, int]]:
        """Start and end of each block that is not empty; of the whole, where there are none."""
        if layout.name not in self._bounds:
            ends = pairwise((*(layout.blocks or (0,)), layout.elements))
            self._bounds[layout.name] = [(low, high) for low, high in ends if low < high]
        return self._bounds[layout.name]

    def _block(self, layout: Layout, piece: Piece) -> tuple[int, int]:
        """Start and end of the block in which a piece lies; of the whole, if it lies in none."""
        blocks = self._blocks(layout)
        place = bisect_right(blocks, piece.start, key=_low) - 1
        if place >= 0 and piece.start < blocks[place][1]:
            return blocks[place]
        return 0, layout.elements

    def _count(self, layout: Layout) -> int:
        return 1 if layout.axis is None else self.mesh.axis_size(layout.axis)

    def _cut(self, layout: Layout, parts: tuple[str, ...], start: int, size: int) -> Form:
        """What [start, start + size) of the rank's segment is."""
        count, blocks = self._count(layout), self._blocks(layout)
        runs: list[Run] = []
        # Of block b the segment has what begins at b // count: ascending, as blocks are.
        place = bisect_right(blocks, start, key=lambda block: block[0] // count) - 1
        for low, high in islice(blocks, max(0, place), None):
            if low // count >= start + size:
                break
            part = (high - low) // count
            first, end = max(start, low // count), min(start + size, low // count + part)
            if first < end:
                runs.append(Run(low + first - low // count, part, end - first))
        if parts:
            return Form(Shape.CUT, parts, tuple(runs))
        return plain(runs[0].start, sum(run.size for run in runs))


def _rows(runs: tuple[Run, ...], count: int) -> Form:
    if len(runs) == 1 and runs[0].stride == runs[0].size:
        return plain(runs[0].start, runs[0].size * count)
    return Form(Shape.ROWS, (), runs, (count,))
