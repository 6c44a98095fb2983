"""Frozen parameters: moved, reduced, counted, not gathered, taken for trained."""

from collections.abc import Callable, Iterator

from faults.changes import (
    Aim,
    Edit,
    adds,
    alone,
    at,
    becomes,
    gone,
    made,
    one_by_one,
)
from faults.fault import Mutant
from faults.schedules import added, replaced, with_buffer
from faults.selections import computes, of_role, updates, with_operands
from zsim.schedule.operation import (
    Action,
    AllGather,
    Allocate,
    AllReduce,
    Compute,
    Copy,
    Fill,
    Free,
    HostWait,
    Operand,
    Operation,
    Role,
    View,
    walk,
)
from zsim.schedule.replace import replace
from zsim.schedule.schedule import Buffer, Kind, LogicalParameter, Program, Schedule
from zsim.strategy.optimizer_rule import SGD

GRADIENT = "edit/gradient"
"""Memory for a gradient that nothing has made."""


def frozen_names(schedule: Schedule) -> set[str]:
    """Return parameters that the contract says are frozen."""
    return {each.name for each in schedule.contract.parameters if each.frozen}


def of_frozen(schedule: Schedule, program: Program, name: str) -> bool:
    """Return True if a buffer holds frozen parameters, and nothing else."""
    layout = program.by_name[name].layout
    if layout is None:
        return False
    pieces = {each.parameter for each in schedule.layout_by_name[layout].pieces if each.size}
    return bool(pieces) and pieces <= frozen_names(schedule)


def held(schedule: Schedule) -> list[Buffer]:
    """Return persistent buffers of frozen parameters, whole or cut."""
    program = schedule.programs[0]
    kept = [program.by_name[name] for name in program.persistent]
    return [
        each
        for each in kept
        if each.kind is Kind.PARAMETER and of_frozen(schedule, program, each.name)
    ]


def moved_by(
    make: Callable[[View, Compute], tuple[Operation, ...]], text: str, *, one: bool = False
) -> Aim:
    """Return the operator that writes frozen parameters after the last update, on all ranks or one.

    The host waits for the write, so that the order of operations is right.
    """

    def aim(schedule: Schedule) -> Iterator[Edit]:
        for update in updates(schedule)[-1:]:
            for buffer in held(schedule):
                view = View(buffer=buffer.name, size=buffer.elements)
                change = _behind(make(view, update), update, buffer)
                yield from (alone if one else made)(schedule, change, f"{text} {buffer.name}")

    return aim


def _behind(
    operations: tuple[Operation, ...], update: Compute, buffer: Buffer
) -> Callable[[Program], Program]:
    """Return the change that adds operations after an update, with memory for a gradient."""
    gradient = replace(buffer, name=GRADIENT, kind=Kind.WORKSPACE, layout=None, shard=None)
    more = (
        Allocate(id="edit/allocate", buffer=GRADIENT),
        *operations,
        HostWait(id="edit/wait", operation=operations[-1].id),
        Free(id="edit/free", buffer=GRADIENT),
    )
    return lambda program: replaced(with_buffer(program, gradient), update.id, update, *more)


def _update(view: View, update: Compute) -> tuple[Operation, ...]:
    gradient = replace(view, buffer=GRADIENT)
    operands = (Operand(role=Role.GRADIENT, view=gradient), Operand(role=Role.PARAMETER, view=view))
    made_up = Fill(id="edit/fill", stream=update.stream, target=gradient, value=1.0)
    moves = Compute(
        id="edit/update",
        stream=update.stream,
        action=Action.UPDATE,
        operands=operands,
        rule=SGD(),
    )
    return made_up, moves


def _shrink(view: View, update: Compute) -> tuple[Operation, ...]:
    return (Copy(id="edit/shrink", stream=update.stream, source=view, target=view, divisor=2),)


def _clear(view: View, update: Compute) -> tuple[Operation, ...]:
    return (Fill(id="edit/clear", stream=update.stream, target=view, value=0.0),)


def gathers(schedule: Schedule) -> list[AllGather]:
    """Return gathers of frozen parameters."""
    program = schedule.programs[0]
    return [
        each
        for each in walk(program.step)
        if isinstance(each, AllGather) and of_frozen(schedule, program, each.target.buffer)
    ]


def begins_otherwise(schedule: Schedule) -> Iterator[Edit]:
    """Begin with another value of frozen parameters, on every rank or on one."""
    program = schedule.programs[0]
    names = {each.name for each in held(schedule)}
    for each in walk(program.setup):
        if not isinstance(each, Compute) or each.action is not Action.INITIALIZE:
            continue
        view = each.operands[0].view
        if view.buffer in names:
            fill = Fill(id="edit/begins", stream=each.stream, target=view, value=1.0)
            for plant in (made, alone):
                yield from plant(schedule, adds(fill, after=each.id), f"{view.buffer} begins at 1")


def _backward_of_frozen(schedule: Schedule) -> Iterator[tuple[Compute, Operand]]:
    """Yield backwards that read a frozen parameter, and the operand."""
    if not frozen_names(schedule):
        return
    program = schedule.programs[0]
    for each in computes(schedule, Action.BACKWARD):
        for operand in of_role(each, Role.PARAMETER):
            if of_frozen(schedule, program, operand.view.buffer):
                yield each, operand
                break


def with_gradient(schedule: Schedule, *, reduced: bool) -> Iterator[Edit]:
    """Make a gradient of a frozen parameter in backward, and perhaps reduce it over ranks."""
    group = next((each.name for each in schedule.groups if each.name == "data"), "")
    for backward, operand in _backward_of_frozen(schedule):

        def change(
            program: Program, backward: Compute = backward, operand: Operand = operand
        ) -> Program:
            dtype = program.by_name[operand.view.buffer].dtype
            buffer = Buffer(
                name=GRADIENT,
                pool=program.buffers[0].pool,
                elements=operand.view.size,
                dtype=dtype,
                kind=Kind.WORKSPACE,
                home=backward.stream,
                produced=True,
            )
            view = View(buffer=buffer.name, size=buffer.elements)
            more = with_operands(
                backward, (*backward.operands, Operand(role=Role.GRADIENT, view=view))
            )
            found = added(
                replaced(with_buffer(program, buffer), backward.id, more),
                Allocate(id="edit/allocate", buffer=buffer.name),
                before=backward.id,
            )
            last = backward.id
            if reduced and group:
                last = "edit/reduce"
                reduction = AllReduce(
                    id=last,
                    stream=backward.stream,
                    group=group,
                    source=view,
                    target=view,
                    wire=dtype,
                    accumulate=dtype,
                )
                found = added(found, reduction, after=backward.id)
            return added(found, Free(id="edit/free", buffer=buffer.name), after=last)

        yield from made(schedule, change, f"{backward.id} makes a gradient more")


def measured(schedule: Schedule) -> Iterator[Edit]:
    """Count frozen parameters in a norm as if they were gradients."""
    for norm in computes(schedule, Action.NORM)[:1]:
        for buffer in held(schedule):
            view = View(buffer=buffer.name, size=buffer.elements)
            more = with_operands(norm, (Operand(role=Role.GRADIENT, view=view), *norm.operands))
            yield from one_by_one(schedule, [norm], becomes(more), f"counts {buffer.name}")


def promised(schedule: Schedule, *, frozen: bool) -> Iterator[Edit]:
    """Say in the contract of a trained parameter that it is frozen, or the reverse."""
    if not frozen_names(schedule):
        return
    contract = schedule.contract

    def flipped(each: LogicalParameter, name: str) -> LogicalParameter:
        return replace(each, frozen=not each.frozen) if each.name == name else each

    for one in reversed(contract.parameters):  # the first ones may have no backward at all
        if one.frozen is not frozen and one.elements:
            parameters = tuple(flipped(each, one.name) for each in contract.parameters)
            yield Mutant.of(
                f"{one.name} {'frozen' if frozen else 'trained'} by contract",
                replace(schedule, contract=replace(contract, parameters=parameters)),
            )


FROZEN: dict[str, Aim] = {
    "frozen parameter updated": moved_by(_update, "updates"),
    "frozen parameter updated on one rank": moved_by(_update, "updates", one=True),
    "frozen parameter decays": moved_by(_shrink, "halves"),
    "frozen parameter cleared": moved_by(_clear, "clears"),
    "frozen parameter not gathered": at(gathers, gone, "gone"),
    "frozen parameter begins otherwise": begins_otherwise,
    "frozen parameter has a gradient": lambda schedule: with_gradient(schedule, reduced=False),
    "frozen parameter reduced": lambda schedule: with_gradient(schedule, reduced=True),
    "frozen parameter in the norm": measured,
    "trained parameter taken for frozen": lambda schedule: promised(schedule, frozen=True),
    "frozen parameter taken for trained": lambda schedule: promised(schedule, frozen=False),
}
