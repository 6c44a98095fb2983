"""Definedness: every byte that is read was written since its memory was allocated.

Proved for every role, every step and every way through the branches: whatever an operation reads
of a buffer was written by operations issued before it and after the allocation; of a persistent
buffer, by setup or by the step. Padding is no exception: what enters a reduction, a norm or a
finite test was written in full. With `races` proved, issued before is finished before.

What a rank reads as its own part must be written in full, or written as the same own part; what it
reads through windows on a layout must be written in full, or through windows on that layout in the
same place. A buffer that holds a rank's segment is whole when the windows on all of its layout are
written.

Assumed: a segment writes its outputs, what it saves, and its gradients in full.

Cost: a regular expression for each buffer whose first access writes all of it; for the others one
look at each view.
"""

import re

from zsim.access import accesses
from zsim.check.cover import Cover
from zsim.check.finding import Finding
from zsim.check.overlap import Overlap, says
from zsim.check.subject import NumberedProgram, Subject
from zsim.numbered import ALLOCATE, FREE, History
from zsim.operation import View
from zsim.order import Timeline, Way
from zsim.schedule import Buffer, Schedule

INVARIANT = "definedness"
WRITERS_MAX = 20
"""Writers of a buffer that a witness names: the last ones."""

FILLED_FIRST = re.compile(rb"(?:A(?:W[^AF]*)?F?)*").fullmatch
"""The history of a buffer that is always written as a whole before anything else."""
FILLED_AT_ONCE = re.compile(rb"AW[^AF]*").fullmatch
"""That of one which is taken, written as a whole, and kept."""


def examine(subject: Subject) -> list[Finding]:
    """Every read of what nothing wrote."""
    overlap = Overlap(subject.schedule)
    found: list[Finding] = []
    for each in subject.programs:
        if each.crowded:
            continue  # a finding of lifetime
        setup = _Examiner(subject.schedule, each, each.setup_order, overlap)
        setup.examine({})
        step = _Examiner(subject.schedule, each, each.step_order, overlap)
        step.examine(setup.left)
        found += [*setup.in_order(), *step.in_order()]
    return found


class _Examiner:
    """Goes through the histories of one part; `left` is what persistent buffers hold after it."""

    def __init__(
        self, schedule: Schedule, each: NumberedProgram, order: Timeline, overlap: Overlap
    ) -> None:
        self.schedule = schedule
        self.program = each.program
        self.order = order
        self.numbered = order.numbered
        self.overlap = overlap
        self.left: dict[str, Cover] = {}
        self.found: dict[tuple[int, str], Finding] = {}

    def in_order(self) -> list[Finding]:
        """What was found, in the order of the operations."""
        return [finding for _, finding in sorted(self.found.items(), key=lambda item: item[0])]

    def examine(self, held: dict[str, Cover]) -> None:
        """Every buffer; `held` has what persistent ones hold before."""
        persistent = set(self.program.persistent)
        fork = min(self.numbered.sides, default=len(self.numbered.operations))
        first, *others = self.order.ways
        for name, history in self.numbered.history.items():
            before = held.get(name)
            if before is not None and before.whole and ALLOCATE not in history.codes:
                continue
            straight = history.numbers[-1] < fork
            if straight and name not in persistent and FILLED_FIRST(history.codes):
                continue
            buffer = self.program.by_name[name]
            if straight and before is None and FILLED_AT_ONCE(history.codes):
                self.left[name] = self._cover(buffer)
                self.left[name].whole = True
                continue
            ends: list[Cover] = []
            for way in (first, *others):
                if way is first or way.since <= history.numbers[-1]:
                    cover = self._cover(buffer) if before is None else before.copy()
                    self._follow(way, history, name, cover)
                    ends.append(cover)
            if name in persistent:
                # Where ways differ, nothing is relied on but a buffer that is whole on all of them.
                alike = len(ends) == 1 or all(cover.whole for cover in ends)
                self.left[name] = ends[0] if alike else self._cover(buffer)

    def _cover(self, buffer: Buffer) -> Cover:
        return Cover(buffer, self.overlap)

    def _follow(self, way: Way, history: History, name: str, cover: Cover) -> None:
        writers: list[tuple[int, View]] = []
        for number, code in zip(history.numbers, history.codes, strict=True):
            if way.known[number] is None or code == FREE:
                continue
            if code == ALLOCATE:
                cover.clear()
                writers.clear()
                continue
            if cover.whole:
                continue
            touched = [
                access
                for access in accesses(self.numbered.operations[number])
                if access.view.buffer == name
            ]
            for view, reads, _ in touched:
                if reads and not cover.holds(view):
                    self._note(number, view, cover, writers)
                    cover.write(View(buffer=name, size=cover.buffer.elements))
            for view, _, writes in touched:
                if writes:
                    cover.write(view)
                    writers.append((number, view))

    def _note(self, number: int, view: View, cover: Cover, writers: list[tuple[int, View]]) -> None:
        name, operations = view.buffer, self.numbered.operations
        low, high = cover.gap(view)
        what = f"elements {low} to {high}"
        buffer = self.program.by_name[name]
        if buffer.layout is not None and buffer.shard is None:
            pieces = self.schedule.layout_by_name[buffer.layout].pieces
            if not any(piece.start < high and low < piece.end for piece in pieces):
                what += ", which are padding"
        self.found.setdefault(
            (number, name),
            Finding(
                invariant=INVARIANT,
                role=self.program.role,
                operation=operations[number].id,
                why=f"reads {name}, of which nothing wrote {what} since it was allocated",
                witness=(
                    f"{operations[number].id} reads {says(view)} of {name}",
                    *(
                        f"{operations[writer].id} wrote {says(written)}"
                        for writer, written in writers[-WRITERS_MAX:]
                    ),
                    *(() if writers else (f"nothing wrote {name} at all",)),
                ),
            ),
        )
