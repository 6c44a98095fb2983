"""Changes of a schedule of experts by the ends of names: in all layers, micro-batches and roles."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from faults.schedules import edited, everywhere, with_buffer

from zsim.dtype import DType
from zsim.schedule.operation import (
    Action,
    Allocate,
    AllReduce,
    AllToAll,
    Compute,
    Copy,
    Fill,
    Free,
    Operation,
    Reduction,
    Role,
    View,
    walk,
)
from zsim.schedule.replace import replace as changed
from zsim.schedule.schedule import Buffer, Program, Schedule

Edit = Callable[[Schedule], Schedule]
Named = Callable[[str], bool]


def ending(*ends: str) -> Named:
    """Return a test for names that end like this."""
    return lambda name: name.endswith(ends)


def put(
    schedule: Schedule, named: Named, change: Callable[[Operation], Iterable[Operation]]
) -> Schedule:
    """Put operations with such a name through a change; there is at least one."""
    found: list[str] = []

    def each(operation: Operation) -> Iterable[Operation]:
        if not named(operation.id):
            return (operation,)
        found.append(operation.id)
        return change(operation)

    made = edited(schedule, each)
    assert found
    return made


def fields(*ends: str, **values: Any) -> Edit:  # noqa: ANN401  # any field
    """Change fields of operations; a value may be a function of the operation."""

    def change(operation: Operation) -> Iterable[Operation]:
        made = {key: own(operation) if callable(own) else own for key, own in values.items()}
        return (changed(operation, **made),)

    return lambda schedule: put(schedule, ending(*ends), change)


def after(*ends: str, more: Callable[[Operation], Operation]) -> Edit:
    """Add an operation after others."""
    return lambda schedule: put(schedule, ending(*ends), lambda each: (each, more(each)))


def before(*ends: str, more: Callable[[Operation], Operation]) -> Edit:
    """Add an operation before others."""
    return lambda schedule: put(schedule, ending(*ends), lambda each: (more(each), each))


def dropped(*ends: str) -> Edit:
    """Leave out operations."""
    return lambda schedule: put(schedule, ending(*ends), lambda _: ())


def doubled(*ends: str) -> Edit:
    """Run operations twice."""
    return after(*ends, more=lambda each: changed(each, id=f"{each.id}/again"))


def operand(end: str, role: Role, buffer: str, other: str) -> Edit:
    """Let computations use another buffer of equal size in place of one."""

    def operands(compute: Compute) -> tuple[object, ...]:
        found = tuple(
            changed(each, view=changed(each.view, buffer=other))
            if each.role is role and each.view.buffer == buffer
            else each
            for each in compute.operands
        )
        assert found != compute.operands
        return found

    return fields(end, operands=operands)


def zeroed(*ends: str, value: float = 0.0) -> Edit:
    """Write a constant in place of operations with a target."""

    def fill(operation: Operation) -> Iterable[Operation]:
        assert isinstance(operation, AllToAll | Copy)
        name, stream, target = operation.id, operation.stream, operation.target
        return (Fill(id=name, stream=stream, target=target, value=value),)

    return lambda schedule: put(schedule, ending(*ends), fill)


def copied(operation: Operation, source: View, target: View, **values: Any) -> Copy:  # noqa: ANN401
    """Return a copy on the stream of an operation, named after it."""
    stream = getattr(operation, "stream", "compute")
    name = f"{operation.id}/more"
    return Copy(id=name, stream=stream, source=source, target=target, **values)


def summed(
    operation: Operation,
    view: View,
    group: str,
    *,
    wire: DType,
    reduction: Reduction = Reduction.SUM,
) -> AllReduce:
    """Return a sum of a view over a group, named after an operation."""
    return AllReduce(
        id=f"{operation.id}/summed",
        stream="compute",
        group=group,
        source=view,
        target=view,
        wire=wire,
        accumulate=DType.FP32,
        reduction=reduction,
    )


def zero(operation: Operation, view: View, value: float = 0.0) -> Fill:
    """Return a constant for a view, named after an operation."""
    return Fill(id=f"{operation.id}/filled", stream="compute", target=view, value=value)


def whole(program: Program, buffer: str) -> View:
    """Return the view of a whole buffer."""
    return View(buffer=buffer, size=program.by_name[buffer].elements)


def of_first_micro_batch(end: str, role: Role, buffer: str) -> Edit:
    """Let computations of the last micro-batch read what a buffer held in the first one."""

    def edit(schedule: Schedule) -> Schedule:
        return everywhere(schedule, lambda program: _of_first(program, end, role, buffer))

    return edit


def _of_first(program: Program, end: str, role: Role, buffer: str) -> Program:
    if buffer not in program.by_name:
        return program
    own = program.by_name[buffer]
    kept: Buffer = changed(own, name=f"first/{buffer}")
    writes = [
        each.id
        for each in program.step
        if "/mb0/" in each.id
        and isinstance(each, Compute | AllToAll | AllReduce | Copy)
        and _made(each, buffer)
    ]
    reader = next(each.id for each in program.step if each.id.endswith(end) and "/mb1/" in each.id)
    view = View(buffer=kept.name, size=kept.elements)
    source = View(buffer=buffer, size=kept.elements)
    batch = None if own.rows is None else 0

    def change(operation: Operation) -> Iterable[Operation]:
        if operation.id == writes[-1]:
            made = Allocate(id="step/first/allocate", buffer=kept.name, micro_batch=batch)
            return operation, made, copied(operation, source, view)
        if operation.id != reader:
            return (operation,)
        assert isinstance(operation, Compute)
        operands = tuple(
            changed(each, view=view) if each.role is role and each.view.buffer == buffer else each
            for each in operation.operands
        )
        free = Free(id="step/first/free", buffer=kept.name)
        return changed(operation, operands=operands), free

    step = tuple(made for each in program.step for made in change(each))
    return replace(with_buffer(program, kept), step=step)


def _made(operation: Compute | AllToAll | AllReduce | Copy, buffer: str) -> bool:
    if not isinstance(operation, Compute):
        return operation.target.buffer == buffer
    return any(
        each.view.buffer == buffer and each.role in (Role.OUTPUT, Role.INPUT_GRADIENT)
        for each in operation.operands
    )


def inside_branch(schedule: Schedule, named: Named) -> bool:
    """Return True if a branch has an operation with such a name."""
    top = {each.id for program in schedule.programs for each in program.step}
    every = {each.id for program in schedule.programs for each in walk(program.step)}
    return any(named(name) for name in every - top)


def recomputes(schedule: Schedule, segment: int, position: str) -> Schedule:
    """Run a segment of each layer again before another operation of the layer."""
    by_id = {each.id: each for program in schedule.programs for each in program.step}

    def change(operation: Operation) -> Iterable[Operation]:
        place = operation.id.removesuffix(position)
        forward = by_id.get(f"{place}/{segment}/forward")
        if not operation.id.endswith(position) or forward is None:
            return (operation,)
        name = f"{place}/{segment}/recompute"
        return changed(forward, id=name, action=Action.RECOMPUTE), operation

    made = edited(schedule, change)
    assert made != schedule
    return made
