"""The simulated ranks: the host and the streams of one rank class, which wait for each other.

A host issues its program as fast as it can, stretch by stretch, until it must wait. Hosts and
streams are not processes: an agenda wakes the waiting ones, and they continue.
"""

from collections.abc import Iterator, Sequence

from zsim.cluster.cluster import Gpu
from zsim.schedule.issue_order import SETUP
from zsim.schedule.operation import Allocate, Operation
from zsim_des.clock.ready_queue import Agenda
from zsim_des.engine.arrival import Key
from zsim_des.engine.gpu_sharing import GpuSharing, takes_from_kernels, uses_libraries
from zsim_des.engine.host_issue import Courses, IssueStretch, Item
from zsim_des.engine.instruction import AllocateRequest, Choose
from zsim_des.engine.memory_wait import AllocationService, Awaited
from zsim_des.engine.rendezvous import Rendezvous
from zsim_des.engine.stream import UNKNOWN, EntryBatch, Links, ProgramRun, Stream
from zsim_des.engine.watch import Durations, RunWatcher
from zsim_des.symmetry.classes import RankClass
from zsim_des.symmetry.fault_state import Pace


class Rank:
    """The host and streams of one rank class.

    Kernels run at `pace` and share `gpu` with collectives. If given, `durations` replaces the times
    of kernels and of the host. `watcher` is called at each event. With `memory`, allocations of the
    host may have to wait. `host_ps` is the time of the host. `end_ps` returns the end of a kernel
    that has the GPU to itself, None if its time is that of its item.
    """

    def __init__(
        self,
        agenda: Agenda,
        rank_class: RankClass,
        program: Courses,
        rendezvous: Rendezvous,
        *,
        pace: Pace | None,
        gpu: Gpu | None,
        durations: Durations | None = None,
        watcher: RunWatcher | None = None,
    ) -> None:
        self.rank_class = rank_class
        self.program = program
        self.memory: AllocationService | None = None
        self.instances: list[ProgramRun] = []
        self._before: list[ProgramRun] = []  # steps before the current run
        self._scalars = program.scalars
        self._agenda = agenda
        self._rendezvous = rendezvous
        self._pace = pace
        self._durations = durations
        self._watcher = watcher
        self._host_at = ""
        self.host_ps = 0
        self._begin_ps = 0
        self._tails: dict[str, tuple[ProgramRun, int]] = {}
        self._meets = bool(rank_class.peers) or any(
            len(each.classes) > 1 for each in rank_class.communicators.values()
        )
        self._going: Iterator[Awaited | int] = iter(())
        self._awaited: Awaited | None = None
        self._has_ended = False
        beside = None
        if gpu is not None and (takes_from_kernels(gpu) or uses_libraries(rank_class.program)):
            beside = GpuSharing(agenda, gpu)
        changes = pace is not None or durations is not None
        self.end_ps = self._end_ps if changes else None
        self._streams = [
            Stream(
                name,
                rank_class,
                agenda=agenda,
                rendezvous=rendezvous,
                end_ps=self.end_ps,
                beside=beside,
                is_alone=self._is_alone,
            )
            for name in program.streams
        ]

    def begin(self, steps: Sequence[int], begin_ps: int, overflow_steps: frozenset[int]) -> None:
        """Start the host at `begin_ps` before `steps`: setup alone, or all other steps."""
        self.start_at(begin_ps)
        self._going = self._host(steps, overflow_steps)
        self._awaited, self._has_ended = None, False
        self._agenda.wake(self)

    def start_at(self, begin_ps: int) -> None:
        """Set the time of the host to `begin_ps`; the windows of slow hardware count from it."""
        self.host_ps = self._begin_ps = begin_ps

    def open(self, step: int, overflow_steps: frozenset[int]) -> ProgramRun:
        """Return the run of setup or of `step` that the host issues next."""
        course = self.program.of(step, self._scalars, overflows=step in overflow_steps)
        self._scalars = course.scalars
        unknown = [UNKNOWN] * len(self.program.slots)
        on_end = None if self._watcher is None else self._report_end
        instance = ProgramRun(step, course, unknown, unknown.copy(), on_end)
        if self.instances and self.instances[-1].step != SETUP:
            self._before.append(self.instances[-1])
        self.instances.append(instance)
        return instance

    def close(self, instance: ProgramRun) -> None:
        """Note the last operation of each group, once the host has issued all of `instance`."""
        for group, slot in instance.course.closes.items():
            self._tails[group] = (instance, slot)

    def advance(self) -> None:
        """Advance the host until it must wait."""
        self._awaited = None
        for awaited in self._going:
            if isinstance(awaited, int):
                self._agenda.wake_after(awaited, self)
            else:
                instance, slot = self._awaited = awaited
                instance.watch(slot, self)
            return
        self._has_ended = True

    def _is_alone(self, stream: Stream) -> bool:
        """Return True if no other entry of the rank can start before `stream` has advanced.

        The other streams are idle, and the host issues nothing: it waits for a slot of this stream.
        """
        if not self._has_ended:
            if self._awaited is None:
                return False
            instance, slot = self._awaited
            if instance.ends[slot] != UNKNOWN:
                return False
        return all(other is stream or other.is_idle for other in self._streams)

    def _host(
        self, steps: Sequence[int], overflow_steps: frozenset[int]
    ) -> Iterator[Awaited | int]:
        """Issue all steps; yield each slot or time that the host waits for."""
        for step in steps:
            instance = self.open(step, overflow_steps)
            for stretch in instance.course.stretches:
                self._issue(stretch, instance)
                stop = stretch.stop
                if stop is None:
                    continue
                self._host_at = stop.name
                if isinstance(stop, AllocateRequest):
                    yield from self._request_memory(instance, stop.operation)
                    self._host_at = ""
                    continue
                waited = [(instance, slot) for slot in stop.after.here]
                waited += self.earlier(stop.after.earlier)
                yield from self._wait(waited)
                self._host_at = ""
                for slot in stretch.skipped:
                    instance.ends[slot] = 0
                if isinstance(stop, Choose):
                    self._report_action(instance, stop.operation)
            self.close(instance)

    def _wait(self, waited: Sequence[Awaited]) -> Iterator[Awaited]:
        """Wait for slots; yield each one that has not ended."""
        for where, slot in waited:
            if where.ends[slot] < 0:
                yield where, slot
            self.host_ps = max(self.host_ps, where.ends[slot])

    def _request_memory(self, instance: ProgramRun, allocate: Allocate) -> Iterator[Awaited | int]:
        """Request memory, and wait until it is available."""
        memory = self.memory
        assert memory is not None
        if memory.depends_on_time and self._agenda.env.now <= self.host_ps:
            yield self.host_ps
        begin_ps = self.host_ps
        yield from self._wait(memory.allocate(instance, allocate, begin_ps))
        instance.memory_wait_ps += self.host_ps - begin_ps

    def _issue(self, stretch: IssueStretch, instance: ProgramRun) -> None:
        """Put the entries of a stretch on their streams."""
        begin_ps = issuing_ps = self.host_ps
        if not stretch.acts:  # the common case between two requests for memory
            if self._durations is None:
                self.host_ps += stretch.length_ps
            instance.issuing.append((issuing_ps, self.host_ps))
            return
        offsets_ps = stretch.offsets_ps
        if self._durations is None and self._watcher is None:
            self.host_ps += stretch.length_ps
            for name, offset_ps in stretch.notes_ps:
                instance.noted[name] = begin_ps + offset_ps
        else:
            offsets_ps = self._walk(stretch, instance)
            if self._durations is None:
                self.host_ps = begin_ps + stretch.length_ps
            begin_ps = 0
        instance.issuing.append((issuing_ps, self.host_ps))
        keys: dict[int, tuple[Key, ...]] = {}
        for item in stretch.meetings:
            if self._meets or len(item.what.members) > 1:
                keys[item.slot] = self._rendezvous.keys(self.rank_class, item.what.members)
        links: Links = {item.slot: self.links(item) for item in stretch.links}
        for stream, items in zip(self._streams, stretch.items, strict=True):
            if items:
                stream.put(EntryBatch(items, instance, begin_ps, offsets_ps, keys, links))
        if self.memory is not None:
            streams = zip(self.program.streams, stretch.items, strict=True)
            tails = {name: items[-1].slot for name, items in streams if items}
            self.memory.issue(instance, stretch.frees, tails)

    def _walk(self, stretch: IssueStretch, instance: ProgramRun) -> list[int]:
        """Issue the acts of a stretch one by one; return the host time at each entry."""
        rank, step, issued_ps = self.rank_class.rank, instance.step, list[int]()
        for act in stretch.acts:
            if not isinstance(act, Item):
                instance.noted[act.name] = self.host_ps
                self._report_action(instance, act.operation)
                continue
            taken_ps = act.what.launch_ps
            if self._durations is not None:
                taken_ps = self._durations.issue_ps(rank, step, act.what.name)
            self.host_ps += taken_ps
            issued_ps.append(self.host_ps)
            if self._watcher is not None:
                self._watcher.put(rank, step, act.what, self.host_ps)
        return issued_ps

    def links(self, item: Item) -> list[tuple[ProgramRun, int]]:
        """Return the slots of earlier runs that `item` waits for."""
        found = self.earlier(item.earlier)
        if item.opens is not None and item.opens in self._tails:
            found.append(self._tails[item.opens])
        return found

    def earlier(self, slots: Sequence[int]) -> list[tuple[ProgramRun, int]]:
        """Return each slot with the latest step before the current run that ran it, if any."""
        found: list[tuple[ProgramRun, int]] = []
        for slot in slots:
            for before in reversed(self._before):
                if slot in before.course.slots:
                    found.append((before, slot))
                    break
        return found

    def _report_action(self, instance: ProgramRun, operation: Operation) -> None:
        if self._watcher is not None:
            self._watcher.act(self.rank_class.rank, instance.step, operation, self.host_ps)

    def _report_end(self, instance: ProgramRun, slot: int) -> None:
        assert self._watcher is not None
        span_ps = instance.starts[slot], instance.ends[slot]
        self._watcher.end(self.rank_class.rank, instance.step, slot, span_ps)

    def _end_ps(self, instance: ProgramRun, item: Item, start_ps: int) -> int:
        """Return the end of a kernel that has the GPU to itself."""
        what, step = item.what, instance.step
        if self._durations is not None:
            return start_ps + self._durations.kernel_ps(self.rank_class.rank, step, what.name)
        if self._pace is None or step == SETUP:
            return start_ps + what.time_ps
        which = step * len(self.program.slots) + what.slot
        begin_ps = self._begin_ps
        return begin_ps + self._pace.end_ps(start_ps - begin_ps, what.time_ps, which)

    def forget_streams(self) -> None:
        """Drop the streams, which refer to the rank, so that it is freed with its last user."""
        self._streams.clear()
        self._going = iter(())

    def stuck(self) -> list[str]:
        """Return the operations that block the host or a stream forever, each with the reason."""
        role = self.rank_class.program.role
        found = [f"{role}: host at {self._host_at}"] if self._host_at else []
        reasons = [stream.stuck() for stream in self._streams]
        return found + [f"{role}: {reason}" for reason in reasons if reason is not None]

    def drained_ps(self) -> int:
        """Return when everything issued so far has finished, the host included."""
        ends = [max(instance.ends, default=0) for instance in self.instances]
        return max([self.host_ps, *ends])
