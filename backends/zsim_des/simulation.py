"""`SimBackend`: a job in, a trace out."""

from collections.abc import Sequence
from fractions import Fraction
from itertools import chain
from math import ceil

import simpy

from zsim.allocator import Returns, book, peak_bytes, pools, witness
from zsim.backend import Job, RefusedError, RunFailedError
from zsim.cluster import ClusterError
from zsim.collective.volume import element_count, is_scalar
from zsim.issue import NO_OVERFLOW, SETUP
from zsim.operation import Allocate, Free, Operation
from zsim.plan import COLLECTIVE
from zsim.schedule import Place, Pool, Scope
from zsim.trace import Event, LinkUse, OutOfMemory, RankTrace, Trace, Transfer
from zsim_des.engine import Instance, Rank
from zsim_des.fold import fold
from zsim_des.instruction import Lowered, LoweringError, lower
from zsim_des.links import Links
from zsim_des.network import Network
from zsim_des.rendezvous import MismatchError, Rendezvous

TRUST = (
    "unvalidated: times come from {gpu} rates, memory bandwidth and link speeds of {cluster} as "
    "published, and have not been judged against measurements"
)


class SimBackend:
    """Simulates a schedule on a cluster, by events, in integer picoseconds.

    An event of a communication starts when the rank reaches it, as a kernel that waits for its
    peers does on a GPU, and ends for all members at one time.

    Attributes:
        unfold: simulate every rank for itself instead of one of each class.
        overflow_steps: steps in which every branch finds a value that is not zero.
    """

    name = "sim"

    def __init__(
        self, *, unfold: bool = False, overflow_steps: frozenset[int] = NO_OVERFLOW
    ) -> None:
        self.unfold = unfold
        self.overflow_steps = overflow_steps

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
        lowered = self._lower(job)
        folded = fold(job.schedule, job.cluster, unfold=self.unfold)
        links = Links(folded, job.cluster)
        env = simpy.Environment()
        network = Network(env, [each.bytes_per_s for each in links.classes])
        rendezvous = Rendezvous(env, links, network)
        ranks = [Rank(env, each, lowered[each.program.role], rendezvous) for each in folded.ranks]
        for rank in ranks:
            rank.begin(rank.program.setup, 0)
        begin_ps = self._drain(env, ranks, [SETUP])
        for rank in ranks:
            rank.begin(rank.program.step, begin_ps)
        self._drain(env, ranks, range(job.steps))
        traces = tuple(_rank_trace(rank, self, job, begin_ps) for rank in ranks)
        return Trace(
            backend=self.name,
            schedule=job.schedule.name,
            seed=seed,
            steps=job.steps,
            ranks=traces,
            step_end_ps=_step_ends(ranks, job.steps, begin_ps),
            links=_link_use(network, links, job.steps - 1),
            out_of_memory=_out_of_memory(traces, job),
            trust=TRUST.format(gpu=job.cluster.gpu.name, cluster=job.cluster.name),
        )

    def _lower(self, job: Job) -> dict[str, Lowered]:
        if job.schedule.mesh.size > job.cluster.ranks:
            raise RefusedError(
                f"cluster.nodes: {job.cluster.nodes} nodes have {job.cluster.ranks} GPUs, "
                f"{job.schedule.mesh.size} ranks need as many"
            )
        try:
            return {
                program.role: lower(job.schedule, program, job.cluster.gpu)
                for program in job.schedule.programs
            }
        except (LoweringError, ClusterError) as error:
            raise RefusedError(str(error)) from None

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


class _Measured:
    """Deferred frees return at the first allocation that the host issues after the uses ended."""

    def __init__(self, instances: Sequence[Instance], slots: dict[str, int]) -> None:
        self._instances = {instance.step: instance for instance in instances}
        self._slots = slots
        self._now_ps = 0

    def issue(self, step: int, operation: Operation) -> None:
        """The host issues `operation`."""
        if isinstance(operation, Allocate):
            self._now_ps = self._instances[step].noted[operation.id]

    def over(self, step: int, free: Free) -> bool:
        """Whether every use had ended when the host issued the latest allocation."""
        ends = self._instances[step].ends
        return all(ends[self._slots[use]] <= self._now_ps for use in free.uses)


def _rank_trace(rank: Rank, backend: SimBackend, job: Job, begin_ps: int) -> RankTrace:
    of = rank.rank_class
    events: list[Event] = []
    transfers: list[Transfer] = []
    streams = job.schedule.streams
    for instance in rank.instances:
        step, starts, ends = instance.step, instance.starts, instance.ends
        for what in instance.issued:
            if what.operation is None:
                continue
            slot = what.slot
            stream = streams[what.stream]
            events.append(
                Event(
                    operation=what.name,
                    step=step,
                    stream=stream,
                    start_ps=starts[slot] - begin_ps,
                    end_ps=ends[slot] - begin_ps,
                )
            )
            for member, size_bytes in what.members:
                transfers.append(
                    Transfer(
                        operation=member.id,
                        step=step,
                        group=member.group,
                        collective=COLLECTIVE[type(member)],
                        elements=element_count(member),
                        bytes=size_bytes,
                        scalar=is_scalar(member),
                    )
                )
    returns: Returns = _Measured(rank.instances, rank.program.slots)
    return RankTrace(
        rank=of.rank,
        role=of.program.role,
        stands_for=of.count,
        events=tuple(events),
        book=book(of.program, job.steps, backend.overflow_steps, returns),
        transfers=tuple(transfers),
    )


def _step_ends(ranks: Sequence[Rank], steps: int, begin_ps: int) -> tuple[int, ...]:
    ends = [0] * steps
    for rank in ranks:
        for instance in rank.instances:
            if instance.step != SETUP:
                drained = max(instance.ends, default=0) - begin_ps
                ends[instance.step] = max(ends[instance.step], drained)
    return tuple(ends)


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
