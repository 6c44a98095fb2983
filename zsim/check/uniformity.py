"""Uniformity: ranks that communicate take the same way through every branch.

Proved for every branch: the value that it decides on is equal on all ranks that run the branch. It
was written, on every way that leads there, by an all-reduce, a broadcast or an all-gather over a
group that holds them all; or it is a constant, a copy of such a value, or computed from nothing
else; where a group holds only some of the axes, what it was given must be equal along the others.
Proved of roles that share a group: branches that issue on it decide, in the same order, on the
outcome of the same collective; host scalars are changed in the same way by all roles.

Assumed: what is initialized or loaded differs on every rank. With one role and no branch there is
nothing to prove.

Cost: from each branch back to what wrote its value.
"""

from collections.abc import Iterator
from itertools import combinations

from zsim.access import accesses
from zsim.check.finding import Finding
from zsim.check.overlap import Overlap
from zsim.check.subject import SETUP, NumberedProgram, Subject
from zsim.numbered import ALLOCATE, FREE, READ, Numbered
from zsim.operation import (
    Action,
    AllGather,
    AllReduce,
    Branch,
    Broadcast,
    Compute,
    Copy,
    Fill,
    Operation,
    SetScalar,
    View,
)

INVARIANT = "uniformity"


def examine(subject: Subject) -> list[Finding]:
    """Every branch that ranks may take differently."""
    found: list[Finding] = []
    overlap = Overlap(subject.schedule)
    deciders: list[list[_Decision]] = []
    for each in subject.programs:
        decisions: list[_Decision] = []
        for part, numbered in each.parts:
            for branch in sorted(numbered.sides):
                origin = _Origin(subject, each, part, overlap)
                found += origin.judge(branch)
                decisions.append(_Decision(each, numbered, branch, origin.collective(branch)))
        deciders.append(decisions)
    for mine, theirs in combinations(deciders, 2):
        found += _same_deciders(mine, theirs)
    found += _same_scalars(subject)
    return found


class _Decision:
    """A branch, the groups that it issues on, and the collective that it decides on the outcome of.

    A collective is known by its group and how many were issued on it before.
    """

    def __init__(
        self,
        each: NumberedProgram,
        numbered: Numbered,
        branch: int,
        collective: tuple[str, int] | None,
    ) -> None:
        self.role = each.program.role
        self.operation = numbered.operations[branch].id
        self.collective = collective
        inside = _inside(numbered, branch)
        self.groups = {
            numbered.group[number] for number in numbered.communications if number in inside
        }


def _inside(numbered: Numbered, branch: int) -> set[int]:
    found: set[int] = set()
    for side in numbered.sides[branch]:
        found |= set(side)
        for number in side:
            if number in numbered.sides:
                found |= _inside(numbered, number)
    return found


class _Origin:
    """Where the values of one part come from."""

    def __init__(
        self, subject: Subject, each: NumberedProgram, part: str, overlap: Overlap
    ) -> None:
        self.schedule = subject.schedule
        self.each = each
        self.numbered = each.setup if part == SETUP else each.step
        self.overlap = overlap
        self.seen: set[tuple[int, int, View, frozenset[str]]] = set()
        self.blame: list[str] = []

    def judge(self, branch: int) -> Iterator[Finding]:
        """A finding if the value of `branch` may differ between ranks that run it."""
        operation = self.numbered.operations[branch]
        assert isinstance(operation, Branch)
        axes = frozenset(axis.name for axis in self.schedule.mesh.axes if axis.size > 1)
        self.seen, self.blame = set(), []
        if not self._is_equal(self.numbered, operation.value, branch, axes):
            yield Finding(
                invariant=INVARIANT,
                role=self.each.program.role,
                operation=operation.id,
                why=f"decides on {operation.value.buffer}, which may differ from rank to rank",
                witness=(*self.blame[:4], "ranks that take different ways issue different things"),
            )

    def collective(self, branch: int) -> tuple[str, int] | None:
        """The collective that wrote the value last, if one did."""
        operation = self.numbered.operations[branch]
        assert isinstance(operation, Branch)
        for numbered, number in self._writers(self.numbered, operation.value, branch):
            if numbered.group[number]:
                before = [
                    other
                    for other in numbered.communications
                    if other < number and numbered.group[other] == numbered.group[number]
                ]
                return numbered.group[number], len(before)
            return None
        return None

    def _writers(
        self, numbered: Numbered, view: View, before: int
    ) -> Iterator[tuple[Numbered, int]]:
        """What may have written `view` last before operation `before`, the latest first."""
        lists = {
            number: branch for branch in numbered.sides for number in _inside(numbered, branch)
        }
        within = {branch for branch in numbered.sides if before in _inside(numbered, branch)}
        parts = [numbered] if numbered is self.each.setup else [numbered, self.each.setup]
        for part in parts:
            history = part.history.get(view.buffer)
            if history is None:
                continue
            events = list(zip(history.numbers, history.codes, strict=True))
            early = [event for event in events if part is not numbered or event[0] < before]
            late = [event for event in events if part is self.each.step and event[0] > before]
            for number, code in (*reversed(early), *reversed(late)):
                if code == ALLOCATE and part is numbered and number < before:
                    return
                if code in (ALLOCATE, FREE, READ) or not self._writes(part, number, view):
                    continue
                yield part, number
                if part is numbered and (number not in lists or lists[number] in within):
                    return

    def _writes(self, numbered: Numbered, number: int, view: View) -> bool:
        return any(
            access.writes
            and access.view.buffer == view.buffer
            and self.overlap.meet(access.view, view)
            for access in accesses(numbered.operations[number])
        )

    def _is_equal(self, numbered: Numbered, view: View, before: int, axes: frozenset[str]) -> bool:
        """Whether `view`, as operation `before` reads it, is equal along all of `axes`."""
        if not axes:
            return True
        key = (id(numbered), before, view, axes)
        if key in self.seen:
            return True  # it comes round to itself: nothing on the way is the cause
        self.seen.add(key)
        writers = list(self._writers(numbered, view, before))
        if not writers:
            self.blame.append(f"nothing wrote {view.buffer}")
        return bool(writers) and all(
            self._is_equal_from(part, number, view, axes) for part, number in writers
        )

    def _is_equal_from(
        self, numbered: Numbered, number: int, view: View, axes: frozenset[str]
    ) -> bool:
        operation = numbered.operations[number]
        match operation:
            case Fill():
                return True
            case AllReduce() | Broadcast() | AllGather():
                rest = axes - self._spanned(operation)
                equal = self._is_equal(numbered, operation.source, number, rest)
                if not equal:
                    along = " and ".join(sorted(rest))
                    self.blame.append(f"{operation.id} makes it equal, but not along {along}")
                return equal
            case Copy():
                read = [operation.source, *([view] if operation.accumulate else [])]
            case Compute(action=Action.INITIALIZE | Action.LOAD):
                read = []
            case Compute():
                read = [each.view for each in accesses(operation) if each.reads]
            case _:
                read = []
        equal = bool(read) and all(self._is_equal(numbered, each, number, axes) for each in read)
        if not equal:
            self.blame.append(f"{operation.id} writes it, on each rank from what the rank has")
        return equal

    def _spanned(self, operation: AllReduce | Broadcast | AllGather) -> set[str]:
        """Axes along which the group of a collective holds every rank."""
        group = self.schedule.group_by_name[operation.group]
        limits = self.schedule.mesh.limits(group.where)
        return {axis for axis in group.axes if len(limits[axis]) == self.overlap.ranks(axis)}


def _same_deciders(mine: list[_Decision], theirs: list[_Decision]) -> Iterator[Finding]:
    """Roles whose branches issue on one group decide on the same collective."""
    shared = {group for each in mine for group in each.groups}
    shared &= {group for each in theirs for group in each.groups}
    ours = [each for each in mine if each.groups & shared]
    others = [each for each in theirs if each.groups & shared]
    for one, other in zip(ours, others, strict=False):
        if one.collective != other.collective:
            yield Finding(
                invariant=INVARIANT,
                role=f"{one.role} and {other.role}",
                operation=one.operation,
                why="the roles decide on different values, and issue on a group that they share",
                witness=(
                    f"{one.role}: {one.operation} decides on {_name(one.collective)}",
                    f"{other.role}: {other.operation} decides on {_name(other.collective)}",
                ),
            )


def _name(collective: tuple[str, int] | None) -> str:
    if collective is None:
        return "no outcome of a collective"
    group, number = collective
    return f"the outcome of operation {number} on {group}"


def _same_scalars(subject: Subject) -> Iterator[Finding]:
    """Every role changes host scalars as the first one does."""
    first, *others = subject.programs
    if not others or not subject.schedule.scalars:
        return
    mine = [list(_changes(part.operations)) for _, part in first.parts]
    for each in others:
        theirs = [list(_changes(part.operations)) for _, part in each.parts]
        for one, other in zip(mine, theirs, strict=True):
            if [key for key, _ in one] == [key for key, _ in other]:
                continue
            at = next(
                (
                    place
                    for place, (a, b) in enumerate(zip(one, other, strict=False))
                    if a[0] != b[0]
                ),
                min(len(one), len(other)),
            )
            here, there = (side[at][1] if at < len(side) else "nothing" for side in (one, other))
            yield Finding(
                invariant=INVARIANT,
                role=f"{first.program.role} and {each.program.role}",
                operation=here if here != "nothing" else there,
                why="the roles change host scalars differently",
                witness=(f"{first.program.role}: {here} | {each.program.role}: {there}",),
            )


def _changes(operations: list[Operation]) -> Iterator[tuple[tuple[object, ...], str]]:
    """Every change of a host scalar, in program order; branches show where they stand."""
    for operation in operations:
        if isinstance(operation, SetScalar):
            yield (
                (
                    operation.scalar,
                    operation.multiply,
                    operation.add,
                    operation.minimum,
                    operation.maximum,
                    operation.counter,
                    operation.every,
                ),
                operation.id,
            )
