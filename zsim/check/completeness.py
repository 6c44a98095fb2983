"""Completeness: what is gathered is used, and whatever is trained is updated, once.

Proved for every role:

* what an all-gather or a reduce-scatter brings into a buffer is read before its memory is
  allocated anew and before another operation writes all of it; of a persistent buffer in this step
  or the next;
* on every way that updates at all (one must, where the contract names a strategy), each persistent
  buffer that is trained (masters where there are any, parameters otherwise) is updated in all
  elements that hold parameters, and no element twice.

That an update comes after the reductions that it reads, and the next gather after it, is proved by
`races` and `definedness`.

Cost: one look at each access to what collectives write, and at each update.
"""

import re
from bisect import bisect_left
from collections.abc import Iterator
from itertools import chain

from zsim.check.finding import Finding
from zsim.check.overlap import Overlap, Span
from zsim.check.padding import Pads
from zsim.check.subject import NumberedProgram, Subject
from zsim.layout import Layout
from zsim.numbered import ALLOCATE, FREE, READ, UPDATE, WHOLE, History, Numbered
from zsim.operation import (
    AllGather,
    Compute,
    ReduceScatter,
    Role,
    Together,
    View,
)
from zsim.order import Way
from zsim.schedule import Buffer, Kind, Schedule

INVARIANT = "completeness"

READ_AT_ONCE = re.compile(rb"(?:[AFr]|[wWu][wu]*r)*").fullmatch
"""The history of a buffer that is read after each write, before it is freed or written anew."""


def examine(subject: Subject) -> list[Finding]:
    """Every gather for nothing, and everything that is trained and not updated, or twice."""
    found: list[Finding] = []
    overlap = Overlap(subject.schedule)
    for each in subject.programs:
        for _, numbered in each.parts:
            found += _unread(each, numbered)
        if not each.crowded:
            for way in each.step_order.ways:
                found += [
                    finding
                    for finding in _updates(subject.schedule, each, way, overlap)
                    if finding not in found
                ]
    return found


def _unread(each: NumberedProgram, numbered: Numbered) -> Iterator[Finding]:
    """Collectives whose result nothing reads."""
    persistent = set(each.program.persistent)
    read = {name for name, history in numbered.history.items() if READ_AT_ONCE(history.codes)}
    inside = {each for sides in numbered.sides.values() for side in sides for each in side}
    for number in numbered.communications:
        operation = numbered.operations[number]
        members = operation.members if isinstance(operation, Together) else (operation,)
        for member in members:
            if type(member) is not AllGather and type(member) is not ReduceScatter:
                continue
            name = member.target.buffer
            if name in read or not member.target.size:
                continue
            if numbered is each.setup and name in persistent:
                continue
            history = numbered.history[name]
            ended = _ended(history, number, inside, lasts=name in persistent)
            if ended is not None:
                by, what = ended
                yield Finding(
                    invariant=INVARIANT,
                    role=each.program.role,
                    operation=member.id,
                    why=f"brings into {name} what nothing reads",
                    witness=(
                        f"{member.id} writes {name}",
                        what if by is None else f"{numbered.operations[by].id} {what}",
                    ),
                )


def _ended(
    history: History, number: int, inside: set[int], *, lasts: bool
) -> tuple[int | None, str] | None:
    """What ends the life of what operation `number` wrote, if nothing read it before.

    What stands `inside` a branch may not run.
    """
    numbers, codes = history.numbers, history.codes
    place = bisect_left(numbers, number)
    places = chain(range(place + 1, len(numbers)), range(place) if lasts else ())
    freed = None
    for at in places:
        code = codes[at]
        if code in (READ, UPDATE):
            return None
        if code == FREE:
            freed = numbers[at] if freed is None else freed
        elif code in (ALLOCATE, WHOLE) and numbers[at] not in inside:
            if freed is None:
                return numbers[at], "allocates it anew" if code == ALLOCATE else "writes all of it"
            break
    if freed is not None:
        return freed, "frees it"
    return None, "it is written again in the next step" if lasts else "then the step ends"


def _updates(
    schedule: Schedule, each: NumberedProgram, way: Way, overlap: Overlap
) -> Iterator[Finding]:
    """What is trained and not updated on one way, or more than once."""
    program, numbered = each.program, way.numbered
    updated: dict[str, list[View]] = {}
    by: dict[str, list[str]] = {}
    for number in numbered.updates:
        operation = numbered.operations[number]
        if way.known[number] is None or not isinstance(operation, Compute):
            continue
        for operand in operation.operands:
            if operand.role in (Role.MASTER, Role.PARAMETER):
                updated.setdefault(operand.view.buffer, []).append(operand.view)
                by.setdefault(operand.view.buffer, []).append(operation.id)
    if not updated and (numbered.updates or schedule.contract.strategy is None):
        return
    for buffer in _trained(each):
        assert buffer.layout is not None
        layout = schedule.layout_by_name[buffer.layout]
        views = updated.get(buffer.name, [])
        amounts = [_amount(layout, view, buffer, overlap) for view in views]
        count, held = sum(amounts), sum(piece.size for piece in layout.pieces)
        why = f"updates {count or 'no'} elements of {buffer.name}, which has {held} to train"
        if held <= count <= layout.elements:
            left_out = _left_out(layout, views, buffer, overlap)
            if left_out is None:
                continue
            why = f"does not update {left_out}, which lies in {buffer.name}"
        yield Finding(
            invariant=INVARIANT,
            role=program.role,
            operation=by.get(buffer.name, ["step"])[-1],
            why=why,
            witness=tuple(by.get(buffer.name, ["no update names it"]))[:5],
        )


def _left_out(layout: Layout, views: list[View], buffer: Buffer, overlap: Overlap) -> str | None:
    """A parameter of which something is in none of `views`.

    Where segments are not equal, or some views are of the own segment and some are not, nobody can
    say, and amounts count.
    """
    own = {view.layout is None and buffer.shard is not None for view in views}
    if View(buffer=buffer.name, size=buffer.elements) in views or len(own) > 1:
        return None
    if own == {True}:
        count = overlap.ranks(buffer.shard or "")
        pads = Pads(layout, count, shard=True, inside=False)
        spans = [(view.start, view.start + view.size) for view in views]
        gaps = _gaps(spans, layout.elements // count if layout.cuts is None else 0)
    else:
        count = 1 if layout.axis is None else overlap.ranks(layout.axis)
        inside = any(view.layout is not None for view in views)
        pads = Pads(layout, count, shard=False, inside=inside)
        steps = [overlap.ranks(view.axis) if view.axis is not None else 1 for view in views]
        spans = [
            (view.start, view.start + step * view.size)
            for view, step in zip(views, steps, strict=True)
        ]
        gaps = _gaps(spans, layout.elements)
    found = (pads.parameter(low, high) for low, high in gaps)
    return next((name for name in found if name is not None), None)


def _gaps(spans: list[Span], end: int) -> list[Span]:
    """What of [0, end) is in none of `spans`."""
    found: list[Span] = []
    place = 0
    for low, high in sorted(spans):
        if low > place:
            found.append((place, low))
        place = max(place, high)
    return [*found, (place, end)] if place < end else found


def _trained(each: NumberedProgram) -> list[Buffer]:
    """Persistent masters, or parameters where there are none."""
    persistent = [each.program.by_name[name] for name in each.program.persistent]
    for kind in (Kind.MASTER, Kind.PARAMETER):
        found = [
            buffer for buffer in persistent if buffer.kind is kind and buffer.layout is not None
        ]
        if found:
            return found
    return []


def _amount(layout: Layout, view: View, buffer: Buffer, overlap: Overlap) -> int:
    """Elements of the tensor that all ranks together have of `view`."""
    if view.layout is not None:
        return view.size
    if buffer.shard is not None and view.size == buffer.elements:
        return layout.elements
    if view.axis is not None:
        return view.size * overlap.ranks(view.axis)
    return view.size * (overlap.ranks(buffer.shard) if buffer.shard is not None else 1)
