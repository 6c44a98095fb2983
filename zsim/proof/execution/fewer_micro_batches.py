"""Schedules with fewer micro-batches, which represent the whole one.

Micro-batches share only data that all of them read, and sums to which they add. Suppose that some
do on every rank the same as another one, in other memory, and that a schedule without these is the
step of plain training on the others. Then the whole schedule is the step of plain training on all.
`docs/adr/0022` has the argument and the conditions on the schedule. They are checked here one by
one; `with_fewer` returns None if one is not known to hold, and then the whole schedule is run.
"""

import re
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain
from typing import TypeGuard, cast

from zsim.proof.execution.grid import Grid, every
from zsim.proof.execution.inferred_model import Training
from zsim.proof.execution.lone_micro_batch import ACTIONS, need_commuting, need_lone
from zsim.proof.execution.micro_batch_list import ListReader, MicroBatchList, identity
from zsim.proof.execution.repetition import IrregularError
from zsim.schedule.operation import (
    Action,
    Allocate,
    Communication,
    Compute,
    Copy,
    Free,
    Operation,
    PointToPoint,
    Role,
    Send,
    SetScalar,
    Together,
)
from zsim.schedule.program import UncheckedSchedule
from zsim.schedule.replace import replace
from zsim.schedule.schedule import Buffer, Program, Schedule
from zsim.strategy.optimizer_rule import Optimizer

MICRO_BATCHES_MIN = 6
"""Minimum number of micro-batches for which the search pays off."""

_NUMBERED = re.compile(r".*?/mb([0-9]{1,9})/")
"""The micro-batch in an id. It only guesses which operations belong together; all is checked."""

OF_STEP = -1
"""The number of operations that belong to no micro-batch."""

SPEAKS_TO_NOBODY = frozenset({Allocate, Free, Compute, Copy})
"""Most operations that involve no other rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FewerMicroBatches:
    """A schedule with fewer micro-batches, and the training that it must carry out."""

    schedule: Schedule
    training: Training


def with_fewer(schedule: Schedule, training: Training) -> FewerMicroBatches | None:
    """Return a schedule whose proof proves `schedule` with at most half its micro-batches.

    Returns None if no such schedule is known.
    """
    count = training.micro_batches
    if count < MICRO_BATCHES_MIN or training.warm_up is not None:
        return None
    try:
        parts = [_RoleStep(schedule, program, count) for program in schedule.programs]
        kept = _kept(parts, count)
        removed = set(range(count)).difference(kept)
        if len(removed) < len(kept):
            return None
        grid = Grid(schedule, every(schedule))
        is_linear = partial(_runs_one_program, grid)
        for part in parts:
            part.need_separable(removed, is_linear)
        _need_same_order(grid, parts)
    except IrregularError:
        return None
    programs = tuple(part.without(removed) for part in parts)
    return FewerMicroBatches(
        schedule=_of(schedule, programs), training=replace(training, micro_batches=len(kept))
    )


def _runs_one_program(grid: Grid, name: str) -> bool:
    """Return True if all members of a group run the same program."""
    group = grid.schedule.group_by_name[name]
    return all(
        other.program is ranks.program
        for ranks in grid.classes
        if name in ranks.program.groups
        for other in grid.row(ranks, group)
    )


def _kept(parts: Sequence["_RoleStep"], count: int) -> list[int]:
    """Return the first two of each set of micro-batches that are equal on all ranks."""
    alike: dict[tuple[object, ...], list[int]] = {}
    for micro_batch in range(count):
        signature = tuple([part.signature[micro_batch] for part in parts])
        alike.setdefault(signature, []).append(micro_batch)
    return sorted({number for each in alike.values() for number in each[:2]})


def _need_same_order(grid: Grid, parts: Sequence["_RoleStep"]) -> None:
    """Raise IrregularError unless matching messages and collectives are of one micro-batch.

    Raises:
        IrregularError: they are not, or it is not known.
    """
    by_role = {part.program.role: part for part in parts}
    sent: dict[object, list[int]] = {}
    received: dict[object, list[int]] = {}
    met: list[dict[str, list[int]]] = []
    for ranks in grid.classes:
        own: dict[str, list[int]] = {}
        for micro_batch, message in by_role[ranks.program.role].messages:
            if isinstance(message, PointToPoint):
                ends = sent if isinstance(message, Send) else received
                ends.setdefault(grid.route(ranks, message), []).append(micro_batch)
            else:
                own.setdefault(message.group, []).append(micro_batch)
        met.append(own)
    if sent != received:
        raise IrregularError
    for ranks, own in zip(grid.classes, met, strict=True):
        for name, numbers in own.items():
            row = grid.row(ranks, grid.schedule.group_by_name[name])
            if any(met[other.index].get(name) != numbers for other in row):
                raise IrregularError


class _RoleStep:
    """The step of one role, micro-batch by micro-batch.

    Attributes:
        signature: for each micro-batch its signature, as a number.
        lists: for each micro-batch its signature and the buffers it touches.
    """

    def __init__(self, schedule: Schedule, program: Program, count: int) -> None:
        self.schedule = schedule
        self.program = program
        _need_followed(program)
        self._step = _singly(program.step)
        self._stretches = list(_stretches(self._step))
        self._places: dict[int, list[range]] = {number: [] for number in (OF_STEP, *range(count))}
        for number, places in self._stretches:
            if number not in self._places:
                raise IrregularError
            self._places[number].append(places)
        if any(_is_of_micro_batch(each) for each in (*program.setup, *self._of(OF_STEP))):
            raise IrregularError
        self._reader = ListReader(program)
        self.lists: list[MicroBatchList] = []
        self.signature: list[int] = []
        by_identity: dict[object, MicroBatchList] = {}
        by_said: dict[object, int] = {}
        for micro_batch in range(count):
            operations = self._of(micro_batch)
            key = identity(operations, micro_batch)
            found = by_identity.get(key)
            if found is None:
                found = by_identity[key] = self._reader.read(operations)
            self.lists.append(found)
            self.signature.append(by_said.setdefault(found.signature, len(by_said)))

    def _of(self, micro_batch: int) -> list[Operation]:
        parts = self._places[micro_batch]
        return [each for part in parts for each in self._step[part.start : part.stop]]

    @cached_property
    def messages(self) -> list[tuple[int, Communication]]:
        """Communication of the step in order, each with its micro-batch."""
        return [
            (number, each)
            for number, places in self._stretches
            for each in self._step[places.start : places.stop]
            if type(each) not in SPEAKS_TO_NOBODY and isinstance(each, Communication)
        ]

    def need_separable(self, removed: Set[int], is_linear: Callable[[str], bool]) -> None:
        """Raise IrregularError unless only sums depend on the `removed` micro-batches.

        Each must be alone, with its own memory, and read only constants outside it. Everything
        else that touches its sums must run before or after all micro-batches with equal
        signatures, or add to the sums too. Equal signatures touch the same outside buffers by
        name, so it is enough to check one.

        Raises:
            IrregularError: something else may depend on them.
        """
        every = range(len(self.lists))
        for number in {self.signature[number]: number for number in removed}.values():
            need_lone(self._of(number), is_linear, self._loads)
        gone = _distinct([self.lists[number] for number in removed])
        stay = _distinct([self.lists[number] for number in every if number not in removed])
        signature = {self.signature[number] for number in removed}
        alike = [number for number in every if self.signature[number] in signature]
        firsts = [places.start for number, places in self._stretches if number != OF_STEP]
        lasts = [places.stop for number, places in self._stretches if number in alike]
        first, last = min(firsts, default=0), max(lasts, default=0)
        beside = self._touched(
            [n for each in self._places[OF_STEP] for n in each if first < n < last]
        )
        own, read, added = (set[str]().union(*sets) for sets in zip(*map(_sets, gone), strict=True))
        touched = beside.union(self.program.persistent, *[each.foreign for each in (*gone, *stay)])
        changed = beside.union(*[each.own | each.added | each.changed for each in stay])
        if not (own.isdisjoint(touched) and read.isdisjoint(changed) and added.isdisjoint(beside)):
            raise IrregularError
        for number in set(every).difference(removed):
            each = self.lists[number]
            seen = added & (each.own | each.read | each.changed)
            if seen:
                self._need_outside(number, seen, alike)
        for name in added:
            adds = [one for each in (*gone, *stay) for one in each.adds]
            self._need_commuting([each for each in adds if each.target.buffer == name], name)

    def _need_commuting(self, adds: Sequence[Copy], name: str) -> None:
        buffer = self.program.by_name[name]
        layout = None
        if buffer.layout is not None and buffer.shard is None:
            layout = self.schedule.layout_by_name[buffer.layout]
        need_commuting(adds, layout)

    @cached_property
    def _loads(self) -> frozenset[str]:
        """Buffers that are copied, once a step, to the loads of experts that updates read."""
        read: set[str] = set()
        copied: set[str] = set()
        for operation in reversed(self._of(OF_STEP)):
            if isinstance(operation, Copy) and operation.target.buffer in read:
                copied.add(operation.source.buffer)
            if isinstance(operation, Compute) and isinstance(operation.rule, Optimizer):
                loads = operation.operands if operation.rule.of_loads else ()
                read |= {each.view.buffer for each in loads if each.role is Role.GRADIENT}
        return frozenset(copied)

    def _touched(self, places: Sequence[int]) -> set[str]:
        """Return the buffers that operations of the step touch, allocate or free.

        Raises:
            IrregularError: a host scalar changes.
        """
        found: set[str] = set()
        for operation in [self._step[place] for place in places]:
            if isinstance(operation, SetScalar):
                raise IrregularError
            found |= self._names(operation)
        return found

    def _names(self, operation: Operation) -> Set[str]:
        if isinstance(operation, Allocate | Free):
            return {operation.buffer}
        read, written = self._reader.names(operation)
        return read | written

    def _need_outside(self, number: int, buffers: Set[str], alike: Sequence[int]) -> None:
        """Raise IrregularError unless a micro-batch only adds to sums while those `alike` add.

        Raises:
            IrregularError: it reads or writes an incomplete sum.
        """
        step = self._step
        sums: dict[str, list[int]] = {name: [] for name in buffers}
        for other in alike:
            for place in chain(*self._places[other]):
                operation = step[place]
                if type(operation) is Copy and operation.target.buffer in buffers:
                    sums[operation.target.buffer].append(place)
        for place in chain(*self._places[number]):
            operation = step[place]
            adds = isinstance(operation, Copy) and operation.accumulate
            seen = self._reader.names(operation)[0] if adds else self._names(operation)
            for name in seen & buffers:
                if min(sums[name]) < place < max(sums[name]):
                    raise IrregularError

    def without(self, removed: Set[int]) -> Program:
        """Return the program without some micro-batches; the others are renumbered."""
        stay = [number for number in range(len(self.lists)) if number not in removed]
        numbers = {number: place for place, number in enumerate(stay)}
        step: list[Operation] = []
        for number, places in self._stretches:
            if number in removed:
                continue
            for operation in self._step[places.start : places.stop]:
                if _is_of_micro_batch(operation):
                    step.append(replace(operation, micro_batch=numbers[number]))
                else:
                    step.append(operation)
        gone = set[str]().union(*[self.lists[number].own for number in removed])
        for operation in (*self.program.setup, *step):
            gone -= self._names(operation)
        left = [each for each in self.program.buffers if each.name not in gone]
        return Program(
            role=self.program.role,
            buffers=tuple([each if each.course is None else _alone(each) for each in left]),
            persistent=self.program.persistent,
            setup=self.program.setup,
            step=tuple(step),
        )


def _need_followed(program: Program) -> None:
    """Raise IrregularError if a program has operations on all micro-batches together.

    Raises:
        IrregularError: it branches, or tests for overflow.
    """
    if program.branches or any(
        isinstance(each, Compute) and each.action is Action.FINITE for each in program.patterns
    ):
        raise IrregularError


def _is_of_micro_batch(operation: Operation) -> TypeGuard[Compute]:
    """Return True if an operation computes for one micro-batch alone."""
    return type(operation) is Compute and operation.action in ACTIONS


def _stretches(step: Sequence[Operation]) -> Iterator[tuple[int, range]]:
    """Yield (micro-batch, places) of operations with one micro-batch in their ids, in order."""
    before, number, start = "/", OF_STEP, 0
    for place, operation in enumerate(step):
        name = operation.id
        if name.startswith(before):
            continue
        found = _NUMBERED.match(name)
        other = OF_STEP if found is None else int(found.group(1))
        before = name if found is None else found.group()
        if other != number:
            yield number, range(start, place)
            number, start = other, place
    yield number, range(start, len(step))


def _singly(operations: Sequence[Operation]) -> Sequence[Operation]:
    """Return operations with each Together replaced by its members, sends first."""
    if Together not in set(map(type, operations)):
        return operations
    found: list[Operation] = []
    for operation in operations:
        if type(operation) is Together:
            found += sorted(operation.members, key=lambda each: not isinstance(each, Send))
        else:
            found.append(operation)
    return found


def _alone(buffer: Buffer) -> Buffer:
    """Return a buffer without tensors of others, which may be removed."""
    return replace(buffer, course=None)


def _sets(each: MicroBatchList) -> tuple[set[str], set[str], set[str]]:
    return each.own, each.read, each.added


def _distinct(lists: Sequence[MicroBatchList]) -> list[MicroBatchList]:
    """Return each list once."""
    return list({id(each): each for each in lists}.values())


def _of(schedule: Schedule, programs: tuple[Program, ...]) -> Schedule:
    """Return `schedule` with other programs. Edges to removed operations are dangling."""
    made = UncheckedSchedule(
        name=schedule.name,
        mesh=schedule.mesh,
        roles=schedule.roles,
        groups=schedule.groups,
        streams=schedule.streams,
        host_threads=schedule.host_threads,
        pools=schedule.pools,
        layouts=schedule.layouts,
        scalars=schedule.scalars,
        generators=schedule.generators,
        programs=programs,
        contract=schedule.contract,
    )
    return cast(Schedule, made)
