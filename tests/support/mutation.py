"""Schedules with a planted fault: one that is right, and small changes to it."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any, cast

from zsim.model.model import Model
from zsim.proof import Finding, check
from zsim.schedule.mesh import Span
from zsim.schedule.operation import Branch, Operation, Previous
from zsim.schedule.schedule import RankRole, Schedule

EXAMPLE = Path(__file__).parents[2] / "examples" / "zero3_by_hand.py"
Edit = Callable[[Operation], Iterable[Operation]]
"""What stands in place of an operation: itself, nothing, several."""


def hand() -> Schedule:
    """ZeRO stage 3 of three layers on four ranks, written by hand."""
    spec = spec_from_file_location("zero3_by_hand", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return cast("Schedule", module.write())


def edited(schedule: Schedule, edit: Edit) -> Schedule:
    """The schedule with every operation of every role put through `edit`."""

    def through(operations: Iterable[Operation]) -> tuple[Operation, ...]:
        found: list[Operation] = []
        for operation in operations:
            if isinstance(operation, Branch):
                inside = replace(
                    operation,
                    then=through(operation.then),
                    otherwise=through(operation.otherwise),
                )
                found.extend(edit(inside))
            else:
                found.extend(edit(operation))
        return tuple(found)

    return replace(
        schedule,
        programs=tuple(
            replace(program, setup=through(program.setup), step=through(program.step))
            for program in schedule.programs
        ),
    )


def without(schedule: Schedule, *names: str) -> Schedule:
    """The schedule without the operations `names`; edges to them go too."""

    def edit(operation: Operation) -> Iterable[Operation]:
        if operation.id in names:
            return ()
        changes: dict[str, Any] = {}
        for field in ("after", "uses"):
            edges = getattr(operation, field, ())
            kept = tuple(
                edge
                for edge in edges
                if (edge.operation if isinstance(edge, Previous) else edge) not in names
            )
            if kept != edges:
                changes[field] = kept
        return (replace(operation, **changes),) if changes else (operation,)

    return edited(schedule, edit)


def changed(schedule: Schedule, name: str, **fields: Any) -> Schedule:  # noqa: ANN401 (any field of any operation)
    """The schedule with other `fields` in operation `name`."""
    assert any(name in program.by_id for program in schedule.programs)
    return edited(
        schedule,
        lambda operation: (replace(operation, **fields) if operation.id == name else operation,),
    )


def moved(schedule: Schedule, name: str, *, before: str) -> Schedule:
    """The schedule with operation `name` issued just before operation `before`."""
    (operation,) = (program.by_id[name] for program in schedule.programs if name in program.by_id)

    def edit(each: Operation) -> Iterable[Operation]:
        if each.id == name:
            return ()
        return (operation, each) if each.id == before else (each,)

    return edited(schedule, edit)


def twice(schedule: Schedule, name: str, **fields: Any) -> Schedule:  # noqa: ANN401 (any field of any operation)
    """The schedule with operation `name` a second time, called `name` + "/again"."""
    return edited(
        schedule,
        lambda each: (
            (each, replace(each, id=f"{name}/again", **fields)) if each.id == name else (each,)
        ),
    )


def split(schedule: Schedule, other: Schedule, *, axis: str = "data") -> Schedule:
    """The schedule in which the first rank along `axis` does what `other` says."""
    size = schedule.mesh.axis_size(axis)
    (mine,), (theirs,) = schedule.programs, other.programs
    return replace(
        schedule,
        roles=(
            RankRole(name="first", boxes=((Span(axis=axis, start=0, end=1),),)),
            RankRole(name="rest", boxes=((Span(axis=axis, start=1, end=size),),)),
        ),
        programs=(replace(theirs, role="first"), replace(mine, role="rest")),
        contract=replace(schedule.contract, peak_bytes=()),
    )


def named(schedule: Schedule, model: Model | None = None) -> list[tuple[str, str]]:
    """(invariant, operation) of every finding."""
    return [(each.invariant, each.operation) for each in check(schedule, model)]


def left(schedule: Schedule, model: Model | None = None) -> str:
    """The operation where a schedule leaves plain training, with no word of what nobody wrote."""
    found = the_finding(schedule, "values", model)
    assert "nobody wrote" not in found.why
    return found.operation


def unwritten(schedule: Schedule, model: Model | None = None) -> str:
    """The first operation that computes with what nobody wrote."""
    found = the_finding(schedule, "values", model)
    assert found.why.startswith("computes with")
    return found.operation


def the_finding(schedule: Schedule, invariant: str, model: Model | None = None) -> Finding:
    """The only finding of one family; other families may have their own."""
    (found,) = (each for each in check(schedule, model) if each.invariant == invariant)
    return found
