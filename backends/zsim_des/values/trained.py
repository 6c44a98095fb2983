"""Runs a schedule with exact values, and compares the result with plain data parallelism."""

from collections.abc import Sequence
from dataclasses import dataclass

from zsim.backend.backend import Job, RunFailedError
from zsim.schedule.issue_order import NO_OVERFLOW
from zsim_des.engine.watch import Durations
from zsim_des.values.carried_run import carry
from zsim_des.values.carrier import Carrier
from zsim_des.values.difference import differences
from zsim_des.values.drawn import independent_draws
from zsim_des.values.modular import Modular
from zsim_des.values.plain import PlainState
from zsim_des.values.planted import Planted
from zsim_des.values.running import Fault


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a run.

    `failure` is the reason why it did not end, or empty; `faults` are invalid memory accesses;
    `differences` are differences between the final and the expected training state.
    """

    failure: str = ""
    faults: tuple[Fault, ...] = ()
    differences: tuple[str, ...] = ()

    @property
    def is_right(self) -> bool:
        """Return True if the run ended without a fault or difference."""
        return not (self.failure or self.faults or self.differences)


def train_by_schedule(
    job: Job,
    expected: PlainState,
    *,
    durations: Durations | None = None,
    overflow_steps: frozenset[int] = NO_OVERFLOW,
    planted: Sequence[Planted] = (),
) -> Result:
    """Run the job with values and compare the result with `expected`.

    Gradients are not finite at `planted` places, and in other steps of `overflow_steps`.

    Raises:
        RefusedError: the schedule cannot be simulated.
    """
    steps = overflow_steps | {each.step for each in planted}
    values = Modular(job.schedule, overflow_steps, planted, apart=independent_draws(job.model))
    carrier = Carrier(job.schedule, values, steps)
    try:
        carry(job, carrier, durations=durations, overflow_steps=steps)
    except RunFailedError as error:
        return Result(failure=str(error))
    found = tuple(differences(carrier, values, expected))
    return Result(faults=tuple(carrier.faults), differences=found)
