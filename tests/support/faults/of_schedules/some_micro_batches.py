"""Changes of some of many micro-batches that are alike: the same in each of those chosen."""

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from faults.changes import Edit
from faults.fault import Mutant, one_of
from faults.of_schedules.each_micro_batch import (
    CHANGES,
    MICRO_BATCH,
    number_of,
    pattern_of,
    renamed,
)
from faults.of_schedules.life import in_buffer
from faults.schedules import cleaned
from zsim.schedule.access import accesses
from zsim.schedule.operation import (
    Allocate,
    Compute,
    Copy,
    Fill,
    Free,
    Operation,
    Receive,
    Send,
    View,
)
from zsim.schedule.replace import replace
from zsim.schedule.schedule import Program, Schedule

CONSTANTS = (0.0, 1.0, -1.0, 2.0)


class Chosen:
    """A schedule that is changed in some roles and micro-batches, the same in each of them.

    One in the middle, all but the first, or any are chosen. Edges to operations that are gone, or
    come later, go too.
    """

    def __init__(self, schedule: Schedule, rng: np.random.Generator) -> None:
        self.programs = {each.role: each for each in schedule.programs}
        self.steps = {each.role: list(each.step) for each in schedule.programs}
        self.count = 1 + max(number_of(each) for step in self.steps.values() for each in step)
        self.roles = list(self.steps)
        if rng.integers(2):
            self.roles = [one_of(rng, self.roles)]
        whole = range(self.count)
        self.numbers: Sequence[int] = one_of(
            rng,
            [
                [int(rng.integers(2, self.count))],
                [int(rng.integers(2, self.count))],
                whole,
                whole[int(rng.integers(1, 4)) :],
                whole[: int(rng.integers(1, self.count))],
                sorted({int(each) for each in rng.integers(0, self.count, 3)}),
            ],
        )

    def change(self, change: Callable[[Operation, str], Iterable[Operation]]) -> None:
        """Put other operations in place of each in the chosen roles and micro-batches."""
        for role in self.roles:
            step: list[Operation] = []
            for each in self.steps[role]:
                step += change(each, role) if number_of(each) in self.numbers else (each,)
            self.steps[role] = step

    def change_alike(
        self, drawn: Operation, role: str, change: Callable[[Operation], Iterable[Operation]]
    ) -> None:
        """Put others in place of a role's operations that are like one that was drawn."""
        self.change(
            lambda each, own: (
                change(each) if own == role and pattern_of(each) == pattern_of(drawn) else (each,)
            )
        )

    def drawn(self, rng: np.random.Generator, *kinds: type[Operation]) -> tuple[str, Operation]:
        """Return a role and an operation of a kind in a chosen micro-batch."""
        role = one_of(rng, self.roles)
        return role, one_of(
            rng,
            [
                each
                for each in self.steps[role]
                if number_of(each) in self.numbers and (not kinds or isinstance(each, kinds))
            ],
        )

    def places(self, role: str, drawn: Operation) -> list[int]:
        """Return places of operations that are like one, in the chosen micro-batches."""
        return [
            place
            for place, each in enumerate(self.steps[role])
            if number_of(each) in self.numbers and pattern_of(each) == pattern_of(drawn)
        ]

    def made(self, schedule: Schedule) -> Schedule:
        """Return the schedule."""
        programs = [
            cleaned(each, each.setup, tuple(self.steps[each.role])) for each in schedule.programs
        ]
        return replace(schedule, programs=tuple(programs))


def renumbered(chosen: Chosen, rng: np.random.Generator) -> None:
    """Compute all of it, or a part, for another micro-batch."""
    other, kinds = int(rng.integers(chosen.count)), int(rng.integers(3))
    _, drawn = chosen.drawn(rng, Compute)

    def change(operation: Operation, _: str) -> list[Operation]:
        if isinstance(operation, Compute) and (
            kinds == 0
            or (kinds == 1 and pattern_of(operation) == pattern_of(drawn))
            or (kinds == 2 and operation.action == "load")
        ):
            return [replace(operation, micro_batch=other)]
        return [operation]

    chosen.change(change)


def named_otherwise(chosen: Chosen, rng: np.random.Generator) -> None:
    """Name another micro-batch in ids, or none; or let two name each other."""
    one, other = (int(each) for each in rng.integers(0, chosen.count, 2))
    ways: list[dict[int, str]] = [{one: "/again/"}, {one: f"/mb{other}/also/"}]
    ways.append({one: f"/mb{other}/", other: f"/mb{one}/"})
    to = one_of(rng, ways)
    both = bool(rng.integers(2)) and len(to) == 2

    def of(path: str) -> str:
        found = MICRO_BATCH.search(path)
        new = None if found is None else to.get(int(found.group(1)))
        return path if new is None else MICRO_BATCH.sub(new, path, count=1)

    for role in chosen.roles:
        step: list[Operation] = []
        for operation in chosen.steps[role]:
            found = renamed(operation, of)
            if both and isinstance(found, Compute) and found.micro_batch in to:
                found = replace(found, micro_batch=other if found.micro_batch == one else one)
            step.append(found)
        chosen.steps[role] = step


def changed(chosen: Chosen, rng: np.random.Generator) -> None:
    """Change an operation, or leave it out."""
    role, drawn = chosen.drawn(rng)
    way, seed = one_of(rng, CHANGES), int(rng.integers(1 << 30))

    def change(operation: Operation) -> list[Operation]:
        made = way(operation, chosen.programs[role], np.random.default_rng(seed))
        return [] if made is None else [made]

    chosen.roles = [role]
    chosen.change_alike(drawn, role, change)


def beside(
    chosen: Chosen, rng: np.random.Generator, make: Callable[[str], Operation], role: str
) -> None:
    """Put an operation next to one that is drawn in each micro-batch, or in the step."""
    _, at = chosen.drawn(rng)
    before, of_step = bool(rng.integers(2)), bool(rng.integers(3) == 0)
    chosen.roles = [role] if rng.integers(2) else chosen.roles

    def change(operation: Operation) -> list[Operation]:
        name = f"step/more/{number_of(operation)}" if of_step else f"{operation.id}/more"
        return [make(name), operation] if before else [operation, make(name)]

    chosen.change_alike(at, role, change)


def views_of(program: Program, step: Sequence[Operation]) -> list[View]:
    """Return views that operations touch, and all of their buffers."""
    found = {each.view for operation in step for each in accesses(operation)}
    found |= {
        View(buffer=each.name, size=each.elements)
        for each in program.buffers
        if each.shard is None and each.elements
    }
    return sorted(found, key=repr)


def filled(chosen: Chosen, rng: np.random.Generator) -> None:
    """Write a number somewhere."""
    role = one_of(rng, chosen.roles)
    view = one_of(rng, views_of(chosen.programs[role], chosen.steps[role]))
    value = one_of(rng, CONSTANTS)
    beside(
        chosen, rng, lambda name: Fill(id=name, stream="compute", target=view, value=value), role
    )


def copied(chosen: Chosen, rng: np.random.Generator) -> None:
    """Copy something somewhere, or add it there."""
    role = one_of(rng, chosen.roles)
    views = views_of(chosen.programs[role], chosen.steps[role])
    source = one_of(rng, views)
    target = one_of(rng, [each for each in views if each.size == source.size])
    adds = bool(rng.integers(2))

    def make(name: str) -> Operation:
        return Copy(id=name, stream="compute", source=source, target=target, accumulate=adds)

    beside(chosen, rng, make, role)


def on_another_buffer(chosen: Chosen, rng: np.random.Generator) -> None:
    """Read or write another buffer as large."""
    role, drawn = chosen.drawn(rng, Compute, Copy, Send, Receive)
    old = one_of(rng, sorted({each.view.buffer for each in accesses(drawn)}))
    program = chosen.programs[role]
    size = program.by_name[old].elements
    new = one_of(
        rng, [each.name for each in program.buffers if each.elements == size and each.name != old]
    )
    chosen.change_alike(drawn, role, lambda each: [in_buffer(each, old, new)])


def with_views_of_another(chosen: Chosen, rng: np.random.Generator) -> None:
    """Run a segment or a copy on the buffers on which another micro-batch runs it."""
    role, drawn = chosen.drawn(rng, Compute, Copy)
    others = [
        each
        for each in chosen.steps[role]
        if pattern_of(each) == pattern_of(drawn) and type(each) is type(drawn)
    ]
    other = one_of(rng, others)

    def change(operation: Operation) -> list[Operation]:
        if isinstance(operation, Compute) and isinstance(other, Compute):
            return [replace(operation, operands=other.operands)]
        if isinstance(operation, Copy) and isinstance(other, Copy):
            return [replace(operation, source=other.source, target=other.target)]
        return [operation]

    chosen.change_alike(drawn, role, change)


def twice(chosen: Chosen, rng: np.random.Generator) -> None:
    """Do an operation a second time."""
    role, drawn = chosen.drawn(rng, Compute, Copy, Fill, Send, Receive)
    chosen.change_alike(drawn, role, lambda each: [each, replace(each, id=f"{each.id}/twice")])


def moved(chosen: Chosen, rng: np.random.Generator) -> None:
    """Move operations some places further on, or back, perhaps among those of another."""
    role, drawn = chosen.drawn(rng)
    by = int(one_of(rng, [1, 2, 5, 15, 40])) * (1 if rng.integers(2) else -1)
    step, places = chosen.steps[role], chosen.places(role, drawn)
    for place in places[::-1] if by > 0 else places:
        operation = step.pop(place)
        step.insert(max(0, place + by), operation)


def exchanged(chosen: Chosen, rng: np.random.Generator) -> None:
    """Exchange two micro-batches' operations of one name."""
    role, drawn = chosen.drawn(rng)
    step = chosen.steps[role]
    places = [place for place, each in enumerate(step) if pattern_of(each) == pattern_of(drawn)]
    one, other = one_of(rng, places), one_of(rng, places)
    step[one], step[other] = step[other], step[one]


def taken_longer(chosen: Chosen, rng: np.random.Generator) -> None:
    """Take a buffer earlier, give it back later, or neither."""
    role, drawn = chosen.drawn(rng, Allocate, Free)
    by, step = int(rng.integers(1, 30)), chosen.steps[role]
    places = chosen.places(role, drawn)
    gone = not rng.integers(3)
    for place in places[::-1] if isinstance(drawn, Free) else places:
        operation = step.pop(place)
        if not gone:
            by_now = by if isinstance(operation, Free) else -by
            step.insert(max(0, place + by_now), operation)


ALIKE: Sequence[Callable[[Chosen, np.random.Generator], None]] = (
    renumbered,
    named_otherwise,
    changed,
    changed,
    filled,
    filled,
    copied,
    copied,
    on_another_buffer,
    on_another_buffer,
    with_views_of_another,
    twice,
    moved,
    exchanged,
    taken_longer,
)


def changed_alike(schedule: Schedule, rng: np.random.Generator, *, count: int = 1) -> Edit:
    """Change some micro-batches alike, in so many ways at once.

    Raises:
        ValueError: nothing can be changed so.
    """
    chosen = Chosen(schedule, rng)
    names: list[str] = []
    for _ in range(count):
        edit = one_of(rng, ALIKE)
        names.append(edit.__name__)
        edit(chosen, rng)
    where = f"{list(chosen.numbers)} of {chosen.roles}"
    number = int(rng.integers(1 << 30))  # texts of others may be the same
    return Mutant.of(f"{' and '.join(names)} in {where}, {number}", chosen.made(schedule))
