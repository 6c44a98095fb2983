"""Throughput in figures of papers, as rows of the table of published runs."""

import os
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from hashlib import sha256

from zsim.analysis.summary import Summary
from zsim.api.answer import Progress
from zsim.api.forecast import accumulating
from zsim.api.run_forecast import RunForecast
from zsim.cluster.foreign_profile import foreign_words
from zsim.files.shipped_files import published_papers
from zsim.files.source import settled
from zsim.prediction.evidence import JudgedRun, flat
from zsim.prediction.run_features import RunFeatures, features
from zsim.scenario.tables import from_tables
from zsim_lab.answer.paper_validation import FAULTS, forecast_of, throughput
from zsim_lab.verdict.judged_rows import rounded
from zsim_lab.verdict.paper_figures import (
    THROUGHPUTS,
    FigureQuantity,
    Paper,
    PaperFigure,
    PaperRun,
    parse,
)

TIMED = (*THROUGHPUTS, FigureQuantity.STEP_TIME)
"""Quantities that determine a step time."""

Asked = tuple[str, str, FigureQuantity, PaperRun]
"""Publication, sweep, quantity and run."""


def figure_runs() -> list[Asked]:
    """Return the runs of paper figures with a published throughput that no fit used.

    Figures whose rows are in a table of published runs are not among them.
    """
    papers = [parse(text) for text in published_papers().values()]
    return [
        (paper.publication.removesuffix(", runs"), _sweep(paper, figure), figure.quantity, run)
        for paper in papers
        for figure in paper.figures
        if figure.quantity in TIMED and not figure.again and not figure.table
        for run in figure.runs
        if not run.fitted and run.published is not None
    ]


def _sweep(paper: Paper, figure: PaperFigure) -> str:
    return sha256(f"{paper.publication}\0{figure.name}".encode()).hexdigest()[:8]


def judged_figures(progress: Progress) -> list[JudgedRun]:
    """Predict the runs of `figure_runs` and return their rows; skip runs that zsim refuses."""
    asked = figure_runs()
    found: list[JudgedRun] = []
    with ProcessPoolExecutor(min(len(asked), os.cpu_count() or 1)) as pool:
        for done, row in enumerate(pool.map(judged_figure, asked), start=1):
            found += [row] if row is not None else []
            progress(done, len(asked))
    return found


def judged_figure(asked: Asked) -> JudgedRun | None:
    """Return the row of a run, by its first scenario that fits, else the last; None on failure."""
    publication, sweep, quantity, run = asked
    assert run.published is not None, "only rows with a published value are asked"
    try:
        for tables in run.alternatives:
            rate, found = _published(quantity, tables)
            if found.fits or tables is run.alternatives[-1]:
                made = found if isinstance(found, RunForecast) else forecast_of(tables)
                step_s = run.published if rate is None else found.step_time_s * rate / run.published
                return _row(run, tables, made, step_s, publication=publication, sweep=sweep)
    except FAULTS:
        return None
    return None


def _published(
    quantity: FigureQuantity, tables: Mapping[str, object]
) -> tuple[float | None, Summary | RunForecast]:
    """Return the predicted rate (None if the step time itself was published) and the forecast."""
    if quantity is FigureQuantity.STEP_TIME:
        return None, forecast_of(tables)
    return throughput(quantity, tables)


def _row(
    run: PaperRun,
    tables: Mapping[str, object],
    made: RunForecast,
    step_s: float,
    *,
    publication: str,
    sweep: str,
) -> JudgedRun | None:
    """Return the row of `run`, with the published step time `step_s`."""
    of_run = scenario_features(tables)
    if not isinstance(of_run, RunFeatures):
        return None
    return JudgedRun(
        publication=publication.split(",")[1].strip(),
        citation=publication,
        sweep=sweep,
        step_s=rounded(step_s),
        predicted_step_s=rounded(made.step_time_s),
        peak_bytes=run.peak_bytes,
        predicted_peak_bytes=None if run.peak_bytes is None else made.peak_reserved_bytes,
        features=of_run,
        settings=flat({name: table for name, table in tables.items() if name != "title"}),
    )


def scenario_features(tables: Mapping[str, object]) -> RunFeatures | str:
    """Return the features of the run in `tables`, or the reason why no published run is similar.

    A run with constants of another GPU judges neither; zsim states no error for such runs. Features
    do not depend on the number of micro-batches, which may exceed the simulated ones.
    """
    train = tables["train"]
    assert isinstance(train, Mapping)
    counted = "gradient_accumulation_steps" in train and "global_batch_size" not in train
    few = accumulating(tables, 1) if counted else tables
    found, _ = settled("scenario", from_tables(few))
    foreign = foreign_words(found.cluster)
    return foreign or features(found.strategy, found.make_model(), found.cluster)
