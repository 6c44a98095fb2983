"""Matching: whoever shares a communicator issues the same operations on it, in the same order.

Proved for every communicator: its members issue equal sequences of collectives, in kind, elements,
wire and accumulate dtype, reduction, root and grouping (`Together`), and where layouts say which
tensor a view is, of the same part of the same tensor, else of one name if both have it; the k-th
send to a member meets the k-th receive from there, of equal size and dtype; ranks outside a group
issue nothing on it. Sequences are compared list by list where they stand in branches.

Assumed: all members take the same way through a branch. Not examined: in which order operations of
different communicators come (progress).

Cost: nothing but a look at sends and receives while all members play one role; where roles share
communicators, one comparison for each pair of roles. Independent of the number of ranks.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import partial
from typing import assert_never

from zsim.check.cell import Communicators, cells, communicators, outside
from zsim.check.finding import Finding
from zsim.check.grouping import mixed
from zsim.check.subject import Subject
from zsim.operation import (
    AllGather,
    AllReduce,
    Branch,
    Broadcast,
    Communication,
    Operation,
    Receive,
    ReduceScatter,
    Send,
    Together,
    View,
)
from zsim.schedule import Program, Schedule

INVARIANT = "matching"
MIDDLE_MAX = 400
"""Up to so many entries between equal ends are aligned; longer stretches differ as a whole."""

Key = tuple[object, ...]
Identity = tuple[object, ...] | None
"""Which part of which tensor a view is, or None where no layout says so."""


@dataclass(frozen=True, slots=True)
class Issue:
    """An operation as its communicator sees it: where it stands, what it is, on which tensors."""

    key: Key
    tensors: tuple[Identity, ...]
    operation: str
    says: str


@dataclass(frozen=True, slots=True)
class Issues:
    """What a role issues on the communicators of one group."""

    collectives: list[Issue]
    sends: dict[int, list[Issue]]
    receives: dict[int, list[Issue]]


def examine(subject: Subject) -> list[Finding]:
    """Every disagreement, and every operation of a rank on a group that it does not belong to."""
    schedule = subject.schedule
    busy = {
        group
        for each in subject.programs
        for _, numbered in each.parts
        for group in numbered.group
        if group
    }
    if len(schedule.roles) == 1 and not any(group.where for group in schedule.groups):
        pairs = (Send, Receive, Together)
        busy = {
            numbered.group[number]
            for each in subject.programs
            for _, numbered in each.parts
            for number in numbered.communications
            if isinstance(numbered.operations[number], pairs)
        }
    if not busy:
        return []
    found = dict.fromkeys(mixed(subject, INVARIANT))
    among = cells(schedule)
    programs = {each.program.role: each.program for each in subject.programs}
    for group in schedule.groups:
        if group.name not in busy:
            continue
        count = group.size(schedule.mesh)
        issues = {
            role: _issues(schedule, program, group.name, count)
            for role, program in programs.items()
        }
        for cell in outside(schedule.mesh, group, among):
            found.update(dict.fromkeys(_strangers(cell.role, group.name, issues[cell.role])))
        for communicator in communicators(schedule.mesh, group, among):
            first, *others = communicator.roles
            for other in others:
                found.update(dict.fromkeys(_compare(group.name, first, other, issues)))
            found.update(dict.fromkeys(_pair(communicator, issues)))
    return list(found)


def _issues(schedule: Schedule, program: Program, group: str, count: int) -> Issues:
    """What `program` issues on `group`, setup and then one step."""
    found = Issues([], defaultdict(list), defaultdict(list))

    def walk(operations: Iterable[Operation], path: Key) -> None:
        branches = 0
        for operation in operations:
            match operation:
                case Branch(then=then, otherwise=otherwise):
                    if any(_uses(each, group) for each in (*then, *otherwise)):
                        branches += 1
                        walk(then, (*path, branches, "then"))
                        walk(otherwise, (*path, branches, "otherwise"))
                case Together(members=members):
                    if operation.group == group:
                        add(operation.id, members, path, grouped=True)
                case _:
                    if isinstance(operation, Communication) and operation.group == group:
                        add(operation.id, (operation,), path, grouped=False)

    def add(name: str, members: tuple[Communication, ...], path: Key, *, grouped: bool) -> None:
        together: list[tuple[Key, str, list[Identity]]] = []
        for member in members:
            what, says = _describe(member)
            tensors = [_identity(schedule, program, view) for view in _views(member)]
            if isinstance(member, Send | Receive):
                peers = found.sends if isinstance(member, Send) else found.receives
                issue = Issue((path, *what), tuple(tensors), member.id, says)
                peers[member.offset % count].append(issue)
            else:
                together.append((what, says, tensors))
        if together:
            key: Key = (path, grouped, *(what for what, _, _ in together))
            tensors = [identity for _, _, each in together for identity in each]
            says = ", ".join(says for _, says, _ in together)
            found.collectives.append(
                Issue(key, tuple(tensors), name, f"together {says}" if grouped else says)
            )

    walk(program.setup, ("setup",))
    walk(program.step, ("step",))
    return found


def _uses(operation: Operation, group: str) -> bool:
    match operation:
        case Branch(then=then, otherwise=otherwise):
            return any(_uses(each, group) for each in (*then, *otherwise))
        case Together():
            return operation.group == group
        case _:
            return isinstance(operation, Communication) and operation.group == group


def _describe(operation: Communication) -> tuple[Key, str]:
    """What has to agree, and the same in words."""
    wire = operation.wire
    match operation:
        case AllGather(source=source):
            return ("all_gather", source.size, wire), f"all_gather of {source.size} {wire}"
        case ReduceScatter(target=shard) | AllReduce(target=shard):
            name = "all_reduce" if isinstance(operation, AllReduce) else "reduce_scatter"
            how = operation.reduction
            key = (name, shard.size, wire, operation.accumulate, how)
            return key, f"{name} ({how}) of {shard.size} {wire} in {operation.accumulate}"
        case Broadcast(source=source, root=root):
            what = f"broadcast of {source.size} {wire} from member {root}"
            return ("broadcast", source.size, wire, root), what
        case Send(source=view) | Receive(target=view):
            return (view.size, wire), f"{view.size} {wire}"
        case _:
            assert_never(operation)


def _views(operation: Communication) -> tuple[View, ...]:
    match operation:
        case (
            AllGather(source=source, target=target)
            | ReduceScatter(source=source, target=target)
            | AllReduce(source=source, target=target)
            | Broadcast(source=source, target=target)
        ):
            return source, target
        case Send(source=view) | Receive(target=view):
            return (view,)
        case _:
            assert_never(operation)


def _identity(schedule: Schedule, program: Program, view: View) -> Identity:
    """Layout, first element, size, and how far from one rank's part to the next one's, along what.

    A rank's own slot of a whole with blocks is what its segment is, and both stand at 0.
    """
    buffer = program.by_name[view.buffer]
    if buffer.layout is None:
        return None
    axis, stride = view.axis, 0 if view.axis is None else view.size
    if buffer.shard is not None:
        uneven = schedule.layout_by_name[buffer.layout].cuts is not None
        axis, stride = buffer.shard, -1 if uneven else buffer.elements
    return (buffer.layout, view.start, view.size, axis, stride)


def _strangers(role: str, group: str, issues: Issues) -> Iterator[Finding]:
    """Operations that ranks outside the group issue on it."""
    pairs = (*issues.sends.values(), *issues.receives.values())
    everything = [*issues.collectives, *(each for found in pairs for each in found)]
    if everything:
        first, *others = everything
        yield Finding(
            invariant=INVARIANT,
            role=role,
            operation=first.operation,
            why=f"some ranks of the role are outside group {group} and issue on it",
            witness=tuple(f"{each.operation}: {each.says}" for each in (first, *others[:4])),
        )


def _compare(group: str, one: str, other: str, issues: dict[str, Issues]) -> Iterator[Finding]:
    """Differences between what two roles issue on a communicator that they share."""
    ours, theirs = issues[one].collectives, issues[other].collectives
    finding = partial(Finding, invariant=INVARIANT, role=f"{one} and {other}")
    for block in _differences([each.key for each in ours], [each.key for each in theirs]):
        low, high, their_low, their_high = block
        mine, yours = ours[low:high], theirs[their_low:their_high]
        yield finding(
            operation=(mine or yours)[0].operation,
            why=f"the roles share communicators of group {group} and issue different sequences",
            witness=tuple(_side_by_side(one, mine, other, yours)),
        )
    shared = {each.operation for each in ours} & {each.operation for each in theirs}
    for our, their in _aligned(ours, theirs):
        known = [pair for pair in zip(our.tensors, their.tensors, strict=True) if all(pair)]
        names = {our.operation, their.operation}
        for identity, their_identity in known:
            if identity and their_identity and identity != their_identity:
                yield finding(
                    operation=our.operation,
                    why=f"the roles bring parts of different tensors, equal in size, to {group}",
                    witness=(
                        f"{one}: {our.operation}: {_tensor(identity)}",
                        f"{other}: {their.operation}: {_tensor(their_identity)}",
                    ),
                )
                break
        if not known and len(names) > 1 and names & shared:
            yield finding(
                operation=our.operation,
                why=f"the roles bring operations of different names to {group}, and both have one",
                witness=tuple(_side_by_side(one, [our], other, [their])),
            )


def _tensor(identity: tuple[object, ...]) -> str:
    layout, start, size, *_ = identity
    return f"{size} elements of {layout} from {start} on"


def _aligned(ours: list[Issue], theirs: list[Issue]) -> Iterator[tuple[Issue, Issue]]:
    """Pairs of equal keys, as long as the sequences agree."""
    if len(ours) == len(theirs):
        yield from (pair for pair in zip(ours, theirs, strict=True) if pair[0].key == pair[1].key)


def _differences(ours: list[Key], theirs: list[Key]) -> Iterator[tuple[int, int, int, int]]:
    """Stretches in which two sequences differ; two with one equal entry between are one."""
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


def _side_by_side(one: str, mine: list[Issue], other: str, yours: list[Issue]) -> Iterator[str]:
    for place in range(min(5, max(len(mine), len(yours)))):
        sides = [
            f"{role}: {issues[place].operation}, {issues[place].says}"
            if place < len(issues)
            else f"{role}: nothing"
            for role, issues in ((one, mine), (other, yours))
        ]
        yield " | ".join(sides)


def _pair(communicator: Communicators, issues: dict[str, Issues]) -> Iterator[Finding]:
    """Sends without their receives, and the reverse, for each pair of roles and each offset."""
    count = communicator.count
    for sender in communicator.roles:
        for receiver in communicator.roles:
            sends, receives = issues[sender].sends, issues[receiver].receives
            offsets = {*sends, *(-offset % count for offset in receives)}
            for offset in sorted(offsets):
                if _reaches(communicator, sender, offset, receiver):
                    yield from _pair_off(
                        (sender, sends.get(offset, [])),
                        (receiver, receives.get(-offset % count, [])),
                        f"offset {offset} of group {communicator.group.name}",
                    )


def _reaches(communicator: Communicators, sender: str, offset: int, receiver: str) -> bool:
    """Whether a member `offset` places on from one that plays `sender` plays `receiver`."""
    count = communicator.count
    targets = communicator.intervals(receiver)
    for low, high in communicator.intervals(sender):
        for shift in (offset, offset - count):
            for start, end in targets:
                if max(low + shift, start) < min(high + shift, end):
                    return True
    return False


def _pair_off(
    sending: tuple[str, list[Issue]], receiving: tuple[str, list[Issue]], where: str
) -> Iterator[Finding]:
    (sender, sends), (receiver, receives) = sending, receiving
    roles = sender if sender == receiver else f"{sender} and {receiver}"
    for low, high, their_low, their_high in _differences(
        [each.key for each in sends], [each.key for each in receives]
    ):
        mine, yours = sends[low:high], receives[their_low:their_high]
        yield Finding(
            invariant=INVARIANT,
            role=roles,
            operation=(mine or yours)[0].operation,
            why=f"sends and receives over {where} do not pair",
            witness=tuple(_side_by_side(f"{sender} sends", mine, f"{receiver} receives", yours)),
        )
    for sent, received in _aligned(sends, receives):
        (identity,), (their_identity,) = sent.tensors, received.tensors
        if identity and their_identity and identity[0] != their_identity[0]:
            yield Finding(
                invariant=INVARIANT,
                role=roles,
                operation=sent.operation,
                why=f"what is sent over {where} is received as another tensor",
                witness=(
                    f"{sender} sends: {sent.operation}: {_tensor(identity)}",
                    f"{receiver} receives: {received.operation}: {_tensor(their_identity)}",
                ),
            )
