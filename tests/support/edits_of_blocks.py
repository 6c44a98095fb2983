"""Edits of what repeats in a schedule: the same in every iteration, in the numbers of each.

An edit of one place makes a schedule irregular, and then it is proved as a whole. These stay
regular, so that a proof by induction has to find what is wrong by itself.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from zsim.model.model import Model
from zsim.proof.execution.repetition import NumberedNames, Run, Signatures, issued, runs, views
from zsim.schedule.operation import Branch, Compute, Copy, Operation, View
from zsim.schedule.schedule import Schedule


@dataclass
class Blocks:
    """A program of one role, and what repeats in it."""

    schedule: Schedule
    model: Model

    def __post_init__(self) -> None:
        (self.program,) = self.schedule.programs
        least = len(self.model.units) // 2
        self.buffers = NumberedNames((each.name for each in self.program.buffers), least)
        self.signatures = Signatures(
            buffers=self.buffers,
            layouts=NumberedNames((each.name for each in self.schedule.layouts), least),
            units=NumberedNames((each.name for each in self.model.units), least),
        )

    def lists(self) -> dict[str, Sequence[Operation]]:
        """Setup, the step, and the lists of its branch."""
        found: dict[str, Sequence[Operation]] = {"setup": self.program.setup}
        found["step"] = self.program.step
        for each in self.program.step:
            if isinstance(each, Branch):
                found |= {"then": each.then, "otherwise": each.otherwise}
        return found

    def with_list(self, name: str, operations: Sequence[Operation]) -> Schedule:
        """Return the schedule with another list."""
        change: dict[str, Any] = {name: tuple(operations)}
        if name in ("setup", "step"):
            program = replace(self.program, **change)
        else:
            step = tuple(
                replace(each, **change) if isinstance(each, Branch) else each
                for each in self.program.step
            )
            program = replace(self.program, step=step)
        return replace(self.schedule, programs=(program,))

    def edited(self, rng: np.random.Generator) -> tuple[str, Schedule]:
        """Draw an edit.

        Raises:
            ValueError: it changes nothing, or makes no schedule.
        """
        lists = {name: issued(each) for name, each in self.lists().items()}
        found = [(name, run) for name, own in lists.items() for run in runs(own, self.signatures)]
        name, run = found[rng.integers(len(found))]
        operations = lists[name]
        edit = EDITS[rng.integers(len(EDITS))]
        text, change = edit(self, operations, run, rng)
        changed: list[Operation] = list(operations[: run.start])
        for iteration in range(run.iterations):
            start = run.start + iteration * run.period
            own = list(operations[start : start + run.period])
            changed += change(own, run.first + iteration * run.step)
        changed += operations[run.end :]
        if changed == operations:
            raise ValueError(f"{name}: {text} changes nothing")
        return f"{name}, {operations[run.start].id}: {text}", self.with_list(name, changed)

    def numbered(self, name: str, number: int, other: str, there: int) -> str:
        """Return the buffer that is to `number` what `other` is to `there`; itself without one."""
        family, own = self.buffers[other]
        if own is None:
            return other
        made = family.replace("#", str(own - there + number), 1)
        return made if made in self.program.by_name else name


Change = Callable[[list[Any], int], list[Any]]
Edited = tuple[str, Change]


def drop(_: Blocks, operations: Sequence[Any], run: Run, rng: np.random.Generator) -> Edited:
    """Drop an operation."""
    place = int(rng.integers(run.period))
    text = f"drop {operations[run.start + place].id}"
    return text, lambda own, _: own[:place] + own[place + 1 :]


def move(_: Blocks, operations: Sequence[Any], run: Run, rng: np.random.Generator) -> Edited:
    """Move an operation to elsewhere in its iteration."""
    place, to = (int(each) for each in rng.integers(run.period, size=2))

    def change(own: list[Any], _: int) -> list[Any]:
        rest = own[:place] + own[place + 1 :]
        return rest[:to] + own[place : place + 1] + rest[to:]

    return f"move {operations[run.start + place].id} to {to}", change


def repeat(_: Blocks, operations: Sequence[Any], run: Run, rng: np.random.Generator) -> Edited:
    """Do an operation twice."""
    place = int(rng.integers(run.period))

    def change(own: list[Any], _: int) -> list[Any]:
        again = replace(own[place], id=own[place].id + "/again")
        return [*own[: place + 1], again, *own[place + 1 :]]

    return f"repeat {operations[run.start + place].id}", change


def other_view(
    blocks: Blocks, operations: Sequence[Any], run: Run, rng: np.random.Generator
) -> Edited:
    """Read or write another buffer: of another block, or of another kind."""
    place = _touching(operations, run, rng)
    template = operations[run.start + place]
    names = [each.buffer for each in views(template)]
    name = names[rng.integers(len(names))]
    other = _other(blocks, name, rng)

    def change(own: list[Any], number: int) -> list[Any]:
        here = blocks.numbered(name, number, name, run.first)
        there = blocks.numbered(here, number, other, run.first)
        return [*own[:place], _renamed(own[place], here, there), *own[place + 1 :]]

    return f"{template.id} has {other} for {name}", change


def insert_copy(
    blocks: Blocks, operations: Sequence[Any], run: Run, rng: np.random.Generator
) -> Edited:
    """Copy a buffer to another one, perhaps that of the next block."""
    place = _touching(operations, run, rng)
    names = [each.buffer for each in views(operations[run.start + place])]
    name = names[rng.integers(len(names))]
    other = _other(blocks, name, rng)
    adds = bool(rng.integers(2))
    size = blocks.program.by_name[name].elements

    def change(own: list[Any], number: int) -> list[Any]:
        here = blocks.numbered(name, number, name, run.first)
        there = blocks.numbered(here, number, other, run.first)
        copy = Copy(
            id=f"{own[place].id}/copied",
            stream="compute",
            source=View(buffer=here, size=size),
            target=View(buffer=there, size=size),
            accumulate=adds,
        )
        return [*own[: place + 1], copy, *own[place + 1 :]]

    return (
        f"copy {name} to {other}{' more' * adds} after {operations[run.start + place].id}",
        change,
    )


def other_field(_: Blocks, operations: Sequence[Any], run: Run, rng: np.random.Generator) -> Edited:
    """Add instead of replacing, divide, run another segment, read no scalar."""
    place = _touching(operations, run, rng)
    template = operations[run.start + place]
    changes: list[dict[str, Any]] = []
    if isinstance(template, Copy):
        changes = [{"accumulate": not template.accumulate}, {"divisor": 2}]
    elif isinstance(template, Compute):
        changes = [{"segment": template.segment + 1}, {"scalars": ()}, {"micro_batch": 1}]
        changes.append({"operands": template.operands[::-1]})
    if not changes:
        raise ValueError("no field to change")
    made = changes[rng.integers(len(changes))]
    if "operands" in made:
        return f"{template.id} backwards", lambda own, _: [
            *own[:place],
            replace(own[place], operands=own[place].operands[::-1]),
            *own[place + 1 :],
        ]
    return f"{template.id} with {made}", lambda own, _: [
        *own[:place],
        replace(own[place], **made),
        *own[place + 1 :],
    ]


EDITS = (drop, move, repeat, other_view, insert_copy, other_field)


def _touching(operations: Sequence[Any], run: Run, rng: np.random.Generator) -> int:
    """Draw an operation of an iteration that names a view."""
    own = operations[run.start : run.start + run.period]
    places = [place for place, each in enumerate(own) if any(views(each))]
    if not places:
        raise ValueError("nothing in it has a view")
    return places[rng.integers(len(places))]


def _other(blocks: Blocks, name: str, rng: np.random.Generator) -> str:
    """Draw another buffer of the same size: often that of the block before or after."""
    family, number = blocks.buffers[name]
    by_name = blocks.program.by_name
    if number is not None and rng.integers(2):
        near = [family.replace("#", str(number + by), 1) for by in (-2, -1, 1, 2)]
    else:
        near = [
            each.name
            for each in blocks.program.buffers
            if each.elements == by_name[name].elements
            and abs((blocks.buffers[each.name][1] or 0) - (number or 5)) < 3
        ]
    found = [each for each in near if each in by_name and each != name]
    if not found:
        raise ValueError(f"nothing is like {name}")
    return found[rng.integers(len(found))]


def _renamed(operation: Operation, here: str, there: str) -> Operation:
    """Return an operation with one buffer for another."""

    def view(each: View) -> View:
        return replace(each, buffer=there) if each.buffer == here else each

    if isinstance(operation, Compute):
        operands = tuple(replace(each, view=view(each.view)) for each in operation.operands)
        return replace(operation, operands=operands)
    changes: dict[str, Any] = {
        name: view(getattr(operation, name))
        for name in ("source", "target")
        if isinstance(getattr(operation, name, None), View)
    }
    return replace(operation, **changes)
