"""`zsim.run`: prove the schedule, run it on a backend, and return the result."""

import os
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from os import PathLike
from pathlib import Path
from time import perf_counter  # noqa: TID251  (how long the run took is part of the answer)
from typing import TYPE_CHECKING, Final, TypedDict, Unpack

from zsim.analysis.summary import summary
from zsim.api.answer import Progress, ignore_progress
from zsim.api.run_result import RunResult
from zsim.api.scenario import Changed, LoadedScenario, load
from zsim.api.step_time_band import step_time_band_s
from zsim.backend.backend import (
    SIMULATOR,
    Backend,
    BackendError,
    BackendTraits,
    Job,
    NoRouteError,
    RunFailedError,
    UnsteadyError,
    load_backend,
)
from zsim.backend.document import Document
from zsim.cluster.cluster import Cluster, unknown_cluster
from zsim.files.source import Source
from zsim.limits import TimeLimitError
from zsim.mistake import MistakeError, mistakes
from zsim.network.link_load import Decision
from zsim.trace.trace import Trace
from zsim.workers.memory_bound import unbounded_memory

if TYPE_CHECKING:
    from zsim.analysis.detour import Detour
    from zsim.analysis.remedies import Remedy
    from zsim.api.imbalance import Imbalance
    from zsim.api.pipeline_fold import FoldedStep, MicroBatchFold
    from zsim.api.proof_result import ProofResult
    from zsim.proof.finding import Finding

__all__ = ["BackendOptions", "NoRouteError", "RefutedError", "RunFailedError", "run"]

PHASES: Final = 2
"""Parts of a run before its first step, of similar duration: schedule and proof."""

FORKED_MIN: Final = 20_000
"""Minimum operations at which a proof takes longer than a fork, about 0.1 s."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ran:
    """Trace of a run, trace without faults and neighbours, and wall time of both in seconds.

    `folded` is the period if only some micro-batches were simulated.
    """

    trace: Trace
    healthy: Trace | None
    wall_time_s: float
    folded: "FoldedStep | None" = None


class RefutedError(ValueError):
    """The proof of a schedule has findings, so it is not run; `proof` has all findings."""

    def __init__(self, proof: "ProofResult") -> None:
        self.proof = proof
        first = proof.findings[0]
        super().__init__(f"{proof.schedule.name}: {first.invariant}: {first.where}: {first.why}")


class BackendOptions(TypedDict, total=False):
    """Options of some backends; a backend that does not support an option refuses to run.

    Attributes:
        data: path of a text to train on, bytes as tokens (torch).
        timeout_s: seconds without progress on any rank after which the run fails (torch).
        poison: fill invalid memory with NaN and delay ranks at random (torch).
        witness: record the calls observed in torch; steps take longer (torch).
        unobserved: do not track live storages; steps take as long as in normal training (torch).
        offload_path: folder for the files that emulate NVMe (torch).
        device_budget: maximum bytes on the device of a rank (torch).
    """

    data: str | PathLike[str] | None
    timeout_s: float | None
    poison: bool
    witness: bool
    unobserved: bool
    offload_path: str | PathLike[str] | None
    device_budget: int | None


def run(
    scenario: LoadedScenario | Job | str | PathLike[str] | Mapping[str, object],
    changes: Changed = None,
    *,
    backend: str = SIMULATOR,
    seed: int = 0,
    check: bool = True,
    forks: bool = False,
    folds: bool = True,
    progress: Progress | None = None,
    **options: Unpack[BackendOptions],
) -> RunResult:
    """Prove the schedule of a scenario, run it, and return the result.

    Of a pipeline with many micro-batches, a few are proved and simulated if the others repeat their
    period (`RunResult.folded`).

    Args:
        scenario: scenario as in `load`, or a job built by hand.
        changes: values by key, as in `load`.
        backend: "sim" simulates, "torch" trains on real ranks, "null" only records.
        seed: seed of all random numbers.
        check: True to prove the schedule first.
        forks: allow the proof of a large schedule in a forked process during the simulation, if
            there are two cores, memory for both, and no other threads.
        folds: False to write out and simulate every micro-batch.
        progress: callback that receives the work done and the total work.
        options: options of some backends, see `BackendOptions`.

    Raises:
        MistakeError: it cannot be run with these arguments.
        RefutedError: the schedule is wrong; only one from a file or built by hand can be.
        NoRouteError: because of faults, ranks cannot reach each other.
        RunFailedError: the run started but failed.
    """
    for name in options.keys() - BackendOptions.__annotations__:
        raise TypeError(f"run() got an unexpected keyword argument {name!r}")
    traits = _traits(backend)
    loaded, of_job = _loaded(scenario, changes, traits)
    how = _BackendChoice(name=backend, settings=_settings({**options}), seed=seed)
    launch = _Launch(how=how, check=check, forks=forks, progress=progress)
    if loaded is None:
        assert of_job is not None
        return launch.result(None, of_job)
    if folds and backend == SIMULATOR:
        for fold in loaded.folds():
            with suppress(UnsteadyError):
                return launch.result(loaded, loaded.of_micro_batches(fold.simulated), fold)
    return launch.result(loaded, loaded.source)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Launch:
    """A run on a backend, with the options of its proof and the callback for progress."""

    how: "_BackendChoice"
    check: bool
    forks: bool
    progress: Progress | None

    def result(
        self, loaded: LoadedScenario | None, source: Source, fold: "MicroBatchFold | None" = None
    ) -> RunResult:
        """Prove and run the job of `source`, which with `fold` has few micro-batches.

        Raises:
            UnsteadyError: `fold` does not hold.
        """
        how = self.how.decided(source.decision)
        traits, progress = _traits(how.name), self.progress
        job = source.job()
        if fold is not None:
            fold.need(job)
        (progress or ignore_progress)(1, phases := _phases(source, job))
        made = how.backend(source, _after(PHASES, progress, phases))
        if traits.is_real:
            job = replace(job, cluster=_this_machine(job.schedule.mesh.size))
        run_it = partial(how.recorded, made, source, job, progress, fold=fold)
        proof = partial(_findings, source, job, traits)
        if self.check and self.forks and traits.predicts and _is_large(job):
            ran = _run_while_proving(proof, made, job, run_it)
        else:
            _need_accepted(made, job)  # before the proof, which takes longer
            _need_none(job, proof() if self.check else ())
            ran = run_it()
        healthy = ran.healthy
        return RunResult(
            title=source.title,
            scenario=loaded,
            job=job,
            recorded=ran.trace,
            wall_time_s=ran.wall_time_s,
            healthy_step_time_s=None if healthy is None else summary(job, healthy).step_time_s,
            look_for_remedies=lambda trace: None if job.excess else how.remedies(loaded, trace),
            look_for_band=lambda: how.band_s(source, job, fold),
            look_for_imbalance=lambda: how.imbalance(source, job, fold),
            folded=ran.folded,
            detours=_detours(source, job, ran),
            write_out=lambda: self.result(loaded, source if loaded is None else loaded.source),
        )


def _detours(source: Source, job: Job, ran: _Ran) -> "tuple[Detour, ...]":
    """Return the ways around dead links of the fabric."""
    if ran.healthy is None or not job.cluster.fabric.edges:
        return ()
    from zsim.analysis.detour import detours

    return detours(source.faults, job, ran.healthy, ran.trace)


def _settings(asked: Mapping[str, object]) -> dict[str, object]:
    """Return the backend options that are set, with paths as Path."""
    found = {name: value for name, value in asked.items() if value not in (None, False)}
    for name in ("data", "offload_path"):
        if isinstance(given := found.get(name), str | PathLike):
            found[name] = Path(given)
    return found


def _traits(backend: str) -> BackendTraits:
    with mistakes(BackendError):
        return load_backend(backend).traits


def _loaded(
    scenario: LoadedScenario | Job | str | PathLike[str] | Mapping[str, object],
    changes: Changed,
    traits: BackendTraits,
) -> tuple[LoadedScenario | None, Source | None]:
    """Return the loaded scenario, or the source of a job."""
    if isinstance(scenario, Job):
        if changes:
            raise MistakeError("changes: are for scenarios, this is a job")
        name = scenario.schedule.name
        return None, Source(name=name, title=name, document=Document.of(scenario))
    loaded = load(scenario, changes)
    joined = os.environ.get("WORLD_SIZE", "")
    if traits.is_real and loaded.changes.ranks is None and joined.isdecimal():
        loaded = loaded.changed(ranks=int(joined))  # number of ranks that torchrun started
    return loaded, None


def _findings(source: Source, job: Job, traits: BackendTraits) -> "tuple[Finding, ...]":
    """Return the findings of the proof of a schedule.

    Values are compared only for real backends and schedules from elsewhere. No simulated figure
    depends on values, and tests cover the values of zsim's own schedules.
    """
    from zsim.proof import check as findings_of

    compares = source.scenario is None or traits.is_real
    return findings_of(job.written, job.model, compares=compares)


def _need_none(job: Job, findings: "tuple[Finding, ...]") -> None:
    """Raise RefutedError if there are findings."""
    if findings:
        from zsim.api.proof_result import ProofResult

        raise RefutedError(ProofResult(schedule=job.written, findings=findings))


def _is_large(job: Job) -> bool:
    """Return True if the proof takes longer than a fork."""
    programs = job.schedule.programs
    return sum(len(each.setup) + len(each.step) for each in programs) >= FORKED_MIN


def _run_while_proving(
    proof: "Callable[[], tuple[Finding, ...]]", made: Backend, job: Job, ran: Callable[[], _Ran]
) -> _Ran:
    """Simulate while a forked process proves the schedule; discard the result if the proof fails.

    If the simulation fails, the schedule may be the reason, so findings are raised first.
    """
    from zsim.workers.forked import ForkedAnswer

    with ForkedAnswer(proof) as forked:
        _need_accepted(made, job)
        try:
            found = ran()
        except TimeLimitError:
            raise
        except Exception:
            _need_none(job, forked.result())
            raise
        _need_none(job, forked.result())
    return found


def _need_accepted(made: Backend, job: Job) -> None:
    """Raise MistakeError if a backend without real ranks refuses the job."""
    if not made.traits.is_real and (refused := made.refusal(job)) is not None:
        raise MistakeError(refused)


def _phases(source: Source, job: Job) -> int:
    """Return the number of parts of a run that progress counts."""
    return PHASES + job.steps * (2 if source.faults or source.neighbours else 1)


def _after(before: int, progress: Progress | None, every: int) -> Progress | None:
    """Return a callback that adds `before` to the steps done and passes them to `progress`."""
    return None if progress is None else lambda done, _: progress(before + done, every)


@dataclass(frozen=True, slots=True, kw_only=True)
class _BackendChoice:
    """Name of the backend of a run, its settings, and the seed."""

    name: str
    settings: Mapping[str, object]
    seed: int

    def backend(self, source: Source, progress: Progress | None = None) -> Backend:
        """Return the backend, with the faults and neighbours of `source`."""
        if not (source.faults or source.neighbours):
            return self._with(self.settings, progress)
        injected = {"faults": source.faults, "neighbours": source.neighbours}
        return self._with({**self.settings, **injected}, progress)

    def decided(self, decision: Decision | None) -> "_BackendChoice":
        """Return this with the algorithm of collectives that a scenario forces, if any."""
        return replace(self, settings=_settings({**self.settings, "decision": decision}))

    def recorded(
        self,
        made: Backend,
        source: Source,
        job: Job,
        progress: Progress | None,
        *,
        fold: "MicroBatchFold | None" = None,
    ) -> _Ran:
        """Run a job; its proof is done or in progress.

        Raises:
            UnsteadyError: `fold` does not hold.
        """
        phases = _phases(source, job)
        (progress or ignore_progress)(PHASES, phases)
        begin = perf_counter()
        # Real ranks inherit the bound on memory, and CUDA reserves more than it uses.
        is_real = made.traits.is_real
        with mistakes(BackendError), unbounded_memory() if is_real else nullcontext():
            if fold is not None:
                trace, folded = fold.run(job, made, seed=self.seed)
                taken_s = perf_counter() - begin
                return _Ran(trace=trace, healthy=None, wall_time_s=taken_s, folded=folded)
            trace = made.run(job, seed=self.seed)
            healthy = self.healthy(source, job, _after(PHASES + job.steps, progress, phases))
        return _Ran(trace=trace, healthy=healthy, wall_time_s=perf_counter() - begin)

    def healthy(self, source: Source, job: Job, progress: Progress | None) -> Trace | None:
        """Return the run without faults and neighbours; None if the scenario has neither."""
        if not (source.faults or source.neighbours):
            return None
        return self._with(self.settings, progress).run(job, seed=self.seed)

    def remedies(self, loaded: LoadedScenario | None, trace: Trace) -> "tuple[Remedy, ...] | None":
        """Return the changes that make a simulated run fit; None if it fits or is not simulated."""
        if trace.out_of_memory is None or not load_backend(self.name).traits.predicts:
            return None
        if loaded is None or loaded.tables is None:
            return ()
        from zsim.api.remedy_runs import remedies_of

        return remedies_of(
            loaded.name, loaded.tables, loaded.changes, backend=self.backend, seed=self.seed
        )

    def band_s(
        self, source: Source, job: Job, fold: "MicroBatchFold | None" = None
    ) -> tuple[float, float] | None:
        """Return the band of the step time in seconds; None if the backend does not predict."""
        predicts = load_backend(self.name).traits.predicts
        return step_time_band_s(job, self.backend(source), fold) if predicts else None

    def imbalance(
        self, source: Source, job: Job, fold: "MicroBatchFold | None" = None
    ) -> "Imbalance | None":
        """Return the run with a busier rank; None without counts, or if nothing is predicted."""
        if job.named is None or not load_backend(self.name).traits.predicts:
            return None
        from zsim.api.imbalance import imbalance_of

        return imbalance_of(job, self.backend(source), fold)

    def _with(self, settings: Mapping[str, object], progress: Progress | None) -> Backend:
        with mistakes(BackendError):
            kind = load_backend(self.name)
        known = kind.traits.options
        without = {
            "data": f"--data: {settings.get('data')}: backend {self.name} reads no data",
            "timeout_s": (
                f"--timeout: {settings.get('timeout_s')}: backend {self.name} waits for nobody"
            ),
            "poison": f"--poison: backend {self.name} has no memory to poison",
            "unobserved": f"unobserved: backend {self.name} observes nothing",
            "witness": f"--witness: backend {self.name} runs nothing that could be watched",
            "offload_path": f"--offload-path: backend {self.name} writes no files for a schedule",
            "device_budget": (
                f"--device-budget: backend {self.name} has no device; a smaller GPU is "
                "--set gpu_memory=SIZE"
            ),
            "faults": f"fault, neighbour: backend {self.name} simulates none",
            "decision": f"network.algorithm: backend {self.name} takes its own",
        }
        for setting, why in without.items():
            if setting in settings and setting not in known:
                raise MistakeError(why)
        told = {} if progress is None or "progress" not in known else {"progress": progress}
        with mistakes(ValueError):
            return kind(**settings, **told)


def _this_machine(ranks: int) -> Cluster:
    """Return the cluster of real ranks, with unknown rates and links."""
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // ranks
    return unknown_cluster("this machine", ranks, memory_bytes=memory_bytes)
