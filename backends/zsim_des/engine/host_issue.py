"""The operations that a host issues in one run of a part, as stretches between its waits.

Computed once for all ranks of a role and all runs that take the same branches. Streams run in
order, so an entry needs to wait only for the latest of its dependencies on each other stream, and
only once. A waited free takes no time: its dependencies move to the next entry of its stream.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from zsim.schedule.issue_order import SETUP, set_scalar
from zsim.schedule.operation import Free, SetScalar
from zsim_des.engine.instruction import (
    AllocateRequest,
    Choose,
    Enqueue,
    HostNote,
    Instruction,
    Lowered,
    Stop,
)


@dataclass(slots=True)
class Item:
    """An entry of a stream and its dependencies beyond its place in the queue.

    `order` is its number among the entries that the host issues in this stretch. `here` are slots
    of the same run, `earlier` slots of the latest previous run that has them. `opens` names the
    group whose first operation in the part this is: it waits for the group's last operation before.
    If `is_recorded`, its time is fixed and does not change while other work shares the GPU. If
    `is_plain`, it is a kernel that waits only for its turn and has a fixed cost.
    """

    what: Enqueue
    slot: int
    time_ps: int
    order: int
    here: tuple[int, ...]
    earlier: tuple[int, ...]
    opens: str | None
    looks_back: bool
    is_met: bool
    is_carried: bool
    is_recorded: bool
    is_plain: bool


@dataclass(slots=True)
class IssueStretch:
    """Operations that the host issues without a wait, and the wait at their end.

    `acts` has all of them in order, `items` the entries of each stream, `frees` the memory that a
    host that may have to wait for memory gives back. `offsets_ps` has, by an item's order, the host
    time since the start of the stretch, `length_ps` the time at its end. Once the wait has passed,
    slots in `skipped` count as finished.
    """

    items: tuple[list[Item], ...]
    acts: list[Item | HostNote] = field(default_factory=list[Item | HostNote])
    meetings: list[Item] = field(default_factory=list[Item])
    links: list[Item] = field(default_factory=list[Item])
    frees: list[Free] = field(default_factory=list[Free])
    offsets_ps: list[int] = field(default_factory=list[int])
    notes_ps: list[tuple[str, int]] = field(default_factory=list[tuple[str, int]])
    length_ps: int = 0
    stop: Stop | Choose | AllocateRequest | None = None
    skipped: tuple[int, ...] = ()


@dataclass(slots=True)
class HostIssue:
    """One run of a part: `issued` in order, and the slot of each group's last operation.

    `scalars` are the values after the run of the scalars that branches read.
    """

    stretches: list[IssueStretch]
    issued: list[Enqueue]
    closes: dict[str, int]
    slots: frozenset[int]
    scalars: Mapping[str, float]


class Courses:
    """The courses of one role, each computed at first use.

    If `apart`, waited frees stay separate entries. This is needed if a watcher observes each one,
    or a host may have to wait for them.
    """

    def __init__(self, lowered: Lowered, *, apart: bool = False) -> None:
        self.streams = lowered.streams
        self.slots = lowered.slots
        self._lowered = lowered
        self._apart = apart
        self._made: dict[tuple[bool, bool, tuple[float, ...]], HostIssue] = {}

    @property
    def scalars(self) -> Mapping[str, float]:
        """Return the scalars that branches read, with their values at the start of setup."""
        return self._lowered.scalars

    def of(self, step: int, scalars: Mapping[str, float], *, overflows: bool) -> HostIssue:
        """Return the course of setup, or of a step that starts with `scalars`."""
        key = (step == SETUP, overflows and step != SETUP, tuple(scalars.values()))
        made = self._made.get(key)
        if made is None:
            part = self._lowered.setup if step == SETUP else self._lowered.step
            making = _Making(self._lowered, scalars, merges=not self._apart)
            making.issue(part, overflows=key[1])
            made = self._made[key] = making.course()
        return made


class _Making:
    """Follows the host through a part. `_places` maps a slot to its stream and position there."""

    def __init__(self, lowered: Lowered, scalars: Mapping[str, float], *, merges: bool) -> None:
        self._scalars = dict(scalars)
        self._count = len(lowered.streams)
        self._awaited = lowered.awaited
        self._merges = merges
        self._issued: list[Enqueue] = []
        self._closes: dict[str, int] = {}
        self._places: dict[int, tuple[int, int]] = {}
        self._lengths = [0] * self._count
        self._reached: list[dict[int, int]] = [{} for _ in range(self._count)]
        self._merged: list[list[Enqueue]] = [[] for _ in range(self._count)]
        self._now = self._stretch()
        self._stretches = [self._now]

    def _stretch(self) -> IssueStretch:
        return IssueStretch(tuple([] for _ in range(self._count)))

    def course(self) -> HostIssue:
        """Return the whole course. Frees that no later entry absorbed become separate entries."""
        for merged in self._merged:
            if merged:
                self._append(merged.pop())
        taken = frozenset(what.slot for what in self._issued)
        return HostIssue(self._stretches, self._issued, self._closes, taken, self._scalars)

    def issue(self, part: tuple[Instruction, ...], *, overflows: bool) -> None:
        """Issue `part`, including the branches that the host takes."""
        for instruction in part:
            if isinstance(instruction, Enqueue):
                self._put(instruction)
            elif isinstance(instruction, HostNote):
                self._now.acts.append(instruction)
                self._now.notes_ps.append((instruction.name, self._now.length_ps))
                if isinstance(instruction.operation, Free):
                    self._now.frees.append(instruction.operation)
                elif isinstance(instruction.operation, SetScalar):
                    set_scalar(instruction.operation, self._scalars)
            else:
                self._stop(instruction, overflows=overflows)

    def _stop(self, instruction: Stop | Choose | AllocateRequest, *, overflows: bool) -> None:
        ended = self._now
        ended.length_ps += instruction.launch_ps
        ended.stop = instruction
        self._now = self._stretch()
        self._stretches.append(self._now)
        if isinstance(instruction, Choose):
            side, ended.skipped = instruction.otherwise, instruction.then_slots
            scalar = instruction.operation.scalar
            if overflows if scalar is None else self._scalars[scalar]:
                side, ended.skipped = instruction.then, instruction.otherwise_slots
            self.issue(side, overflows=overflows)

    def _put(self, what: Enqueue) -> None:
        self._now.length_ps += what.launch_ps
        self._issued.append(what)
        if self._merges and what.operation is None and what.slot not in self._awaited:
            self._merged[what.stream].append(what)
        else:
            self._append(what)

    def _append(self, what: Enqueue) -> None:
        stream, stretch = what.stream, self._now
        waits = list(what.after.here)
        earlier = what.after.earlier
        if self._merged[stream]:
            for free in self._merged[stream]:
                waits += free.after.here
                earlier += free.after.earlier
            self._merged[stream].clear()
        opens = None
        if what.members:  # a communicator runs one operation at a time
            group = what.members[0][0].group
            if group in self._closes:
                waits.append(self._closes[group])
            else:
                opens = group
            self._closes[group] = what.slot
        here = self._still(stream, waits) if waits else ()
        order, looks_back = len(stretch.offsets_ps), bool(earlier) or opens is not None
        is_met = bool(what.members)
        waits_for = (here, earlier, opens, looks_back)
        is_carried = what.carries is not None
        is_plain = not (here or looks_back or is_met or is_carried or what.operation is None)
        kind = (is_met, is_carried, what.is_recorded, is_plain)
        item = Item(what, what.slot, what.time_ps, order, *waits_for, *kind)
        stretch.offsets_ps.append(stretch.length_ps)
        stretch.items[stream].append(item)
        stretch.acts.append(item)
        if what.members:
            stretch.meetings.append(item)
        if looks_back:
            stretch.links.append(item)
        for slot in (what.slot,) if what.begins is None else (what.begins, what.slot):
            self._places[slot] = stream, self._lengths[stream]
            self._lengths[stream] += 1

    def _still(self, stream: int, waits: list[int]) -> tuple[int, ...]:
        """Return the slots in `waits` that still need a wait; skip branches that are not taken."""
        reached = self._reached[stream]
        latest: dict[int, int] = {}
        for slot in waits:
            place = self._places.get(slot)
            if place is None:
                continue
            other, position = place
            if other != stream and reached.get(other, -1) < position:
                reached[other] = position
                latest[other] = slot
        return tuple(latest.values())
