"""What the buffers of one program hold while it is gone through, and what was found wrong."""

from collections.abc import Sequence

from zsim.check.content import Contents
from zsim.check.finding import Finding
from zsim.check.value import (
    ANY,
    MIXED,
    NOTHING,
    OWN,
    REPLICATE,
    SHARD,
    WORDS,
    Piece,
    Placement,
    Rule,
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


def _along(mesh: Mesh, names: list[str]) -> tuple[dict[str, tuple[int, ...]], dict[str, int]]:
    """For each axis, joined ones too: numbers of its parts among `names`, and its ranks."""
    every = [axis.name for axis in mesh.axes] + [joined.name for joined in mesh.joined]
    numbers = {
        name: tuple(names.index(part) for part in mesh.parts(name) if part in names)
        for name in every
    }
    return numbers, {name: mesh.axis_size(name) for name in every}


class Ledger:
    """What the buffers of one program hold while it is gone through, and what was found wrong."""

    def __init__(
        self, schedule: Schedule, program: Program, invariant: str, contents: Contents
    ) -> None:
        self.program = program
        self.invariant = invariant
        self.layouts = schedule.layout_by_name
        axes = [axis for axis in schedule.mesh.axes if axis.size > 1]
        self.axes = [axis.name for axis in axes]
        self.size = {axis.name: axis.size for axis in axes}
        self.numbers, self.span = _along(schedule.mesh, self.axes)
        self.anything: Placement = (ANY,) * (len(axes) + 1)
        self.values = Values(len(axes) + 1)
        self.contents = contents
        self.found: dict[tuple[str, str], Finding] = {}

    def read(self, view: View) -> Placement:
        """What `view` is; the rank's own part of a whole tensor is a shard."""
        values = self.values
        name = view.buffer
        if view.axis is None and view.layout is None and name not in values.inside:
            pieces = values.pieces.get(name, ())
            return values.read(pieces, view.start, view.start + view.size)
        pieces, start, end = self.where(view)
        placement = values.read(pieces, start, end)
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

    def write(self, writer: str, view: View, placement: Placement) -> None:
        """`view` becomes `placement`; a shard at its place in a whole tensor stays there."""
        values, name = self.values, view.buffer
        if view.axis is None and view.layout is None and name not in values.inside:
            piece = (view.start, view.start + view.size, placement, writer, None)
            pieces = values.pieces.get(name)
            values.pieces[name] = written(pieces, piece) if pieces else (piece,)
            return
        slot = None
        if along := self._apart(view):
            placement = self.with_codes(placement, along, (ANY, REPLICATE, SHARD), OWN)
            slot = view
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
        placement = self.values.read(pieces, 0, elements)
        if not pieces or NOTHING in placement:
            return ()
        slot = pieces[0][4] if len(pieces) == 1 else None
        return ((0, self._tensor(buffer).elements, placement, pieces[0][3], slot),)

    def _blur(self, buffer: str, writer: str, placement: Placement) -> None:
        """Some elements of a buffer that is known by elements of its layout become `placement`."""
        self.values.inside[buffer] = tuple(
            (low, high, tuple(map(both, before, placement)), writer, slot)
            for low, high, before, _, slot in self.values.inside[buffer]
        )

    def need(self, operation: str, view: View, rule: Rule, verb: str) -> Placement:
        """What `view` is; where `rule` does not allow that, a finding, and then anything."""
        if view.size == 0:
            return self.anything
        placement = self.read(view)
        if placement in rule.passed:
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
        elif axis == len(self.axes):
            state = self.contents.word(code)
            state = f"{state}, not {rule.only.word}" if rule.only else state
        else:
            state = f"{WORDS[code]} over {self.axes[axis]}: it must be {rule.needs}"
        self.note(operation, f"{what}, which is {state}", history)

    def divided(self, placement: Placement, divisor: int) -> Placement:
        """`placement`, of what was divided."""
        if divisor == 1:
            return placement
        return (*placement[:-1], self.contents.divided(placement[-1], divisor))

    def added(self, copy: Copy, before: Placement, placed: Placement, where: Where) -> Placement:
        """What a sum is; a finding where a summand meets what is no summand."""
        found = tuple(map(both, before, placed))
        if MIXED not in found and not self.contents.is_parameter(found[-1]):
            return found
        history = self.told(*where)
        if self.contents.is_parameter(found[-1]):
            why = (
                f"adds {copy.source.buffer} to {copy.target.buffer}, and parameters are no summands"
            )
            self.note(copy.id, why, history)
        for number, (its, mine) in enumerate(zip(before, placed, strict=True)):
            if both(its, mine) != MIXED:
                continue
            if number == len(self.axes):
                why = f"adds {copy.source.buffer}, {self.contents.word(mine)}, to what is"
                self.note(copy.id, f"{why} {self.contents.word(its)}", history)
            else:
                why = f"adds {WORDS[mine]} {copy.source.buffer} to what is {WORDS[its]}"
                self.note(copy.id, f"{why} over {self.axes[number]}", history)
        return self.anything

    def history(self, view: View) -> Lines:
        """What wrote `view`, line by line."""
        told = self.told(*self.where(view))
        return told or (f"nothing wrote {view.buffer} since it was allocated",)

    def told(self, pieces: tuple[Piece, ...], start: int, end: int) -> Lines:
        """What wrote the elements of `pieces` from `start` to `end`, line by line."""
        lines: list[str] = []
        for low, high, placement, writer, _ in pieces:
            if high <= start or end <= low:
                continue
            words = [
                f"{WORDS[code]} over {name}"
                for name, code in zip(self.axes, placement[:-1], strict=True)
                if code != ANY
            ]
            if placement[-1] not in (ANY, NOTHING):
                words.append(self.contents.word(placement[-1]))
            lines.append(f"{writer} wrote it: {', '.join(words) or 'a constant'}")
        return tuple(lines)

    def note(self, operation: str, why: str, witness: Lines) -> None:
        """Keep a finding, once."""
        finding = Finding(
            invariant=self.invariant,
            role=self.program.role,
            operation=operation,
            why=why,
            witness=witness,
        )
        self.found.setdefault((operation, why), finding)
