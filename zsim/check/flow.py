"""Goes through programs once, for all families that ask what values are: placement and value.

Each write makes a version of a range: where it is along each axis, and what it is of. The step
starts from what setup leaves; from what it leaves itself, made one step older, it is gone through
again until nothing new comes.
"""

from typing import assert_never

from zsim.check.by_parameter import ByParameter
from zsim.check.collect import Collectives
from zsim.check.content import Content, What
from zsim.check.exchange import Exchange
from zsim.check.finding import Finding
from zsim.check.form import Forms
from zsim.check.ledger import VALUE, Ledger
from zsim.check.optimizer import Optimizer
from zsim.check.placed import (
    ANY,
    MIXED,
    REPLICATE,
    SHARD,
    SHIFTED,
    WRITTEN,
    Number,
    Placement,
    Rule,
    Values,
)
from zsim.check.routine import Made, Routine, Routines
from zsim.check.segment import Segments
from zsim.check.signature import Signatures
from zsim.check.subject import STEP, NumberedProgram, Subject
from zsim.check.tensor import Tensors
from zsim.check.where import Where
from zsim.numbered import Numbered
from zsim.operation import (
    Action,
    AllGather,
    Allocate,
    AllReduce,
    Branch,
    Broadcast,
    Compute,
    Copy,
    Fill,
    Free,
    HostWait,
    Operation,
    Receive,
    ReduceScatter,
    Role,
    Send,
    SetScalar,
    Together,
    View,
)
from zsim.order import OUTCOMES_MAX, outcomes
from zsim.schedule import Kind

TRAINED = (Kind.PARAMETER, Kind.MASTER, Kind.MOMENT)
"""Model states that an update changes."""

STATES_MAX = 16
"""Different contents of persistent buffers from which a step is gone through."""

UNFOLLOWED = (
    f"each of {STATES_MAX} steps leaves other values behind than the steps before it, and more "
    "are not gone through"
)


def findings(subject: Subject) -> list[Finding]:
    """Every value that is not what its reader needs; a second look tells where it comes from."""
    return _looked(subject, tells=False) and _looked(subject, tells=True)


def _looked(subject: Subject, *, tells: bool) -> list[Finding]:
    exchange = Exchange(subject)
    found = _through(subject, exchange, tells=tells)
    while exchange.moves():  # what is sent may depend on what was received
        found = _through(subject, exchange, tells=tells)
    return found


def _through(subject: Subject, exchange: Exchange, *, tells: bool) -> list[Finding]:
    """Every program gone through, with what the exchange knows of what others send."""
    found: list[Finding] = []
    for each in subject.programs:
        if any(outcomes(part, part.items) > OUTCOMES_MAX for _, part in each.parts):
            continue  # a finding of lifetime
        walk = _Walk(subject, each, exchange, tells=tells)
        begun: set[tuple[object, ...]] = set()
        waiting = walk.part(each.setup, walk.beginning())
        while waiting:
            values = waiting.pop()
            state = values.state(each.program.persistent, walk.counted)
            if state in begun:
                continue
            if len(begun) == STATES_MAX:
                walk.ledger.note(STEP, UNFOLLOWED, (), VALUE)
                break
            begun.add(state)
            waiting += walk.part(each.step, values)
        found += walk.ledger.found.values()
    return found


def _counted(each: NumberedProgram) -> tuple[str, ...]:
    """Numbers of the host that updates are given as their own: what others are changes nothing."""
    updates = (part.operations[number] for _, part in each.parts for number in part.updates)
    return tuple(
        dict.fromkeys(
            name for update in updates if isinstance(update, Compute) for name in update.scalars[:1]
        )
    )


class _Walk:
    """Goes through one program in order, with the rule that each operation states."""

    def __init__(
        self, subject: Subject, each: NumberedProgram, exchange: Exchange, *, tells: bool
    ) -> None:
        schedule, program = subject.schedule, each.program
        self.schedule = schedule
        self.program = program
        self.persistent = frozenset(program.persistent)
        self.counted = _counted(each)
        self.exchange = exchange
        self.ledger = Ledger(schedule, program, exchange.contents, tells=tells)
        axes = self.ledger.axes
        self.data = [name in schedule.contract.data_axes for name in axes]
        forms = Forms(schedule, program)
        self.written = Rule([WRITTEN] * len(axes), "whole where it is read")
        self.tensors = Tensors(forms, self.ledger)
        self.routines = Routines(self.ledger)
        self.copied: dict[tuple[bool, int], Made] = {}
        self.collectives = Collectives(schedule, self.ledger, self.tensors, self.routines)
        self.by_parameter = ByParameter(self.ledger, forms, self.written)
        self.signatures = Signatures(subject, each)
        judges = bool(schedule.contract.parameters)
        self.segments = Segments(
            self.ledger, signatures=self.signatures, data=self.data, judges=judges
        )
        self.optimizer = Optimizer(
            schedule,
            self.ledger,
            self.tensors,
            signatures=self.signatures,
            data=self.data,
            judges=judges,
        )
        self.flowing: Placement = tuple(SHARD if data else ANY for data in self.data)
        contents = exchange.contents
        self.initial = {
            Kind.PARAMETER: contents.code(Content(What.PARAMETER)),
            Kind.MASTER: contents.code(Content(What.PARAMETER)),
            Kind.MOMENT: contents.code(Content(What.MOMENT)),
        }
        self.in_setup = True
        self._older: dict[tuple[Placement, bool], Placement] = {}
        self._initials: dict[tuple[str | None, int], Placement] = {}

    def beginning(self) -> Values:
        """What there is before setup: nothing, and the numbers of the host."""
        values = Values(len(self.ledger.anything))
        for scalar in self.schedule.scalars:
            values.scalars[scalar.name] = Number(scalar.initial)
        return values

    def part(self, numbered: Numbered, values: Values) -> list[Values]:
        """Go through setup or a step: what it leaves to the next step, for each way through it."""
        ends = self._go(numbered, numbered.items, values)
        for end in ends:
            self._age(end)
        self.in_setup = False
        return ends

    def _go(self, numbered: Numbered, items: list[int], values: Values) -> list[Values]:
        self.ledger.values = values
        operations, sides = numbered.operations, numbered.sides
        pieces, inside = values.pieces, values.inside
        for place, number in enumerate(items):
            operation = operations[number]
            if type(operation) is Allocate or type(operation) is Free:  # two thirds of them
                pieces.pop(operation.buffer, None)
                if inside:
                    inside.pop(operation.buffer, None)
                continue
            self._apply(operation)
            if number in sides:
                rest = items[place + 1 :]
                then, otherwise = sides[number]
                ends = self._go(numbered, then + rest, values.copy())
                return ends + self._go(numbered, otherwise + rest, values)
        return [values]

    def _age(self, values: Values) -> None:
        """What persistent buffers hold is a step older; what was updated is of this step."""
        updated = values.updated
        for held in (values.pieces, values.inside):
            for name in list(held):
                if name not in self.persistent:
                    del held[name]
                    continue
                pieces = held[name]
                aged = [self._aged(piece[2], updated) for piece in pieces]
                if any(now != piece[2] for now, piece in zip(aged, pieces, strict=True)):
                    held[name] = tuple(
                        (low, high, now, origin, slot)
                        for now, (low, high, _, origin, slot) in zip(aged, pieces, strict=True)
                    )
        for name, number in values.scalars.items():
            amount = None if number.amount is None else number.amount - updated
            values.scalars[name] = Number(amount)
        values.updated = False

    def _aged(self, placement: Placement, updated: bool) -> Placement:  # noqa: FBT001 (a key)
        key = (placement, updated)
        if key not in self._older:
            code = self.ledger.contents.aged(placement[-1], updated=updated)
            self._older[key] = (*placement[:-1], code)
        return self._older[key]

    def _apply(self, operation: Operation) -> None:
        match operation:
            case Compute():
                self._compute(operation)
            case Copy():
                self._copy(operation)
            case AllGather() | ReduceScatter() | AllReduce() | Broadcast():
                self.collectives.apply(operation)
            case Fill(target=target):
                self.ledger.write(
                    self.ledger.origin(operation.id), target, self._constant(operation)
                )
            case Send(source=source):
                sent = self.ledger.need(operation.id, source, self.written, "sends")
                code = self.tensors.carried(operation.id, (source, source), sent[-1])
                self.exchange.send((self.program.role, operation.id), (*sent[:-1], code))
            case Receive(target=target):
                self.ledger.write(
                    self.ledger.origin(operation.id), target, self._received(operation)
                )
            case Together(members=members):
                for member in members:
                    self._apply(member)
            case Branch(value=value):
                self.optimizer.decide(operation.id, value)
            case SetScalar():
                self.optimizer.count(operation)
            case Allocate() | Free() | HostWait():
                pass
            case _:
                assert_never(operation)

    def _received(self, receive: Receive) -> Placement:
        """What a member sends; parts of a tensor along the group are those of another rank."""
        sent = self.exchange.receive((self.program.role, receive.id))
        if sent is None:
            return self.ledger.anything
        axes = self.schedule.group_by_name[receive.group].axes
        along = [number for axis in axes for number in self.ledger.numbers[axis]]
        placed = self.ledger.with_codes(sent, along, (SHARD,), SHIFTED)
        return (*placed[:-1], self.ledger.contents.put(placed[-1], None))

    def _constant(self, fill: Fill) -> Placement:
        """What a constant is; in what is trained, setup makes it that."""
        buffer = self.program.by_name[fill.target.buffer]
        scalar = None if fill.scalar is None else self.optimizer.scalar(fill.scalar)
        content = self.ledger.contents.constant(fill.value, scalar)
        if buffer.kind not in TRAINED or buffer.name not in self.persistent:
            return (*self.ledger.anything[:-1], content)
        if self.in_setup:
            content = self.initial[buffer.kind]
        return self._initial(buffer.shard, content)

    def _initial(self, shard: str | None, content: int) -> Placement:
        found = self._initials.get((shard, content))
        if found is None:
            along = () if shard is None else self.ledger.numbers[shard]
            placed = (
                SHARD if number in along else REPLICATE if data else ANY
                for number, data in enumerate(self.data)
            )
            found = self._initials[shard, content] = (*placed, content)
        return found

    def _compute(self, compute: Compute) -> None:
        match compute.action:
            case Action.FORWARD | Action.RECOMPUTE | Action.BACKWARD:
                self.segments.run(compute)
            case Action.UPDATE | Action.NORM | Action.FINITE | Action.CLIP | Action.UNSCALE:
                self.optimizer.run(compute)
            case Action.INITIALIZE:
                for operand in compute.operands:
                    shard = self.program.by_name[operand.view.buffer].shard
                    placement = self._initial(shard, self.initial[Kind.PARAMETER])
                    self.ledger.write(self.ledger.origin(compute.id), operand.view, placement)
            case Action.LOAD:
                self._load(compute)
            case _:
                assert_never(compute.action)

    def _load(self, compute: Compute) -> None:
        made = [each.view for each in compute.operands if each.role is Role.OUTPUT]
        for number, view in enumerate(made):
            name = f"{self.signatures.batch}/{number}" if number else self.signatures.batch
            part = (compute.micro_batch, 0, 1)
            place = self.ledger.contents.numbered(Where(name, -view.start))
            code = self.ledger.contents.named(What.TENSOR, name, part, place)
            self.ledger.write(self.ledger.origin(compute.id), view, (*self.flowing, code))

    def _copy(self, copy: Copy) -> None:
        if copy.by_parameter:
            self.by_parameter.copy(copy)
            return
        made = self.copied.setdefault((copy.accumulate, copy.divisor), {})
        routine = self.routines.between(copy.source, copy.target, made)
        if routine is not None and self.routines.again(routine, adds=copy.accumulate):
            return
        noted = self.ledger.noted
        self.tensors.same(copy.id, copy.source, copy.target)
        if routine is not None and not routine.fits and self.ledger.noted == noted:
            routine.fits = routine.described  # then what others made of the same is known
            if self.routines.again(routine, adds=copy.accumulate):
                return
        if self._is_uniform(copy.source) and (not copy.accumulate or self._is_uniform(copy.target)):
            self._copy_part(copy, (copy.source, copy.target), routine, noted)
            return
        for source, target in self.ledger.cut(copy.source, copy.target):
            part = self.routines.between(source, target, made)
            if part is None or not self.routines.again(part, adds=copy.accumulate):
                self._copy_part(copy, (source, target), part, noted)

    def _is_uniform(self, view: View) -> bool:
        """Whether all elements of a view are of one content."""
        pieces = self.ledger.values.pieces.get(view.buffer, ())
        return len(pieces) == 1 or not view.size or self.ledger.read(view)[-1] != MIXED

    def _copy_part(
        self, copy: Copy, views: tuple[View, View], routine: Routine | None, noted: int
    ) -> None:
        ledger, (source, target) = self.ledger, views
        given = ledger.need(copy.id, source, self.written, "copies")
        code = self.tensors.carried(copy.id, views, given[-1])
        placed = ledger.divided((*given[:-1], code), copy.divisor)
        origin, before = ledger.origin(copy.id, source), None
        if copy.accumulate:
            before = ledger.need(copy.id, target, self.written, "adds to")
            code = self.tensors.standing(target, placed[-1], before[-1])
            origin = ledger.origin(copy.id, target, source)
            placed = ledger.added(copy, before, (*placed[:-1], code), origin[1])
        ledger.write(origin, target, placed)
        if routine is not None and ledger.noted == noted:
            self.routines.learn(routine, given, placed, before)
