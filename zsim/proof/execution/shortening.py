"""Shorter schedules with fewer of the repeated blocks, which represent the whole one.

Values of a step with repeated blocks are proved by induction over the blocks. Operations of a
repetition touch only names with numbers near that of their iteration. So the inputs of a segment
are made from outputs of other segments not far away, from the state at the start of the step, and
from numbers that are the same for all blocks. Suppose a shorter schedule, without some iterations
in the middle, gives every segment the inputs of plain training. Then the whole one does too: the
neighbourhood of each of its operations is in the shorter one, with other numbers. `shortened`
returns None if this is not certain; then the whole schedule is run. `docs/adr/0017` has the
argument.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

from zsim.model.model import Model, Parameter, Segment
from zsim.proof.execution.block_removal import BlockNames, BlockRemoval
from zsim.proof.execution.data_flow import Iteration, longest_path
from zsim.proof.execution.repetition import (
    IrregularError,
    NumberedNames,
    Run,
    RunList,
    Signatures,
    counted,
    issued,
    runs,
    single,
)
from zsim.schedule.operation import Branch, Operation, PointToPoint, SetScalar, Together
from zsim.schedule.schedule import Schedule

UNITS_MIN = 12
"""Minimum number of units in a family for which the search for repetitions pays off."""

COSTS = {
    *("forward", "backward", "again", "forward_course", "backward_course"),
    *("forward_workspace_bytes", "backward_workspace_bytes", "split"),
}
"""Fields of a segment that are costs, without effect on values."""

NAMED = {"inputs", "outputs", "parameters", "routes"}
SAID = [each.name for each in fields(Segment) if each.name not in COSTS | NAMED]
"""Fields of a segment that must be equal, besides its names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortened:
    """A schedule with fewer blocks, and its model.

    `alike` holds families of persistent buffers that must have equal contents, by number.
    """

    schedule: Schedule
    model: Model
    alike: Sequence[Sequence[str]]


def shortened(schedule: Schedule, model: Model) -> Shortened | None:
    """Return a schedule of half the blocks or fewer whose proof proves `schedule`, or None."""
    if len(schedule.programs) != 1:
        return None
    least = UNITS_MIN
    units = NumberedNames((each.name for each in model.units), least)
    blocks = max((len(each) for each in units.families.values()), default=0)
    if blocks < UNITS_MIN:
        return None
    try:
        return _Shortening(schedule, model, blocks).made()
    except IrregularError:
        return None


class _Shortening:
    """The search: repetitions, their common range of numbers, and the numbers to remove."""

    def __init__(self, schedule: Schedule, model: Model, blocks: int) -> None:
        self.schedule = schedule
        self.model = model
        (self.program,) = schedule.programs
        self.names = names = BlockNames.of(schedule, model, blocks // 2 + 1, blocks)
        self.signatures = Signatures(
            buffers=names.buffers, layouts=names.layouts, units=names.units
        )
        self.parts: dict[int, RunList] = {}
        self.inner = range(0)

    def made(self) -> Shortened:
        """Return the shorter schedule.

        Raises:
            IrregularError: there is none.
        """
        self._find_runs(self.program.setup)
        self._find_runs(self.program.step)
        found = [(part, run) for part in self.parts.values() for run in part.runs]
        if not found:
            raise IrregularError
        low, high = max(run.span[0] for _, run in found), min(run.span[1] for _, run in found)
        near = max(self._near(part, run) for part, run in found)
        self.inner = range(low + near, high - near + 1)
        if not self.inner:
            raise IrregularError
        reach = self._longest_distance(found) + 2 * near + 1
        last = low + reach  # the last number before the removed ones
        count = high - reach - last
        if 2 * count < high - low:
            raise IrregularError
        self._compare_buffers()
        self._compare_layouts()
        self._compare_parameters()
        self._compare_units()
        left = BlockRemoval(
            schedule=self.schedule,
            model=self.model,
            names=self.names,
            parts=self.parts,
            inner=self.inner,
            near=near,
            last=last,
            count=count,
        )
        return Shortened(schedule=left.schedule_left(), model=left.model_left(), alike=left.alike())

    def _find_runs(self, operations: Sequence[Operation]) -> None:
        """Find the runs of a list, and those of its branches.

        Raises:
            IrregularError: the list has operations that are not supported here.
        """
        every = issued(operations)
        part = RunList(every, runs(every, self.signatures))
        part = RunList(every, [self._centered(part, run) for run in part.runs])
        self.parts[id(operations)] = part
        kinds = set(map(type, every))
        if Together in kinds:
            kinds |= set(map(type, single(every)))
        if any(issubclass(kind, PointToPoint) for kind in kinds):
            raise IrregularError
        for run in part.runs:
            for each in part.iteration(run, run.first):
                if isinstance(each, Branch | SetScalar):
                    raise IrregularError
        for each in part.rest():
            if isinstance(each, Branch):
                self._find_runs(each.then)
                self._find_runs(each.otherwise)

    def _centered(self, part: RunList, run: Run) -> Run:
        """Return the run with each iteration's number in the middle of the numbers it names.

        Any number that grows by one from iteration to iteration is valid. The nearer it is to the
        numbers that an iteration names, the more iterations can be removed.
        """
        numbers = self._numbers(part, run)
        return replace(run, first=(min(numbers) + max(numbers)) // 2)

    def _near(self, part: RunList, run: Run) -> int:
        """Return the largest distance between an iteration's number and the numbers it names."""
        return max(abs(number - run.first) for number in self._numbers(part, run))

    def _numbers(self, part: RunList, run: Run) -> list[int]:
        """Return the numbers that the first iteration of a run names."""
        return [
            number
            for each in part.iteration(run, run.first)
            for number in self.signatures.numbers(each)
        ]

    def _longest_distance(self, found: Sequence[tuple[RunList, Run]]) -> int:
        """Return the maximum distance that data flows between two segments."""
        return longest_path(
            [
                flow
                for name, (part, run) in enumerate(found)
                for flow in Iteration(
                    str(name), run.first, part.iteration(run, run.first), self.names.buffers
                ).flows(self.program.by_name)
            ]
        )

    def _compare(self, names: NumberedNames, said: Callable[[str, int], object]) -> None:
        """Compare all names of each family in the range.

        Raises:
            IrregularError: one is missing, or differs from the first one.
        """
        for by_number in names.families.values():
            inner = [by_number.get(number) for number in self.inner]
            there = [name for name in inner if name is not None]
            if len(there) != len(inner):
                raise IrregularError
            first = said(there[0], self.inner.start)
            for number, name in zip(self.inner, there, strict=True):
                if said(name, number) != first:
                    raise IrregularError

    def _compare_buffers(self) -> None:
        by_name, persistent = self.program.by_name, set(self.program.persistent)

        def said(name: str, number: int) -> object:
            each = by_name[name]
            layout = each.layout and counted(number, self.names.layouts[each.layout])
            what = (each.elements, each.dtype, each.kind, each.shard, layout)
            return (*what, each.name in persistent)

        self._compare(self.names.buffers, said)

    def _compare_layouts(self) -> None:
        by_name = self.schedule.layout_by_name

        def said(name: str, number: int) -> object:
            each = by_name[name]
            pieces = [
                (
                    counted(number, self.names.parameters[piece.parameter]),
                    *(piece.start, piece.size, piece.copies),
                )
                for piece in each.pieces
            ]
            return pieces, each.elements, each.axis, each.cuts, each.blocks

        self._compare(self.names.layouts, said)

    def _compare_parameters(self) -> None:
        by_name = {each.name: each for each in self.schedule.contract.parameters}

        def said(name: str, number: int) -> object:
            each = by_name[name]
            load = counted(number, self.names.values[each.load])
            return each.elements, each.frozen, each.rule, each.expert, load

        self._compare(self.names.parameters, said)

    def _compare_units(self) -> None:
        by_name = {each.name: each for each in self.model.units}
        places = {each.name: place for place, each in enumerate(self.model.units)}

        def said(name: str, number: int) -> object:
            each = by_name[name]
            parameters = [
                (
                    counted(number, self.names.parameters[own.name]),
                    counted(number, self.names.values[own.load]),
                    *_parameter_facts(own),
                )
                for own in each.parameters
            ]
            segments = [
                (
                    [counted(number, self.names.values[value]) for value in segment.inputs],
                    [
                        (
                            counted(number, self.names.values[value.name]),
                            *(value.elements, value.dtype),
                            *(value.requires_gradient, value.tensor_sharded),
                        )
                        for value in segment.outputs
                    ],
                    [counted(number, self.names.parameters[own]) for own in segment.parameters],
                    counted(number, self.names.values[segment.routes]),
                    [getattr(segment, name) for name in SAID],
                )
                for segment in each.segments
            ]
            calls = [
                counted(number, self.names.units[other]) for other in (each.module, each.block)
            ]
            return parameters, segments, calls, places[name] - number

        self._compare(self.names.units, said)


def _parameter_facts(parameter: Parameter) -> tuple[object, ...]:
    sharded = parameter.tensor_sharded
    kinds = sharded, parameter.serves_own_heads, parameter.frozen, parameter.expert
    return parameter.shape, *kinds
