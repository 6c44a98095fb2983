"""The simulated ranks: one host and its streams per rank class, as SimPy processes.

Times are worked out ahead where nothing can change them: a kernel whose inputs have known ends has
a known end itself, and costs no event. Processes wait, and time advances, only for what depends on
the network.
"""

from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

import simpy

from zsim.issue import SETUP
from zsim_des.beside import Beside
from zsim_des.fold import RankClass
from zsim_des.instruction import After, Choose, Enqueue, Instruction, Lowered, Note
from zsim_des.rendezvous import Entry, Key, Rendezvous
from zsim_des.trouble import Pace

Steps = Generator[simpy.Event, None, None]
UNKNOWN = -1


@dataclass(slots=True)
class Instance:
    """One run of setup or of a step on one rank class: when each slot started and ended.

    `issued` has what the host put on streams, in order; `noted` the host's time at allocations.
    """

    step: int
    starts: list[int]
    ends: list[int]
    issued: list[Enqueue] = field(default_factory=list[Enqueue])
    noted: dict[str, int] = field(default_factory=dict[str, int])
    watched: dict[int, simpy.Event] = field(default_factory=dict[int, simpy.Event])

    def finish(self, slot: int, end_ps: int) -> None:
        """The end of `slot` is known; wake who waits for it."""
        self.ends[slot] = end_ps
        if self.watched:
            event = self.watched.pop(slot, None)
            if event is not None:
                event.succeed()

    def watch(self, env: simpy.Environment, slot: int) -> simpy.Event:
        """What happens when the end of `slot` becomes known."""
        event = self.watched.get(slot)
        if event is None:
            event = self.watched[slot] = env.event()
        return event


NOBODY: Sequence[tuple[Instance, int]] = ()


@dataclass(slots=True)
class Queued:
    """An entry of a stream, with all that it waits for beyond its place in the queue."""

    what: Enqueue
    instance: Instance
    earlier: Sequence[tuple[Instance, int]]
    keys: tuple[Key, ...]
    issued_ps: int


@dataclass(slots=True)
class Stream:
    """A queue of entries, and what it stands at: for what a deadlock leaves behind."""

    name: str
    queue: deque[Queued] = field(default_factory=deque[Queued])
    bell: simpy.Event | None = None
    at: Queued | None = None
    entry: Entry | None = None


class Rank:
    """The host and streams of one rank class.

    Kernels run at `pace`, and take `slowdown` times as long while a collective is on the GPU.
    """

    def __init__(
        self,
        env: simpy.Environment,
        rank_class: RankClass,
        program: Lowered,
        rendezvous: Rendezvous,
        *,
        pace: Pace | None,
        slowdown: Fraction,
    ) -> None:
        self.env = env
        self.rank_class = rank_class
        self.program = program
        self.instances: list[Instance] = []
        self.host_at = ""
        self._host_ps = 0
        self._pace = pace
        self._beside = Beside(env, slowdown) if slowdown != 1 else None
        self._begin_ps = 0
        self._instructions: tuple[Instruction, ...] = ()
        self._rendezvous = rendezvous
        self._last: dict[int, Instance] = {}
        self._tails: dict[str, tuple[Instance, int]] = {}
        self.streams = [Stream(name) for name in program.streams]
        for stream in self.streams:
            env.process(self._stream(stream))

    def begin(self, part: tuple[Instruction, ...], begin_ps: int) -> None:
        """The host stands before `part`, setup or the step, at `begin_ps`."""
        self._instructions = part
        self._host_ps = self._begin_ps = begin_ps

    def host(self, steps: Sequence[int], overflow_steps: frozenset[int]) -> Steps:
        """The process of the host: issue the part once for each of `steps`."""
        for step in steps:
            unknown = [UNKNOWN] * len(self.program.slots)
            instance = Instance(step, unknown, unknown.copy())
            self.instances.append(instance)
            yield from self._issue(self._instructions, instance, overflows=step in overflow_steps)
            if step != SETUP:
                for enqueued in instance.issued:
                    self._last[enqueued.slot] = instance

    def _issue(
        self, part: tuple[Instruction, ...], instance: Instance, *, overflows: bool
    ) -> Steps:
        for instruction in part:
            if isinstance(instruction, Enqueue):
                self._put(instruction, instance)
            elif isinstance(instruction, Note):
                instance.noted[instruction.name] = self._host_ps
            else:
                yield from self._stop(instruction.name, instruction.after, instance)
                if isinstance(instruction, Choose):
                    side, other = instruction.otherwise, instruction.then_slots
                    if overflows:
                        side, other = instruction.then, instruction.otherwise_slots
                    for slot in other:
                        instance.ends[slot] = 0
                    yield from self._issue(side, instance, overflows=overflows)

    def _stop(self, name: str, after: After, instance: Instance) -> Steps:
        """The host waits until everything in `after` has finished."""
        waited = [(instance, slot) for slot in after.here]
        waited += self._earlier(after)
        for where, slot in waited:
            if where.ends[slot] < 0:
                self.host_at = name
                yield where.watch(self.env, slot)
                self.host_at = ""
            self._host_ps = max(self._host_ps, where.ends[slot])

    def _earlier(self, after: After) -> list[tuple[Instance, int]]:
        return [(self._last[slot], slot) for slot in after.earlier if slot in self._last]

    def _put(self, what: Enqueue, instance: Instance) -> None:
        self._host_ps += what.launch_ps
        instance.issued.append(what)
        earlier = self._earlier(what.after) if what.after.earlier else NOBODY
        keys: tuple[Key, ...] = ()
        if what.members:
            keys = self._rendezvous.keys(self.rank_class, what.members)
            group = what.members[0][0].group
            if group in self._tails:  # a communicator runs one operation at a time
                earlier = [*earlier, self._tails[group]]
            self._tails[group] = (instance, what.slot)
        stream = self.streams[what.stream]
        stream.queue.append(Queued(what, instance, earlier, keys, self._host_ps))
        if stream.bell is not None:
            stream.bell.succeed()
            stream.bell = None

    def _stream(self, stream: Stream) -> Steps:
        free_ps = 0
        queue = stream.queue
        while True:
            if not queue:
                stream.bell = self.env.event()
                yield stream.bell
            queued = stream.at = queue.popleft()
            what, instance = queued.what, queued.instance
            ready_ps = queued.issued_ps
            ready_ps = max(ready_ps, free_ps)
            ends = instance.ends
            for slot in what.after.here:
                if ends[slot] < 0:
                    yield instance.watch(self.env, slot)
                ready_ps = max(ready_ps, ends[slot])
            for where, slot in queued.earlier:
                if where.ends[slot] < 0:
                    yield where.watch(self.env, slot)
                ready_ps = max(ready_ps, where.ends[slot])
            slot = what.slot
            instance.starts[slot] = ready_ps
            if self._beside is not None:
                yield from self._beside.reach(ready_ps)
            if what.members:
                stream.entry = self._entry(queued, ready_ps)
                yield from self._communicate(stream.entry, queued)
                stream.entry = None
                free_ps = ends[slot]
            else:
                free_ps = self._end_ps(queued, ready_ps)
                if self._beside is not None and free_ps > ready_ps:
                    yield from self._beside.kernel(free_ps - ready_ps)
                    free_ps = int(self.env.now)
                instance.finish(slot, free_ps)
            stream.at = None

    def _communicate(self, entry: Entry, queued: Queued) -> Steps:
        """Meet the others, and wait until it is done."""
        instance, slot = queued.instance, queued.what.slot
        if self._beside is not None:
            self._beside.collective(1)
        self._rendezvous.come(entry)
        if instance.ends[slot] < 0:
            yield instance.watch(self.env, slot)
        if self._beside is not None:
            yield from self._beside.reach(instance.ends[slot])
            self._beside.collective(-1)

    def _end_ps(self, queued: Queued, start_ps: int) -> int:
        """When a kernel ends that has the GPU to itself."""
        what = queued.what
        if self._pace is None or queued.instance.step == SETUP:
            return start_ps + what.time_ps
        which = queued.instance.step * len(self.program.slots) + what.slot
        begin_ps = self._begin_ps
        return begin_ps + self._pace.end_ps(start_ps - begin_ps, what.time_ps, which)

    def _entry(self, queued: Queued, ready_ps: int) -> Entry:
        instance, slot = queued.instance, queued.what.slot
        return Entry(
            self.rank_class,
            queued.what.name,
            instance.step,
            queued.what.members,
            queued.keys,
            lambda end_ps: instance.finish(slot, end_ps),
            ready_ps,
        )

    def stuck(self) -> list[str]:
        """Operations at which the host or a stream stands for ever, each with what it waits for."""
        role = self.rank_class.program.role
        found = [f"{role}: host at {self.host_at}"] if self.host_at else []
        for stream in self.streams:
            if stream.at is None:
                continue
            what = stream.at.what
            if stream.entry is not None:
                reason = self._rendezvous.missing(stream.entry)
            else:
                known = {each.slot: each.name for each in stream.at.instance.issued}
                late = [s for s in what.after.here if stream.at.instance.ends[s] < 0]
                reason = known[late[0]] if late else "its communicator or a previous instance"
            found.append(f"{role}: {what.name} on {stream.name} waits for {reason}")
        return found

    def drained_ps(self) -> int:
        """When everything issued so far has finished, the host included."""
        ends = [max(instance.ends, default=0) for instance in self.instances]
        return max([self._host_ps, *ends])
