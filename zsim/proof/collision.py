"""Overlapping accesses, view by view: the slow and exact part of `races`."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from zsim.proof.overlap import Overlap
from zsim.proof.step_boundary import StepBoundary
from zsim.schedule.access import Access, accesses, touching, views_of
from zsim.schedule.happens_before import BranchPath, Timeline
from zsim.schedule.operation import CollectiveOperation, Copy, Operation, View
from zsim.schedule.program_index import ALLOCATE, FREE, HOST
from zsim.schedule.schedule import Schedule


@dataclass(frozen=True, slots=True)
class Race:
    """Two accesses without an order between them.

    `earlier` is the number of an operation, minus the number of operations if it is of the
    previous step.
    """

    later: int
    earlier: int
    later_view: View
    earlier_view: View
    later_writes: bool
    earlier_writes: bool


Marks = dict[int, tuple[int, ...]]
"""On each stream the last operation that read a view, or wrote it.

For earlier steps, all operations that may be the last, since later ones are in a branch.
"""


class AccessesByBuffer:
    """Accesses of operations, cached for operations that touch the same views."""

    def __init__(self) -> None:
        self._found: dict[tuple[int, ...], dict[str, list[Access]]] = {}

    def of(self, operation: Operation) -> dict[str, list[Access]]:
        """Return the accesses of `operation` by buffer."""
        key = views_of(operation) or (id(operation),)
        found = self._found.get(key)
        if found is None:
            found = self._found[key] = {}
            for access in accesses(operation):
                found.setdefault(access.view.buffer, []).append(access)
        return found


class Collisions:
    """The accesses to one buffer, view by view."""

    def __init__(
        self,
        order: Timeline,
        name: str,
        overlap: Overlap,
        *,
        boundary: StepBoundary,
        known: AccessesByBuffer,
    ) -> None:
        self.path = order.paths[0]
        self.boundary = boundary
        self.numbered = order.numbered
        self.history = self.numbered.history[name]
        self.views: list[View] = []
        self.touched: dict[int, list[tuple[int, bool, bool]]] = {}
        numbers: dict[View, int] = {}
        alike: dict[int, list[tuple[int, bool, bool]]] = {}
        for number, code in zip(self.history.numbers, self.history.codes, strict=True):
            if code in (ALLOCATE, FREE):
                continue
            found = known.of(self.numbered.operations[number])[name]
            touched = alike.get(id(found))
            if touched is None:
                touched = [
                    (numbers.setdefault(view, len(numbers)), reads, writes)
                    for view, reads, writes in found
                ]
                alike[id(found)] = touched
            self.touched[number] = touched
        self.views = list(numbers)
        self.beside = _overlapping(self.views, overlap)
        self.reads: list[Marks] = []
        self.writes: list[Marks] = []

    def find(self, path: BranchPath, *, lasts: bool) -> list[Race]:
        """Find races on one path; with the step before, if the buffer `lasts`.

        A race is an overlapping pair of accesses without an order; of each stream only the last is
        found.
        """
        self.path = path
        self._clear()
        if lasts:
            self._enter_earlier()
        found: list[Race] = []
        entered, turn = HOST, 0
        ordered: dict[tuple[int, int], int] = {}
        for number, code in zip(self.history.numbers, self.history.codes, strict=True):
            if path.known[number] is None or code == FREE:
                continue
            if code == ALLOCATE:
                self._clear()
                continue
            stream = self.numbered.stream[number]
            if stream != entered:
                entered, turn = stream, turn + 1
            same = (stream, id(self.touched[number]))
            if ordered.get(same) != turn:  # else only its own stream touched the buffer since
                races = self._unknown(number)
                found += races
                if not races:
                    ordered[same] = turn
            self._enter(number)
        return found

    def _clear(self) -> None:
        self.reads = [{} for _ in self.views]
        self.writes = [{} for _ in self.views]

    def _enter(self, number: int) -> None:
        stream = self.numbered.stream[number]
        if stream == HOST:  # the host continues only after its read
            return
        for view, reads, writes in self.touched[number]:
            if reads:
                self.reads[view][stream] = (number,)
            if writes:
                self.writes[view][stream] = (number,)

    def _enter_earlier(self) -> None:
        """Enter the possible last accesses of earlier steps, by stream and list of a branch."""
        count = len(self.numbered.operations)
        for number, touched in self.touched.items():
            stream = self.numbered.stream[number]
            if stream == HOST:
                continue
            for view, reads, writes in touched:
                for marks, happens in ((self.reads[view], reads), (self.writes[view], writes)):
                    if happens:
                        kept = [
                            mark
                            for mark in marks.get(stream, ())
                            if not self.boundary.is_followed(mark + count, number)
                        ]
                        marks[stream] = (*kept, number - count)

    def _unknown(self, number: int) -> list[Race]:
        worst: dict[int, Race] = {}
        known: set[int] = set()
        stream = self.numbered.stream[number]
        views = self.views
        for view, _, writes in self.touched[number]:
            for other in self.beside[view]:
                fronts = [(self.writes[other], True)]
                if writes:
                    fronts.append((self.reads[other], False))
                for marks, wrote in fronts:
                    for at, mark in _each(marks):
                        if at == stream or mark in known:
                            continue
                        if self._knows(number, mark):
                            known.add(mark)
                        elif at not in worst or worst[at].earlier < mark:
                            worst[at] = Race(number, mark, views[view], views[other], writes, wrote)
        return list(worst.values())

    def _knows(self, number: int, mark: int) -> bool:
        """Return True if operation `number` starts after the marked one has finished."""
        numbered, known = self.numbered, self.path.known[number]
        assert known is not None
        if mark >= 0:
            return known[numbered.stream[mark]] >= numbered.position[mark]
        earlier = mark + len(numbered.operations)
        stream = numbered.stream[earlier]
        if known[stream] >= numbered.position[earlier] - len(numbered.entries[stream]):
            return True
        return self.boundary.knows(self.path, number, earlier)


def _each(marks: Marks) -> Iterator[tuple[int, int]]:
    """Yield streams and marks."""
    return ((stream, mark) for stream, found in marks.items() for mark in found)


def _meeting(views: Sequence[View], overlap: Overlap) -> Iterator[tuple[int, int]]:
    """Yield the pairs of views that share an element on some rank, by their numbers."""
    hulls = [overlap.hull(view) for view in views]
    active: list[int] = []
    for number in sorted(range(len(views)), key=hulls.__getitem__):
        active = [other for other in active if hulls[other][1] > hulls[number][0]]
        for other in active:
            if overlap.meet(views[number], views[other]):
                yield other, number
        active.append(number)


def _overlapping(views: list[View], overlap: Overlap) -> list[list[int]]:
    """Return, for each view, the views that it overlaps, itself included."""
    found = [[number] for number in range(len(views))]
    for one, other in _meeting(views, overlap):
        found[one].append(other)
        found[other].append(one)
    return found


def inside(
    schedule: Schedule, operation: Operation, overlap: Overlap
) -> Iterator[tuple[Access, Access]]:
    """Yield overlapping views of one operation, one of them written, unless in place."""
    by_buffer: dict[str, list[tuple[Operation, Access]]] = defaultdict(list)
    for member in touching((operation,)):
        for access in accesses(member):
            by_buffer[access.view.buffer].append((member, access))
    for touched in by_buffer.values():
        for one, other in _meeting([access.view for _, access in touched], overlap):
            (member, ours), (other_member, theirs) = touched[one], touched[other]
            if not (ours.writes or theirs.writes):
                continue
            if member is other_member and _in_place(schedule, member, overlap):
                continue
            yield (ours, theirs) if ours.writes else (theirs, ours)


def _in_place(schedule: Schedule, operation: Operation, overlap: Overlap) -> bool:
    """Return True if an operation from a buffer into itself is legal."""
    match operation:
        case Copy():
            return operation.source == operation.target
        case CollectiveOperation(part=None):
            return operation.moves_in_place and operation.source == operation.target
        case CollectiveOperation(part=View() as part, whole=whole):
            group = schedule.group_by_name[operation.group]
            if group.size(schedule.mesh) == 1:
                return part == whole or overlap.is_own_slot(part, whole, group)
            return overlap.is_own_slot(part, whole, group)
        case _:
            return False
