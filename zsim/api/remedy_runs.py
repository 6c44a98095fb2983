"""Find changes that make an out-of-memory run fit, by simulating each change."""

from collections.abc import Callable, Mapping
from dataclasses import replace

from zsim.analysis.remedies import Remedy, TightScenario, remedies
from zsim.analysis.simulated_footprint import footprint_of
from zsim.analysis.summary import summary
from zsim.backend.backend import Backend, BackendError, Job, NoRouteError
from zsim.files.source import Changes, Source, described, resolved
from zsim.mistake import MistakeError
from zsim.schedule.operation import walk
from zsim.units import format_seconds

MOST_OPERATIONS = 1_000_000
"""Limit of operations of all schedules that a search writes and checks, about a minute. Beyond
it, changes not yet tried count as not fitting."""


def remedies_of(
    name: str,
    tables: Mapping[str, object],
    changes: Changes,
    *,
    backend: Callable[[Source], Backend],
    seed: int,
) -> tuple[Remedy, ...]:
    """Return the cheapest changes with which the scenario `name` in `tables` fits.

    `backend` builds the backend for a source, with its faults.
    """
    subject = _tight(name, tables, changes)
    found: dict[tuple[str, ...], tuple[Source, Job]] = {}

    def made(settings: tuple[str, ...]) -> tuple[Source, Job] | None:
        put = replace(changes, settings=(*changes.settings, *settings))
        try:
            again = described(name, tables, put)
            source = resolved(name, again, ranks=changes.ranks, quiet=True)
            return source, source.job()
        except MistakeError:  # the change contradicts the scenario
            return None

    tried = 0

    def fits(settings: tuple[str, ...]) -> bool:
        nonlocal tried
        if tried > MOST_OPERATIONS:
            return False
        each = made(settings)
        if each is None:
            return False
        tried += _operations(each[1])
        if not footprint_of(each[1]).fits:
            return False
        found[settings] = each
        return True

    def run(settings: tuple[str, ...]) -> Remedy | None:
        each = found.get(settings) or made(settings)
        if each is None:
            return None
        source, job = each
        try:
            figures = summary(job, backend(source).run(job, seed=seed))
        except (BackendError, NoRouteError):
            return None
        if not figures.fits:
            return None
        return Remedy(
            settings=settings,
            step_time_s=figures.step_time_s,
            reserved_bytes=figures.peak_reserved_bytes,
        )

    return remedies(subject, fits, run)


def _tight(name: str, tables: Mapping[str, object], changes: Changes) -> TightScenario:
    scenario = described(name, tables, changes)
    before = resolved(name, scenario, ranks=changes.ranks, quiet=True).job()
    strategy = before.schedule.contract.strategy
    assert strategy is not None  # the schedule of a scenario has a strategy in its contract
    return TightScenario(
        scenario=scenario,
        strategy=strategy,
        model=before.model,
        cluster=before.cluster,
    )


def _operations(job: Job) -> int:
    """Return the number of operations in a step of all programs of a job."""
    return sum(1 for program in job.schedule.programs for _ in walk(program.step))


def remedy_objects(found: tuple[Remedy, ...]) -> list[dict[str, object]]:
    """Return remedies for `--json`, cheapest first."""
    return [
        {
            "settings": list(each.settings),
            "step_time_s": each.step_time_s,
            "peak_reserved_bytes": each.reserved_bytes,
        }
        for each in found
    ]


def remedy_lines(found: tuple[Remedy, ...]) -> list[tuple[str, str]]:
    """Return a line for each remedy, cheapest first."""
    if not found:
        tried = (
            "smaller batches, higher stages, checkpoints, tensor and context axes, pipelines, "
            "offload, shorter sequences"
        )
        return [("it would fit", f"with no change that was tried ({tried}); try more GPUs")]
    names = ("it would fit with", *("or with" for _ in found[1:]))
    return [
        (name, f"{' '.join(each.settings)}: {format_seconds(each.step_time_s)} a step{_less(each)}")
        for name, each in zip(names, found, strict=True)
    ]


def _less(remedy: Remedy) -> str:
    """Return a note that a step has fewer tokens if the remedy shortens sequences."""
    is_shorter = any(each.startswith("model.sequence_length=") for each in remedy.settings)
    return ", which has fewer tokens" if is_shorter else ""
