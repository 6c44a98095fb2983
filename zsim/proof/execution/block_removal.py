"""Schedules without some of their blocks: blocks with larger numbers are renumbered."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from zsim.model.model import Model, Unit
from zsim.proof.execution.repetition import IrregularError, NumberedNames, RunList, counted
from zsim.schedule.layout import Layout
from zsim.schedule.operation import Action, Branch, Compute, Operand, Operation, View
from zsim.schedule.program import UncheckedSchedule
from zsim.schedule.replace import replace
from zsim.schedule.schedule import Buffer, Program, Schedule

SUMS = (Action.NORM, Action.FINITE, Action.AMAX)
"""Actions that measure any number of gradients, or parameters."""

Renamed = Callable[[NumberedNames, str], str]
Each = TypeVar("Each", bound=Operation)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockNames:
    """All names in a schedule of one role and in its model, by kind."""

    buffers: NumberedNames
    layouts: NumberedNames
    parameters: NumberedNames
    units: NumberedNames
    values: NumberedNames

    @classmethod
    def of(cls, schedule: Schedule, model: Model, least: int, blocks: int) -> "BlockNames":
        """Split all names into family and number; number families of at least `least` names."""
        (program,) = schedule.programs
        parameters = schedule.contract.parameters
        return cls(
            buffers=NumberedNames((each.name for each in program.buffers), least, blocks),
            layouts=NumberedNames((each.name for each in schedule.layouts), least, blocks),
            parameters=NumberedNames((each.name for each in parameters), least),
            units=NumberedNames((each.name for each in model.units), least),
            values=NumberedNames(model.values, least),
        )


@dataclass(frozen=True, kw_only=True)
class BlockRemoval:
    """Remove `count` numbers after `last` from a schedule and its model.

    `parts` holds the run lists of its operation lists. Names with a number in `inner` differ only
    in the number. `near` is the largest distance of such a number to the iteration that touches
    it.
    """

    schedule: Schedule
    model: Model
    names: BlockNames
    parts: Mapping[int, RunList]
    inner: range
    near: int
    last: int
    count: int

    def model_left(self) -> Model:
        """Return the model without the removed units."""
        units = (each for each in self.model.units if self._is_kept(self.names.units, each.name))
        return replace(self.model, units=tuple(self._unit(each) for each in units))

    def schedule_left(self) -> Schedule:
        """Return the schedule without the removed numbers; edges to them are left dangling.

        Raises:
            IrregularError: an operation outside iterations refers to a number in `inner`.
        """
        names, contract = self.names, self.schedule.contract
        (program,) = self.schedule.programs
        parameters = (
            replace(
                each,
                name=self._outside(names.parameters, each.name),
                load=each.load and self._outside(names.values, each.load),
            )
            for each in contract.parameters
            if self._is_kept(names.parameters, each.name)
        )
        made = UncheckedSchedule(
            name=self.schedule.name,
            mesh=self.schedule.mesh,
            roles=self.schedule.roles,
            groups=self.schedule.groups,
            streams=self.schedule.streams,
            host_threads=self.schedule.host_threads,
            pools=self.schedule.pools,
            layouts=tuple(
                self._layout(each)
                for each in self.schedule.layouts
                if self._is_kept(names.layouts, each.name)
            ),
            scalars=self.schedule.scalars,
            generators=self.schedule.generators,
            programs=(
                Program(
                    role=program.role,
                    buffers=tuple(
                        self._buffer(each)
                        for each in program.buffers
                        if self._is_kept(names.buffers, each.name)
                    ),
                    persistent=tuple(
                        self._outside(names.buffers, each)
                        for each in program.persistent
                        if self._is_kept(names.buffers, each)
                    ),
                    setup=self._operations(program.setup),
                    step=self._operations(program.step),
                ),
            ),
            contract=replace(contract, parameters=tuple(parameters)),
        )
        return cast(Schedule, made)

    def alike(self) -> list[list[str]]:
        """Return, by family, the remaining persistent buffers with equal content, in order."""
        (program,) = self.schedule.programs
        persistent = set(program.persistent)
        return [
            [by_number[number] for number in self.inner[: len(self.inner) - self.count]]
            for by_number in self.names.buffers.families.values()
            if by_number[self.inner.start] in persistent
        ]

    def _is_kept(self, names: NumberedNames, name: str) -> bool:
        _, number = names[name]
        return number is None or not self.last < number <= self.last + self.count

    def _outside(self, names: NumberedNames, name: str) -> str:
        """Return the new name of something that is kept."""
        _, number = names[name]
        if number is None or number <= self.last:
            return name
        return names.moved(name, -self.count)

    def _buffer(self, buffer: Buffer) -> Buffer:
        renamed = self._renaming(self.names.buffers, buffer.name)
        name = renamed(self.names.buffers, buffer.name)
        layout = buffer.layout and renamed(self.names.layouts, buffer.layout)
        if (name, layout, None) == (buffer.name, buffer.layout, buffer.course):
            return buffer
        return replace(buffer, name=name, layout=layout, course=None)

    def _layout(self, layout: Layout) -> Layout:
        renamed = self._renaming(self.names.layouts, layout.name)
        pieces = tuple(
            replace(piece, parameter=renamed(self.names.parameters, piece.parameter))
            for piece in layout.pieces
        )
        return replace(layout, name=renamed(self.names.layouts, layout.name), pieces=pieces)

    def _unit(self, unit: Unit) -> Unit:
        renamed = self._renaming(self.names.units, unit.name)
        return replace(
            unit,
            name=renamed(self.names.units, unit.name),
            module=renamed(self.names.units, unit.module),
            block=renamed(self.names.units, unit.block),
            parameters=tuple(
                replace(
                    each,
                    name=renamed(self.names.parameters, each.name),
                    load=each.load and renamed(self.names.values, each.load),
                )
                for each in unit.parameters
            ),
            segments=tuple(
                replace(
                    segment,
                    inputs=tuple(renamed(self.names.values, each) for each in segment.inputs),
                    outputs=tuple(
                        replace(each, name=renamed(self.names.values, each.name))
                        for each in segment.outputs
                    ),
                    parameters=tuple(
                        renamed(self.names.parameters, each) for each in segment.parameters
                    ),
                    routes=segment.routes and renamed(self.names.values, segment.routes),
                )
                for segment in unit.segments
            ),
        )

    def _renaming(self, names: NumberedNames, name: str) -> Renamed:
        """Return a function that renames references in an object, by the object's own number."""
        _, number = names[name]
        if number is None:
            return self._outside_name
        by = 0 if number <= self.last else -self.count

        def renamed(others: NumberedNames, other: str) -> str:
            """Return the new name of something near.

            Raises:
                IrregularError: it is far away.
            """
            there = others[other][1]
            if there is not None and abs(there - number) > 2 * self.near:
                raise IrregularError
            return others.moved(other, by)

        return renamed

    def _outside_name(self, names: NumberedNames, name: str) -> str:
        """Return the new name of something that is named outside of all iterations.

        Raises:
            IrregularError: its number is in `inner`, so only iterations may name it.
        """
        _, number = names[name]
        if number in self.inner:
            raise IrregularError
        return self._outside(names, name)

    def _operations(self, operations: Sequence[Operation]) -> tuple[Operation, ...]:
        part = self.parts[id(operations)]
        found: list[Operation] = []
        place = 0
        for run in part.runs:
            found += map(self._rest, part.operations[place : run.start])
            for iteration in range(run.iterations):
                number = run.first + iteration * run.step
                own = (part.operations[each] for each in run.iteration(number))
                if number <= self.last:
                    found += own
                elif number > self.last + self.count:
                    found += (self._moved(each, self._up) for each in own)
            place = run.end
        found += map(self._rest, part.operations[place:])
        return tuple(found)

    def _up(self, names: NumberedNames, name: str) -> str:
        """Return the new name of something with a number after the removed ones."""
        return names.moved(name, -self.count)

    def _rest(self, operation: Operation) -> Operation:
        if isinstance(operation, Branch):
            return replace(
                operation,
                value=operation.value and self._view(operation.value, self._outside_name),
                then=self._operations(operation.then),
                otherwise=self._operations(operation.otherwise),
            )
        if isinstance(operation, Compute) and operation.action in SUMS:
            return replace(operation, operands=tuple(self._summands(operation.operands)))
        return self._moved(operation, self._outside_name)

    def _summands(self, operands: Sequence[Operand]) -> Iterator[Operand]:
        """Yield the operands of kept blocks in an operation that measures all blocks.

        Raises:
            IrregularError: it measures different operands in different blocks.
        """
        of_inner: dict[int, list[object]] = {number: [] for number in self.inner}
        for operand in operands:
            view = operand.view
            family, number = self.names.buffers[view.buffer]
            if number is None or number not in self.inner:
                yield replace(operand, view=self._view(view, self._outside_name))
                continue
            layout = view.layout and counted(number, self.names.layouts[view.layout])
            where = (family, view.start, view.size, view.axis, layout, view.origin)
            of_inner[number].append((operand.role, *where))
            if self._is_kept(self.names.buffers, view.buffer):
                yield replace(
                    operand, view=self._view(view, self._renaming(self.names.buffers, view.buffer))
                )
        first = of_inner[self.inner.start]
        if any(each != first for each in of_inner.values()):
            raise IrregularError

    def _view(self, view: View, renamed: Renamed) -> View:
        name = renamed(self.names.buffers, view.buffer)
        layout = view.layout and renamed(self.names.layouts, view.layout)
        if (name, layout) == (view.buffer, view.layout):
            return view
        return replace(view, buffer=name, layout=layout)

    def _moved(self, operation: Each, renamed: Renamed) -> Each:
        """Return an operation with other names. Its `after` is unchanged."""
        changes: dict[str, Any] = {}
        for name in operation.__struct_fields__:
            value = getattr(operation, name)
            if isinstance(value, View):
                changes[name] = self._view(value, renamed)
            elif name == "buffer":
                changes[name] = renamed(self.names.buffers, value)
            elif name == "unit":
                changes[name] = renamed(self.names.units, value)
            elif name == "operands":
                changes[name] = tuple(
                    Operand(role=own.role, view=self._view(own.view, renamed), partial=own.partial)
                    for own in value
                )
            elif name == "members":
                changes[name] = tuple(self._moved(own, renamed) for own in value)
        return replace(operation, **changes) if changes else operation
