"""A stream of a simulated rank: its entries in order, each once its dependencies have ended.

Times that cannot change are computed ahead: a kernel whose inputs have known ends has a known end
itself, and needs no event. Time advances only for entries that depend on the network.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial

from zsim_des.clock.ready_queue import Agenda, Walker
from zsim_des.engine.arrival import ALONE, Arrival, Key
from zsim_des.engine.gpu_sharing import GpuSharing
from zsim_des.engine.host_issue import HostIssue, Item
from zsim_des.engine.rendezvous import CarriedStart, Rendezvous
from zsim_des.symmetry.classes import RankClass

UNKNOWN = -1

Interval = tuple[int, int]


@dataclass(slots=True)
class ProgramRun:
    """One run of setup or of a step on one rank class: when each slot started and ended.

    `noted` has the host time at allocations, `issuing` the interval in which it issued each
    stretch; `memory_wait_ps` is how long it waited for memory. `late` has, by stream, entries that
    waited only for the host: when each could have started and when the host issued it. `on_end` is
    called with each slot whose end becomes known.
    """

    step: int
    course: HostIssue
    starts: list[int]
    ends: list[int]
    on_end: Callable[["ProgramRun", int], None] | None = None
    noted: dict[str, int] = field(default_factory=dict[str, int])
    issuing: list[Interval] = field(default_factory=list[Interval])
    memory_wait_ps: int = 0
    late: dict[str, list[Interval]] = field(default_factory=dict[str, list[Interval]])
    watched: dict[int, list[Walker]] = field(default_factory=dict[int, "list[Walker]"])

    def has_drained(self) -> bool:
        """Return True if the end of every slot of this run is known."""
        return all(self.ends[slot] >= 0 for slot in self.course.slots)

    def finish(self, agenda: Agenda, slot: int, end_ps: int) -> None:
        """Record the end of `slot`, and wake its waiters."""
        self.ends[slot] = end_ps
        if self.on_end is not None:
            self.on_end(self, slot)
        if self.watched:
            for walker in self.watched.pop(slot, ()):
                agenda.wake(walker)

    def watch(self, slot: int, walker: Walker) -> None:
        """Wake `walker` when the end of `slot` becomes known."""
        self.watched.setdefault(slot, []).append(walker)


Links = Mapping[int, Sequence[tuple[ProgramRun, int]]]
"""By slot, the slots of earlier runs that it waits for."""


@dataclass(slots=True)
class EntryBatch:
    """Entries that the host put on a stream together: item i at `begin_ps` + its offset.

    An entry without `keys` meets no other rank class.
    """

    items: Sequence[Item]
    instance: ProgramRun
    begin_ps: int
    offsets_ps: Sequence[int]
    keys: Mapping[int, tuple[Key, ...]]
    links: Links


class Stream:
    """A queue of entries and the position in it.

    `end_ps` returns the end of a kernel that has the GPU to itself; with `beside` it may be later.
    `is_alone` returns True if no other entry of the rank can start before this stream advances.
    """

    def __init__(
        self,
        name: str,
        rank_class: RankClass,
        *,
        agenda: Agenda,
        rendezvous: Rendezvous,
        end_ps: Callable[[ProgramRun, Item, int], int] | None,
        beside: GpuSharing | None,
        is_alone: Callable[["Stream"], bool],
    ) -> None:
        self.name = name
        self.entry: Arrival | None = None
        self._rank_class = rank_class
        self._agenda = agenda
        self._rendezvous = rendezvous
        self._end_ps = end_ps
        self._beside = beside
        self._is_alone = is_alone
        self._queue: deque[EntryBatch] = deque()
        self._batch: EntryBatch | None = None
        self._at = 0
        self._free_ps = 0
        self._could_ps = 0  # when it could have run more; waits without an operation are not work
        self._traffic = 0

    @property
    def is_idle(self) -> bool:
        """Return True if every entry that the host put on the stream has ended."""
        return self._batch is None

    def put(self, batch: EntryBatch) -> None:
        """Append entries that the host has issued."""
        if self._batch is None:
            self._batch = batch
            self._agenda.wake(self)
        else:
            self._queue.append(batch)

    def advance(self) -> None:
        """Run entries until one has to wait."""
        while (batch := self._batch) is not None:
            instance, offsets_ps, count = batch.instance, batch.offsets_ps, len(batch.items)
            starts = instance.starts
            while self._at < count:
                item = batch.items[self._at]
                if item.is_plain and self._runs_ahead(instance):
                    self._run_plain(batch)
                    continue
                after_ps = self._after_ps(batch, item) if item.here or item.looks_back else 0
                if after_ps == UNKNOWN:
                    return
                could_ps = self._could_ps
                could_ps = max(could_ps, after_ps)
                ready_ps = issued_ps = batch.begin_ps + offsets_ps[item.order]
                ready_ps = max(ready_ps, after_ps)
                ready_ps = max(ready_ps, self._free_ps)
                shares = self._beside is not None and self._may_share(self._beside, item)
                if shares and ready_ps > self._agenda.env.now:
                    self._agenda.at(ready_ps, lambda: self._agenda.wake(self))
                    return
                is_work = item.what.operation is not None
                if could_ps < issued_ps and is_work:
                    instance.late.setdefault(self.name, []).append((could_ps, issued_ps))
                starts[item.slot] = ready_ps
                if item.is_met:
                    self._meet(batch, item, ready_ps)
                    return
                if item.is_carried:
                    start = CarriedStart(ready_ps, self._over)
                    if self._rendezvous.carry(self._rank_class, item.what, instance.step, start):
                        return
                end_ps = ready_ps + item.time_ps
                if self._end_ps is not None:
                    end_ps = self._end_ps(instance, item, ready_ps)
                if shares and end_ps > ready_ps:
                    self._share(item, end_ps - ready_ps)
                    return
                self._free_ps = end_ps
                self._could_ps = end_ps if is_work else could_ps
                self._at += 1
                instance.finish(self._agenda, item.slot, end_ps)
            self._at = 0
            self._batch = self._queue.popleft() if self._queue else None

    def _runs_ahead(self, instance: ProgramRun) -> bool:
        """Return True if times of plain kernels cannot change, and no watcher observes them."""
        if self._end_ps is not None or instance.on_end is not None:
            return False
        return self._beside is None or (self._beside.is_free and self._is_alone(self))

    def _run_plain(self, batch: EntryBatch) -> None:
        """Run kernels in sequence, up to one that is not plain or that has a waiter."""
        instance, items, offsets_ps = batch.instance, batch.items, batch.offsets_ps
        starts, ends, watched = instance.starts, instance.ends, instance.watched
        begin_ps, free_ps, could_ps = batch.begin_ps, self._free_ps, self._could_ps
        at, count = self._at, len(items)
        while at < count:
            item = items[at]
            if not item.is_plain:
                break
            start_ps = issued_ps = begin_ps + offsets_ps[item.order]
            if could_ps < issued_ps:
                instance.late.setdefault(self.name, []).append((could_ps, issued_ps))
            if free_ps > issued_ps:
                start_ps = free_ps
            slot = item.slot
            starts[slot] = start_ps
            ends[slot] = free_ps = could_ps = start_ps + item.time_ps
            at += 1
            if slot in watched:
                instance.finish(self._agenda, slot, free_ps)
                break
        self._at, self._free_ps, self._could_ps = at, free_ps, could_ps

    def _after_ps(self, batch: EntryBatch, item: Item) -> int:
        """Return when all dependencies have ended; UNKNOWN if one will wake the stream later."""
        instance = batch.instance
        ends, after_ps = instance.ends, 0
        for slot in item.here:
            end_ps = ends[slot]
            if end_ps < 0:
                instance.watch(slot, self)
                return UNKNOWN
            after_ps = max(after_ps, end_ps)
        if item.looks_back:
            for where, slot in batch.links[item.slot]:
                end_ps = where.ends[slot]
                if end_ps < 0:
                    where.watch(slot, self)
                    return UNKNOWN
                after_ps = max(after_ps, end_ps)
        return after_ps

    def _may_share(self, beside: GpuSharing, item: Item) -> bool:
        """Return True if other work may share the GPU, or the network, with an entry."""
        if item.is_recorded:
            return False
        return item.is_met or item.is_carried or not (beside.is_free and self._is_alone(self))

    def _share(self, item: Item, time_ps: int) -> None:
        """Run a kernel that takes `time_ps` alone; scale its memory-moving time accordingly."""
        beside = self._beside
        assert beside is not None
        moving_ps = item.what.moving_ps
        if time_ps != item.time_ps:
            moving_ps = moving_ps * time_ps // item.time_ps
        beside.kernel(time_ps, moving_ps, self._over)

    def _meet(self, batch: EntryBatch, item: Item, ready_ps: int) -> None:
        """Arrive at the meeting of a communication, which `_met` ends."""
        beside = self._beside
        if beside is not None:
            beside.come(share=item.what.share)
            beside.carry(item.what.taken_ps)
        begins, instance = item.what.begins, batch.instance
        self.entry = Arrival(
            self._rank_class,
            item.what.name,
            batch.instance.step,
            item.what.members,
            batch.keys.get(item.slot, ALONE),
            self._met,
            ready_ps,
            None if beside is None or beside.has_threads else self._move,
            None if begins is None else partial(instance.finish, self._agenda, begins),
        )
        self._rendezvous.come(self.entry)

    def _move(self, bytes_per_s: Fraction) -> None:
        """Set the rate at which bytes of the current communication pass the GPU's memory."""
        assert self._beside is not None
        self._traffic = self._beside.move(bytes_per_s, self._traffic)

    def _met(self, end_ps: int) -> None:
        self.entry = None
        if self._beside is not None:
            assert self._batch is not None
            share = self._batch.items[self._at].what.share
            self._beside.leave(end_ps, self._traffic, share=share)
            self._traffic = 0
        self._over(end_ps)

    def _over(self, end_ps: int) -> None:
        """End the current entry at `end_ps`."""
        batch = self._batch
        assert batch is not None
        self._free_ps = self._could_ps = end_ps
        slot = batch.items[self._at].slot
        self._at += 1
        batch.instance.finish(self._agenda, slot, end_ps)
        self._agenda.wake(self)

    def stuck(self) -> str | None:
        """Return the entry that blocks the stream, and its reason; None if it is idle."""
        batch = self._batch
        if batch is None:
            return None
        item = batch.items[self._at]
        if self.entry is not None:
            reason = self._rendezvous.missing(self.entry)
        else:
            known = {each.slot: each.name for each in batch.instance.course.issued}
            late = [slot for slot in item.here if batch.instance.ends[slot] < 0]
            reason = known[late[0]] if late else "its communicator or a previous instance"
        return f"{item.what.name} on {self.name} waits for {reason}"
