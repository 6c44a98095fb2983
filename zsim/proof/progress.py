"""Progress: no rank ever waits for an operation that waits for it (no deadlock).

Proved for setup and two steps, and for every path through the branches: the graph of waits has no
cycle. A rank waits in host order, on streams first-in-first-out, by `after`, at waits of the host
and of frees, for the communicator (one operation at a time, in issue order), and for its partners:
a collective ends when every member has started it, a send when its receive has started and the
reverse, so a lone send is a rendezvous. An edge to an operation that the same step issues later is
a fault of its own, since it does not exist yet.

Proved of order across communicators: there is no cycle either if each rank runs its communications
in sequence, in the order of its host, whatever their streams and communicators. NCCL requires that
if kernels of several communicators share a GPU: a kernel that has started occupies it until its
peers have started too, and two that wait for each other on two ranks never end. Sends and receives
count too; those that are issued as one count as one.

That proves progress with full memory as well. PyTorch's allocator may then return its cache at any
`Allocate`, and the host waits for everything that it has issued. With communications in the order
of hosts, such a wait depends only on operations that ranks issued before, so it always ends.

While all members of every communicator have one role and there are no sends, all waits point to
operations issued before, and only edges to later ones have to be found. Otherwise the graph is
built on classes of ranks that nothing distinguishes. That is exact: a cycle over classes is one
over ranks, since from any rank of a class its edges lead to some rank of the next class, and ranks
are finite. If several classes send within one group, its axes are expanded rank by rank (a
pipeline's ends differ from its middle), and the cost grows with their sizes. On one rank all waits
point to operations issued before: with communications in the order of hosts, a cycle leads from
communication to communication. So a graph of these alone, each after the previous one, shows
whether there is one.

Operations on groups that do not match (a finding of matching) are not waited for here. Each
further step adds the same waits as the second one.
"""

from collections import defaultdict
from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

from zsim.proof.context import Context
from zsim.proof.execution.rank_class import EqualCommunicators, RankBox, communicators, rank_classes
from zsim.proof.finding import Finding
from zsim.proof.wait_graph import WaitGraph
from zsim.schedule.happens_before import OUTCOMES_MAX
from zsim.schedule.operation import (
    Branch,
    Free,
    FreeMode,
    PointToPoint,
    Send,
    Together,
)
from zsim.schedule.program_index import HOST, Numbered

INVARIANT = "progress"
IN_ORDER = "order across communicators"
STEPS = 2

DEADLOCK = "deadlock: it waits for operations that wait for it"
DISORDERED = "ranks issue operations of several communicators in different orders"
IN_HOST_ORDER = "the host issues that first, on another communicator"


def examine(context: Context) -> list[Finding]:
    """Find edges to operations issued later, and cycles of waits."""
    found = [
        finding
        for each in context.programs
        for _, numbered in each.parts
        for finding in _forward_edges(each.program.role, numbered)
    ]
    among = _rank_classes(context)
    if not among:
        return found
    branches = sorted(
        {
            numbered.operations[number].id
            for each in context.programs
            for _, numbered in each.parts
            for number in numbered.sides
        }
    )
    if 2 ** len(branches) > OUTCOMES_MAX:
        why = f"{len(branches)} branches have more than {OUTCOMES_MAX} outcomes together"
        return [*found, Finding(invariant=INVARIANT, role="", operation=branches[0], why=why)]
    cycles: dict[frozenset[str], Finding] = {}
    for choice in product((True, False), repeat=len(branches)):
        taken = {name for name, then in zip(branches, choice, strict=True) if then}
        if not any(RankWaits(context, among, taken, of=CommunicationWalker).graph.cycles()):
            continue
        in_order = list(RankWaits(context, among, taken, in_order=True).cycles())
        stuck = list(RankWaits(context, among, taken).cycles()) if in_order else []
        for operations, finding in stuck or in_order:
            cycles.setdefault(operations, finding)
    return found + list(cycles.values())


def _forward_edges(role: str, numbered: Numbered) -> Iterator[Finding]:
    for number, name in numbered.forward:
        target = numbered.index[name]
        if _exclude_each_other(numbered, number, target):
            continue
        waiting = numbered.operations[number].id
        yield Finding(
            invariant=INVARIANT,
            role=role,
            operation=waiting,
            why=f"waits for {name}, which the same step does not issue before it",
            witness=(f"{number}: {waiting} waits for", f"{target}: {name}, later in host order"),
        )


def _exclude_each_other(numbered: Numbered, one: int, other: int) -> bool:
    """Return True if two operations are in different lists of a branch, so that only one runs."""
    for then, otherwise in numbered.sides.values():
        first, second = _within(numbered, then), _within(numbered, otherwise)
        if (one in first and other in second) or (one in second and other in first):
            return True
    return False


def _within(numbered: Numbered, items: list[int]) -> set[int]:
    found = set(items)
    for number in items:
        for side in numbered.sides.get(number, ()):
            found |= _within(numbered, side)
    return found


def _pairing_groups(context: Context) -> set[str]:
    """Return the groups that have sends or receives."""
    return {
        numbered.group[number]
        for each in context.programs
        for _, numbered in each.parts
        for number in numbered.communications
        if _peers(numbered, number)
    }


def _peers(numbered: Numbered, number: int) -> list[tuple[bool, int]]:
    """Return (whether it sends, offset) of each send and receive in an operation."""
    operation = numbered.operations[number]
    members = operation.members if isinstance(operation, Together) else (operation,)
    return [
        (isinstance(member, Send), member.offset)
        for member in members
        if isinstance(member, PointToPoint)
    ]


def _rank_classes(context: Context) -> list[RankBox]:
    """Return classes on which to build the graph; none if waits can only point back."""
    schedule = context.schedule
    pairing = _pairing_groups(context)
    if len(schedule.roles) == 1 and not pairing:
        return []
    among = rank_classes(schedule)
    groups = [group for group in schedule.groups if group.name in pairing]
    if any(
        len(each.members) > 1
        for group in groups
        for each in communicators(schedule.mesh, group, among)
    ):
        among = rank_classes(schedule, frozenset(axis for group in groups for axis in group.axes))
    return among


class _Issued(NamedTuple):
    """An operation of a group as issued by the ranks of a class, with its nodes in the graph."""

    numbered: Numbered
    number: int
    start: int
    done: int


class _Walker:
    """Adds the operations of one class to the graph, without waits for other classes."""

    def __init__(
        self, graph: WaitGraph, role: str, taken: set[str], stream_count: int, *, in_order: bool
    ) -> None:
        self.graph = graph
        self.role = role
        self.taken = taken
        self.in_order = in_order
        self.communication: _Issued | None = None
        self.tails: list[int | None] = [None] * stream_count
        self.host: int | None = None
        self.done: dict[int, int] = {}
        self.previous: dict[str, int] = {}
        self.latest: dict[str, int] = {}
        self.issued: dict[str, list[_Issued]] = defaultdict(list)

    def part(self, numbered: Numbered) -> None:
        """Add setup, or a step."""
        self.done = {}
        self._issue(numbered, numbered.items)
        for number, node in self.done.items():
            self.previous[numbered.operations[number].id] = node

    def drain(self, everything: int) -> None:
        """End setup: node `everything` waits for it, and later operations wait for that node."""
        for node in (self.host, *self.tails):
            self.graph.wait(everything, node, "setup ends when all streams are drained")
        self.host = everything

    def _issue(self, numbered: Numbered, items: list[int]) -> None:
        wait = self.graph.wait
        for number in items:
            operation = numbered.operations[number]
            issue = self.graph.node(self.role, operation.id)
            wait(issue, self.host, "the host issues it later")
            self.host = issue
            stream = numbered.stream[number]
            if stream == HOST:
                if not isinstance(operation, Free) or operation.mode is FreeMode.HOST:
                    self._after(numbered, number, issue, "the host waits for it")
                elif numbered.position[number]:
                    self._enter(numbered, number, numbered.home[operation.buffer], issue)
                if isinstance(operation, Branch):
                    then, otherwise = numbered.sides[number]
                    self._issue(numbered, then if operation.id in self.taken else otherwise)
            else:
                self._enter(numbered, number, stream, issue)

    def _enter(self, numbered: Numbered, number: int, stream: int, issue: int) -> None:
        """Add an entry of a stream: its start and its end."""
        wait, name = self.graph.wait, numbered.operations[number].id
        start, done = self.graph.node(self.role, name), self.graph.node(self.role, name)
        wait(start, issue, "it must be issued")
        wait(start, self.tails[stream], f"earlier on stream {numbered.streams[stream]}")
        self._after(numbered, number, start, "it is named in after")
        wait(done, start, "it must start")
        if group := numbered.group[number]:
            wait(start, self.latest.get(group), f"earlier on the communicator of {group}")
            self.latest[group] = done
            issued = _Issued(numbered, number, start, done)
            self.issued[group].append(issued)
            if self.in_order:
                if before := self.communication:
                    wait(start, before.done, IN_HOST_ORDER)
                self.communication = issued
        self.tails[stream] = self.done[number] = done

    def _after(self, numbered: Numbered, number: int, node: int, why: str) -> None:
        for edge in numbered.edges[number]:
            self.graph.wait(node, self.done.get(edge), why)
        for name in numbered.previous.get(number, ()):
            self.graph.wait(node, self.previous.get(name), why)


class CommunicationWalker(_Walker):
    """Adds only communications, each after the one that the host issued before."""

    def _issue(self, numbered: Numbered, items: list[int]) -> None:
        group_of, sides = numbered.group, numbered.sides
        for number in items:
            if group := group_of[number]:
                name = numbered.operations[number].id
                behind = {} if self.host is None else {self.host: IN_HOST_ORDER}
                start = self.graph.node(self.role, name, behind)
                done = self.graph.node(self.role, name, {start: "it must start"})
                self.issued[group].append(_Issued(numbered, number, start, done))
                self.host = done
            elif number in sides:
                then, otherwise = sides[number]
                is_taken = numbered.operations[number].id in self.taken
                self._issue(numbered, then if is_taken else otherwise)


class RankWaits:
    """The graph of setup and the steps, for one path through the branches.

    With `in_order`, a rank's communications run in sequence, whatever their communicators.
    """

    def __init__(
        self,
        context: Context,
        among: list[RankBox],
        taken: set[str],
        *,
        in_order: bool = False,
        of: type[_Walker] = _Walker,
    ) -> None:
        schedule = context.schedule
        self.in_order = in_order
        self.graph = WaitGraph()
        by_role = {each.program.role: each for each in context.programs}
        walkers = {
            rank_class: of(
                self.graph, rank_class.role, taken, len(schedule.streams), in_order=in_order
            )
            for rank_class in among
        }
        everything = self.graph.node("", "the end of setup")
        for rank_class, walker in walkers.items():
            walker.part(by_role[rank_class.role].setup)
            walker.drain(everything)
            for _ in range(STEPS):
                walker.part(by_role[rank_class.role].step)
        issued = {rank_class: walker.issued for rank_class, walker in walkers.items()}
        for group in schedule.groups:
            for each in communicators(schedule.mesh, group, among):
                self._meet(each, [issued[rank_class][group.name] for rank_class, _ in each.members])

    def _meet(self, communicator: EqualCommunicators, issued: list[list[_Issued]]) -> None:
        """Make partners wait for each other's start."""
        collectives = [[each for each in one if _is_collective(each)] for one in issued]
        if len({len(each) for each in collectives}) == 1:
            for partners in zip(*collectives, strict=True):
                if len(partners) > 1:
                    self._rendezvous(partners)
        count = communicator.count
        sends: dict[tuple[int, int], list[_Issued]] = defaultdict(list)
        receives: dict[tuple[int, int], list[_Issued]] = defaultdict(list)
        alone = len(communicator.members) == 1
        for (_, intervals), one in zip(communicator.members, issued, strict=True):
            # If one class is the whole communicator, one member represents all.
            member = 0 if alone else intervals[0][0]
            for each in one:
                for sending, offset in _peers(each.numbered, each.number):
                    peer = 0 if alone else (member + offset) % count
                    shift = offset % count if alone else 0
                    if sending:
                        sends[shift, member * count + peer].append(each)
                    else:
                        receives[-shift % count, peer * count + member].append(each)
        for key in sends.keys() & receives.keys():
            if len(sends[key]) == len(receives[key]):
                for pair in zip(sends[key], receives[key], strict=True):
                    self._rendezvous(pair)

    def _rendezvous(self, partners: tuple[_Issued, ...]) -> None:
        first = partners[0]
        behind = {each.start: "a partner must start it" for each in partners}
        node = self.graph.node("", first.numbered.operations[first.number].id, behind)
        for each in partners:
            self.graph.wait(each.done, node, "its partners must start it")

    def cycles(self) -> Iterator[tuple[frozenset[str], Finding]]:
        """Yield each cycle with the operations in it."""
        label = self.graph.label
        for cycle in self.graph.cycles():
            names = [label[node] for node, _ in cycle]
            lines: list[str] = []
            for (node, why), (_, other) in zip(cycle, [*names[1:], names[0]], strict=True):
                role, name = label[node]
                if name != other:
                    lines.append(f"{role}{': ' if role else ''}{name} waits for {other}: {why}")
            roles = sorted({role for role, _ in names if role})
            operations = frozenset(name for _, name in names)
            yield (
                operations,
                Finding(
                    invariant=IN_ORDER if self.in_order else INVARIANT,
                    role=" and ".join(roles),
                    operation=min(operations),
                    why=DISORDERED if self.in_order else DEADLOCK,
                    witness=tuple(lines),
                ),
            )


def _is_collective(issued: _Issued) -> bool:
    operation = issued.numbered.operations[issued.number]
    members = operation.members if isinstance(operation, Together) else (operation,)
    return not all(isinstance(member, PointToPoint) for member in members)
