"""Ends of messages, and members of communicators."""

from collections.abc import Callable, Iterator

from faults.changes import Aim, Edit, alone, made, through
from faults.fault import Mutant
from faults.schedules import rewritten
from faults.selections import in_step
from zsim.schedule.mesh import Group, Span
from zsim.schedule.operation import Communication, Operation, Receive, Send, Together
from zsim.schedule.replace import replace
from zsim.schedule.schedule import Program, Schedule

Message = Send | Receive


def _offsets(schedule: Schedule, message: Message) -> list[int]:
    """Return offsets of all other members of the message's group, its own rank among them."""
    count = schedule.group_by_name[message.group].size(schedule.mesh)
    return [each for each in range(count) if (each - message.offset) % count]


def _puts(message: Message, offset: int) -> Callable[[Program], Program]:
    """Return the change of one message's offset, alone or one of several issued as one."""
    new = replace(message, offset=offset)

    def change(each: Operation) -> tuple[Operation, ...]:
        if isinstance(each, Together):
            members = tuple(new if one.id == message.id else one for one in each.members)
            return (replace(each, members=members),)
        return (new if each.id == message.id else each,)

    return lambda program: rewritten(program, change)


def _messages(schedule: Schedule) -> Iterator[Message]:
    for each in in_step(schedule):
        for one in each.members if isinstance(each, Together) else (each,):
            if isinstance(one, Message):
                yield one


def elsewhere(kind: type[Send] | type[Receive], *, on_one_rank: bool) -> Aim:
    """Return the operator that sends a message to another rank, or awaits it from one."""

    def aim(schedule: Schedule) -> Iterator[Edit]:
        changed = alone if on_one_rank else made
        for message in _messages(schedule):
            if isinstance(message, kind):
                for offset in _offsets(schedule, message):
                    text = f"{message.id} at offset {offset}, not {message.offset}"
                    yield from changed(schedule, _puts(message, offset), text)

    return aim


def all_elsewhere(schedule: Schedule) -> Iterator[Edit]:
    """Send every message one rank further, and await it from there."""

    def further(each: Communication) -> Communication:
        if isinstance(each, Message):
            return replace(each, offset=each.offset + (1 if isinstance(each, Send) else -1))
        return each

    def change(each: Operation) -> tuple[Operation, ...] | None:
        if isinstance(each, Together):
            return (replace(each, members=tuple(further(one) for one in each.members)),)
        return (further(each),) if isinstance(each, Message) else None

    if any(len(_offsets(schedule, message)) > 1 for message in _messages(schedule)):
        yield from through(schedule, change, "every message goes one rank further")


def _with_group(schedule: Schedule, group: Group, text: str) -> Iterator[Edit]:
    groups = tuple(group if each.name == group.name else each for each in schedule.groups)
    try:
        found = replace(schedule, groups=groups)
    except ValueError:
        return
    if found != schedule:
        yield Mutant.of(f"{group.name} {text}", found)


def along_other_axes(schedule: Schedule) -> Iterator[Edit]:
    """Lay a group along another axis, one more, or one less."""
    large = [axis.name for axis in schedule.mesh.axes if axis.size > 1]
    for group in schedule.groups:
        own = tuple(axis for axis in group.axes if axis in large)
        others = [(axis,) for axis in large] + [(*own, axis) for axis in large if axis not in own]
        others += [own[:place] + own[place + 1 :] for place in range(len(own))]
        for axes in others:
            ordered = tuple(axis for axis in large if axis in axes)
            if ordered and ordered != own:
                axes_in_words = ", ".join(ordered)
                yield from _with_group(
                    schedule, replace(group, axes=ordered), f"along {axes_in_words}"
                )


def without_a_member(schedule: Schedule) -> Iterator[Edit]:
    """Leave the first rank, or the last one, out of a group along one of its axes."""
    for group in schedule.groups:
        limits = schedule.mesh.limits(group.where)
        for axis in group.axes:
            low, high = limits[axis].start, limits[axis].stop
            rest = tuple(span for span in group.where if span.axis != axis)
            for start, end in ((low + 1, high), (low, high - 1)):
                if start < end:
                    where = (*rest, Span(axis=axis, start=start, end=end))
                    yield from _with_group(
                        schedule, replace(group, where=where), f"in {axis} {start} to {end}"
                    )


PEERS: dict[str, Aim] = {
    "sent to another rank": elsewhere(Send, on_one_rank=False),
    "sent to another rank by one rank": elsewhere(Send, on_one_rank=True),
    "received from another rank": elsewhere(Receive, on_one_rank=False),
    "received from another rank by one rank": elsewhere(Receive, on_one_rank=True),
    "every message one rank further": all_elsewhere,
    "group along other axes": along_other_axes,
    "group without a member": without_a_member,
}
