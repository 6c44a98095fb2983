"""An oracle for training with experts: it runs a schedule on real rows, rank by rank.

Ranks run their operations in the order of issue and meet in collectives. Nothing here knows places,
bindings or the proof (`real_tokens` has the kernels and plain training).
"""

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from experts_by_hand import Plan
from real_kernels import Held, Kernels, StuckError, trained_by
from real_tokens import P, Routing, Rule, State, h, plain, plus, total

from zsim.schedule.counts import RowIndex
from zsim.schedule.operation import (
    Action,
    Allocate,
    AllReduce,
    AllToAll,
    Branch,
    Broadcast,
    Compute,
    Copy,
    Fill,
    Free,
    Operation,
    ReadCounts,
    Receive,
    Reduction,
    Send,
    View,
)
from zsim.schedule.schedule import Program, Schedule

Meeting = AllReduce | Broadcast | AllToAll
Parts = tuple[Sequence[Operation], ...]


@dataclass(frozen=True)
class Overflow:
    """A gradient that is not finite: of a parameter, on a rank, in a micro-batch."""

    rank: int
    micro_batch: int
    parameter: str


@dataclass
class Ranks:
    """All ranks of a schedule."""

    plan: Plan
    schedule: Schedule
    overflow: Overflow | None = None
    memory: list[dict[str, Held]] = field(init=False)
    routes: dict[tuple[int, int, int], Routing] = field(
        default_factory=dict[tuple[int, int, int], Routing]
    )
    """The routing of each layer, micro-batch and rank."""

    def __post_init__(self) -> None:
        mesh = self.schedule.mesh
        self.memory = [{} for _ in range(mesh.size)]
        self.programs: list[Program] = []
        for rank in range(mesh.size):
            at = mesh.coordinates(rank)
            self.programs += [
                program
                for role, program in zip(self.schedule.roles, self.schedule.programs, strict=True)
                if any(
                    all(span.start <= at[span.axis] < span.end for span in box)
                    for box in role.boxes
                )
            ]
        assert len(self.programs) == mesh.size
        self.rules = {
            each.name: Rule(each.drops, each.sent // each.experts if each.padded else None)
            for each in self.schedule.counts
        }
        self.scalars = {each.name: int(each.initial) for each in self.schedule.scalars}
        self.mail: dict[tuple[str, int, int], deque[Held]] = defaultdict(deque)

    def source(self, rank: int) -> int:
        """Return the number of a rank among those of its pipeline stage."""
        return rank % self.plan.sources

    def run(self) -> list[State]:
        """Run setup and a step; return the parameters that each rank holds.

        Raises:
            StuckError: ranks do not fit together.
        """
        try:
            self._run()
        except (KeyError, IndexError, ValueError, TypeError, AttributeError) as error:
            raise StuckError(repr(error)) from error
        return [
            {
                name: memory[name].numbers
                for name in program.persistent
                if program.by_name[name].layout is not None and name in memory
            }
            for memory, program in zip(self.memory, self.programs, strict=True)
        ]

    def _run(self) -> None:
        hosts = [
            self._host(rank, (*program.setup, *program.step))
            for rank, program in enumerate(self.programs)
        ]
        waits = [next(host, None) for host in hosts]
        while any(each is not None for each in waits):
            served = False
            for rank, request in enumerate(waits):
                ready = [] if request is None else self._ready(rank, request, waits)
                for member in ready:
                    waits[member] = next(hosts[member], None)
                served = served or bool(ready)
            if not served:
                raise StuckError("ranks wait for each other")

    def _host(self, rank: int, operations: Iterable[Operation]) -> Iterator[Operation]:
        """Run the operations of a rank; yield those that need other ranks."""
        for operation in operations:
            if isinstance(operation, Branch):
                assert operation.value is not None
                part = self._part(rank, operation.value)
                (decided,) = self.memory[rank][operation.value.buffer].numbers[part]
                yield from self._host(rank, operation.then if decided else operation.otherwise)
            elif isinstance(operation, Meeting | Receive):
                yield operation
            else:
                self._alone(rank, operation)

    def _ready(
        self, rank: int, request: Operation, waits: Sequence[Operation | None]
    ) -> Sequence[int]:
        """Carry out a request if all that it needs is there; return the ranks that go on."""
        if isinstance(request, Receive):
            mail = self.mail[request.group, self._partner(rank, request), rank]
            if not mail:
                return ()
            self.memory[rank][request.target.buffer].numbers = mail.popleft().numbers
            return (rank,)
        assert isinstance(request, Meeting)
        members = self._members(request.group, rank)
        others = [waits[member] for member in members]
        if any(not isinstance(each, Meeting) or each.group != request.group for each in others):
            return ()
        meetings = [each for each in others if isinstance(each, Meeting)]
        if len({type(each) for each in meetings}) > 1:
            raise StuckError(f"{request.id}: members meet for different collectives")
        self._meet(meetings, members)
        return members

    def _members(self, group: str, rank: int) -> Sequence[int]:
        mesh = self.schedule.mesh
        return self.schedule.group_by_name[group].members(mesh, mesh.coordinates(rank))

    def _partner(self, rank: int, operation: Send | Receive) -> int:
        members = self._members(operation.group, rank)
        return members[(members.index(rank) + operation.offset) % len(members)]

    def _alone(self, rank: int, operation: Operation) -> None:
        """Run an operation that needs no other rank."""
        memory, program = self.memory[rank], self.programs[rank]
        match operation:
            case Allocate(buffer=name, micro_batch=micro_batch):
                garbage = [h("garbage", name)] * program.by_name[name].elements
                memory[name] = Held(garbage, micro_batch or 0)
            case Free(buffer=name):
                del memory[name]
            case Compute():
                Kernels(self, rank, operation).run()
            case Copy():
                self._copy(rank, operation)
            case Fill(target=target, value=value):
                held = memory[target.buffer]
                factor = self.scalars[operation.scalar] if operation.scalar else 1
                held.numbers = [int(value) * factor] * len(held.numbers)
                held.bad = False
            case Send(source=source):
                copied = Held(list(memory[source.buffer].numbers))
                self.mail[operation.group, rank, self._partner(rank, operation)].append(copied)
            case ReadCounts():
                self._read(rank, operation)
            case _:
                pass

    def _read(self, rank: int, read: ReadCounts) -> None:
        """Compare the counts that the host reads with the rows that will arrive."""
        count = next(each for each in self.schedule.counts if each.name == read.count)
        members = self._members(count.group, rank)
        own = members.index(rank)
        wanted = [
            rows
            for source in members
            for rows in self.blocks(
                read.count, (read.layer, read.micro_batch, source), len(members)
            )[own]
        ]
        if self.memory[rank][read.source.buffer].numbers != wanted:
            raise StuckError(f"{read.id}: counts are not those of the rows")

    def _copy(self, rank: int, copy: Copy) -> None:
        memory = self.memory[rank]
        share = pow(copy.divisor, -1, P)
        held, read = memory[copy.target.buffer], memory[copy.source.buffer]
        given = [each * share % P for each in read.numbers[self._part(rank, copy.source)]]
        part = self._part(rank, copy.target)
        if copy.accumulate:
            given = plus(given, held.numbers[part])
        held.numbers = list(held.numbers)
        held.numbers[part], held.routing = given, read.routing
        held.bad = read.bad or (copy.accumulate and held.bad)

    def _part(self, rank: int, view: View) -> slice:
        """Return the elements of a view; all rows of a buffer of rows."""
        buffer = self.programs[rank].by_name[view.buffer]
        if buffer.rows is not None or view.size == buffer.elements:
            return slice(None)
        return slice(view.start, view.start + view.size)

    def _meet(self, operations: Sequence[Meeting], members: Sequence[int]) -> None:
        given = [
            self.memory[rank][each.source.buffer]
            for rank, each in zip(members, operations, strict=True)
        ]
        numbers = [each.numbers for each in given]
        made: list[list[int]]
        match operations[0]:
            case AllReduce(reduction=reduction):
                whole = [total(each) for each in zip(*numbers, strict=True)]
                if reduction is Reduction.AVERAGE:
                    share = pow(len(members), -1, P)
                    whole = [each * share % P for each in whole]
                if reduction is Reduction.MAX:
                    whole = [max(each) for each in zip(*numbers, strict=True)]
                made = [whole] * len(members)
            case Broadcast(root=root):
                made = [numbers[root]] * len(members)
            case AllToAll():
                blocks = [
                    self._blocks(each.source.buffer, rank, held, members)
                    for rank, each, held in zip(members, operations, given, strict=True)
                ]
                made = [
                    [row for block in blocks for row in block[place]]
                    for place in range(len(members))
                ]
        bad = any(each.bad for each in given)
        for rank, each, found in zip(members, operations, made, strict=True):
            held = self.memory[rank][each.target.buffer]
            held.numbers, held.bad = list(found), bad

    def _blocks(
        self, buffer: str, rank: int, held: Held, members: Sequence[int]
    ) -> list[list[int]]:
        """Return the block of `rank` for each member."""
        rows = self.programs[rank].by_name[buffer].rows
        count = len(members)
        if rows is None:
            sizes = [len(held.numbers) // count] * count
        elif rows.own is RowIndex.SOURCE:
            at = (rows.layer, held.micro_batch, rank)
            sizes = [sum(each) for each in self.blocks(rows.count, at, count)]
        else:
            own = members.index(rank)
            sizes = [
                sum(self.blocks(rows.count, (rows.layer, held.micro_batch, other), count)[own])
                for other in members
            ]
        if sum(sizes) != len(held.numbers):
            raise StuckError(f"{buffer}: {len(held.numbers)} rows, {sum(sizes)} in blocks")
        found: list[list[int]] = []
        start = 0
        for size in sizes:
            found.append(held.numbers[start : start + size])
            start += size
        return found

    def blocks(self, count: str, at: tuple[int, int, int], members: int) -> list[list[int]]:
        """Return the rows that a rank sends to each expert of each member.

        `at` is the layer, the micro-batch and the rank.
        """
        sent = self.routes[at].sent(self.rules[count])
        own = len(sent) // members
        return [sent[place * own : (place + 1) * own] for place in range(members)]

    def rule(self, rank: int, buffer: str) -> Rule:
        """Return the rule of the rows of a buffer."""
        rows = self.programs[rank].by_name[buffer].rows
        return Rule() if rows is None else self.rules[rows.count]


def trains_plainly(plan: Plan, schedule: Schedule) -> bool:
    """Return True if every rank ends with the parameters of plain training.

    With a loss scale, also if any gradient overflows on any rank.
    """
    cases: list[Overflow | None] = [None]
    if plan.half:
        for rank in range(schedule.mesh.size):
            names = [*_gradients(schedule, rank)]
            last = plan.micro_batches - 1
            cases += [Overflow(rank, rank % (last + 1), names[rank % len(names)])]
            cases += [Overflow(rank, last, name) for name in names if rank == 0]
    return all(_trains(plan, schedule, overflow) for overflow in cases)


def _gradients(schedule: Schedule, rank: int) -> Iterator[str]:
    """Yield the parameters whose gradients a rank makes."""
    program = Ranks(Plan(), schedule).programs[rank]
    for operation in program.step:
        if isinstance(operation, Compute) and operation.action is Action.BACKWARD:
            name = trained_by(operation)
            if name and operation.micro_batch == 0:
                yield name


def _trains(plan: Plan, schedule: Schedule, overflow: Overflow | None) -> bool:
    wanted = plain(plan, overflows=overflow is not None)
    ranks = Ranks(plan, schedule, overflow)
    try:
        states = ranks.run()
    except StuckError:
        return False
    held: set[str] = set()
    for rank, state in enumerate(states):
        at = schedule.mesh.coordinates(rank)
        held |= state.keys()
        for name, numbers in state.items():
            buffer = ranks.programs[rank].by_name[name]
            start = at[buffer.shard] * buffer.elements if buffer.shard else 0
            if numbers != wanted[name][start : start + buffer.elements]:
                return False
    return held == wanted.keys()
