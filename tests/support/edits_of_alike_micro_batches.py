"""Edits that tell micro-batches apart, or only seem to: what a proof by two of them must see.

Each is made in some micro-batches, by one role or by all: one in the middle, all but the first, or
any. Operations are told by their ids without the micro-batch, so that what is made is alike in all
that are chosen. Edges to what is gone, or comes later now, are gone too.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np
from edits.programs import cleaned, one_of
from edits_of_micro_batches import CHANGES

from zsim.schedule.access import accesses
from zsim.schedule.operation import (
    Allocate,
    Compute,
    Copy,
    Edge,
    Fill,
    Free,
    HostWait,
    Operation,
    Receive,
    Send,
    StreamOperation,
    View,
)
from zsim.schedule.schedule import Program, Schedule, ScheduleError

MICRO_BATCH = re.compile(r"/mb(\d+)/")
SLOT = re.compile(r"@\d+")
NONE = -1
CONSTANTS = (0.0, 1.0, -1.0, 2.0)
Steps = dict[str, list[Operation]]
"""The step of each role."""
AlikeEdit = Callable[["Chosen", np.random.Generator], None]


def number_of(operation: Operation) -> int:
    """Return the micro-batch that an id names; NONE if it names none."""
    found = MICRO_BATCH.search(operation.id)
    return NONE if found is None else int(found.group(1))


def pattern_of(operation: Operation) -> str:
    """Return what ids of an operation have in common in all micro-batches."""
    return SLOT.sub("", MICRO_BATCH.sub("/mb/", operation.id))


class Chosen:
    """A schedule that is edited in some roles and micro-batches, the same in each of them."""

    def __init__(self, schedule: Schedule, rng: np.random.Generator) -> None:
        self.programs = {each.role: each for each in schedule.programs}
        self.steps: Steps = {each.role: list(each.step) for each in schedule.programs}
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
    """Ids that name another micro-batch, or none; or two that name each other."""
    one, other = (int(each) for each in rng.integers(0, chosen.count, 2))
    ways: list[dict[int, str]] = [{one: "/again/"}, {one: f"/mb{other}/also/"}]
    ways.append({one: f"/mb{other}/", other: f"/mb{one}/"})
    to = one_of(rng, ways)
    both = bool(rng.integers(2)) and len(to) == 2

    def of(path: str) -> str:
        found = MICRO_BATCH.search(path)
        new = None if found is None else to.get(int(found.group(1)))
        return path if new is None else MICRO_BATCH.sub(new, path, count=1)

    def edge(each: Edge) -> Edge:
        return of(each) if isinstance(each, str) else each

    for role in chosen.roles:
        step: list[Operation] = []
        for operation in chosen.steps[role]:
            found = replace(operation, id=of(operation.id))
            if isinstance(found, Free):
                found = replace(found, uses=tuple(map(of, found.uses)))
            elif isinstance(found, HostWait):
                found = replace(found, operation=edge(found.operation))
            elif isinstance(found, StreamOperation):
                found = replace(found, after=tuple(map(edge, found.after)))
            if both and isinstance(found, Compute) and found.micro_batch in to:
                found = replace(found, micro_batch=other if found.micro_batch == one else one)
            step.append(found)
        chosen.steps[role] = step


def changed(chosen: Chosen, rng: np.random.Generator) -> None:
    """An operation that does something else, or is gone."""
    role, drawn = chosen.drawn(rng)
    way, seed = one_of(rng, CHANGES), int(rng.integers(1 << 30))

    def change(operation: Operation, own: str) -> list[Operation]:
        if pattern_of(operation) != pattern_of(drawn):
            return [operation]
        del own
        made = way(operation, chosen.programs[role], np.random.default_rng(seed))
        return [] if made is None else [made]

    chosen.roles = [role]
    chosen.change(change)


def beside(
    chosen: Chosen, rng: np.random.Generator, make: Callable[[str], Sequence[Operation]], role: str
) -> None:
    """Put operations beside one that is drawn in each micro-batch, or in the step."""
    _, at = chosen.drawn(rng)
    before, of_step = bool(rng.integers(2)), bool(rng.integers(3) == 0)
    chosen.roles = [role] if rng.integers(2) else chosen.roles

    def change(operation: Operation, own: str) -> list[Operation]:
        if own != role or pattern_of(operation) != pattern_of(at):
            return [operation]
        name = f"step/more/{number_of(operation)}" if of_step else f"{operation.id}/more"
        made = list(make(name))
        return [*made, operation] if before else [operation, *made]

    chosen.change(change)


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
    """A number that is written somewhere."""
    role = one_of(rng, chosen.roles)
    view = one_of(rng, views_of(chosen.programs[role], chosen.steps[role]))
    value = one_of(rng, CONSTANTS)
    beside(
        chosen, rng, lambda name: [Fill(id=name, stream="compute", target=view, value=value)], role
    )


def copied(chosen: Chosen, rng: np.random.Generator) -> None:
    """A copy, or a sum, of something somewhere."""
    role = one_of(rng, chosen.roles)
    views = views_of(chosen.programs[role], chosen.steps[role])
    source = one_of(rng, views)
    target = one_of(rng, [each for each in views if each.size == source.size])
    accumulate = bool(rng.integers(2))

    def make(name: str) -> list[Operation]:
        return [
            Copy(id=name, stream="compute", source=source, target=target, accumulate=accumulate)
        ]

    beside(chosen, rng, make, role)


def on_another_buffer(chosen: Chosen, rng: np.random.Generator) -> None:
    """An operation that reads or writes another buffer as large."""
    role, drawn = chosen.drawn(rng, Compute, Copy, Send, Receive)
    names = sorted({each.view.buffer for each in accesses(drawn)})
    old, program = one_of(rng, names), chosen.programs[role]
    size = program.by_name[old].elements
    new = one_of(
        rng, [each.name for each in program.buffers if each.elements == size and each.name != old]
    )

    def moved(view: View) -> View:
        return replace(view, buffer=new) if view.buffer == old else view

    def change(operation: Operation, own: str) -> list[Operation]:
        if own != role or pattern_of(operation) != pattern_of(drawn):
            return [operation]
        match operation:
            case Compute():
                operands = [replace(each, view=moved(each.view)) for each in operation.operands]
                return [replace(operation, operands=tuple(operands))]
            case Copy():
                source, target = moved(operation.source), moved(operation.target)
                return [replace(operation, source=source, target=target)]
            case Send():
                return [replace(operation, source=moved(operation.source))]
            case Receive():
                return [replace(operation, target=moved(operation.target))]
            case _:
                return [operation]

    chosen.change(change)


def with_views_of_another(chosen: Chosen, rng: np.random.Generator) -> None:
    """A segment or copy on the buffers on which another micro-batch runs it."""
    role, drawn = chosen.drawn(rng, Compute, Copy)
    others = [
        each
        for each in chosen.steps[role]
        if pattern_of(each) == pattern_of(drawn) and type(each) is type(drawn)
    ]
    other = one_of(rng, others)

    def change(operation: Operation, own: str) -> list[Operation]:
        if own != role or pattern_of(operation) != pattern_of(drawn):
            return [operation]
        if isinstance(operation, Compute) and isinstance(other, Compute):
            return [replace(operation, operands=other.operands)]
        if isinstance(operation, Copy) and isinstance(other, Copy):
            return [replace(operation, source=other.source, target=other.target)]
        return [operation]

    chosen.change(change)


def twice(chosen: Chosen, rng: np.random.Generator) -> None:
    """An operation that stands a second time."""
    role, drawn = chosen.drawn(rng, Compute, Copy, Fill, Send, Receive)

    def change(operation: Operation, own: str) -> list[Operation]:
        if own != role or pattern_of(operation) != pattern_of(drawn):
            return [operation]
        return [operation, replace(operation, id=f"{operation.id}/twice")]

    chosen.change(change)


def moved(chosen: Chosen, rng: np.random.Generator) -> None:
    """Operations that stand some places further on, or back, perhaps among those of another."""
    role, drawn = chosen.drawn(rng)
    by = int(one_of(rng, [1, 2, 5, 15, 40])) * (1 if rng.integers(2) else -1)
    step = chosen.steps[role]
    places = [
        place
        for place, each in enumerate(step)
        if number_of(each) in chosen.numbers and pattern_of(each) == pattern_of(drawn)
    ]
    for place in places[::-1] if by > 0 else places:
        operation = step.pop(place)
        step.insert(max(0, place + by), operation)


def exchanged(chosen: Chosen, rng: np.random.Generator) -> None:
    """All of two micro-batches' operations of one name, each in the place of the other."""
    role, drawn = chosen.drawn(rng)
    pattern, step = pattern_of(drawn), chosen.steps[role]
    places = [place for place, each in enumerate(step) if pattern_of(each) == pattern]
    one, other = one_of(rng, places), one_of(rng, places)
    step[one], step[other] = step[other], step[one]


def taken_longer(chosen: Chosen, rng: np.random.Generator) -> None:
    """A buffer that is taken earlier, given back later, or neither."""
    role, drawn = chosen.drawn(rng, Allocate, Free)
    by, step = int(rng.integers(1, 30)), chosen.steps[role]
    places = [
        place
        for place, each in enumerate(step)
        if number_of(each) in chosen.numbers and pattern_of(each) == pattern_of(drawn)
    ]
    gone = not rng.integers(3)
    for place in places[::-1] if isinstance(drawn, Free) else places:
        operation = step.pop(place)
        if not gone:
            by_now = by if isinstance(operation, Free) else -by
            step.insert(max(0, place + by_now), operation)


ALIKE: Sequence[AlikeEdit] = (
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


def of_alike(schedule: Schedule, seed: int, count: int = 1) -> Iterator[tuple[str, Schedule]]:
    """Yield schedules with so many edits at once, made in the same micro-batches."""
    rng = np.random.default_rng(seed)
    while True:
        drawn = int(rng.integers(1 << 62))
        try:
            yield edited(schedule, drawn, count)
        except (ValueError, ScheduleError):
            continue


def edited(schedule: Schedule, seed: int, count: int = 1) -> tuple[str, Schedule]:
    """Return a schedule that is edited as `seed` says, and how, in words.

    Raises:
        ValueError: it cannot be edited so.
    """
    rng = np.random.default_rng(seed)
    chosen = Chosen(schedule, rng)
    names: list[str] = []
    for _ in range(count):
        edit = one_of(rng, ALIKE)
        names.append(edit.__name__)
        edit(chosen, rng)
    made = chosen.made(schedule)
    if made == schedule:
        raise ValueError("nothing is changed")
    where = f"{list(chosen.numbers)} of {chosen.roles}"
    return f"{' and '.join(names)} in {where}, {seed} x {count}", made
