"""Folds of pipeline steps: which micro-batches are simulated, and which repeat their period.

A step of a pipeline has a fill, a steady state and a drain. zsim writes, proves and simulates a
step with fewer micro-batches that has all three. If its steady state is periodic, a step with more
micro-batches repeats the period, so its times follow exactly, and its memory peaks are the same
(docs/adr/0051-micro-batches-of-a-pipeline-are-folded.md). Otherwise the whole step is written out.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from zsim.analysis.periodic_summary import periodic_summary, with_longer_steps
from zsim.backend.backend import Backend, Job, PeriodicBackend, UnsteadyError
from zsim.memory.longer_ledger import UnsteadyMemoryError
from zsim.schedule.binding import Balanced, Ratio
from zsim.schedule.schedule import Place
from zsim.strategy.runtime_options import RuntimeOptions
from zsim.units import PICOSECONDS_PER_SECOND, format_seconds

if TYPE_CHECKING:
    from zsim.analysis.summary import Summary
    from zsim.scenario.resolved_scenario import ResolvedScenario
    from zsim.trace.trace import PeriodicStep, Trace

SETTLING = 4
"""Micro-batches after the fill of stages with one chunk, in which their times become periodic."""

TURNS = 3
"""Turns of stages with several chunks: the fill takes more than one, the comparison one more."""

TRIES = (0, 1, 3)
"""Further turns of the steps that are simulated before the whole step is."""

MOST_OF_ONE_TRY, MOST_OF_FURTHER_TRIES = 0.75, 0.5
"""Largest fractions of a step that are simulated in the hope that they show its period."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchFold:
    """A step of `micro_batches`.

    zsim simulates `simulated` of them; the others repeat a period of `turn`.
    """

    micro_batches: int
    simulated: int
    turn: int

    @property
    def proved(self) -> str:
        """Return which micro-batches of a step are proved, and which follow from them."""
        few, turn = self.simulated, self.turn
        return f"{few} of {self.micro_batches} proved; the others repeat the last {turn} in order"

    @property
    def times(self) -> int:
        """Return the number of periods that follow the simulated ones."""
        return (self.micro_batches - self.simulated) // self.turn

    def last_step_s(self, job: Job, simulation: Backend, *, waits: bool = True) -> float:
        """Return the seconds of the last step of `job`, whose step has the simulated micro-batches.

        `waits=False` asserts that no host waits for memory, which makes the simulation faster.

        Raises:
            UnsteadyError: the step has no period.
        """
        found = _periodic(simulation).periodic_step(
            job, seed=0, micro_batches=self.simulated, turn=self.turn, waits=waits
        )
        return found.with_periods(self.times) / PICOSECONDS_PER_SECOND

    @staticmethod
    def need(job: Job) -> None:
        """Raise UnsteadyError if a job uses files, or has more rows than declared.

        Raises:
            UnsteadyError: the job uses files, or has more rows than declared.
        """
        if any(pool.place not in {Place.DEVICE, Place.HOST} for pool in job.schedule.pools):
            raise UnsteadyError("states in files")
        if job.excess is not None:
            raise UnsteadyError("more rows than declared")

    def run(self, job: Job, backend: Backend, *, seed: int) -> "tuple[Trace, FoldedStep]":
        """Return the trace of the simulated micro-batches, and their period.

        Raises:
            UnsteadyError: the step has no period, or its memory is not steady.
            RefusedError, RunFailedError: as `Backend.run`.
        """
        trace, step = _periodic(backend).run_periodic(
            job, seed=seed, micro_batches=self.simulated, turn=self.turn
        )
        if trace.out_of_memory is None:  # else, more micro-batches run out as well
            try:
                trace = with_longer_steps(
                    job, trace, micro_batches=self.simulated, times=self.times, turn=self.turn
                )
            except UnsteadyMemoryError as error:
                raise UnsteadyError(str(error)) from None
        return trace, FoldedStep(fold=self, step=step)


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldedStep:
    """A fold with the simulated step and its period."""

    fold: MicroBatchFold
    step: "PeriodicStep"

    def summary(self, job: Job, trace: "Trace") -> "Summary":
        """Return the figures of the whole step."""
        fold = self.fold
        return periodic_summary(
            job,
            trace,
            self.step,
            micro_batches=fold.simulated,
            times=fold.times,
            turn=fold.turn,
        )

    def text(self) -> str:
        """Return which micro-batches are simulated, and how long the others take."""
        fold = self.fold
        period = format_seconds(self.step.period_ps / PICOSECONDS_PER_SECOND)
        each = "each further one takes" if fold.turn == 1 else f"each further {fold.turn} take"
        return f"{fold.simulated} of {fold.micro_batches} simulated; {each} {period}"

    def to_dict(self) -> dict[str, object]:
        """Return the numbers of micro-batches and the period for `zsim run --json`."""
        return {
            "micro_batches": self.fold.micro_batches,
            "simulated": self.fold.simulated,
            "turn": self.fold.turn,
            "period_s": self.step.period_ps / PICOSECONDS_PER_SECOND,
        }


def folds_of(found: "ResolvedScenario") -> Iterator[MicroBatchFold]:
    """Yield folds to try of a scenario, the shortest first; none if it needs the whole step.

    Faults and other jobs act at certain times, drawn and recorded counts differ between
    micro-batches, and some runtimes receive every micro-batch into separate memory.
    """
    strategy, binding = found.strategy, found.experts.binding
    if strategy.parallel.pipeline == 1 or found.faults or found.neighbours:
        return
    if not isinstance(binding, Balanced | Ratio):
        return
    runtime = strategy.zero.emulate
    if runtime is None or runtime.receives_separately:
        return
    stages, total = strategy.parallel.pipeline, strategy.train.gradient_accumulation_steps
    turn = stages if _has_chunks(runtime, stages) else 1
    least = TURNS * stages if turn > 1 else stages + SETTLING
    for more in TRIES:
        simulated = least + total % turn + more * stages
        if simulated <= total * (MOST_OF_ONE_TRY if not more else MOST_OF_FURTHER_TRIES):
            yield MicroBatchFold(micro_batches=total, simulated=simulated, turn=turn)


def _has_chunks(runtime: RuntimeOptions, stages: int) -> bool:
    given = {name: getattr(runtime, name) for name in type(runtime).model_fields}
    return runtime.has_chunks(given, stages=stages)


def _periodic(backend: Backend) -> PeriodicBackend:
    if not isinstance(backend, PeriodicBackend):
        raise UnsteadyError(f"backend {backend.name} finds no periods")
    return backend
