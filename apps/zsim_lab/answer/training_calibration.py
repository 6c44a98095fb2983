"""Fit the speed of kernels in training to published runs: simulate each run, then fit."""

import os
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, replace
from datetime import date
from pathlib import Path
from typing import Any

from zsim.api.forecast import accumulating, last_step_s, simulated_micro_batches
from zsim.backend.backend import Job, simulator
from zsim.cluster.cluster import Gpu
from zsim.cluster.profile.in_training import ALONE, MATRIX, Evidence, InTraining
from zsim.cluster.profile.kernels import FittedKernels, KernelProfile
from zsim.compute.roofline import peaks_of
from zsim.files.source import resolved
from zsim.scenario.tables import from_tables
from zsim.schedule.operation import Compute
from zsim.schedule.schedule import Program
from zsim_lab.answer.kept_results import keep, kept_results, key_of
from zsim_lab.fit.training_fit import AS_ALONE, Observed, alone_s, fitted
from zsim_lab.rows.gpu_kinds import TIMED_WARM, TRAINING_SIBLINGS
from zsim_lab.rows.published import Published
from zsim_lab.rows.training_tables import TABLES
from zsim_lab.verdict.verdict import errors_of

FITTED = tuple(name for name, table in TABLES.items() if table.fits_kernels)
"""Tables whose sweeps are fitted, except those that judge. Runs of other trainers only judge."""

ROUNDS = 2
"""Rounds of simulating all fitted runs, each with the constants of the round before.

Collectives slow kernels down for as long as they run, which depends on the constants.
"""


def with_training(
    kernels: Sequence[FittedKernels],
    runs: Sequence[Published],
    *,
    today: date,
    report: Callable[[str], None],
    resume: Path | None = None,
) -> list[FittedKernels]:
    """Return `kernels` with training constants, siblings first; `report` receives progress lines.

    `today` is the date in the evidence of judged runs; the file `resume` keeps simulated runs.
    """
    kept = {} if resume is None else dict(kept_results(resume))
    found: dict[str, FittedKernels] = {}
    for each in sorted(kernels, key=lambda each: each.gpu in TRAINING_SIBLINGS):
        own = [
            run
            for run in runs
            if _profile(run) == each.gpu
            and run.step_time_s is not None
            and TABLES[run.file].fits(each.gpu)
        ]
        sibling = found.get(TRAINING_SIBLINGS.get(each.gpu, ""))
        start = start_of(each.gpu, sibling)
        report(f"{each.gpu}: {len(own)} runs of training")
        pool = _Simulations(kept, resume)
        training = _trained(each, own, start, pool, today=today, report=report) if own else start
        found[each.gpu] = replace(each, constants=replace(each.constants, training=training))
    return list(found.values())


def start_of(gpu: str, sibling: FittedKernels | None) -> InTraining:
    """Return the training constants of a GPU before any of its runs is fitted."""
    if gpu in AS_ALONE:
        return ALONE
    found = InTraining() if sibling is None else sibling.constants.training
    if gpu in TIMED_WARM:
        for name in MATRIX:
            found = found.changed(name, 1.0)
    return found


def _profile(run: Published) -> object:
    compute = run.scenario.get("compute")
    return compute.get("profile") if isinstance(compute, Mapping) else None


def _trained(
    each: FittedKernels,
    runs: Sequence[Published],
    start: InTraining,
    pool: "_Simulations",
    *,
    today: date,
    report: Callable[[str], None],
) -> InTraining:
    training = start
    for_fit = [run for run in runs if not run.judged and not run.incomplete]
    for_judging = [run for run in runs if run.judged]
    seen: list[Observed] = []
    for _ in range(ROUNDS):
        constants = replace(each.constants, training=training)
        seen = [Observed(**made) for made in pool.each(for_fit, _observed, constants)]
        training = fitted(seen, training)
        report(f"{each.gpu}: {training}")
    if not seen:
        return start
    judged = pool.each(for_judging, judged_run, replace(each.constants, training=training))
    errors = errors_of(judged) if judged else None
    return replace(
        training,
        evidence=Evidence(
            gpu=each.gpu,
            fitted=len(seen),
            publications=tuple(dict.fromkeys(TABLES[run.file].publication for run in for_fit)),
            judged=len(judged),
            median=errors.median if errors else 0.0,
            p90=errors.p90 if errors else 0.0,
            rows=_lines(for_judging),
            date=today,
        ),
    )


def _lines(runs: Sequence[Published]) -> tuple[str, ...]:
    """Return the tables of `runs`, each with the line numbers of its runs."""
    lines: defaultdict[str, list[str]] = defaultdict(list)
    for run in runs:
        lines[run.file].append(str(run.line))
    return tuple(f"{file}: {', '.join(found)}" for file, found in lines.items())


class _Simulations:
    """Simulates runs on all processors; results by key are `kept`, and added to the file `path`."""

    def __init__(self, kept: dict[str, Any], path: Path | None) -> None:
        self._kept = kept
        self._path = path

    def each(
        self,
        runs: Sequence[Published],
        simulated: Callable[[Published, KernelProfile], object],
        constants: KernelProfile,
    ) -> list[Any]:
        """Return the results of `simulated` for all runs; runs with a kept result are skipped."""
        keys = [
            key_of(simulated.__name__, run.scenario, run.step_time_s, repr(constants))
            for run in runs
        ]
        todo = {key: run for key, run in zip(keys, runs, strict=True) if key not in self._kept}
        if todo:
            with ProcessPoolExecutor(min(len(todo), os.cpu_count() or 1)) as pool:
                running = {pool.submit(simulated, run, constants): key for key, run in todo.items()}
                for done in as_completed(running):
                    self._kept[running[done]] = made = done.result()
                    if self._path is not None:
                        keep(self._path, running[done], made)
        return [self._kept[key] for key in keys]


def judged_run(run: Published, constants: KernelProfile) -> float:
    """Return the relative error of the step time of `run`, simulated as by `zsim run`.

    The fit assumes that the slowdown of kernels by collectives is constant, but it changes with
    the constants. So a prediction must be simulated with the fitted constants.
    """

    def step_s(tables: Mapping[str, object]) -> float:
        return _timed(run, tables, constants)[1]

    steps = _accumulation_steps(run)
    few, turn = simulated_micro_batches(run.scenario)
    taken_s = step_s(accumulating(run.scenario, min(steps, few)))
    if steps > few:
        less_s = step_s(accumulating(run.scenario, few - turn))
        taken_s += (steps - few) * (taken_s - less_s) / turn
    assert run.step_time_s is not None
    return abs(taken_s / run.step_time_s - 1)


def _accumulation_steps(run: Published) -> int:
    train = run.scenario["train"]
    assert isinstance(train, Mapping)
    return int(train["gradient_accumulation_steps"])


def _observed(run: Published, constants: KernelProfile) -> dict[str, object]:
    """Return the fields of `_simulated`."""
    return asdict(_simulated(run, constants))


def _simulated(run: Published, constants: KernelProfile) -> Observed:
    steps = _accumulation_steps(run)
    few, turn = simulated_micro_batches(run.scenario)
    if steps <= few:
        return _once(run, run.scenario, constants)
    less = _once(run, accumulating(run.scenario, few - turn), constants)
    more = _once(run, accumulating(run.scenario, few), constants)

    def extended(less_s: float, more_s: float) -> float:
        return more_s + (steps - few) * (more_s - less_s) / turn

    return replace(
        more,
        alone_s={name: extended(less.alone_s[name], more.alone_s[name]) for name in more.alone_s},
        rest_s=extended(less.rest_s, more.rest_s),
    )


def _timed(
    run: Published, tables: Mapping[str, object], constants: KernelProfile
) -> tuple[Job, float]:
    """Return the job of `run` on a GPU with `constants`, and the seconds of its step."""
    bare = {name: table for name, table in tables.items() if name != "compute"}
    job = resolved(f"{run.file}, line {run.line}", from_tables(bare)).job()
    gpu = job.cluster.gpu.timed_by(constants)
    job = replace(job, cluster=replace(job.cluster, gpu=gpu))
    return job, last_step_s(job, simulator())


def _alone_s(program: Program, gpu: Gpu, constants: KernelProfile) -> dict[str, float]:
    """Return the seconds of work of the kernels of a step, by the name of their constant.

    Of a pipeline, the busiest stage counts.
    """
    counts = Counter(
        kernel
        for operation in program.step
        if isinstance(operation, Compute)
        for kernel in operation.kernels
    )
    return alone_s(counts, {kernel: peaks_of(kernel, gpu) for kernel in counts}, constants)


def _once(run: Published, tables: Mapping[str, object], constants: KernelProfile) -> Observed:
    job, step_s = _timed(run, tables, constants)
    gpu = job.cluster.gpu
    alone = max(
        (_alone_s(program, gpu, constants) for program in job.schedule.programs),
        key=lambda found: sum(found.values()),
    )
    in_training = sum(value / constants.training.constant(name) for name, value in alone.items())
    assert run.step_time_s is not None
    return Observed(
        file=run.file,
        seconds=run.step_time_s,
        alone_s=alone,
        rest_s=step_s - in_training,
    )
