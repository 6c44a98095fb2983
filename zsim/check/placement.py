"""Placement: every operation reads values that are where and what it needs.

Each write makes a version of a range, with a placement for each axis: Shard (ranks hold different
parts), Replicate (copies), Partial (summands). Proved for every role and every way through the
branches:

* an all-gather makes Shard Replicate, a reduce-scatter makes Partial Shard, an all-reduce makes
  Partial Replicate; none is given anything else (an all-reduce of copies multiplies by the ranks);
  a shard along a joined axis is Shard along its parts, and is gathered over all of them;
* copies, casts, divisions keep placements, and what is added to a Partial value is Partial; copies
  by parameter and windows take a rank's own part out of a whole, or put it there;
* forward and backward read parameters that are Replicate over the data axes, and nothing Partial;
* update, norm, clip and finite test read no Partial gradient, and an update changes parameters that
  are placed as its gradient is; clip and branches read what is equal on all ranks: norms and flags
  are Partial over the axes that their gradients are cut along until they are reduced;
* gradients that are added are divided by the same number, and those that an update reads by the
  loss divisor of the contract: by copies, by reductions that average, by the seed of backward; of
  a loss scale they are freed, and so is the norm by which they are clipped; no gradient is used as
  a parameter, and no parameter is divided, or used as a gradient;
* what is received is what the member there sends, and no shard of the receiver's own;
* what is read was written since its memory was allocated;
* what a collective, a copy or an update brings together are the same elements of one tensor, in
  the order that it makes, where layouts say which they are.

The step starts from what setup leaves; if it leaves other placements behind than it found, it is
gone through once more from those.

Assumed: ranks along the data axes of the contract see different data, ranks along other axes hold
slices or copies of parameters as their layouts say, and what a segment writes is Partial where its
operand says so and otherwise as the model has it. A group that has only some of the coordinates of
an axis changes no placement along it. That a gradient enters once is not examined.

Cost: one look at each operand. Axes of one rank are left out, without others there is no work.
"""

from fractions import Fraction
from typing import assert_never

from zsim.check.by_parameter import ByParameter
from zsim.check.collect import Collectives
from zsim.check.content import Content, What
from zsim.check.exchange import Exchange
from zsim.check.finding import Finding
from zsim.check.form import Forms
from zsim.check.ledger import Ledger
from zsim.check.subject import Subject
from zsim.check.tensor import Tensors
from zsim.check.value import (
    ANY,
    COMPLETE,
    EVERY,
    MIXED,
    PARTIAL,
    REPLICATE,
    SHARD,
    SHIFTED,
    VERDICT,
    WHOLE,
    WORDS,
    WRITTEN,
    Only,
    Placement,
    Rule,
    Values,
    both,
)
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
    Operand,
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
from zsim.schedule import Kind, Program, Schedule

INVARIANT = "placement"
TRAINED = (Kind.PARAMETER, Kind.MASTER, Kind.MOMENT)
"""Model states that an update changes."""

STATES_MAX = 16
"""Different placements of persistent buffers from which a step is gone through."""


def examine(subject: Subject) -> list[Finding]:
    """Every value that is not placed as its reader needs it."""
    schedule = subject.schedule
    if all(axis.size == 1 for axis in schedule.mesh.axes):
        return []
    exchange = Exchange(subject)
    found = _through(subject, exchange)
    while exchange.moves():  # what is sent may depend on what was received
        found = _through(subject, exchange)
    return found


def _through(subject: Subject, exchange: Exchange) -> list[Finding]:
    """Every program gone through, with what the exchange knows of what others send."""
    found: list[Finding] = []
    for each in subject.programs:
        if any(outcomes(part, part.items) > OUTCOMES_MAX for _, part in each.parts):
            continue  # a finding of lifetime
        walk = _Walk(subject.schedule, each.program, exchange)
        begun: set[tuple[object, ...]] = set()
        waiting = walk.part(each.setup, Values(len(walk.ledger.anything)))
        while waiting and len(begun) < STATES_MAX:
            values = waiting.pop()
            state = values.state(each.program.persistent)
            if state not in begun:
                begun.add(state)
                waiting += walk.part(each.step, values)
        found += walk.ledger.found.values()
    return found


class _Walk:
    """Goes through one program in order, with the rule that each operation states."""

    def __init__(self, schedule: Schedule, program: Program, exchange: Exchange) -> None:
        self.schedule = schedule
        self.program = program
        self.persistent = frozenset(program.persistent)
        self.exchange = exchange
        self.ledger = Ledger(schedule, program, INVARIANT, exchange.contents)
        self.forms = Forms(schedule, program)
        axes = self.ledger.axes
        self.data = [name in schedule.contract.data_axes for name in axes]
        over = " and ".join(name for name, data in zip(axes, self.data, strict=True) if data)
        self.complete = Rule([COMPLETE] * len(axes), "no summand, and whole where it is read")
        divisor, contents = schedule.contract.loss_divisor, self.ledger.contents
        mean = contents.only(What.GRADIENT, Fraction(1, divisor))
        promises = bool(schedule.contract.parameters)
        complete = self.complete
        self.gradient = Rule(complete.allowed, complete.needs, mean if promises else None)
        trained = contents.only(What.PARAMETER, Fraction(1))
        self.trained = Rule(complete.allowed, complete.needs, trained)
        self.initial = contents.code(Content(What.PARAMETER))
        self.whole = Rule([WHOLE] * len(axes), "equal on all ranks")
        self.written = Rule([WRITTEN] * len(axes), "whole where it is read")
        self.tensors = Tensors(self.forms, self.ledger)
        self.collectives = Collectives(schedule, self.ledger, self.tensors)
        self.by_parameter = ByParameter(self.ledger, self.forms, self.written)
        self.parameter = Rule(
            [WHOLE if data else COMPLETE for data in self.data],
            f"Replicate over {over}",
            trained,
        )
        self.flowing = tuple(SHARD if data else ANY for data in self.data)
        self.summand = tuple(PARTIAL if data else ANY for data in self.data)

    def part(self, numbered: Numbered, values: Values) -> list[Values]:
        """Go through setup or a step from `values` on: what it leaves, for each way through it."""
        return self._go(numbered, numbered.items, values)

    def _go(self, numbered: Numbered, items: list[int], values: Values) -> list[Values]:
        self.ledger.values = values
        operations = numbered.operations
        for place, number in enumerate(items):
            self._apply(operations[number])
            if number in numbered.sides:
                rest = items[place + 1 :]
                then, otherwise = numbered.sides[number]
                ends = self._go(numbered, then + rest, values.copy())
                return ends + self._go(numbered, otherwise + rest, values)
        return [values]

    def _apply(self, operation: Operation) -> None:
        match operation:
            case Allocate(buffer=buffer) | Free(buffer=buffer):
                self.ledger.values.forget(buffer)
            case Compute():
                self._compute(operation)
            case AllGather() | ReduceScatter() | AllReduce() | Broadcast():
                self.collectives.apply(operation)
            case Copy():
                self._copy(operation)
            case Fill(target=target):
                self.ledger.write(operation.id, target, self._constant(operation))
            case Send(source=source):
                sent = self.ledger.need(operation.id, source, self.written, "sends")
                self.exchange.send((self.program.role, operation.id), sent)
            case Receive(target=target):
                self.ledger.write(operation.id, target, self._received(operation))
            case Together(members=members):
                for member in members:
                    self._apply(member)
            case Branch(value=value):
                self.ledger.need(operation.id, value, self.whole, "decides on")
            case HostWait() | SetScalar():
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
        return self.ledger.with_codes(sent, along, (SHARD,), SHIFTED)

    def _constant(self, fill: Fill) -> Placement:
        """What a constant is: anything, but in what is trained what that is."""
        buffer = self.program.by_name[fill.target.buffer]
        if buffer.kind not in TRAINED or buffer.name not in self.persistent:
            content = self.ledger.contents.constant(fill.value, fill.scalar)
            return (*self.ledger.anything[:-1], content)
        return self._initial(buffer.shard, ANY)

    def _initial(self, shard: str | None, content: int) -> Placement:
        along = () if shard is None else self.ledger.numbers[shard]
        placed = (
            SHARD if number in along else REPLICATE if data else ANY
            for number, data in enumerate(self.data)
        )
        return (*placed, content)

    def _compute(self, compute: Compute) -> None:
        match compute.action:
            case Action.FORWARD | Action.RECOMPUTE | Action.BACKWARD:
                self._segment(compute)
            case Action.UPDATE:
                self._update(compute)
            case Action.NORM | Action.FINITE:
                self._measure(compute)
            case Action.CLIP:
                self._clip(compute)
            case Action.UNSCALE:
                self._unscale(compute)
            case Action.INITIALIZE:
                for operand in compute.operands:
                    shard = self.program.by_name[operand.view.buffer].shard
                    self.ledger.write(compute.id, operand.view, self._initial(shard, self.initial))
            case Action.LOAD:
                for operand in compute.operands:
                    self.ledger.write(compute.id, operand.view, (*self.flowing, ANY))
            case _:
                assert_never(compute.action)

    def _segment(self, compute: Compute) -> None:
        name = compute.id
        reads_saved = Role.SAVED if compute.action is Action.BACKWARD else None
        slope, writes = ANY, list[tuple[Operand, Placement]]()
        for operand in compute.operands:
            role = operand.role
            if role is Role.PARAMETER:
                self.ledger.need(name, operand.view, self.parameter, "computes with")
            elif role is Role.GRADIENT:
                writes.append((operand, self.summand))
            elif role is reads_saved or role is Role.INPUT or role is Role.OUTPUT_GRADIENT:
                read = self.ledger.need(name, operand.view, self.complete, "computes with")
                if role is Role.OUTPUT_GRADIENT:
                    slope = both(slope, read[-1])
            else:
                writes.append((operand, self.flowing))
        backward = compute.action is Action.BACKWARD
        content = self.ledger.contents.gradient(slope) if backward else ANY
        ends = {self.flowing: (*self.flowing, content), self.summand: (*self.summand, content)}
        for operand, codes in writes:
            placement = ends[codes]
            if operand.partial:
                along = [n for axis in operand.partial for n in self.ledger.numbers[axis]]
                placement = self.ledger.with_codes(placement, along, EVERY, PARTIAL)
            self.ledger.write(name, operand.view, placement)

    def _update(self, update: Compute) -> None:
        (gradient,) = (each for each in update.operands if each.role is Role.GRADIENT)
        placed = self.ledger.need(update.id, gradient.view, self.gradient, "updates with")
        if placed[-1] == ANY and self.gradient.only and gradient.view.size:
            self._constant_gradient(update.id, gradient.view, self.gradient.only)
        for operand in update.operands:
            if operand is gradient:
                continue
            self.tensors.same(update.id, gradient.view, operand.view)
            rule = self.complete if operand.role is Role.MOMENT else self.trained
            state = self.ledger.need(update.id, operand.view, rule, "updates")
            for axis, mine, its in zip(self.ledger.axes, placed[:-1], state[:-1], strict=True):
                if mine != its and both(mine, its) == MIXED:
                    self.ledger.note(
                        update.id,
                        f"updates {operand.view.buffer} over {axis} with a gradient that is placed "
                        "differently",
                        (
                            f"{gradient.view.buffer} is {WORDS[mine]} over {axis}",
                            f"{operand.view.buffer} is {WORDS[its]} over {axis}",
                        ),
                    )
            self.ledger.write(update.id, operand.view, state)

    def _constant_gradient(self, name: str, view: View, only: Only) -> None:
        if not self.ledger.found:  # else it may be anything because of what was found
            why = f"updates with {view.buffer}, which is a constant, not {only.word}"
            self.ledger.note(name, why, self.ledger.history(view))

    def _measure(self, compute: Compute) -> None:
        """A number over gradients: a summand where they are cut, and where they have copies."""
        contents, placed = self.ledger.contents, self.ledger.anything
        for operand in compute.operands:
            if operand.role is Role.GRADIENT:
                read = self.ledger.need(compute.id, operand.view, self.complete, "measures")
                placed = tuple(map(both, placed, read))
        if MIXED in placed[:-1]:
            axis = self.ledger.axes[placed.index(MIXED)]
            why = f"measures gradients of which some are Shard and some Replicate over {axis}"
            self.ledger.note(compute.id, why, ("no single reduction makes their sum complete",))
        tests = compute.action is Action.FINITE
        apart = VERDICT if tests else PARTIAL
        norm = ANY if tests or placed[-1] >= 0 else contents.of(What.NORM, placed[-1])
        number = (
            *(
                apart if code == SHARD or not data else ANY if code == MIXED else code
                for data, code in zip(self.data, placed[:-1], strict=True)
            ),
            norm,
        )
        for operand in compute.operands:
            if operand.role is Role.OUTPUT:
                self.ledger.write(compute.id, operand.view, number)

    def _unscale(self, compute: Compute) -> None:
        for operand in compute.operands:
            placed = self.ledger.need(compute.id, operand.view, self.written, "unscales")
            content = self.ledger.contents.unscaled(placed[-1], compute.scalars)
            if content != placed[-1]:
                self.ledger.write(compute.id, operand.view, (*placed[:-1], content))

    def _clip(self, clip: Compute) -> None:
        contents, norm = self.ledger.contents, ANY
        for operand in clip.operands:
            if operand.role is Role.INPUT:
                norm = self.ledger.need(clip.id, operand.view, self.whole, "clips by")[-1]
        due = contents.unscaled(norm, clip.scalars)
        for operand in clip.operands:
            if operand.role is Role.GRADIENT:
                mine = self.ledger.need(clip.id, operand.view, self.complete, "clips")[-1]
                if mine < 0 and due < 0 and contents.of(What.NORM, mine) != due:
                    why = f"clips {operand.view.buffer}, {contents.word(mine)}"
                    self.ledger.note(
                        clip.id,
                        f"{why}, by what is {contents.word(due)}",
                        self.ledger.history(operand.view),
                    )

    def _copy(self, copy: Copy) -> None:
        if copy.by_parameter:
            self.by_parameter.copy(copy)
            return
        placed = self.ledger.need(copy.id, copy.source, self.written, "copies")
        self.tensors.same(copy.id, copy.source, copy.target)
        placed = self.ledger.divided(placed, copy.divisor)
        if copy.accumulate:
            before = self.ledger.need(copy.id, copy.target, self.written, "adds to")
            placed = self.ledger.added(copy, before, placed, self.ledger.where(copy.target))
        self.ledger.write(copy.id, copy.target, placed)
