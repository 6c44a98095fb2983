"""Generate and check a schedule once, then simulate it on any number of clusters."""

from collections.abc import Callable

from zsim.analysis.summary import Room, StepWork, room, step_of, summed_up, work
from zsim.backend.backend import BackendError, Job, NoRouteError, ReusableBackend, RunFailedError
from zsim.config_error import ConfigError
from zsim.memory import capacity_bytes, node_bytes
from zsim.model.model import Model, ModelError
from zsim.proof import check
from zsim.scenario.resolved_scenario import ResolvedScenario
from zsim.schedule.describe_operation import moment
from zsim.schedule.schedule import Schedule
from zsim.trace.trace import LastStep
from zsim.units import format_bytes
from zsim_study.study.outcome import Status, StudyOutcome

Size = tuple[int | None, ...]
"""Number of steps, and the capacity of each pool in bytes."""


class Proved:
    """The checked schedule of a scenario, with a backend that all trials share.

    FLOPs depend only on the schedule, and memory only on the capacities, so both are cached; each
    trial simulates only times. If deferred frees make memory depend on timing, every trial is
    simulated in full.
    """

    def __init__(self, model: Model, made: Schedule, backend: ReusableBackend) -> None:
        self._model = model
        self._schedule = made
        self._backend = backend
        self._work: StepWork | None = None
        self._rooms: dict[Size, Room] = {}
        self._defers = any(program.defers for program in made.programs)

    def tried(self, resolved: ResolvedScenario) -> StudyOutcome:
        """Simulate the schedule with the cluster and the faults of `resolved`."""
        job = Job(
            schedule=self._schedule,
            model=self._model,
            cluster=resolved.cluster,
            steps=resolved.steps,
            setup=resolved.setup,
        )
        try:
            backend = self._warm(job).under(
                faults=resolved.faults, neighbours=resolved.neighbours, decision=resolved.decision
            )
            done, taken, step = self._figures(job, backend)
        except NoRouteError as cut:
            return StudyOutcome(status=Status.CUT_OFF, reason=str(cut))
        except BackendError as refused:
            return StudyOutcome(status=Status.NOT_MODELLED, reason=str(refused))
        except RunFailedError as failed:
            return StudyOutcome(status=Status.FAILED, reason=str(failed))
        found = summed_up(job, done, taken, step)
        full = taken.full_at
        reason = ""
        if full is not None:
            usable = format_bytes(taken.usable_bytes)
            reason = f"out of memory at {moment(full)}: {resolved.cluster.gpu.name} leaves {usable}"
        elif (short := taken.tier_short) is not None:
            reason = f"out of {short.name}: {short.text()}"
        status = Status.FULL if reason else Status.DONE
        return StudyOutcome(
            status=status,
            reason=reason,
            summary=found,
            error_text=step.error_text,
            error=step.error,
        )

    def _warm(self, job: Job) -> ReusableBackend:
        """Return the backend after it has read the schedule; backends derived from it reuse that.

        Raises:
            BackendError: the backend does not support the job.
        """
        refusal = self._backend.refusal(job)
        if refusal is not None:
            raise BackendError(refusal)
        return self._backend

    def _figures(self, job: Job, backend: ReusableBackend) -> tuple[StepWork, Room, LastStep]:
        memory = [
            capacity_bytes(pool, self._schedule, program, job.cluster)
            for program in self._schedule.programs
            for pool in self._schedule.pools
        ]
        memory += [node_bytes(pool, job.cluster) for pool in self._schedule.pools]
        key: Size = (job.steps, *memory)
        if self._work is not None and key in self._rooms and not self._defers:
            return self._work, self._rooms[key], backend.last_step(job, seed=0)
        trace = backend.run(job, seed=0)
        self._work = self._work or work(job, trace)
        self._rooms[key] = room(job, trace)
        return self._work, self._rooms[key], step_of(job, trace)


def proved(
    resolved: ResolvedScenario, backend: Callable[[], ReusableBackend]
) -> Proved | StudyOutcome:
    """Return the generated and checked schedule of a scenario.

    Return the outcome of all its runs instead if the scenario is impossible or the check fails.
    """
    try:
        job = resolved.make_job()
    except (ModelError, ConfigError) as error:
        return StudyOutcome(status=Status.IMPOSSIBLE, reason=str(error))
    model, made = job.model, job.schedule
    findings = check(made, model, compares=False)  # no figure of a simulation depends on values
    if findings:
        first, count = findings[0], len(findings)
        return StudyOutcome(
            status=Status.NOT_PROVED,
            reason=f"{count} findings, the first: {first.invariant}: {first.where}: {first.why}",
        )
    return Proved(model, made, backend())
