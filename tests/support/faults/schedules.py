"""Schedules taken apart and put together again: operations replaced, added, moved, left out.

Functions of a program drop edges to operations that are gone or come later; those of a schedule
that change operations by name keep edges as they are, unless an operation is left out.
"""

from collections.abc import Callable, Iterable, Iterator
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any, cast

from zsim.schedule.access import accesses
from zsim.schedule.mesh import Span
from zsim.schedule.operation import Branch, Operation, Previous, View, walk
from zsim.schedule.replace import replace
from zsim.schedule.schedule import Buffer, Program, RankRole, Schedule

EXAMPLE = Path(__file__).parents[3] / "examples" / "zero3_by_hand.py"
Change = Callable[[Operation], Iterable[Operation]]
"""The operations in place of one: itself, none, several."""
ProgramChange = Callable[[Program], Program]


def hand() -> Schedule:
    """Return ZeRO stage 3 of three layers on four ranks, written by hand."""
    spec = spec_from_file_location("zero3_by_hand", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return cast("Schedule", module.write())


def _through(operations: Iterable[Operation], change: Change) -> tuple[Operation, ...]:
    found: list[Operation] = []
    for each in operations:
        if isinstance(each, Branch):
            sides = _through(each.then, change), _through(each.otherwise, change)
            found.extend(change(replace(each, then=sides[0], otherwise=sides[1])))
        else:
            found.extend(change(each))
    return tuple(found)


# Programs.


def rewritten(program: Program, change: Change, *, part: str = "") -> Program:
    """Return the program with every operation, of `part` or of both, put through `change`."""
    setup = program.setup if part == "step" else _through(program.setup, change)
    step = program.step if part == "setup" else _through(program.step, change)
    return cleaned(program, setup, step)


def cleaned(program: Program, setup: tuple[Operation, ...], step: tuple[Operation, ...]) -> Program:
    """Return the program with other operations, without edges to later ones or to none."""
    everything = {each.id for each in (*walk(setup), *walk(step))}

    def through(operations: Iterable[Operation], known: set[str]) -> tuple[Operation, ...]:
        found: list[Operation] = []
        for operation in operations:
            changes: dict[str, Any] = {}
            for field in ("after", "uses"):
                edges = getattr(operation, field, ())
                kept = tuple(
                    edge
                    for edge in edges
                    if target_of(edge) in (everything if isinstance(edge, Previous) else known)
                )
                if kept != edges:
                    changes[field] = kept
            if isinstance(operation, Branch):
                changes["then"] = through(operation.then, known)
                changes["otherwise"] = through(operation.otherwise, known)
            known.add(operation.id)
            found.append(replace(operation, **changes) if changes else operation)
        return tuple(found)

    return replace(program, setup=through(setup, set()), step=through(step, set()))


def target_of(edge: str | Previous) -> str:
    """Return the operation that an edge names."""
    return edge.operation if isinstance(edge, Previous) else edge


def replaced(program: Program, name: str, *others: Operation) -> Program:
    """Return the program with `others` in place of operation `name`."""
    return rewritten(program, lambda each: others if each.id == name else (each,))


def dropped(program: Program, *names: str) -> Program:
    """Return the program without operations `names`, and without edges to them."""
    return rewritten(program, lambda each: () if each.id in names else (each,))


def added(program: Program, operation: Operation, *, before: str = "", after: str = "") -> Program:
    """Return the program with `operation` next to another one."""

    def change(each: Operation) -> Iterable[Operation]:
        if each.id == before:
            return (operation, each)
        return (each, operation) if each.id == after else (each,)

    return rewritten(program, change)


def shifted(program: Program, name: str, *, before: str = "", after: str = "") -> Program:
    """Return the program with operation `name` next to another one."""
    operation = program.by_id[name]
    return added(dropped(program, name), operation, before=before, after=after)


def with_buffer(program: Program, *buffers: Buffer) -> Program:
    """Return the program that declares more buffers."""
    return replace(program, buffers=(*program.buffers, *buffers))


def alive(program: Program) -> Iterator[tuple[str, View]]:
    """Yield views that operations of the step touch, with the operation."""
    for operation in walk(program.step):
        for access in accesses(operation):
            yield operation.id, access.view


# Schedules.


def with_program(schedule: Schedule, program: Program) -> Schedule:
    """Return the schedule in which the role of `program` runs it."""
    programs = tuple(program if each.role == program.role else each for each in schedule.programs)
    return replace(schedule, programs=programs)


def everywhere(schedule: Schedule, change: ProgramChange) -> Schedule:
    """Return the schedule with every program changed."""
    return replace(schedule, programs=tuple(map(change, schedule.programs)))


def edited(schedule: Schedule, change: Change) -> Schedule:
    """Return the schedule with every operation of every role put through `change`."""

    def through(program: Program) -> Program:
        setup, step = _through(program.setup, change), _through(program.step, change)
        return replace(program, setup=setup, step=step)

    return everywhere(schedule, through)


def without(schedule: Schedule, *names: str) -> Schedule:
    """Return the schedule without the operations `names`, and without edges to them."""
    return everywhere(schedule, lambda program: dropped(program, *names))


def changed(schedule: Schedule, name: str, **fields: Any) -> Schedule:  # noqa: ANN401  # any field
    """Return the schedule with other `fields` in operation `name`."""
    assert any(name in program.by_id for program in schedule.programs)
    return edited(
        schedule,
        lambda operation: (replace(operation, **fields) if operation.id == name else operation,),
    )


def moved(schedule: Schedule, *names: str, before: str) -> Schedule:
    """Return the schedule with operations `names` issued just before operation `before`."""
    by_id = {name: each for program in schedule.programs for name, each in program.by_id.items()}
    operations = [by_id[name] for name in names]

    def change(each: Operation) -> Iterable[Operation]:
        if each.id in names:
            return ()
        return (*operations, each) if each.id == before else (each,)

    return edited(schedule, change)


def exchanged(schedule: Schedule, one: Operation, other: Operation) -> Schedule:
    """Return the schedule with each of two operations in the other's place."""
    places = {one.id: other, other.id: one}
    return edited(schedule, lambda each: (places.get(each.id, each),))


def twice(schedule: Schedule, name: str, **fields: Any) -> Schedule:  # noqa: ANN401  # any field
    """Return the schedule with operation `name` a second time, called `name` + "/again"."""
    return edited(
        schedule,
        lambda each: (each, again(each, **fields)) if each.id == name else (each,),
    )


def again(operation: Operation, **fields: Any) -> Operation:  # noqa: ANN401  # any field
    """Return a copy of an operation under another id."""
    return replace(operation, id=f"{operation.id}/again", **fields)


# Ranks that differ.


def places(schedule: Schedule) -> list[tuple[str, int]]:
    """Return axes along which there are several ranks, and the places along each."""
    return [
        (axis.name, place)
        for axis in schedule.mesh.axes
        if axis.size > 1
        for place in range(axis.size)
    ]


def split(schedule: Schedule, other: Schedule, *, axis: str = "data", place: int = 0) -> Schedule:
    """Return the schedule of one role in which ranks at `place` run the program of `other`."""
    (theirs,) = other.programs
    return _apart(schedule, axis, place, lambda _: theirs, lambda _: ("first", "rest"))


def apart(schedule: Schedule, axis: str, place: int, change: ProgramChange) -> Schedule:
    """Return the schedule in which ranks at `place` along `axis` run other programs.

    Raises:
        ValueError: roles differ along that axis already.
    """
    found = _apart(schedule, axis, place, change, lambda role: (f"{role} one", f"{role} rest"))
    return replace(found, contract=replace(found.contract, wire_bytes=None))


def _apart(
    schedule: Schedule,
    axis: str,
    place: int,
    change: ProgramChange,
    named: Callable[[str], tuple[str, str]],
) -> Schedule:
    roles: list[RankRole] = []
    programs: list[Program] = []
    ends = [(0, place), (place + 1, schedule.mesh.axis_size(axis))]
    for role, program in zip(schedule.roles, schedule.programs, strict=True):
        if any(span.axis == axis for box in role.boxes for span in box):
            raise ValueError(f"{role.name} differs along {axis}")
        own = tuple((*box, Span(axis=axis, start=place, end=place + 1)) for box in role.boxes)
        rest = tuple(
            (*box, Span(axis=axis, start=low, end=high))
            for box in role.boxes
            for low, high in ends
            if low < high
        )
        one, other = named(role.name)
        roles += [RankRole(name=one, boxes=own), RankRole(name=other, boxes=rest)]
        programs += [replace(change(program), role=one), replace(program, role=other)]
    contract = replace(schedule.contract, peak_bytes=())
    return replace(schedule, roles=tuple(roles), programs=tuple(programs), contract=contract)
