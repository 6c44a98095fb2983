"""Figures of a run: step time, rates, exposed communication, peak memory. Pure arithmetic.

All figures describe the last step, which starts at the end of the step before it (or at time 0).
"""

from dataclasses import dataclass

from zsim.analysis.drive_life import DriveLife, drive_life, written_bytes
from zsim.analysis.exposed_time import HostSide, StepParts, step_parts
from zsim.analysis.tier_fit import TierUse, tier_uses_of_run
from zsim.backend.backend import Job
from zsim.cluster.cluster import ClusterError
from zsim.dtype import Multiplied
from zsim.memory import Peak, peak, peak_bytes, reservations
from zsim.model.kernel import Kernel
from zsim.schedule.operation import OF_SEGMENTS, Action, Communication, Compute, Together
from zsim.schedule.schedule import Kind, Place, Program
from zsim.trace.trace import Interval, LastStep, RankStep, RankTrace, Reservation, Trace, within
from zsim.units import PICOSECONDS_PER_SECOND

MODEL_ACTIONS = OF_SEGMENTS
"""Actions whose FLOPs count as hardware FLOPs; includes recomputation (Korthikanti et al. 2022)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """The four rates of a `Summary`, for one method of counting FLOPs."""

    model_tflops_per_gpu: float
    hardware_tflops_per_gpu: float
    mfu: float
    hfu: float


def utilization_text(counted: float, causal: float) -> str:
    """Return a utilization as text; above 100 %, add the `causal` one without masked attention."""
    return f"{counted:.1%}" if counted <= 1 else f"{counted:.1%} (causal {causal:.1%})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Figures of the last step of a run.

    Attributes:
        step_time_s: seconds; 0 from a backend without a clock.
        model_tflops_per_gpu: 10^12 FLOPs of forward and backward per second and GPU, without
            recomputation (Narayanan et al. 2021, section 5.1).
        hardware_tflops_per_gpu: the same for all executed matrix products, including
            recomputation.
        mfu, hfu: these two divided by the GPU's peak in the dominant format; 0 without a peak.
        causal: these four rates without the half of attention that causal masks hide.
        tokens_per_s: tokens of all replicas and micro-batches per second.
        peak_allocated_bytes: highest allocated device memory of any rank.
        memory_by_kind: bytes allocated at that peak, by kind.
        needed_bytes: lower bound on a rank's peak device memory, even if its host waits for every
            deferred free. Memory that an allocator caches is extra.
        peak_reserved_bytes: highest reserved device memory of any rank. With PyTorch's caching
            allocator, this includes rounding, split blocks and blocks kept for another stream. If
            the rank runs out of memory, only the reservations until then count.
        usable_bytes: bytes that this rank can reserve: GPU memory minus CUDA's and NCCL's part.
        exposed_communication_s: time in which some communication runs or waits for its peers and
            no Compute runs; of the rank with the most.
        exposed_by_group: its parts by group; an overlap belongs to the group that started first.
        host_bound_s: time in which no Compute runs because the host is still issuing it; of the
            rank with the most.
        memory_wait_s: time in which the host waits for memory to be freed; of the rank with the
            most. The GPU may still be busy meanwhile.
        fits: True if no rank runs out of memory, waits included, and no tier is too small.
        peak_host_bytes: host memory of a node's ranks if each had the highest peak of all ranks.
        tiers: use of host memory and NVMe on the node with the highest use; only tiers in use.
        exposed_on_host: time in which that rank waits for host-side work (kernels, copies, files)
            and neither computes nor communicates; an overlap belongs to the first kind.
        compute_s: time in which that rank computes.
        reserved_is_known: True if no rank ran out of device memory, which ends the accounting.
        drive_life: wear of a node's drives by writes; None if the run writes nothing to them.
    """

    step_time_s: float
    model_tflops_per_gpu: float
    hardware_tflops_per_gpu: float
    mfu: float
    hfu: float
    causal: Rates
    tokens_per_s: float
    peak_allocated_bytes: int
    memory_by_kind: tuple[tuple[Kind, int], ...]
    peak_reserved_bytes: int
    usable_bytes: int
    exposed_communication_s: float
    exposed_by_group: tuple[tuple[str, float], ...]
    host_bound_s: float
    fits: bool
    peak_host_bytes: int = 0
    reserved_is_known: bool = True
    needed_bytes: int = 0
    memory_wait_s: float = 0.0
    tiers: tuple[TierUse, ...] = ()
    exposed_on_host: tuple[tuple[str, float], ...] = ()
    compute_s: float = 0.0
    drive_life: DriveLife | None = None

    @property
    def reserved_bytes(self) -> int | None:
        """Return the highest reserved memory of any rank in bytes, or None if unknown."""
        return self.peak_reserved_bytes if self.reserved_is_known else None

    @property
    def mfu_text(self) -> str:
        """Return the MFU as text; above 100 %, add the causal one. Empty without a peak."""
        return utilization_text(self.mfu, self.causal.mfu) if self.mfu else ""

    @property
    def parts_s(self) -> dict[str, float]:
        """Return the seconds of each activity of the step, without overlaps; the rest is idle."""
        parts = {
            "compute": self.compute_s,
            "communication": self.exposed_communication_s,
            **dict(self.exposed_on_host),
        }
        idle_s = max(self.step_time_s - sum(parts.values()), 0.0)
        return {**parts, "the host": min(self.host_bound_s, idle_s)}

    @property
    def bound_by(self) -> str:
        """Return the name of the largest part of the step: compute, or the cause of waiting."""
        parts = self.parts_s
        return max(parts, key=lambda name: parts[name])


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWork:
    """FLOPs of all ranks in a step, for the model and for the executed matrix products.

    `causal_` fields exclude the half of attention that masks hide. `dtype` is the format with the
    most FLOPs. A rank writes `written_bytes` to files.
    """

    model_flops: int
    hardware_flops: int
    causal_model_flops: int
    causal_hardware_flops: int
    dtype: Multiplied | None
    tokens: int
    written_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """The memory of a run, with the same fields as `Summary`.

    `full_at` is the operation at which memory ran out, or None.
    """

    peak_allocated_bytes: int
    memory_by_kind: tuple[tuple[Kind, int], ...]
    peak_reserved_bytes: int
    usable_bytes: int
    full_at: str | None
    peak_host_bytes: int = 0
    reserved_is_known: bool = True
    needed_bytes: int = 0
    tiers: tuple[TierUse, ...] = ()

    @property
    def tier_short(self) -> TierUse | None:
        """Return the first tier that exceeds the capacity of a node, or None."""
        return next((each for each in self.tiers if not each.fits), None)


def summary(job: Job, trace: Trace) -> Summary:
    """Return the figures of `trace`, the result of running `job`."""
    return summed_up(job, work(job, trace), room(job, trace), step_of(job, trace))


def summed_up(job: Job, done: StepWork, taken: Room, step: LastStep) -> Summary:
    """Return the figures of a run of `job` from its work, its memory and its times."""
    return figures(job, done, taken, times_of(step))


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Duration of a step, and its parts on the ranks that have the most of each."""

    step_ps: int
    parts: StepParts
    host_bound_ps: int
    memory_wait_ps: int


def times_of(step: LastStep) -> StepTimes:
    """Return the times of a simulated or recorded step."""
    return StepTimes(
        step_ps=step.end_ps - step.begin_ps,
        parts=step_parts(step),
        host_bound_ps=max(each.host_bound_ps for each in step.ranks),
        memory_wait_ps=max(each.memory_wait_ps for each in step.ranks),
    )


def figures(job: Job, done: StepWork, taken: Room, times: StepTimes) -> Summary:
    """Return the figures of a run of `job` from its work, its memory and its times."""
    seconds, parts = times.step_ps / PICOSECONDS_PER_SECOND, times.parts
    scale = _Scale(
        gpu_seconds=seconds * job.schedule.mesh.size, peak_rate=_peak_rate(job, done.dtype)
    )
    every = scale.rates(done.model_flops, done.hardware_flops)
    return Summary(
        step_time_s=seconds,
        model_tflops_per_gpu=every.model_tflops_per_gpu,
        hardware_tflops_per_gpu=every.hardware_tflops_per_gpu,
        mfu=every.mfu,
        hfu=every.hfu,
        causal=scale.rates(done.causal_model_flops, done.causal_hardware_flops),
        tokens_per_s=_per_second(done.tokens, seconds),
        peak_allocated_bytes=taken.peak_allocated_bytes,
        memory_by_kind=taken.memory_by_kind,
        peak_reserved_bytes=taken.peak_reserved_bytes,
        usable_bytes=taken.usable_bytes,
        exposed_communication_s=parts.exposed_ps / PICOSECONDS_PER_SECOND,
        exposed_by_group=tuple(
            (name, each / PICOSECONDS_PER_SECOND) for name, each in parts.by_group.items()
        ),
        exposed_on_host=tuple(
            (name, each / PICOSECONDS_PER_SECOND) for name, each in parts.on_host.items()
        ),
        compute_s=parts.compute_ps / PICOSECONDS_PER_SECOND,
        host_bound_s=times.host_bound_ps / PICOSECONDS_PER_SECOND,
        fits=taken.full_at is None and taken.tier_short is None,
        peak_host_bytes=taken.peak_host_bytes,
        reserved_is_known=taken.reserved_is_known,
        needed_bytes=taken.needed_bytes,
        memory_wait_s=times.memory_wait_ps / PICOSECONDS_PER_SECOND,
        tiers=taken.tiers,
        drive_life=drive_life(job, done.written_bytes, seconds),
    )


def work(job: Job, trace: Trace) -> StepWork:
    """Return the FLOPs and tokens of all ranks in the last step of `trace`."""
    stages = (
        1
        if job.schedule.contract.strategy is None
        else job.schedule.contract.strategy.parallel.pipeline
    )
    replicas = job.schedule.mesh.size // (job.model.tensor * stages)
    batches = replicas * micro_batches(job)
    model_flops = batches * (job.model.forward_flops + job.model.backward_flops)
    flops, masked = _executed(job, trace)
    return StepWork(
        model_flops=model_flops,
        hardware_flops=sum(flops.values()),
        causal_model_flops=model_flops - batches * job.model.masked_flops,
        causal_hardware_flops=sum(flops.values()) - masked,
        dtype=max(flops, key=lambda dtype: flops[dtype]) if flops else None,
        tokens=batches * job.model.tokens,
        written_bytes=written_bytes(job),
    )


def room(job: Job, trace: Trace) -> Room:
    """Return the memory of the rank that uses the most."""
    largest, reservations_made = _largest(job, trace), _reserved(job, trace)
    reserved = max(reservations_made, key=lambda each: each.peak_bytes)
    full = trace.out_of_memory
    return Room(
        peak_allocated_bytes=largest.bytes,
        memory_by_kind=largest.by_kind,
        peak_reserved_bytes=reserved.peak_bytes,
        usable_bytes=reserved.capacity_bytes or 0,
        full_at=None if full is None else full.operation,
        peak_host_bytes=_on_node(job, trace),
        reserved_is_known=all(each.shortage is None for each in reservations_made),
        needed_bytes=max(each.needed_bytes for each in reservations_made),
        tiers=tier_uses_of_run(job, trace),
    )


def last_step(trace: Trace) -> Interval:
    """Return start and end of the last step, in picoseconds."""
    return (trace.step_end_ps[-2] if trace.steps > 1 else 0, trace.step_end_ps[-1])


def micro_batches(job: Job) -> int:
    """Return the number of micro-batches per replica and step, counted by their forward passes."""
    found = {
        operation.micro_batch
        for program in job.schedule.programs
        for operation in program.step
        if isinstance(operation, Compute) and operation.action is Action.FORWARD
    }
    return len(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scale:
    """GPU seconds of a step and peak FLOP/s of a GPU, which turn FLOPs into rates."""

    gpu_seconds: float
    peak_rate: int

    def rates(self, model_flops: int, hardware_flops: int) -> Rates:
        """Return the rates for these FLOPs of all ranks."""
        model = _per_second(model_flops, self.gpu_seconds)
        hardware = _per_second(hardware_flops, self.gpu_seconds)
        return Rates(
            model_tflops_per_gpu=model / 1e12,
            hardware_tflops_per_gpu=hardware / 1e12,
            mfu=model / self.peak_rate if self.peak_rate else 0.0,
            hfu=hardware / self.peak_rate if self.peak_rate else 0.0,
        )


def _per_second(amount: float, seconds: float) -> float:
    return amount / seconds if seconds else 0.0


def _program(job: Job, rank: RankTrace) -> Program:
    return next(program for program in job.schedule.programs if program.role == rank.role)


def _executed(job: Job, trace: Trace) -> tuple[dict[Multiplied, int], int]:
    """Return matrix-product FLOPs of the last step by format, and the FLOPs hidden by masks."""
    totals: dict[Multiplied, int] = {}
    masked = 0
    last = trace.steps - 1
    for rank in trace.ranks:
        by_id = _program(job, rank).by_id
        done: dict[tuple[Kernel, ...], int] = {}
        for event in rank.events:
            operation = by_id[event.operation] if event.step == last else None
            if isinstance(operation, Compute) and operation.action in MODEL_ACTIONS:
                done[operation.kernels] = done.get(operation.kernels, 0) + 1
        for kernels, count in done.items():
            for kernel in kernels:
                if kernel.kind.multiplies_matrices:
                    times = count * rank.stands_for
                    totals[kernel.dtype] = totals.get(kernel.dtype, 0) + kernel.flops * times
                    masked += (kernel.flops - kernel.causal_flops) * times
    return totals, masked


def _peak_rate(job: Job, dtype: Multiplied | None) -> int:
    """Return the GPU's peak rate in the format `dtype`; 0 if it has none."""
    try:
        return 0 if dtype is None else job.cluster.gpu.rate(dtype).peak
    except ClusterError:
        return 0


def _largest(job: Job, trace: Trace) -> Peak:
    """Return the highest peak over all device pools of all ranks."""
    device = [pool.name for pool in job.schedule.pools if pool.place is Place.DEVICE]
    peaks = [peak(rank.book, pool) for rank in trace.ranks for pool in device]
    return max(peaks, key=lambda each: each.bytes)


def _on_node(job: Job, trace: Trace) -> int:
    """Return the host memory of a node's ranks, assuming that each has the highest peak."""
    pools = [pool.name for pool in job.schedule.pools if pool.place is Place.HOST]
    books = {id(rank.book): rank.book for rank in trace.ranks}.values()
    each = sum(max(peak_bytes(entries, pool) for entries in books) for pool in pools)
    return each * min(job.cluster.gpus_per_node, job.schedule.mesh.size)


def _reserved(job: Job, trace: Trace) -> list[Reservation]:
    """Return the device memory reservations of all ranks, once for each distinct ledger."""
    device = {pool.name for pool in job.schedule.pools if pool.place is Place.DEVICE}
    books = {id(rank.book): rank for rank in trace.ranks}  # ranks of a role share their ledger
    return [
        each
        for rank in books.values()
        for each in rank.reservations
        or reservations(job.schedule, _program(job, rank), rank.book, job.cluster)
        if each.pool in device
    ]


def step_of(job: Job, trace: Trace) -> LastStep:
    """Return the times of the last step of `trace`."""
    begin_ps, end_ps = last_step(trace)
    ranks = tuple(_rank_step(job, rank, trace) for rank in trace.ranks)
    return LastStep(
        begin_ps=begin_ps,
        end_ps=end_ps,
        ranks=ranks,
        error_text=trace.error_text,
        error=trace.error,
    )


def _rank_step(job: Job, rank: RankTrace, trace: Trace) -> RankStep:
    begin_ps, end_ps = last_step(trace)
    program = _program(job, rank)
    host_side = HostSide(job.schedule, program)
    computing: list[Interval] = []
    by_group: dict[str, list[Interval]] = {}
    on_host: dict[str, list[Interval]] = {}
    delays = job.schedule.delays_updates
    for event in rank.events:
        is_late = delays and event.step == trace.steps - 1
        whole = (event.start_ps, event.end_ps)
        found = list(within(whole, (begin_ps, end_ps), is_late=is_late))
        if not found:
            continue
        operation = program.by_id[event.operation]
        work = host_side.work(operation)
        if work is not None:
            on_host.setdefault(work, []).extend(found)
        elif isinstance(operation, Compute):
            computing.extend(found)
        elif isinstance(operation, Communication | Together):
            by_group.setdefault(operation.group, []).extend(found)
    return RankStep(
        computing=computing,
        by_group=by_group,
        on_host=on_host,
        host_bound_ps=rank.host_bound_ps[-1] if rank.host_bound_ps else 0,
        memory_wait_ps=rank.memory_wait_ps[-1] if rank.memory_wait_ps else 0,
    )
