"""Fit the speed of kernels in training to published runs: simulate each run, then fit."""

import os
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from datetime import date
from functools import partial
from typing import TypeVar

from zsim.api.forecast import FEW, accumulating, last_step_s
from zsim.backend.backend import Job, simulator
from zsim.cluster.profile.in_training import ALONE, MATRIX, Evidence, InTraining
from zsim.cluster.profile.kernels import FittedKernels, KernelProfile
from zsim.compute.roofline import peaks_of
from zsim.files.source import resolved
from zsim.scenario.tables import from_tables
from zsim.schedule.operation import Compute
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

Found = TypeVar("Found")


def with_training(
    kernels: Sequence[FittedKernels],
    runs: Sequence[Published],
    *,
    today: date,
    report: Callable[[str], None],
) -> list[FittedKernels]:
    """Return `kernels` with training constants, siblings first; `report` receives progress lines.

    `today` is the date in the evidence of judged runs.
    """
    found: dict[str, FittedKernels] = {}
    for each in sorted(kernels, key=lambda each: each.gpu in TRAINING_SIBLINGS):
        own = [run for run in runs if _profile(run) == each.gpu and run.step_time_s is not None]
        sibling = found.get(TRAINING_SIBLINGS.get(each.gpu, ""))
        start = start_of(each.gpu, sibling)
        report(f"{each.gpu}: {len(own)} runs of training")
        training = _trained(each, own, start, today=today, report=report) if own else start
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
        seen = _each(for_fit, partial(_simulated, constants=constants))
        training = fitted(seen, training)
        report(f"{each.gpu}: {training}")
    if not seen:
        return start
    judge = partial(judged_run, constants=replace(each.constants, training=training))
    judged = _each(for_judging, judge)
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


def _each(runs: Sequence[Published], simulated: Callable[[Published], Found]) -> list[Found]:
    """Return the results of `simulated` for all runs, using all processors."""
    if not runs:
        return []
    with ProcessPoolExecutor(min(len(runs), os.cpu_count() or 1)) as pool:
        return list(pool.map(simulated, runs, chunksize=2))


def judged_run(run: Published, constants: KernelProfile) -> float:
    """Return the relative error of the step time of `run`, simulated as by `zsim run`.

    The fit assumes that the slowdown of kernels by collectives is constant, but it changes with
    the constants. So a prediction must be simulated with the fitted constants.
    """

    def step_s(tables: Mapping[str, object]) -> float:
        return _timed(run, tables, constants)[1]

    steps = _accumulation_steps(run)
    taken_s = step_s(accumulating(run.scenario, min(steps, FEW)))
    if steps > FEW:
        taken_s += (steps - FEW) * (taken_s - step_s(accumulating(run.scenario, FEW - 1)))
    assert run.step_time_s is not None
    return abs(taken_s / run.step_time_s - 1)


def _accumulation_steps(run: Published) -> int:
    train = run.scenario["train"]
    assert isinstance(train, Mapping)
    return int(train["gradient_accumulation_steps"])


def _simulated(run: Published, constants: KernelProfile) -> Observed:
    steps = _accumulation_steps(run)
    if steps <= FEW:
        return _once(run, run.scenario, constants)
    fewer = _once(run, accumulating(run.scenario, FEW - 1), constants)
    few = _once(run, accumulating(run.scenario, FEW), constants)

    def extended(less: float, more: float) -> float:
        return more + (steps - FEW) * (more - less)

    return replace(
        few,
        alone_s={name: extended(fewer.alone_s[name], few.alone_s[name]) for name in few.alone_s},
        rest_s=extended(fewer.rest_s, few.rest_s),
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


def _once(run: Published, tables: Mapping[str, object], constants: KernelProfile) -> Observed:
    job, step_s = _timed(run, tables, constants)
    gpu = job.cluster.gpu
    counts = Counter(
        kernel
        for operation in job.schedule.programs[0].step
        if isinstance(operation, Compute)
        for kernel in operation.kernels
    )
    alone = alone_s(counts, {kernel: peaks_of(kernel, gpu) for kernel in counts}, constants)
    in_training = sum(value / constants.training.constant(name) for name, value in alone.items())
    assert run.step_time_s is not None
    return Observed(
        file=run.file,
        seconds=run.step_time_s,
        alone_s=alone,
        rest_s=step_s - in_training,
    )
