"""Forecasts of pipelines in a search: some micro-batches are simulated, by the folds of `zsim run`.

So an answer has the step time and the memory that `zsim run` finds for it. A search needs no trace:
if no free is deferred, the ledger alone gives the memory, and only times are simulated.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from zsim.analysis.memory_footprint import (
    Footprint,
    certain_footprint,
    certain_out_of_memory,
    depends_on_time,
    most_kept_bytes,
    served_ledgers,
)
from zsim.analysis.summary import Summary, summary
from zsim.analysis.tier_fit import ServedLedger
from zsim.api.counted_work import count_work
from zsim.api.forecast import MANY_STAGES, last_step_s, memory_forecast
from zsim.api.pipeline_fold import MicroBatchFold, folds_of
from zsim.api.run_forecast import RunForecast
from zsim.backend.backend import Job, UnsteadyError
from zsim.files.source import Source, scheduled, settled
from zsim.memory.longer_ledger import UnsteadyMemoryError, longer_reservations
from zsim.mistake import MistakeError
from zsim.scenario.resolved_scenario import ResolvedScenario
from zsim.scenario.tables import from_tables
from zsim.schedule.schedule import Place
from zsim_plan.bounds.pipeline_bounds import accumulating

NAME = "scenario"
"""Name of the generated scenarios in messages."""

FEW_TURNS = 2, 4, 8
"""Micro-batches for each stage from which the memory of all is known, if there is no fold."""

SHORTER = 2
"""Micro-batches after the fill of stages with one chunk, of a fold that is tried before others."""


@dataclass(kw_only=True)
class FoldSchedule:
    """The schedule of a step, with the micro-batches of `fold`; without a fold, with all."""

    source: Source
    fold: MicroBatchFold | None

    @property
    def job(self) -> Job:
        """The job of the schedule."""
        return self.source.job()

    @cached_property
    def served(self) -> dict[str, ServedLedger]:
        """Allocations and reservations of each role, with frees as late as possible."""
        return served_ledgers(self.job)

    @cached_property
    def certain(self) -> Footprint | None:
        """The footprint that decides whether it fits; None if only a simulation decides."""
        return certain_footprint(self.job, self.served)

    @cached_property
    def is_exact(self) -> bool:
        """True if times change no memory, so that the footprint is that of a run."""
        return not depends_on_time(self.job.schedule)

    def forecast(self) -> RunForecast:
        """Return the figures of the whole step.

        Raises:
            UnsteadyError: the fold does not hold.
            BackendError, RunFailedError, NoRouteError: the step cannot run.
        """
        job, fold = self.job, self.fold
        if fold is not None:
            fold.need(job)
        waits = any(each.waits for _, made in self.served.values() for each in made)
        if not self.is_exact or waits or self.certain is None or job.excess is not None:
            return self._of_trace()
        known = memory_forecast(self.certain)
        if not known.fits:
            return known
        count_work(job)
        if fold is None:
            step_s = last_step_s(job, self.source.simulation(), waits=False)
            return replace(known, step_time_s=step_s)
        step_s = fold.last_step_s(job, self.source.simulation(), waits=False)
        reserved = self._longer_bytes(fold)
        return replace(known, step_time_s=step_s, peak_reserved_bytes=reserved)

    def lack(self) -> RunForecast | None:
        """Return the memory of these micro-batches alone if it is too large; else None.

        All micro-batches of the step need at least as much, and cost far more to simulate.

        Raises:
            BackendError, RunFailedError, NoRouteError: the step cannot run.
        """
        job = self.job
        count_work(job)
        found = _of_run(summary(job, self.source.simulation().run(job, seed=0)), job)
        return None if found.fits else replace(found, step_time_s=0.0)

    def _of_trace(self) -> RunForecast:
        """Return the figures of a run with a trace, in which memory depends on times."""
        job, backend = self.job, self.source.simulation()
        count_work(job)
        if self.fold is None:
            return _of_run(summary(job, backend.run(job, seed=0)), job)
        trace, folded = self.fold.run(job, backend, seed=0)
        return _of_run(folded.summary(job, trace), job)

    def _longer_bytes(self, fold: MicroBatchFold) -> int:
        """Return the most bytes that a rank reserves in the whole step.

        Raises:
            UnsteadyError: more micro-batches need other memory.
        """
        schedule = self.job.schedule
        device = {pool.name for pool in schedule.pools if pool.place is Place.DEVICE}
        largest_bytes = max(
            each.peak_bytes
            for _, made in self.served.values()
            for each in made
            if each.pool in device
        )
        try:
            return max(
                each.peak_bytes
                for program in schedule.programs
                for each in longer_reservations(
                    program,
                    schedule.pools,
                    *self.served[program.role],
                    micro_batches=fold.simulated,
                    turn=fold.turn,
                    times=fold.times,
                    largest_bytes=largest_bytes,
                )
                if each.pool in device
            )
        except UnsteadyMemoryError as error:
            raise UnsteadyError(str(error)) from None


@dataclass(kw_only=True)
class FoldedPipeline:
    """A setting with pipeline stages, and the folds to try; None for all micro-batches."""

    found: ResolvedScenario
    folds: tuple[MicroBatchFold | None, ...]

    @cached_property
    def first(self) -> FoldSchedule:
        """The schedule of the first fold."""
        return self._written(self.folds[0])

    @property
    def job(self) -> Job:
        """The job of the first fold."""
        return self.first.job

    def memory(self) -> tuple[RunForecast | None, bool]:
        """Return the memory of the setting, and True if it is certain.

        None means that only a simulation decides. Memory that is not certain is an upper bound.
        It is that of the first fold; more micro-batches need at least as much. One micro-batch of
        many stages, and few micro-batches without a fold, are checked first, since their schedules
        are much faster to write. The memory that follows from few is a lower bound.

        Raises:
            MistakeError: the model cannot exist, or has no schedule.
        """
        if (lack := self._lack_of_one()) is not None:
            return memory_forecast(lack), True
        if self.folds[0] is None and (least := self._least_of_all()) is not None:
            return least, True
        count_work(self.job)
        found = self.first.certain
        return None if found is None else memory_forecast(found), self.first.is_exact

    def _lack_of_one(self) -> Footprint | None:
        """Return the footprint of one micro-batch of many stages if it cannot fit; else None."""
        if self.found.strategy.parallel.pipeline <= MANY_STAGES or self._micro_batches == 1:
            return None
        one = self._job_of(1)
        return None if one is None else certain_out_of_memory(one)

    def _least_of_all(self) -> RunForecast | None:
        """Return the least memory of all micro-batches, known from few; None if that is unknown.

        Stages that receive each micro-batch into separate memory allocate the same number of bytes
        for each. Three steps show if they do.
        """
        stages = self.found.strategy.parallel.pipeline
        counts = [times * stages for times in FEW_TURNS]
        if 2 * counts[-1] > self._micro_batches:
            return None
        made: list[Footprint] = []
        for job in map(self._job_of, counts):
            found = None if job is None else certain_footprint(job, served_ledgers(job))
            if found is None or not found.fits:
                return None if found is None else memory_forecast(found)
            made.append(found)
        first, second, last = (found.allocated_bytes for found in made)
        each, rest = divmod(second - first, counts[1] - counts[0])
        if rest or last - second != each * (counts[2] - counts[1]):
            return None
        needed_bytes = last + each * (self._micro_batches - counts[2])
        known = memory_forecast(made[-1])
        return replace(
            known,
            peak_allocated_bytes=needed_bytes,
            peak_reserved_bytes=max(needed_bytes, known.peak_reserved_bytes),
            fits=needed_bytes <= known.usable_bytes,
        )

    @property
    def _micro_batches(self) -> int:
        return self.found.strategy.train.gradient_accumulation_steps

    def _job_of(self, count: int) -> Job | None:
        """Return the job of `count` micro-batches; None if the order needs more of them."""
        try:
            found = scheduled(NAME, _with_micro_batches(self.found, count)).job()
        except MistakeError:
            return None
        count_work(found)
        return found

    def forecast(self) -> RunForecast:
        """Return the figures that `zsim run` finds.

        Raises:
            MistakeError, BackendError, RunFailedError, NoRouteError: the setting cannot run.
        """
        made = self.first
        for place, fold in enumerate(self.folds):
            if fold is None and place and (lack := made.lack()) is not None:
                return lack
            made = self._written(fold) if place else made
            try:
                return made.forecast()
            except UnsteadyError:
                continue
        raise AssertionError("a step with all micro-batches needs no period")

    def _written(self, fold: MicroBatchFold | None) -> FoldSchedule:
        found = self.found if fold is None else _with_micro_batches(self.found, fold.simulated)
        return FoldSchedule(source=scheduled(NAME, found), fold=fold)


def folded_pipeline(tables: Mapping[str, Any]) -> FoldedPipeline | None:
    """Return the setting in `tables` with its folds; None without pipeline stages.

    Raises:
        MistakeError: fields contradict each other, or a named file cannot be read.
    """
    if tables.get("parallel", {}).get("pipeline", 1) == 1:
        return None
    found, _ = settled(NAME, from_tables(tables))
    folds = (*_shorter(found), *folds_of(found), None)
    return FoldedPipeline(found=found, folds=folds)


def _shorter(found: ResolvedScenario) -> list[MicroBatchFold]:
    """Return a fold with fewer micro-batches than any fold of `zsim run`, which often holds.

    Every fold that holds gives the figures of the whole step.
    """
    stages = found.strategy.parallel.pipeline
    return [
        replace(each, simulated=stages + SHORTER)
        for each in list(folds_of(found))[:1]
        if each.turn == 1 and each.simulated > stages + SHORTER
    ]


def _with_micro_batches(found: ResolvedScenario, count: int) -> ResolvedScenario:
    return replace(found, strategy=accumulating(found.strategy, count))


def _of_run(found: Summary, job: Job) -> RunForecast:
    return RunForecast(
        step_time_s=found.step_time_s,
        peak_allocated_bytes=found.peak_allocated_bytes,
        peak_reserved_bytes=found.peak_reserved_bytes,
        usable_bytes=found.usable_bytes,
        fits=found.fits,
        kept_bytes=most_kept_bytes(job),
    )
