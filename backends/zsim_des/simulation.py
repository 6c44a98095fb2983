"""`SimBackend`: simulates a job and returns its trace."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial
from itertools import chain
from math import ceil
from typing import TYPE_CHECKING

from zsim.backend.backend import (
    BackendTraits,
    Job,
    NoRouteError,
    RefusedError,
    RunFailedError,
    UnsteadyError,
)
from zsim.backend.run_size import too_large
from zsim.cluster.cluster import ClusterError, Gpu
from zsim.cluster.fault import Fault, Jitter, Neighbour, Window
from zsim.gc_paused import uncollected
from zsim.memory import RankMemory
from zsim.network.link_load import Decision
from zsim.prediction.predicted_error import step_error
from zsim.schedule.binding import Ratio
from zsim.schedule.issue_order import NO_OVERFLOW, SETUP
from zsim.schedule.schedule import Schedule
from zsim.trace.trace import (
    Interval,
    LastStep,
    LinkUse,
    OutOfMemory,
    PeriodicStep,
    RankStep,
    RankTrace,
    StepError,
    Trace,
)
from zsim_des.clock.ready_queue import Agenda, Clock
from zsim_des.engine.ahead import AheadRun, NotAheadError, Tapes
from zsim_des.engine.gpu_sharing import takes_from_kernels
from zsim_des.engine.host_issue import Courses, HostIssue
from zsim_des.engine.lowering import LoweringError, lower
from zsim_des.engine.memory_wait import AllocationService
from zsim_des.engine.rank import Rank
from zsim_des.engine.record import Records
from zsim_des.engine.rendezvous import MismatchError, Rendezvous
from zsim_des.engine.spans import SlotKinds, rank_period, rank_step, slots_of
from zsim_des.engine.steady_state import steady_steps
from zsim_des.engine.watch import Durations, RunWatcher
from zsim_des.engine.worst_case import WorstCases
from zsim_des.network.communicator_placement import Used, used_of
from zsim_des.network.edge_routes import CutError
from zsim_des.network.fluid import Network
from zsim_des.symmetry.classes import Fold
from zsim_des.symmetry.fault_state import Disturbances
from zsim_des.symmetry.fold import fold
from zsim_des.symmetry.folded_links import FoldedLinkTable, shapes

if TYPE_CHECKING:
    from zsim.schedule.bind import ExcessRows

FOLDS_KEPT = 1000
"""Maximum number of cluster states whose folds are kept."""


@dataclass(frozen=True, slots=True)
class LoweredSchedule:
    """Instructions by role and the groups in use, with the schedule and GPU of their origin.

    `asking` are the instructions of hosts that request memory, filled at first use. `tapes` are the
    courses of runs without events, `uneven` the classes of communicators that need events.
    """

    schedule: Schedule
    gpu: Gpu
    programs: dict[str, Courses]
    used: Used
    worst_cases: WorstCases
    asking: dict[str, Courses] = field(default_factory=dict[str, Courses])
    folds: dict[object, Fold] = field(default_factory=dict[object, Fold])
    tapes: Tapes = field(default_factory=Tapes)
    uneven: set[object] = field(default_factory=set[object])
    slots_by_course: dict[int, SlotKinds] = field(default_factory=dict[int, SlotKinds])

    def slots(self, course: HostIssue) -> SlotKinds:
        """Return the kinds of the slots of `course`, computed once per course."""
        found = self.slots_by_course.get(id(course))
        if found is None:
            found = self.slots_by_course[id(course)] = slots_of(course)
        return found

    def fold(
        self, disturbances: Disturbances, *, unfold: bool, whole: Schedule | None = None
    ) -> Fold:
        """Return the classes of the schedule; clusters that differ only in bandwidth share them."""
        if unfold:
            return fold(self.schedule, disturbances, unfold=True, used=self.used)
        key = disturbances.shape(), whole is None
        found = self.folds.get(key)
        if found is None:
            found = fold(self.schedule, disturbances, used=self.used, whole=whole)
            if len(self.folds) >= FOLDS_KEPT:
                self.folds.clear()
            self.folds[key] = found
        return found


EVENTS_AT_ONCE = 5000
"""Events between two progress reports: about a tenth of a second."""

At = Callable[[int, Callable[[], None]], None]
"""Calls a function at a time after the start of the first step."""


class SimBackend:
    """Simulates a schedule on a cluster, by events, in integer picoseconds.

    The event of a communication starts when the rank reaches it, like a GPU kernel that waits for
    its peers. It ends for all members at the same time.

    Attributes:
        unfold: simulate every rank separately instead of one per class.
        overflow_steps: steps in which every branch finds a value that is not zero.
        faults: slow or dead hardware. Ranks that a fault affects differently are simulated
            separately; jitter affects every rank differently.
        neighbours: other jobs that use the links.
        decision: the algorithm of collectives that support it, and its number of chunks; if not
            given, the tuner chooses if the cluster has fitted constants, else a ring is used.
        durations: times of all operations, in place of the cluster's times.
        watcher: observer, called with each event once it is known.
        progress: called with the number of simulated steps and the total.
    """

    name = "sim"
    traits = BackendTraits(
        predicts=True, options=frozenset({"faults", "neighbours", "decision", "progress"})
    )

    def __init__(
        self,
        *,
        unfold: bool = False,
        overflow_steps: frozenset[int] = NO_OVERFLOW,
        faults: Sequence[Fault] = (),
        neighbours: Sequence[Neighbour] = (),
        decision: Decision | None = None,
        durations: Durations | None = None,
        watcher: RunWatcher | None = None,
        progress: Callable[[int, int], object] | None = None,
    ) -> None:
        self.unfold = unfold
        self.overflow_steps = overflow_steps
        self.faults = tuple(faults)
        self.neighbours = tuple(neighbours)
        self.decision = decision
        self.durations = durations
        self.watcher = watcher
        self.progress = progress
        self._lowered: LoweredSchedule | None = None

    @uncollected()
    def refusal(self, job: Job) -> str | None:
        """Return one line that says why `job` cannot be simulated, or None."""
        try:
            self._lower(job)
        except RefusedError as error:
            return str(error)
        return None

    @uncollected()
    def run(self, job: Job, *, seed: int) -> Trace:
        """Simulate setup and all steps. Nothing is random but jitter; the trace records `seed`.

        Raises:
            RefusedError: more ranks than GPUs, an unknown rate, an edge to a later operation.
            RunFailedError: operations wait forever, or meet others that do not match.
        """
        return self._trace(job, seed, self._simulate(job, seed))

    def _trace(self, job: Job, seed: int, done: "_Done") -> Trace:
        """Return the trace of a finished run."""
        worst = self._lower(job).worst_cases
        records = Records(job, self.overflow_steps, done.begin_ps, worst)
        traces = tuple(records.rank_trace(rank) for rank in done.ranks)
        found = step_error(job, self._aside)
        return Trace(
            backend=self.name,
            schedule=job.schedule.name,
            seed=seed,
            steps=job.steps,
            ranks=traces,
            step_end_ps=done.step_ends_ps(job.steps),
            links=_link_use(done.network, done.links, job.steps - 1),
            out_of_memory=_out_of_memory(traces) or _of_excess(job.excess),
            error_text=found.text,
            error=StepError.of(found.bounds, found.features_text),
        )

    @property
    def _aside(self) -> list[str]:
        """Return simulated features that no published measurement covers."""
        return ["faults"] * bool(self.faults) + ["other jobs"] * bool(self.neighbours)

    def step_ends_ps(
        self, job: Job, *, seed: int = 0, faults: Sequence[Fault] = (), waits: bool = True
    ) -> tuple[int, ...]:
        """Return only the end of each step, in picoseconds: fast, for many what-if questions.

        The same numbers as in the trace of `run`, without the cost of recording. Results that do
        not depend on bandwidths are cached for later calls with the same schedule. `faults` are
        added to those of the backend. Without `waits`, hosts neither wait for memory nor check it.

        Raises:
            RefusedError, RunFailedError: as `run`.
        """
        return self._simulate(job, seed, faults, waits=waits).step_ends_ps(job.steps)

    def under(
        self,
        *,
        faults: Sequence[Fault] = (),
        neighbours: Sequence[Neighbour] = (),
        decision: Decision | None = None,
    ) -> "SimBackend":
        """Return a backend with other faults, neighbours and decision; share cached results."""
        found = SimBackend(
            unfold=self.unfold,
            overflow_steps=self.overflow_steps,
            faults=faults,
            neighbours=neighbours,
            decision=decision,
            durations=self.durations,
            watcher=self.watcher,
        )
        found._lowered = self._lowered
        return found

    def last_step(self, job: Job, *, seed: int) -> LastStep:
        """Return the times of the last step, as in the trace of `run`, without recording the rest.

        Raises:
            RefusedError, RunFailedError: as `run`.
        """
        return self._last_step(job, self._simulate(job, seed))

    def _last_step(self, job: Job, done: "_Done") -> LastStep:
        """Return the times of the last step of a finished run."""
        ends_ps = done.step_ends_ps(job.steps)
        begin_ps = ends_ps[-2] if job.steps > 1 else 0
        slots = self._lower(job).slots
        ranks = [
            rank_step(
                rank,
                slots(rank.instances[-1].course),
                done.begin_ps,
                (begin_ps, ends_ps[-1]),
                delays=job.schedule.delays_updates,
            )
            for rank in done.ranks
        ]
        return self._of_step(job, (begin_ps, ends_ps[-1]), ranks)

    def _of_step(self, job: Job, window: Interval, ranks: Sequence[RankStep]) -> LastStep:
        found = step_error(job, self._aside)
        return LastStep(
            begin_ps=window[0],
            end_ps=window[1],
            ranks=tuple(ranks),
            error_text=found.text,
            error=StepError.of(found.bounds, found.features_text),
        )

    @uncollected()
    def run_periodic(
        self, job: Job, *, seed: int, micro_batches: int, turn: int
    ) -> tuple[Trace, PeriodicStep]:
        """Return the trace of `run`, and the period of the last step: `turn` micro-batches.

        Raises:
            UnsteadyError: a step of this many micro-batches shows no period.
            RefusedError, NoRouteError, RunFailedError: as in `run`.
        """
        done = self._simulate(job, seed)
        periodic = self._periodic(job, done, micro_batches, turn)
        return self._trace(job, seed, done), periodic

    @uncollected()
    def periodic_step(
        self, job: Job, *, seed: int, micro_batches: int, turn: int, waits: bool = True
    ) -> PeriodicStep:
        """Return the period alone; without `waits`, hosts do not check their memory.

        Raises:
            UnsteadyError, RefusedError, NoRouteError, RunFailedError: as in `run_periodic`.
        """
        return self._periodic(job, self._simulate(job, seed, waits=waits), micro_batches, turn)

    def _periodic(self, job: Job, done: "_Done", micro_batches: int, turn: int) -> PeriodicStep:
        """Return the last step and its period.

        Raises:
            UnsteadyError: a step has no period.
        """
        if self.faults or self.neighbours or job.schedule.delays_updates:
            raise UnsteadyError("faults, other jobs and delayed updates have no period")
        begin_ps, end_ps = steady_steps(done.ranks, job.steps, micro_batches, turn)[-1].window_ps
        window = begin_ps - done.begin_ps, end_ps - done.begin_ps
        slots = self._lower(job).slots
        ranks = [
            rank_period(rank, slots(rank.instances[-1].course), done.begin_ps, window)
            for rank in done.ranks
        ]
        period = self._of_step(job, window, ranks)
        return PeriodicStep(step=self._last_step(job, done), period=period)

    @uncollected()
    def _simulate(
        self, job: Job, seed: int, faults: Sequence[Fault] = (), *, waits: bool = True
    ) -> "_Done":
        lowered = self._lower(job)
        every, others = (*self.faults, *faults), self.neighbours
        disturbances = Disturbances(every, others, cluster=job.cluster, seed=seed)
        plain = job.named if isinstance(job.binding, Ratio) and not (every or others) else None
        try:
            found = lowered.fold(disturbances, unfold=self.unfold, whole=plain)
            return self._move(job, lowered, disturbances, found, waits=waits)
        except CutError as error:
            raise NoRouteError(str(error)) from None

    def _move(
        self,
        job: Job,
        lowered: LoweredSchedule,
        disturbances: Disturbances,
        folded: Fold,
        *,
        waits: bool,
    ) -> "_Done":
        """Simulate one rank of each class, without events if no time depends on them."""
        links = FoldedLinkTable(folded, disturbances, self.decision)
        hardware = _Hardware(disturbances, folded, links)
        asks = waits and lowered.worst_cases.may_wait(job)
        if asks and not lowered.asking:
            lowered.asking.update(self._courses(job, asks=True))
        alike = tuple(each.classes for each in folded.communicators)
        if not asks and self._is_steady(job, hardware) and alike not in lowered.uneven:
            try:
                return self._pass(job, self._begun(job, lowered.programs, hardware), lowered.tapes)
            except NotAheadError:
                lowered.uneven.add(alike)
        programs = lowered.asking if asks else lowered.programs
        parts = self._begun(job, programs, hardware)
        ranks, agenda = parts.ranks, parts.agenda
        for rank in ranks if asks else ():
            memory = RankMemory(job.schedule, rank.rank_class.program, job.cluster)
            rank.memory = AllocationService(memory, rank.program.slots)
        begin_ps = self._drain(agenda, ranks, [SETUP], 0)
        _begin_disturbances(parts.network, links, disturbances, begin_ps)
        self._drain(agenda, ranks, range(job.steps), begin_ps)
        for rank in ranks:
            rank.forget_streams()
        return _Done(ranks, links, parts.network, begin_ps)

    def _begun(
        self, job: Job, programs: Mapping[str, Courses], hardware: "_Hardware"
    ) -> "_Simulation":
        """Return the ranks of a new simulation, at the start of setup."""
        agenda, folded, links = Agenda(Clock()), hardware.folded, hardware.links
        network = Network(agenda.env, [each.bytes_per_s for each in links.classes], folded.cuts)
        rendezvous = Rendezvous(agenda, links, network, self.durations)
        ranks = [
            Rank(
                agenda,
                each,
                programs[each.program.role],
                rendezvous,
                pace=hardware.disturbances.pace(each.rank),
                gpu=job.cluster.gpu if self.durations is None else None,
                durations=self.durations,
                watcher=self.watcher,
            )
            for each in folded.ranks
        ]
        return _Simulation(agenda, network, links, rendezvous, ranks)

    def _is_steady(self, job: Job, hardware: "_Hardware") -> bool:
        """Return True if no link and no kernel changes its speed during the steps."""
        disturbances, links = hardware.disturbances, hardware.links
        observes = self.watcher is not None or self.durations is not None
        changes = len(disturbances.outages.turns) > 1 or bool(disturbances.neighbours)
        lasting = all(not window.start_ps and window.end_ps is None for *_, window in links.slow)
        return lasting and not (observes or changes or takes_from_kernels(job.cluster.gpu))

    def _pass(self, job: Job, parts: "_Simulation", tapes: Tapes) -> "_Done":
        """Simulate without events.

        Raises:
            NotAheadError: some times depend on events.
        """
        ahead = AheadRun(parts.ranks, parts.rendezvous, tapes)
        begin_ps = ahead.drain([SETUP], 0, self.overflow_steps)
        for link, factor, _ in parts.links.slow:
            parts.network.scale(link, 1 / factor)
        ahead.forget_costs()
        told = self.progress
        report = None if told is None else lambda step: told(step + 1, job.steps)
        ahead.drain(range(job.steps), begin_ps, self.overflow_steps, report)
        for rank in parts.ranks:
            rank.forget_streams()
        return _Done(parts.ranks, parts.links, parts.network, begin_ps)

    def _lower(self, job: Job) -> LoweredSchedule:
        apart = self.unfold or any(isinstance(fault, Jitter) for fault in self.faults)
        large = too_large(job, apart=apart)
        if large is not None:
            raise RefusedError(large)
        cluster, ranks = job.cluster, job.schedule.mesh.size
        if ranks > cluster.ranks:
            least, gpus = -(-ranks // cluster.gpus_per_node), cluster.gpus_per_node
            told = f"{cluster.nodes} must be at least {least} for {ranks} ranks"
            raise RefusedError(f"cluster.nodes: {told}, with gpus_per_node = {gpus}")
        kept, gpu = self._lowered, cluster.gpu
        if kept is None or kept.schedule is not job.schedule or kept.gpu != gpu:
            programs, worst = self._courses(job, asks=False), WorstCases(self.overflow_steps)
            kept = LoweredSchedule(job.schedule, gpu, programs, used_of(job.schedule), worst)
        kept.used.need_hosts(cluster)
        self._lowered = kept
        return kept

    def _courses(self, job: Job, *, asks: bool) -> dict[str, Courses]:
        """Return the courses of the hosts by role; with `asks`, hosts request their memory."""
        watched, gpu = self.watcher is not None, job.cluster.gpu
        try:
            return {
                program.role: Courses(
                    lower(job.schedule, program, gpu, watched=watched, asks=asks),
                    apart=watched or asks,
                )
                for program in job.schedule.programs
            }
        except (LoweringError, ClusterError) as error:
            raise RefusedError(str(error)) from None

    def _drain(
        self, agenda: Agenda, ranks: Sequence[Rank], steps: Sequence[int], begin_ps: int
    ) -> int:
        """Let the hosts issue `steps` from `begin_ps` on; return when everything has finished."""
        for rank in ranks:
            rank.begin(steps, begin_ps, self.overflow_steps)
        try:
            agenda.run()
            if self.progress is None or steps == [SETUP]:
                agenda.env.ring_all()
            else:
                self._run_with_progress(self.progress, agenda.env, ranks[0], len(steps))
        except MismatchError as error:
            raise RunFailedError(str(error)) from None
        stuck = list(chain.from_iterable(rank.stuck() for rank in ranks))
        if stuck:
            first = f"deadlock: {len(stuck)} operations wait for ever"
            raise RunFailedError("\n  ".join([first, *stuck]))
        return max(rank.drained_ps() for rank in ranks)

    @staticmethod
    def _run_with_progress(
        progress: Callable[[int, int], object], env: Clock, rank: Rank, steps: int
    ) -> None:
        """Run all events; regularly report how many steps of `rank` have finished."""
        done = 0
        while env.has_alarms:
            env.ring_some(EVENTS_AT_ONCE)
            issued = rank.instances[1:]  # without setup
            while done < len(issued) and issued[done].has_drained():
                done += 1
            progress(done, steps)
        progress(steps, steps)


@dataclass(frozen=True, slots=True)
class _Hardware:
    """The classes of a schedule on a cluster, their links, and what is slow or dead."""

    disturbances: Disturbances
    folded: Fold
    links: FoldedLinkTable


@dataclass(frozen=True, slots=True)
class _Simulation:
    """Ranks of one simulation, and the clock and network that they share."""

    agenda: Agenda
    network: Network
    links: FoldedLinkTable
    rendezvous: Rendezvous
    ranks: list[Rank]


@dataclass(frozen=True, slots=True)
class _Done:
    """State after everything has finished. The first step began at `begin_ps`."""

    ranks: Sequence[Rank]
    links: FoldedLinkTable
    network: Network
    begin_ps: int

    def step_ends_ps(self, steps: int) -> tuple[int, ...]:
        """Return by step when all streams of all ranks had finished, since the first one began."""
        ends = [0] * steps
        for rank in self.ranks:
            for instance in rank.instances:
                if instance.step != SETUP:
                    drained = max(instance.ends, default=0) - self.begin_ps
                    ends[instance.step] = max(ends[instance.step], drained)
        return tuple(ends)


def _begin_disturbances(
    network: Network, links: FoldedLinkTable, disturbances: Disturbances, begin_ps: int
) -> None:
    """Start and end slow links and neighbours at their times after `begin_ps`."""
    env = network.env

    def at(time_ps: int, act: Callable[[], None]) -> None:
        env.at(begin_ps + time_ps, act)

    for time_ps, state in disturbances.outages.turns[1:]:
        at(time_ps, partial(network.set_state, state))
    for link, factor, window in links.slow:
        at(window.start_ps, partial(network.scale, link, 1 / factor))
        if window.end_ps is not None:
            at(window.end_ps, partial(network.scale, link, factor))
    for neighbour, loads in zip(disturbances.neighbours, links.neighbours, strict=True):
        shape = network.number(shapes(loads))
        at(neighbour.window.start_ps, partial(_visit, at, network, shape, neighbour.window))


def _visit(at: At, network: Network, shape: int, window: Window) -> None:
    leave = network.occupy(shape)
    if window.end_ps is not None:
        at(window.end_ps, leave)


def _link_use(network: Network, links: FoldedLinkTable, step: int) -> tuple[LinkUse, ...]:
    """Return the bytes that the network moved on every kind of link in `step`."""
    moved = [Fraction(0)] * len(links.classes)
    for (number, when, state), size_bytes in network.moved.items():
        if when == step:
            for link, taken in network.shapes(number)[state]:
                moved[link] += taken * size_bytes * links.classes[link].count
    uses: list[LinkUse] = []
    counted = [each for each in links.classes if each.carries_bytes]
    for name in dict.fromkeys(name for each in counted for name in each.names):
        classes = zip(links.classes, moved, strict=True)
        alike = [(each, size) for each, size in classes if name in each.names]
        if not any(size for _, size in alike):
            continue
        uses.append(
            LinkUse(
                link=name,
                count=ceil(sum(each.count for each, _ in alike)),
                bytes=int(sum(size for _, size in alike)),
                capacity_bytes_per_s=int(alike[0][0].bytes_per_s),
            )
        )
    return tuple(uses)


def _of_excess(excess: "ExcessRows | None") -> OutOfMemory | None:
    """Return the allocation of more rows than a schedule has declared, or None."""
    if excess is None:
        return None
    needed = excess.buffer.size_bytes
    return OutOfMemory(
        rank=excess.rank,
        pool=excess.buffer.pool,
        operation=excess.operation,
        needed_bytes=needed,
        capacity_bytes=excess.maximum_bytes,
        alive=((excess.buffer.name, needed),),
    )


def _out_of_memory(traces: Sequence[RankTrace]) -> OutOfMemory | None:
    """Return the first rank and pool that need more memory than their capacity."""
    for trace in traces:
        for found in trace.reservations:
            if found.shortage is not None and found.capacity_bytes is not None:
                return OutOfMemory(
                    rank=trace.rank,
                    pool=found.pool,
                    operation=found.shortage.operation,
                    needed_bytes=found.shortage.needed_bytes,
                    capacity_bytes=found.capacity_bytes,
                    alive=found.shortage.alive,
                )
    return None
