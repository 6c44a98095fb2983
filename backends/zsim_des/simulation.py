"""`SimBackend`: a job in, a trace out."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from itertools import chain
from math import ceil

import simpy

from zsim.allocator import peak_bytes, pools, witness
from zsim.backend import Job, NoWayError, RefusedError, RunFailedError
from zsim.cluster import Cluster, ClusterError, Gpu
from zsim.collective.demand import Decision
from zsim.fault import Fault, Neighbour, Window
from zsim.issue import NO_OVERFLOW, SETUP
from zsim.schedule import Place, Pool, Schedule, Scope
from zsim.trace import LinkUse, OutOfMemory, RankTrace, Trace
from zsim_des.engine import Rank
from zsim_des.fold import fold
from zsim_des.instruction import Lowered, LoweringError, lower
from zsim_des.links import Links
from zsim_des.network import Network
from zsim_des.record import Records
from zsim_des.rendezvous import MismatchError, Rendezvous
from zsim_des.routes import CutError
from zsim_des.spread import Used, used_groups
from zsim_des.trouble import Trouble

TRUST = (
    "unvalidated: times come from {gpu} rates, memory bandwidth and link speeds of {cluster} as "
    "published, and have not been judged against measurements"
)
FITTED = (
    "unvalidated: times of kernels come from {gpu} rates and memory bandwidth as published; "
    "collectives take fitted constants, which zsim validate network judges"
)


def _trust(cluster: Cluster) -> str:
    sentence = TRUST if cluster.network is None else FITTED
    return sentence.format(gpu=cluster.gpu.name, cluster=cluster.name)


At = Callable[[int, Callable[[], None]], None]
"""Does something at a time after the first step began."""


class SimBackend:
    """Simulates a schedule on a cluster, by events, in integer picoseconds.

    An event of a communication starts when the rank reaches it, as a kernel that waits for its
    peers does on a GPU, and ends for all members at one time.

    Attributes:
        unfold: simulate every rank for itself instead of one of each class.
        overflow_steps: steps in which every branch finds a value that is not zero.
        faults: what is slow or dead. Ranks that a fault tells apart are simulated apart; jitter
            tells all of them apart.
        neighbours: other jobs that use the links.
        decision: the algorithm that collectives take where they can, and in how many chunks;
            without one the tuner chooses if the cluster has fitted constants, else it is a ring.
    """

    name = "sim"

    def __init__(
        self,
        *,
        unfold: bool = False,
        overflow_steps: frozenset[int] = NO_OVERFLOW,
        faults: Sequence[Fault] = (),
        neighbours: Sequence[Neighbour] = (),
        decision: Decision | None = None,
    ) -> None:
        self.unfold = unfold
        self.overflow_steps = overflow_steps
        self.faults = tuple(faults)
        self.neighbours = tuple(neighbours)
        self.decision = decision
        self._lowered: _LoweredSchedule | None = None

    def refusal(self, job: Job) -> str | None:
        """One line that says why `job` cannot be simulated, or None."""
        try:
            self._lower(job)
        except RefusedError as error:
            return str(error)
        return None

    def run(self, job: Job, *, seed: int) -> Trace:
        """Simulate setup and all steps. Nothing is drawn: `seed` is only noted.

        Raises:
            RefusedError: more ranks than GPUs, an unknown rate, an edge to a later operation.
            RunFailedError: operations wait for ever, or meet others that do not match.
        """
        done = self._simulate(job, seed)
        records = Records(job, self.overflow_steps, done.begin_ps)
        traces = tuple(records.rank_trace(rank) for rank in done.ranks)
        return Trace(
            backend=self.name,
            schedule=job.schedule.name,
            seed=seed,
            steps=job.steps,
            ranks=traces,
            step_end_ps=done.step_ends_ps(job.steps),
            links=_link_use(done.network, done.links, job.steps - 1),
            out_of_memory=_out_of_memory(traces, job),
            trust=_trust(job.cluster),
        )

    def step_ends_ps(
        self, job: Job, *, seed: int = 0, faults: Sequence[Fault] = ()
    ) -> tuple[int, ...]:
        """When each step ends, and nothing else: for many what-if questions in a row.

        The same numbers as in the trace of `run`, without the time that recording takes. What does
        not depend on the cluster's links is kept for the next call with the same schedule. `faults`
        come on top of those of the backend.

        Raises:
            RefusedError, RunFailedError: as `run`.
        """
        return self._simulate(job, seed, faults).step_ends_ps(job.steps)

    def _simulate(self, job: Job, seed: int, faults: Sequence[Fault] = ()) -> "_Done":
        lowered = self._lower(job)
        everything = (*self.faults, *faults)
        trouble = Trouble(everything, self.neighbours, cluster=job.cluster, seed=seed)
        try:
            folded = fold(job.schedule, trouble, unfold=self.unfold, used=lowered.used)
        except CutError as error:
            raise NoWayError(str(error)) from None
        links = Links(folded, trouble, self.decision)
        env = simpy.Environment()
        network = Network(env, [each.bytes_per_s for each in links.classes])
        rendezvous = Rendezvous(env, links, network)
        ranks = [
            Rank(
                env,
                each,
                lowered.programs[each.program.role],
                rendezvous,
                pace=trouble.pace(each.rank),
                slowdown=job.cluster.gpu.slowdown_beside_collective,
            )
            for each in folded.ranks
        ]
        for rank in ranks:
            rank.begin(rank.program.setup, 0)
        begin_ps = self._drain(env, ranks, [SETUP])
        _begin_trouble(network, links, trouble, begin_ps)
        for rank in ranks:
            rank.begin(rank.program.step, begin_ps)
        self._drain(env, ranks, range(job.steps))
        return _Done(ranks, links, network, begin_ps)

    def _lower(self, job: Job) -> "_LoweredSchedule":
        if job.schedule.mesh.size > job.cluster.ranks:
            raise RefusedError(
                f"cluster.nodes: {job.cluster.nodes} nodes have {job.cluster.ranks} GPUs, "
                f"{job.schedule.mesh.size} ranks need as many"
            )
        kept, gpu = self._lowered, job.cluster.gpu
        if kept is not None and kept.schedule is job.schedule and kept.gpu == gpu:
            return kept
        try:
            programs = {
                program.role: lower(job.schedule, program, gpu) for program in job.schedule.programs
            }
        except (LoweringError, ClusterError) as error:
            raise RefusedError(str(error)) from None
        made = _LoweredSchedule(job.schedule, gpu, programs, used_groups(job.schedule))
        self._lowered = made
        return made

    def _drain(self, env: simpy.Environment, ranks: Sequence[Rank], steps: Sequence[int]) -> int:
        """Let the hosts issue `steps` until everything has drained; when that is."""
        for rank in ranks:
            env.process(rank.host(steps, self.overflow_steps))
        try:
            env.run()
        except MismatchError as error:
            raise RunFailedError(str(error)) from None
        stuck = list(chain.from_iterable(rank.stuck() for rank in ranks))
        if stuck:
            first = f"deadlock: {len(stuck)} operations wait for ever"
            raise RunFailedError("\n  ".join([first, *stuck]))
        return max(rank.drained_ps() for rank in ranks)


@dataclass(frozen=True, slots=True)
class _LoweredSchedule:
    """Instructions by role and the groups in use, and what they were made from."""

    schedule: Schedule
    gpu: Gpu
    programs: dict[str, Lowered]
    used: Used


@dataclass(frozen=True, slots=True)
class _Done:
    """What is left when everything has drained. The first step began at `begin_ps`."""

    ranks: Sequence[Rank]
    links: Links
    network: Network
    begin_ps: int

    def step_ends_ps(self, steps: int) -> tuple[int, ...]:
        """When all streams of all ranks had drained of each step, since the first began."""
        ends = [0] * steps
        for rank in self.ranks:
            for instance in rank.instances:
                if instance.step != SETUP:
                    drained = max(instance.ends, default=0) - self.begin_ps
                    ends[instance.step] = max(ends[instance.step], drained)
        return tuple(ends)


def _begin_trouble(network: Network, links: Links, trouble: Trouble, begin_ps: int) -> None:
    """Let slow links and neighbours come and go at their times after `begin_ps`."""
    env = network.env

    def at(time_ps: int, act: Callable[[], None]) -> None:
        alarm = env.timeout(begin_ps + time_ps - int(env.now))
        alarm.callbacks.append(lambda _: act())

    for link, factor, window in links.slow:
        at(window.start_ps, partial(network.scale, link, 1 / factor))
        if window.end_ps is not None:
            at(window.end_ps, partial(network.scale, link, factor))
    for neighbour, loads in zip(trouble.neighbours, links.neighbours, strict=True):
        shape = network.number(tuple(sorted(loads.items())))
        at(neighbour.window.start_ps, partial(_visit, at, network, shape, neighbour.window))


def _visit(at: At, network: Network, shape: int, window: Window) -> None:
    leave = network.occupy(shape)
    if window.end_ps is not None:
        at(window.end_ps, leave)


def _link_use(network: Network, links: Links, step: int) -> tuple[LinkUse, ...]:
    """Bytes on every kind of link in `step`, as the network moved them."""
    moved = [Fraction(0)] * len(links.classes)
    for (number, when), size_bytes in network.moved.items():
        if when == step:
            for link, taken in network.shape(number):
                moved[link] += taken * size_bytes * links.classes[link].count
    uses: list[LinkUse] = []
    for name in dict.fromkeys(name for each in links.classes for name in each.names):
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


def _out_of_memory(traces: Sequence[RankTrace], job: Job) -> OutOfMemory | None:
    """The first rank and pool whose book is larger than the memory that there is."""
    by_name = {pool.name: pool for pool in job.schedule.pools}
    for trace in traces:
        for name in pools(trace.book):
            capacity = _capacity_bytes(by_name[name], job)
            if capacity is None or peak_bytes(trace.book, name) <= capacity:
                continue
            found = witness(trace.book, name, capacity)
            return OutOfMemory(
                rank=trace.rank,
                pool=name,
                operation=found.operation,
                needed_bytes=found.bytes,
                capacity_bytes=capacity,
                alive=found.alive,
            )
    return None


def _capacity_bytes(pool: Pool, job: Job) -> int | None:
    """Bytes that one rank may book; of a pool that a node shares, an equal part."""
    capacity = pool.capacity_bytes
    if capacity is None and pool.place is Place.DEVICE:
        capacity = job.cluster.gpu.memory_bytes
    if capacity is not None and pool.scope is Scope.NODE:
        capacity //= min(job.cluster.gpus_per_node, job.schedule.mesh.size)
    return capacity
