"""Predictions of memory compared with published runs that ended without a result.

A run without a result may have run out of memory, crashed or taken too long. If a run of the same
model with at most as many tensor ranks and at least as large a micro-batch has a result, memory is
not the reason: the successful run dominates it, and it is excluded.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from zsim.api.run_forecast import RunForecast
from zsim_lab.rows.published import Published

NEAR = 0.05
"""Fraction below the limit at which a run without a result may be predicted."""

ABOVE = 0.1
"""Fraction above the limit that no run with a result may be predicted to exceed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryFit:
    """Predictions of which runs of a file fit, compared with the outcomes.

    The limit is the memory that a rank may reserve: that of its GPU minus that of CUDA and NCCL.

    Attributes:
        without: number of modelled runs without a result that no successful run dominates.
        refused: number of these that are predicted above the limit, or within `NEAR` of it.
        results: number of modelled runs with a result.
        wrong: runs with a result that are predicted more than `ABOVE` above the limit.
        not_begun: number of runs without a result that the trainer refuses; not in `without`.
    """

    file: str
    without: int
    refused: int
    results: int
    wrong: tuple[Published, ...]
    not_begun: int = 0


def fit(
    file: str, runs: Sequence[Published], forecasts: Sequence[RunForecast | str | None]
) -> MemoryFit | None:
    """Return the fit of `runs` of `file`; None if every run has a result."""
    made = [
        (run, forecast)
        for run, forecast in zip(runs, forecasts, strict=True)
        if isinstance(forecast, RunForecast)
    ]
    results = [(run, forecast) for run, forecast in made if not run.failed]
    left = {id(run) for run in undominated([run for run, _ in made])}
    without = [forecast for run, forecast in made if id(run) in left]
    if len(results) == len(made):
        return None
    return MemoryFit(
        file=file,
        without=len(without),
        refused=sum(each.needed_bytes >= each.usable_bytes * (1 - NEAR) for each in without),
        results=len(results),
        wrong=tuple(
            run for run, each in results if each.needed_bytes > each.usable_bytes * (1 + ABOVE)
        ),
        not_begun=sum(bool(run.failed and run.refusal) for run in runs),
    )


def undominated(runs: Sequence[Published]) -> list[Published]:
    """Return the runs without a result that no successful run of the same file dominates."""
    hardest = [(_model(run), *_hardness(run)) for run in runs if not run.failed]
    return [
        run
        for run in runs
        if run.failed and not _dominated((_model(run), *_hardness(run)), hardest)
    ]


def _model(run: Published) -> str:
    return f"{run.file}: {run.model}"


def _hardness(run: Published) -> tuple[int, int]:
    """Return tensor ranks (fewer are harder), and sequences of a micro-batch (more are harder)."""
    parallel = cast("Mapping[str, int]", run.scenario["parallel"])
    train = cast("Mapping[str, int]", run.scenario["train"])
    return parallel.get("tensor", 1), train["micro_batch_size"]


def _dominated(run: tuple[str, int, int], successful: Sequence[tuple[str, int, int]]) -> bool:
    model, tensor, micro_batch = run
    return any(
        model == other and ranks <= tensor and sequences >= micro_batch
        for other, ranks, sequences in successful
    )
