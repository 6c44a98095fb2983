"""What the buffers of one program hold while it is gone through, and what was found wrong."""

from collections.abc import Sequence
from functools import partial
from itertools import pairwise

from zsim.check.content import Contents
from zsim.check.finding import Finding
from zsim.check.origin import told
from zsim.check.padding import Pads
from zsim.check.placed import (
    ANY,
    MIXED,
    NOTHING,
    OWN,
    PARTIAL,
    REPLICATE,
    SHARD,
    UNTOLD,
    WORDS,
    ZERO,
    Origin,
    Padding,
    Piece,
    Placement,
    Rule,
    Source,
    Values,
    both,
    written,
)
from zsim.layout import Layout
from zsim.mesh import Mesh
from zsim.operation import Copy, View
from zsim.schedule import Buffer, Program, Schedule

Where = tuple[tuple[Piece, ...], int, int]
"""Pieces, and the elements of theirs that are meant: from the first, without the second."""

Lines = tuple[str, ...]
"""What witnesses a finding."""

PLACEMENT, VALUE = "placement", "value"
"""The two families whose findings are noted here."""


def _along(mesh: Mesh, names: list[str]) -> tuple[dict[str, tuple[int, ...]], dict[str, int]]:
    """For each axis, joined ones too: numbers of its parts among `names`, and its ranks."""
    every = [axis.name for axis in mesh.axes] + [joined.name for joined in mesh.joined]
    numbers = {
        name: tuple(names.index(part) for part in mesh.parts(name) if part in names)
        for name in every
    }
    return numbers, {name: mesh.axis_size(name) for name in every}


class Ledger:
    """What the buffers of one program hold while it is gone through, and what was found wrong.

    Where values come from is kept if it `tells`, which costs time and matters to witnesses alone.
    """

    def __init__(
        self, schedule: Schedule, program: Program, contents: Contents, *, tells: bool
    ) -> None:
        self.program = program
        self.tells = tells
        self.layouts = schedule.layout_by_name
        self.trains = bool(schedule.contract.parameters)
        axes = [axis for axis in schedule.mesh.axes if axis.size > 1]
        self.axes = [axis.name for axis in axes]
        self.size = {axis.name: axis.size for axis in axes}
        self.numbers, self.span = _along(schedule.mesh, self.axes)
        self.anything: Placement = (ANY,) * (len(axes) + 1)
        self.values = Values(len(axes) + 1)
        self.contents = contents
        self.found: dict[tuple[str, str], Finding] = {}
        self.noted = 0
        """How often something was found wrong, though it be the same again."""
        self._paddings: dict[tuple[str, bool], Padding] = {}
        self._views: dict[tuple[str, int, int], View] = {}

    def read(self, view: View) -> Placement:
        """What `view` is; the rank's own part of a whole tensor is a shard."""
        values = self.values
        name = view.buffer
        if view.axis is None and view.layout is None and name not in values.inside:
            pieces = values.pieces.get(name, ())
            start, end = view.start, view.start + view.size
            if len(pieces) == 1 and pieces[0][0] <= start and end <= pieces[0][1]:
                return pieces[0][2]
            return values.read(pieces, start, end, self.padding(name))
        pieces, start, end = self.where(view)
        placement = values.read(pieces, start, end, self.padding(name))
        along = self._apart(view)
        if not along or not any(placement[number] in (REPLICATE, OWN) for number in along):
            return placement
        if OWN in placement and any(
            slot is not None and slot != view
            for low, high, _, _, slot in pieces
            if low < end and start < high
        ):
            return placement
        return self.with_codes(placement, along, (REPLICATE, OWN), SHARD)

    def origin(self, operation: str, *views: View) -> Origin:
        """Where what an operation makes of `views` comes from."""
        return (operation, tuple(map(self.source, views))) if self.tells else UNTOLD

    def source(self, view: View) -> Source:
        """What an operation that reads `view` makes something of."""
        if view.axis is None and view.layout is None and view.buffer not in self.values.inside:
            pieces = self.values.pieces.get(view.buffer, ())
            return (view.buffer, pieces, view.start, view.start + view.size)
        return (view.buffer, *self.where(view))

    def write(self, writer: Origin, view: View, placement: Placement) -> None:
        """`view` becomes `placement`; a shard at its place in a whole tensor stays there."""
        values, name = self.values, view.buffer
        if view.axis is None and view.layout is None and name not in values.inside:
            piece = (view.start, view.start + view.size, placement, writer, None)
            pieces = values.pieces.get(name)
            values.pieces[name] = written(pieces, piece) if pieces else (piece,)
            return
        slot = None
        if along := self._apart(view):
            slot = view
            if any(placement[number] == PARTIAL for number in along) and (
                values.read(*self.where(view)) != placement
            ):  # the rest stays what it was, and is no summand of the same
                placement = self.with_codes(placement, along, (PARTIAL,), MIXED)
            placement = self.with_codes(placement, along, (ANY, REPLICATE, SHARD), OWN)
        start, end = self._extent(view)
        if view.layout is not None and view.origin is None:
            values.inside[name] = written(self._inside(name), (start, end, placement, writer, None))
            return
        if name in values.inside:
            if start > 0 or end < self.program.by_name[name].elements:
                self._blur(name, writer, placement)
                return
            del values.inside[name]
        values.pieces[name] = written(
            values.pieces.get(name, ()), (start, end, placement, writer, slot)
        )

    def with_codes(
        self, placement: Placement, along: Sequence[int], those: Sequence[int], code: int
    ) -> Placement:
        """`placement` with `code` along the axes `along` where it is one of `those`."""
        codes = list(placement)
        for number in along:
            if codes[number] in those:
                codes[number] = code
        return tuple(codes)

    def _apart(self, view: View) -> tuple[int, ...]:
        """Axes along which ranks have different places in the whole of which `view` is a part."""
        if view.axis is not None:
            return self.numbers[view.axis]
        if view.origin is not None and view.layout is not None:
            return self.numbers[self._cut(view.layout)]
        return ()

    def _cut(self, layout: str) -> str:
        axis = self.layouts[layout].axis
        assert axis is not None
        return axis

    def where(self, view: View) -> Where:
        """Pieces that say what `view` is, and from where to where on some rank."""
        name = view.buffer
        start, end = self._extent(view)
        if view.layout is not None and view.origin is None:
            return self._inside(name), start, end
        if name in self.values.inside:
            return self.values.inside[name], 0, self._tensor(name).elements
        return self.values.pieces.get(name, ()), start, end

    def _extent(self, view: View) -> tuple[int, int]:
        """From where to where `view` is on some rank: of the layout, of a window; of the buffer."""
        start = view.start if view.origin is None else view.origin
        ranks = 1 if view.axis is None else self.span[view.axis]
        return start, start + ranks * view.size

    def _tensor(self, buffer: str) -> Layout:
        layout = self.program.by_name[buffer].layout
        assert layout is not None
        return self.layouts[layout]

    def by_element(self, buffer: Buffer) -> tuple[Piece, ...]:
        """What `buffer` holds, by elements of its layout, as if its blocks stood whole."""
        name = buffer.name
        if buffer.shard is None and self._tensor(name).blocks is None:
            return self.values.pieces.get(name, ())
        return self._inside(name)

    def put(self, buffer: Buffer, piece: Piece) -> None:
        """Elements of the layout of `buffer` become what `piece` says."""
        name = buffer.name
        if buffer.shard is None and self._tensor(name).blocks is None:
            self.values.pieces[name] = written(self.values.pieces.get(name, ()), piece)
        else:
            self.values.inside[name] = written(self._inside(name), piece)

    def _inside(self, buffer: str) -> tuple[Piece, ...]:
        if buffer in self.values.inside:
            return self.values.inside[buffer]
        elements, pieces = self.program.by_name[buffer].elements, self.values.pieces.get(buffer, ())
        placement = self.values.read(pieces, 0, elements, self.padding(buffer))
        if not pieces or NOTHING in placement:
            return ()
        slot = pieces[0][4] if len(pieces) == 1 else None
        return ((0, self._tensor(buffer).elements, placement, pieces[0][3], slot),)

    def _blur(self, buffer: str, writer: Origin, placement: Placement) -> None:
        """Some elements of a buffer that is known by elements of its layout become `placement`."""
        self.values.inside[buffer] = tuple(
            (low, high, tuple(map(both, before, placement)), writer, slot)
            for low, high, before, _, slot in self.values.inside[buffer]
        )

    def need(self, operation: str, view: View, rule: Rule, verb: str) -> Placement:
        """What `view` is; where `rule` does not allow that, a finding, and then anything."""
        if view.size == 0:
            return self.anything
        pieces = self.values.pieces.get(view.buffer, ())
        if (
            len(pieces) == 1
            and view.axis is None
            and view.layout is None
            and pieces[0][0] <= view.start
            and view.start + view.size <= pieces[0][1]
            and view.buffer not in self.values.inside
        ):
            placement = pieces[0][2]
        else:
            placement = self.read(view)
        if placement[-1] != NOTHING and placement[:-1] in rule.passed:
            return placement
        axis = rule.breach(placement)
        if axis is None:
            return placement
        history = self.history(view)
        what = f"{verb} {view.buffer}"
        self.refuse(operation, what, axis, placement[axis], rule=rule, history=history)
        return self.anything

    def refuse(
        self, operation: str, what: str, axis: int, code: int, *, rule: Rule, history: Lines
    ) -> None:
        """A finding: `what` is `code` along `axis`, and that is not what `rule` needs."""
        if code == NOTHING:
            state = f"{WORDS[NOTHING]}: it must be {rule.needs}"
        else:
            state = f"{WORDS[code]} over {self.axes[axis]}: it must be {rule.needs}"
        self.note(operation, f"{what}, which is {state}", history)

    def expect(self, operation: str, view: View, verb: str, *, code: int, due: int) -> None:
        """A finding if the content of `view` is another than the one that is due."""
        if code in (due, ANY) or not view.size:
            return
        is_, must = self.contents.against(code, due)
        why = f"{verb} {view.buffer}, which is {is_}, not {must}"
        self.note(operation, why, self.history(view), VALUE)

    def cut(self, source: View, target: View) -> list[tuple[View, View]]:
        """Both views, cut where pieces of either meet; whole, if they depend on the rank."""
        known = self.values
        for view in (source, target):
            if view.axis is not None or view.layout is not None or view.buffer in known.inside:
                return [(source, target)]
        ends = {0, source.size}
        for view in (source, target):
            pieces = known.pieces.get(view.buffer, ())
            edges = (edge - view.start for low, high, *_ in pieces for edge in (low, high))
            ends.update(edge for edge in edges if 0 < edge < view.size)
        return [
            (
                self.view(source.buffer, source.start + low, high - low),
                self.view(target.buffer, target.start + low, high - low),
            )
            for low, high in pairwise(sorted(ends))
        ]

    def view(self, buffer: str, start: int, size: int) -> View:
        """A view, always the same one of the same elements: others remember views by identity."""
        key = (buffer, start, size)
        if key not in self._views:
            self._views[key] = View(buffer=buffer, start=start, size=size)
        return self._views[key]

    def padding(self, buffer: str, *, inside: bool | None = None) -> Padding:
        """Which elements of a buffer are padding.

        They are elements of the layout where the buffer is known by those. Of segments that are
        not equal all count as padding.
        """
        if inside is None:
            inside = buffer in self.values.inside
        key = (buffer, inside)
        if key not in self._paddings:
            declared = self.program.by_name[buffer]
            layout = None if declared.layout is None else self.layouts[declared.layout]
            self._paddings[key] = self._behind
            if layout is not None:
                ranks = 1 if layout.axis is None else self.span[layout.axis]
                shard = declared.shard is not None
                pads = Pads(layout, ranks, shard=shard, inside=inside)
                self._paddings[key] = partial(self._stands, pads)
        return self._paddings[key]

    def divided(self, placement: Placement, divisor: int) -> Placement:
        """`placement`, of what was divided."""
        if divisor == 1:
            return placement
        return (*placement[:-1], self.contents.divided(placement[-1], divisor))

    def _stands(self, pads: Pads, low: int, high: int, code: int, _other: int) -> bool:
        """Whether a content stands where there is padding, and may stand there."""
        return self.contents.pads(code) and pads.parameter(low, high) is None

    def _behind(self, low: int, high: int, code: int, other: int) -> bool:
        """Whether zeros that no layout describes are padding of what stands beside them."""
        where = self.contents.where(other)
        if where is None or where.tensor not in self.layouts or where.axes or where.form:
            return False
        first, end = low + where.shift, high + where.shift
        pieces = self.layouts[where.tensor].pieces
        return code == ZERO and not any(piece.start < end and first < piece.end for piece in pieces)

    def added(
        self, copy: Copy, before: Placement, placed: Placement, sources: tuple[Source, ...]
    ) -> Placement:
        """What a sum of `sources` is; a finding where a summand meets what is no summand."""
        contents, source, target = self.contents, copy.source.buffer, copy.target.buffer
        was, more = before[-1], placed[-1]
        if contents.is_parameter(was) or contents.is_parameter(more):
            if self.trains:  # what promises no parameters may average them, say
                why = f"adds {source} to {target}, and parameters are no summands"
                self.note(copy.id, why, self.tell(sources), VALUE)
            return self.anything
        found = tuple(map(both, before[:-1], placed[:-1]))
        for number, (its, mine) in enumerate(zip(before[:-1], placed[:-1], strict=True)):
            if found[number] == MIXED:
                why = f"adds {WORDS[mine]} {source} to what is {WORDS[its]}"
                self.note(copy.id, f"{why} over {self.axes[number]}", self.tell(sources))
        content = contents.sum(was, more)
        if content is None:
            batch = contents.repeated(was, more)
            if batch is not None and contents[was][:3] == contents[more][:3]:
                why = f"adds {source} to {target}, which has it from micro-batch {batch} already"
            else:
                one, other = contents.against(more, was)
                why = f"adds {source}, {one}, to what is {other}"
            self.note(copy.id, why, self.tell(sources), VALUE)
            return self.anything
        return self.anything if MIXED in found else (*found, content)

    def history(self, view: View) -> Lines:
        """What wrote `view`, line by line."""
        lines = told(self.source(view), self.says)
        return lines or (f"nothing wrote {view.buffer} since it was allocated",)

    def tell(self, sources: tuple[Source, ...]) -> Lines:
        """What wrote several things, line by line."""
        return tuple(line for source in sources for line in told(source, self.says))

    def says(self, placement: Placement) -> str:
        """A placement in words."""
        words = [
            f"{WORDS[code]} over {name}"
            for name, code in zip(self.axes, placement[:-1], strict=True)
            if code != ANY
        ]
        if placement[-1] not in (ANY, NOTHING):
            words.append(self.contents.word(placement[-1]))
        return ", ".join(words) or "a constant"

    def note(self, operation: str, why: str, witness: Lines, invariant: str = PLACEMENT) -> None:
        """Keep a finding, once."""
        finding = Finding(
            invariant=invariant,
            role=self.program.role,
            operation=operation,
            why=why,
            witness=witness,
        )
        self.noted += 1
        self.found.setdefault((operation, why), finding)
