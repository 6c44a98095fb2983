"""Matching: ranks that share a communicator issue the same operations on it, in the same order.

Proved for every communicator: its members issue equal sequences of collectives, in kind, elements,
wire and accumulate dtype, reduction, root and grouping (`Together`); the k-th send to a member
matches the k-th receive from there, of equal size and dtype; ranks outside a group issue nothing
on it. Sequences in branches are compared list by list.

Assumed: all members take the same list of a branch.

Not checked: the order of operations of different communicators (progress), and the tensors of the
views (values).

Cost: only sends and receives are checked while all members have one role; if roles share
communicators, one comparison for each pair of roles. Independent of the number of ranks.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import chain

from zsim.proof.context import Context
from zsim.proof.execution.rank_class import EqualCommunicators, communicators, outside, rank_classes
from zsim.proof.finding import Finding
from zsim.schedule.access import touching
from zsim.schedule.operation import (
    Branch,
    Communication,
    Operation,
    PointToPoint,
    Receive,
    Send,
    Together,
    walk,
)
from zsim.schedule.schedule import Program

INVARIANT = "matching"
MIDDLE_MAX = 400
"""Up to this number of entries between equal ends are aligned; more differ as a whole."""
COMMUNICATES = (Communication, Together)

Key = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class Issue:
    """An operation as its communicator sees it: a key to compare, its id, and a description."""

    key: Key
    operation: str
    text: str


Side = tuple[str, list[Issue]]
"""A role, and operations that it issues."""


@dataclass(frozen=True, slots=True)
class Issues:
    """Operations that a role issues on the communicators of one group."""

    collectives: list[Issue]
    sends: dict[int, list[Issue]]
    receives: dict[int, list[Issue]]


def examine(context: Context) -> list[Finding]:
    """Find every mismatch, and operations on groups to which a rank does not belong."""
    schedule = context.schedule
    alike = len(schedule.roles) == 1 and not any(group.where for group in schedule.groups)
    kinds = Send | Receive | Together if alike else Communication | Together
    busy = {
        numbered.group[number]
        for each in context.programs
        for _, numbered in each.parts
        for number in numbered.communications
        if isinstance(numbered.operations[number], kinds)
    }
    if not busy:
        return []
    found = dict.fromkeys(_mixed(context))
    among = rank_classes(schedule)
    programs = {each.program.role: each.program for each in context.programs}
    for group in schedule.groups:
        if group.name not in busy:
            continue
        count = group.size(schedule.mesh)
        why = f"the roles share communicators of {group.name} and issue different sequences"
        issues = {role: _issues(program, group.name, count) for role, program in programs.items()}
        for rank_class in outside(schedule.mesh, group, among):
            found.update(
                dict.fromkeys(_strangers(rank_class.role, group.name, issues[rank_class.role]))
            )
        for communicator in communicators(schedule.mesh, group, among):
            first, *others = communicator.roles
            for other in others:
                ours, theirs = ((role, issues[role].collectives) for role in (first, other))
                found.update(dict.fromkeys(_unequal(f"{first} and {other}", ours, theirs, why)))
            found.update(dict.fromkeys(_pair(communicator, issues)))
    return list(found)


def _mixed(context: Context) -> Iterator[Finding]:
    """Find operations issued as one with several kinds; sends and receives are one kind.

    Runtimes coalesce only collectives of one kind (torch.distributed's coalescing manager); cost
    and effect of a group of several kinds are not defined here.
    """
    for each in context.programs:
        for operation in chain(each.program.setup_work, each.program.step_work):
            if not isinstance(operation, Together):
                continue
            kinds = [
                "send or receive" if isinstance(member, PointToPoint) else member.name
                for member in operation.members
            ]
            if len(set(kinds)) > 1:
                named = zip(operation.members, kinds, strict=True)
                several = ", ".join(dict.fromkeys(kinds))
                yield Finding(
                    invariant=INVARIANT,
                    role=each.program.role,
                    operation=operation.id,
                    why=f"operations issued as one must be of one kind: {several}",
                    witness=tuple(f"{member.id}: {kind}" for member, kind in named),
                )


def _issues(program: Program, group: str, count: int) -> Issues:
    """Return the operations of `program` on `group`, in setup and then in one step."""
    found = Issues([], defaultdict(list), defaultdict(list))

    def go(operations: Iterable[Operation], path: Key) -> None:
        branches = 0
        for operation in operations:
            if isinstance(operation, Branch) and _uses(operation, group):
                branches += 1
                go(operation.then, (*path, branches, "then"))
                go(operation.otherwise, (*path, branches, "otherwise"))
            elif isinstance(operation, COMMUNICATES) and operation.group == group:
                add(operation, path)

    def add(operation: Communication | Together, path: Key) -> None:
        whats: list[Key] = []
        words: list[str] = []
        for member in touching((operation,)):
            assert isinstance(member, Communication)
            what, text = _describe(member)
            if isinstance(member, PointToPoint):
                peers = found.sends if isinstance(member, Send) else found.receives
                peers[member.offset % count].append(Issue((path, *what), member.id, text))
            else:
                whats.append(what)
                words.append(text)
        if whats:
            grouped = isinstance(operation, Together)
            text = f"{'together ' if grouped else ''}{', '.join(words)}"
            key = (path, grouped, *whats)
            found.collectives.append(Issue(key, operation.id, text))

    # Without branches, allocations and frees can be skipped.
    go(program.setup if program.branches else program.setup_work, ("setup",))
    go(program.step if program.branches else program.step_work, ("step",))
    return found


def _uses(branch: Branch, group: str) -> bool:
    return any(
        isinstance(each, Communication) and each.group == group
        for each in touching(walk((branch,)))
    )


def _describe(operation: Communication) -> tuple[Key, str]:
    """Return the key that must agree, and its description."""
    key: Key = (operation.size, operation.wire, *operation.agreed)
    if not isinstance(operation, PointToPoint):
        key = (operation.name, *key)
    return key, operation.words


def _strangers(role: str, group: str, issues: Issues) -> Iterator[Finding]:
    """Find operations that ranks outside the group issue on it."""
    pairs = (*issues.sends.values(), *issues.receives.values())
    everything = [*issues.collectives, *(each for found in pairs for each in found)]
    if everything:
        first, *others = everything
        yield Finding(
            invariant=INVARIANT,
            role=role,
            operation=first.operation,
            why=f"some ranks of the role are outside group {group} and issue on it",
            witness=tuple(f"{each.operation}: {each.text}" for each in (first, *others[:4])),
        )


def _unequal(roles: str, ours: Side, theirs: Side, why: str) -> Iterator[Finding]:
    """Yield a finding for each part in which two sequences differ."""
    (one, mine), (other, yours) = ours, theirs
    keys = [each.key for each in mine], [each.key for each in yours]
    for low, high, their_low, their_high in _differences(*keys):
        stretches = (one, mine[low:high]), (other, yours[their_low:their_high])
        yield Finding(
            invariant=INVARIANT,
            role=roles,
            operation=(stretches[0][1] or stretches[1][1])[0].operation,
            why=why,
            witness=tuple(_side_by_side(*stretches)),
        )


def _differences(ours: list[Key], theirs: list[Key]) -> Iterator[tuple[int, int, int, int]]:
    """Yield the ranges in which two sequences differ, joined across one equal entry."""
    if ours == theirs:
        return
    start = 0
    while start < min(len(ours), len(theirs)) and ours[start] == theirs[start]:
        start += 1
    end = 0
    rest = min(len(ours), len(theirs)) - start
    while end < rest and ours[-1 - end] == theirs[-1 - end]:
        end += 1
    one, other = ours[start : len(ours) - end], theirs[start : len(theirs) - end]
    if max(len(one), len(other)) > MIDDLE_MAX:
        yield start, start + len(one), start, start + len(other)
        return
    pending: tuple[int, int, int, int] | None = None
    for tag, low, high, their_low, their_high in SequenceMatcher(
        None, one, other, autojunk=False
    ).get_opcodes():
        if tag == "equal":
            continue
        block = (start + low, start + high, start + their_low, start + their_high)
        if pending and block[0] - pending[1] <= 1:
            block = (pending[0], block[1], pending[2], block[3])
        elif pending:
            yield pending
        pending = block
    if pending:
        yield pending


def _side_by_side(*sides: Side) -> Iterator[str]:
    for place in range(min(5, max(len(issues) for _, issues in sides))):
        yield " | ".join(
            f"{role}: {issues[place].operation}, {issues[place].text}"
            if place < len(issues)
            else f"{role}: nothing"
            for role, issues in sides
        )


def _pair(communicator: EqualCommunicators, issues: dict[str, Issues]) -> Iterator[Finding]:
    """Find sends without their receives, and the reverse, by pair of roles and offset."""
    count = communicator.count
    for sender in communicator.roles:
        for receiver in communicator.roles:
            sends, receives = issues[sender].sends, issues[receiver].receives
            offsets = {*sends, *(-offset % count for offset in receives)}
            for offset in sorted(offsets):
                if _reaches(communicator, sender, offset, receiver):
                    where = f"offset {offset} of group {communicator.group.name}"
                    roles = sender if sender == receiver else f"{sender} and {receiver}"
                    sides = (
                        (f"{sender} sends", sends.get(offset, [])),
                        (f"{receiver} receives", receives.get(-offset % count, [])),
                    )
                    why = f"sends and receives over {where} do not pair"
                    yield from _unequal(roles, *sides, why)


def _reaches(communicator: EqualCommunicators, sender: str, offset: int, receiver: str) -> bool:
    """Return True if some `sender` has a `receiver` at `offset` places further."""
    count = communicator.count
    targets = communicator.intervals(receiver)
    for low, high in communicator.intervals(sender):
        for shift in (offset, offset - count):
            for start, end in targets:
                if max(low + shift, start) < min(high + shift, end):
                    return True
    return False
