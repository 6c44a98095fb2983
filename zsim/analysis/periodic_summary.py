"""Figures of a pipeline step whose last micro-batches repeat a simulated period."""

from collections.abc import Mapping
from dataclasses import replace

from zsim.analysis.exposed_time import StepParts, most_exposed, parts_of
from zsim.analysis.summary import StepTimes, StepWork, Summary, figures, room, work
from zsim.backend.backend import Job
from zsim.memory.longer_ledger import longer_reservations
from zsim.schedule.schedule import Place
from zsim.trace.trace import PeriodicStep, Reservation, Trace


def periodic_summary(
    job: Job, trace: Trace, step: PeriodicStep, *, micro_batches: int, times: int, turn: int
) -> Summary:
    """Return the figures of a step that repeats the period of `step` `times` more.

    `trace` is the run of `job`, whose step has `micro_batches` and a period of `turn` of them.
    """
    done = work(job, trace)
    return figures(
        job,
        _more_work(done, micro_batches, micro_batches + times * turn),
        room(job, trace),
        step_times(step, times),
    )


def with_longer_steps(
    job: Job, trace: Trace, *, micro_batches: int, times: int, turn: int
) -> Trace:
    """Return `trace` with the memory that ranks reserve in steps of `times` more turns.

    Raises:
        UnsteadyMemoryError: more micro-batches need other memory.
    """
    programs = {each.role: each for each in job.schedule.programs}
    device = {pool.name for pool in job.schedule.pools if pool.place is Place.DEVICE}
    largest_bytes = max(
        each.peak_bytes for rank in trace.ranks for each in rank.reservations if each.pool in device
    )
    found: dict[int, tuple[Reservation, ...]] = {}  # ranks of a role share their ledger
    for rank in trace.ranks:
        if id(rank.book) not in found:
            found[id(rank.book)] = longer_reservations(
                programs[rank.role],
                job.schedule.pools,
                rank.book,
                rank.reservations,
                micro_batches=micro_batches,
                turn=turn,
                times=times,
                largest_bytes=largest_bytes,
            )
    ranks = (replace(rank, reservations=found[id(rank.book)]) for rank in trace.ranks)
    return replace(trace, ranks=tuple(ranks))


def step_times(step: PeriodicStep, times: int) -> StepTimes:
    """Return the times of a step that repeats its period `times` more."""
    pairs = list(zip(step.step.ranks, step.period.ranks, strict=True))
    parts = [_more_parts(parts_of(each), parts_of(more), times) for each, more in pairs]
    return StepTimes(
        step_ps=step.with_periods(times),
        parts=most_exposed(parts),
        host_bound_ps=max(each.host_bound_ps + times * more.host_bound_ps for each, more in pairs),
        memory_wait_ps=0,
    )


def _more_parts(step: StepParts, period: StepParts, times: int) -> StepParts:
    return StepParts(
        compute_ps=step.compute_ps + times * period.compute_ps,
        by_group=_more(step.by_group, period.by_group, times),
        on_host=_more(step.on_host, period.on_host, times),
    )


def _more(step: Mapping[str, int], period: Mapping[str, int], times: int) -> dict[str, int]:
    return {name: each + times * period.get(name, 0) for name, each in step.items()}


def _more_work(done: StepWork, few: int, many: int) -> StepWork:
    """Return the work of `many` micro-batches from that of `few`; all do equal work."""
    return replace(
        done,
        model_flops=done.model_flops * many // few,
        hardware_flops=done.hardware_flops * many // few,
        causal_model_flops=done.causal_model_flops * many // few,
        causal_hardware_flops=done.causal_hardware_flops * many // few,
        tokens=done.tokens * many // few,
    )
