"""Changes of a block that are the same in every block that repeats, in the numbers of each.

A change of one block makes a schedule irregular, and then it is proved as a whole. These stay
regular, so that a proof by induction has to find by itself what is wrong. Operations repeat if
their ids are the same but for the distance of numbers of blocks and buckets from the block's own.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np

from faults.changes import Edit
from faults.fault import Mutant, one_of
from faults.of_schedules.life import in_buffer
from faults.selections import only_program
from zsim.schedule.access import accesses
from zsim.schedule.operation import Branch, Compute, Copy, Operation, View
from zsim.schedule.replace import replace
from zsim.schedule.schedule import Program, Schedule

NUMBERED = re.compile(r"(block|bucket)(\d+)")
Block = tuple[int, list[Any]]
"""The number of a block, and its operations in one part of a list."""


def lists(program: Program) -> dict[str, Sequence[Operation]]:
    """Return setup, the step, and the lists of its branch."""
    found: dict[str, Sequence[Operation]] = {"setup": program.setup, "step": program.step}
    for each in program.step:
        if isinstance(each, Branch):
            found |= {"then": each.then, "otherwise": each.otherwise}
    return found


def with_list(schedule: Schedule, name: str, operations: Sequence[Operation]) -> Schedule:
    """Return the schedule with another list."""
    program = only_program(schedule)
    change: dict[str, Any] = {name: tuple(operations)}
    if name in ("setup", "step"):
        return replace(schedule, programs=(replace(program, **change),))
    step = tuple(
        replace(each, **change) if isinstance(each, Branch) else each for each in program.step
    )
    return replace(schedule, programs=(replace(program, step=step),))


def buckets_of_a_block(program: Program) -> int:
    """Return the number of buckets for each block."""
    found = {each.groups() for buffer in program.buffers if (each := NUMBERED.match(buffer.name))}
    counts = Counter(noun for noun, _ in found)
    return max(1, round(counts["bucket"] / max(1, counts["block"])))


def _part(operation: Operation, buckets: int) -> tuple[str, int]:
    """Return the part of a list that an operation is in, and its block; -1 is none."""
    found = NUMBERED.search(operation.id)
    return ("", -1) if found is None else (operation.id[: found.start()], _block(found, buckets))


def _block(found: re.Match[str], buckets: int) -> int:
    return int(found.group(2)) // (buckets if found.group(1) == "bucket" else 1)


def shifted(name: str, by: int, buckets: int) -> str:
    """Return a name with the numbers of so many blocks later, and of their buckets."""

    def later(found: re.Match[str]) -> str:
        noun, number = found.groups()
        return f"{noun}{int(number) + by * (buckets if noun == 'bucket' else 1)}"

    return NUMBERED.sub(later, name)


def blocks(operations: Sequence[Operation], buckets: int) -> Iterator[list[Block]]:
    """Yield blocks that repeat: neighbours with the same operations but for their numbers."""

    def key(operation: Operation) -> tuple[str, int]:
        return _part(operation, buckets)

    parts = [(part, list(own)) for part, own in groupby(operations, key=key)]
    same: list[Block] = []
    before: tuple[str, list[str]] | None = None
    for (where, number), own in parts:
        here = where, [shifted(each.id, -number, buckets) for each in own]
        if here != before and len(same) > 2:
            yield same
        same = [*same, (number, own)] if here == before else [(number, own)]
        before = here if number >= 0 else None
    if len(same) > 2:
        yield same


@dataclass
class Draw:
    """A part of a list that repeats, and an operation of its first block."""

    program: Program
    part: list[Block]
    place: int
    buckets: int
    rng: np.random.Generator

    @property
    def first(self) -> Any:  # noqa: ANN401  # any operation
        """The operation of the first block."""
        return self.part[0][1][self.place]

    def touched(self) -> str:
        """Draw a buffer that the operation touches."""
        return one_of(self.rng, sorted({each.view.buffer for each in accesses(self.first)}))

    def like(self, name: str) -> str:
        """Draw another buffer of the same size: often that of a block before or after."""
        by_name = self.program.by_name
        near = [shifted(name, by, self.buckets) for by in (-2, -1, 1, 2)]
        if not NUMBERED.search(name) or self.rng.integers(2):
            size, number = by_name[name].elements, self.part[0][0]
            near = [
                each.name
                for each in self.program.buffers
                if each.elements == size and abs(self._number(each.name, number) - number) < 3
            ]
        return one_of(self.rng, [each for each in near if each in by_name and each != name])

    def at(self, name: str, number: int) -> str:
        """Return the buffer that is to block `number` as `name` is to the first."""
        made = shifted(name, number - self.part[0][0], self.buckets)
        return made if made in self.program.by_name else name

    def _number(self, name: str, otherwise: int) -> int:
        found = NUMBERED.search(name)
        return otherwise if found is None else _block(found, self.buckets)


Change = Callable[[list[Any], int], list[Any]]


def drop(draw: Draw) -> tuple[str, Change]:
    """Leave an operation out."""
    return "drop", lambda own, _: own[: draw.place] + own[draw.place + 1 :]


def move(draw: Draw) -> tuple[str, Change]:
    """Move an operation to elsewhere in its block."""
    to = int(draw.rng.integers(len(draw.part[0][1])))

    def change(own: list[Any], _: int) -> list[Any]:
        rest = own[: draw.place] + own[draw.place + 1 :]
        return rest[:to] + own[draw.place : draw.place + 1] + rest[to:]

    return f"move to {to}", change


def repeat(draw: Draw) -> tuple[str, Change]:
    """Do an operation twice."""
    return "repeat", _behind(draw, lambda each, _: replace(each, id=f"{each.id}/again"))


def _behind(draw: Draw, make: Callable[[Any, int], Operation]) -> Change:
    place = draw.place
    return lambda own, number: [*own[: place + 1], make(own[place], number), *own[place + 1 :]]


def _instead(draw: Draw, make: Callable[[Any, int], Operation]) -> Change:
    place = draw.place
    return lambda own, number: [*own[:place], make(own[place], number), *own[place + 1 :]]


def other_view(draw: Draw) -> tuple[str, Change]:
    """Read or write another buffer: of another block, or of another kind."""
    old = draw.touched()
    new = draw.like(old)
    text = f"{new} for {old}"
    return text, _instead(
        draw, lambda each, number: in_buffer(each, draw.at(old, number), draw.at(new, number))
    )


def insert_copy(draw: Draw) -> tuple[str, Change]:
    """Copy a buffer to another one, perhaps that of the next block."""
    old = draw.touched()
    new, adds = draw.like(old), bool(draw.rng.integers(2))
    size = draw.program.by_name[old].elements

    def make(each: Operation, number: int) -> Operation:
        source = View(buffer=draw.at(old, number), size=size)
        return Copy(
            id=f"{each.id}/copied",
            stream="compute",
            source=source,
            target=replace(source, buffer=draw.at(new, number)),
            accumulate=adds,
        )

    return f"copy {old} to {new}{' more' * adds}", _behind(draw, make)


def other_field(draw: Draw) -> tuple[str, Change]:
    """Add instead of replacing, divide, run another segment, read no scalar."""
    changes: list[dict[str, Any]] = []
    if isinstance(draw.first, Copy):
        changes = [{"accumulate": not draw.first.accumulate}, {"divisor": 2}]
    elif isinstance(draw.first, Compute):
        changes = [{"segment": draw.first.segment + 1}, {"scalars": ()}, {"micro_batch": 1}]
        changes.append({"operands": "backwards"})
    made = one_of(draw.rng, changes)

    def make(each: Any, _: int) -> Operation:  # noqa: ANN401  # any operation
        fields = {"operands": each.operands[::-1]} if "operands" in made else made
        found: Operation = replace(each, **fields)
        return found

    return f"with {made}", _instead(draw, make)


EDITS = (drop, move, repeat, other_view, insert_copy, other_field)


def in_every_block(schedule: Schedule, rng: np.random.Generator) -> Edit:
    """Change one operation in every block that repeats.

    Raises:
        ValueError: nothing is changed, or the result is no schedule.
    """
    program = only_program(schedule)
    buckets = buckets_of_a_block(program)
    found = [(name, part) for name, own in lists(program).items() for part in blocks(own, buckets)]
    name, part = found[int(rng.integers(len(found)))]
    draw = Draw(program, part, int(rng.integers(len(part[0][1]))), buckets, rng)
    text, change = one_of(rng, EDITS)(draw)
    new = {own[0].id: change(own, number) for number, own in part}
    gone = {each.id for _, own in part for each in own}
    operations: list[Operation] = []
    for each in lists(program)[name]:
        operations += new.get(each.id, [] if each.id in gone else [each])
    if operations == list(lists(program)[name]):
        raise ValueError(f"{name}: {text} changes nothing")
    return Mutant.of(f"{name}, {draw.first.id}: {text}", with_list(schedule, name, operations))
