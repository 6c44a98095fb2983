"""Placement: every operation reads values that are where and what it needs.

Each write makes a version of a range, with a placement for each axis: Shard (ranks hold different
parts), Replicate (copies), Partial (summands). Proved for every role and every way through the
branches:

* an all-gather makes Shard Replicate, a reduce-scatter makes Partial Shard, an all-reduce makes
  Partial Replicate; none is given anything else (an all-reduce of copies multiplies by the ranks);
* copies, casts, divisions keep placements, and what is added to a Partial value is Partial;
* forward and backward read parameters that are Replicate over `data`, and nothing Partial;
* update, norm, clip and finite test read no Partial gradient, and an update changes parameters that
  are placed as its gradient is; clip and branches read what is equal on all ranks: norms and flags
  are Partial over the axes that their gradients are cut along until they are reduced;
* what is read was written since its memory was allocated;
* source and target of a collective, and the operands of an update, are the same tensor where both
  say which layout they hold.

The step starts from what setup leaves; if it leaves other placements behind than it found, it is
gone through once more from those.

Assumed: ranks along `data` see different data, ranks along other axes hold slices or copies of
parameters as their layouts say, and what a segment writes is Partial where its operand says so and
otherwise as the model has it. A group that has only some of the coordinates of an axis changes no
placement along it. What `Receive` brings is not judged.

Cost: one look at each operand. Axes of one rank are left out, without others there is no work.
"""

from typing import assert_never

from zsim.check.finding import Finding
from zsim.check.subject import Subject
from zsim.check.value import (
    ANY,
    COMPLETE,
    MIXED,
    PARTIAL,
    PARTS,
    REPLICATE,
    SHARD,
    SUMMANDS,
    VERDICT,
    VERDICTS,
    WHOLE,
    WORDS,
    WRITTEN,
    Ledger,
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
    Reduction,
    Role,
    Send,
    SetScalar,
    Together,
    View,
)
from zsim.order import OUTCOMES_MAX, outcomes
from zsim.schedule import MODEL_STATE, Program, Schedule

INVARIANT = "placement"
DATA = "data"
"""The axis along which ranks see different data."""

STATES_MAX = 16
"""Different placements of persistent buffers from which a step is gone through."""


def examine(subject: Subject) -> list[Finding]:
    """Every value that is not placed as its reader needs it."""
    schedule = subject.schedule
    if all(axis.size == 1 for axis in schedule.mesh.axes):
        return []
    found: list[Finding] = []
    for each in subject.programs:
        if any(outcomes(part, part.items) > OUTCOMES_MAX for _, part in each.parts):
            continue  # a finding of lifetime
        walk = _Walk(schedule, each.program)
        begun: set[tuple[object, ...]] = set()
        waiting = walk.part(each.setup, Values(len(walk.ledger.axes)))
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

    def __init__(self, schedule: Schedule, program: Program) -> None:
        self.schedule = schedule
        self.program = program
        self.ledger = Ledger(schedule, program, INVARIANT)
        axes = self.ledger.axes
        self.complete = Rule([COMPLETE] * len(axes), "no summand, and whole where it is read")
        self.whole = Rule([WHOLE] * len(axes), "equal on all ranks")
        self.written = Rule([WRITTEN] * len(axes), "whole where it is read")
        self.parameter = Rule(
            [WHOLE if name == DATA else COMPLETE for name in axes], f"Replicate over {DATA}"
        )
        self.flowing = tuple(SHARD if name == DATA else ANY for name in axes)
        self.summand = tuple(PARTIAL if name == DATA else ANY for name in axes)
        self._collective: dict[tuple[type[Operation], str, frozenset[int]], Rule] = {}
        self._inside: dict[str, list[int]] = {}

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
                self.ledger.values.pieces.pop(buffer, None)
            case Compute():
                self._compute(operation)
            case AllGather() | ReduceScatter() | AllReduce() | Broadcast():
                self._collect(operation)
            case Copy():
                self._copy(operation)
            case Fill(target=target):
                self.ledger.write(operation.id, target, self._constant(target))
            case Send(source=source):
                self.ledger.need(operation.id, source, self.written, "sends")
            case Receive(target=target):
                self.ledger.write(operation.id, target, self.ledger.anything)
            case Together(members=members):
                for member in members:
                    self._apply(member)
            case Branch(value=value):
                self.ledger.need(operation.id, value, self.whole, "decides on")
            case HostWait() | SetScalar():
                pass
            case _:
                assert_never(operation)

    def _constant(self, target: View) -> Placement:
        """What a constant is: anything, but in model states what they are."""
        buffer = self.program.by_name[target.buffer]
        if buffer.kind not in MODEL_STATE or buffer.name not in self.program.persistent:
            return self.ledger.anything
        return self._initial(buffer.shard)

    def _initial(self, shard: str | None) -> Placement:
        return tuple(
            SHARD if name == shard else REPLICATE if name == DATA else ANY
            for name in self.ledger.axes
        )

    def _compute(self, compute: Compute) -> None:
        match compute.action:
            case Action.FORWARD | Action.RECOMPUTE | Action.BACKWARD:
                self._segment(compute)
            case Action.UPDATE:
                self._update(compute)
            case Action.NORM | Action.FINITE:
                self._measure(compute)
            case Action.CLIP | Action.UNSCALE:
                self._change(compute)
            case Action.INITIALIZE:
                for operand in compute.operands:
                    shard = self.program.by_name[operand.view.buffer].shard
                    self.ledger.write(compute.id, operand.view, self._initial(shard))
            case Action.LOAD:
                for operand in compute.operands:
                    self.ledger.write(compute.id, operand.view, self.flowing)
            case _:
                assert_never(compute.action)

    def _segment(self, compute: Compute) -> None:
        name = compute.id
        reads_saved = Role.SAVED if compute.action is Action.BACKWARD else None
        writes: list[tuple[Operand, Placement]] = []
        for operand in compute.operands:
            role = operand.role
            if role is Role.PARAMETER:
                self.ledger.need(name, operand.view, self.parameter, "computes with")
            elif role is Role.GRADIENT:
                writes.append((operand, self.summand))
            elif role is reads_saved or role is Role.INPUT or role is Role.OUTPUT_GRADIENT:
                self.ledger.need(name, operand.view, self.complete, "computes with")
            else:
                writes.append((operand, self.flowing))
        for operand, placement in writes:
            written = placement
            if operand.partial:
                written = tuple(
                    PARTIAL if axis in operand.partial else code
                    for axis, code in zip(self.ledger.axes, placement, strict=True)
                )
            self.ledger.write(name, operand.view, written)

    def _update(self, update: Compute) -> None:
        (gradient,) = (each for each in update.operands if each.role is Role.GRADIENT)
        placed = self.ledger.need(update.id, gradient.view, self.complete, "updates with")
        for operand in update.operands:
            if operand is gradient:
                continue
            self._same_tensor(update.id, gradient.view, operand.view)
            state = self.ledger.need(update.id, operand.view, self.complete, "updates")
            for axis, mine, its in zip(self.ledger.axes, placed, state, strict=True):
                if MIXED in (both(mine, its), mine, its):
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

    def _measure(self, compute: Compute) -> None:
        """A number over gradients: a summand where they are cut, and where they have copies."""
        placed = self.ledger.anything
        for operand in compute.operands:
            if operand.role is Role.GRADIENT:
                read = self.ledger.need(compute.id, operand.view, self.complete, "measures")
                placed = tuple(map(both, placed, read))
        if MIXED in placed:
            axis = self.ledger.axes[placed.index(MIXED)]
            why = f"measures gradients of which some are Shard and some Replicate over {axis}"
            self.ledger.note(compute.id, why, ("no single reduction makes their sum complete",))
        apart = VERDICT if compute.action is Action.FINITE else PARTIAL
        number = tuple(
            apart if code == SHARD or axis != DATA else ANY if code == MIXED else code
            for axis, code in zip(self.ledger.axes, placed, strict=True)
        )
        for operand in compute.operands:
            if operand.role is Role.OUTPUT:
                self.ledger.write(compute.id, operand.view, number)

    def _change(self, compute: Compute) -> None:
        clips = compute.action is Action.CLIP
        for operand in compute.operands:
            if operand.role is Role.INPUT:
                self.ledger.need(compute.id, operand.view, self.whole, "clips by")
            elif clips:
                self.ledger.need(compute.id, operand.view, self.complete, "clips")
            else:
                self.ledger.need(compute.id, operand.view, self.written, "unscales")

    def _copy(self, copy: Copy) -> None:
        placed = self.ledger.need(copy.id, copy.source, self.written, "copies")
        if copy.accumulate:
            before = self.ledger.need(copy.id, copy.target, self.written, "adds to")
            for axis, its, mine in zip(self.ledger.axes, before, placed, strict=True):
                if both(its, mine) == MIXED:
                    why = f"adds {WORDS[mine]} {copy.source.buffer} to what is {WORDS[its]}"
                    self.ledger.note(
                        copy.id, f"{why} over {axis}", self.ledger.history(copy.target)
                    )
            placed = tuple(map(both, before, placed))
            if MIXED in placed:
                placed = self.ledger.anything
        self.ledger.write(copy.id, copy.target, placed)

    def _collect(self, operation: AllGather | ReduceScatter | AllReduce | Broadcast) -> None:
        along = self._along_group(operation.group)
        source, target = operation.source, operation.target
        self._same_tensor(operation.id, source, target)
        name = operation.id
        match operation:
            case AllGather():
                rule, after, verb = self._rule(operation, PARTS, "Shard"), REPLICATE, "gathers"
            case AllReduce(reduction=Reduction.MAX) | ReduceScatter(reduction=Reduction.MAX):
                rule = self._rule(operation, VERDICTS, "a verdict or Replicate")
                after = REPLICATE if isinstance(operation, AllReduce) else SHARD
                verb = "takes the maximum of"
            case ReduceScatter():
                rule, after, verb = self._rule(operation, SUMMANDS, "Partial"), SHARD, "reduces"
            case AllReduce():
                rule, after, verb = self._rule(operation, SUMMANDS, "Partial"), REPLICATE, "reduces"
            case Broadcast():
                rule, after, verb = self._rule(operation, COMPLETE, "whole"), REPLICATE, "sends"
            case _:
                assert_never(operation)
        placement = self.ledger.need(name, source, rule, verb)
        if along:
            codes = list(placement)
            for axis in along:
                codes[axis] = after
            placement = tuple(codes)
        self.ledger.write(name, target, placement)

    def _along_group(self, name: str) -> list[int]:
        """Axes of which a communicator of the group has every coordinate."""
        if name not in self._inside:
            group = self.schedule.group_by_name[name]
            limits = self.schedule.mesh.limits(group.where)
            self._inside[name] = [
                number
                for number, axis in enumerate(self.ledger.axes)
                if axis in group.axes and len(limits[axis]) == self.ledger.size[axis]
            ]
        return self._inside[name]

    def _rule(self, operation: Operation, allowed: frozenset[int], needs: str) -> Rule:
        """`allowed` along the axes of the operation's group, any value along the others."""
        assert isinstance(operation, AllGather | ReduceScatter | AllReduce | Broadcast)
        key = (type(operation), operation.group, allowed)
        if key not in self._collective:
            along = self._along_group(operation.group)
            self._collective[key] = Rule(
                [allowed if axis in along else WRITTEN for axis in range(len(self.ledger.axes))],
                f"{needs} over {' and '.join(self.ledger.axes[axis] for axis in along)}",
            )
        return self._collective[key]

    def _same_tensor(self, operation: str, one: View, other: View) -> None:
        first = self.program.by_name[one.buffer].layout
        second = self.program.by_name[other.buffer].layout
        if first is None or second is None or first == second:
            return
        layouts = self.schedule.layout_by_name
        if layouts[first].pieces != layouts[second].pieces:
            self.ledger.note(
                operation,
                f"{one.buffer} and {other.buffer} hold different tensors",
                (f"{one.buffer} has layout {first}", f"{other.buffer} has layout {second}"),
            )
