"""`zsim validate paper`: figures of papers that ship, predicted, beside what was published."""

import os
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from itertools import chain
from pathlib import Path

from zsim.analysis.summary import summary
from zsim.api.largest_result import largest_of
from zsim.backend.backend import BackendError, NoWayError
from zsim.calibration.paper_figures import (
    FigureQuantity,
    FigureVerdict,
    Paper,
    PaperRun,
    Predicted,
    parse,
    shown,
    verdict,
)
from zsim.cli.answer import print_json
from zsim.cli.errors import errors_object
from zsim.files.installed import published_papers
from zsim.files.picture import need_format, write_picture
from zsim.files.source import resolved
from zsim.files.written import answer_before
from zsim.mistake import MistakeError
from zsim.report.svg.paper_picture import picture
from zsim.scenario.tables import ScenarioError, from_tables

Answer = tuple[float, int] | str
"""A value and which of its scenarios fits, or why there is none."""


def validate_paper(*, as_json: bool, drawing: Path | None) -> None:
    """Print how well every figure that ships is predicted.

    Raises:
        MistakeError: no picture can be made.
        UnwrittenError: the picture cannot be written.
    """
    if drawing is not None:
        need_format("--picture", drawing)
    papers = [parse(text) for text in published_papers().values()]
    verdicts = {paper.publication: verdicts_of(paper) for paper in papers}
    every = list(chain.from_iterable(verdicts.values()))
    outputs = (
        [] if drawing is None else [lambda: write_picture("--picture", drawing, picture(every))]
    )
    with answer_before(*outputs):
        if as_json:
            print_json({"files": {each.figure.name: verdict_object(each) for each in every}})
        else:
            for publication, found in verdicts.items():
                print(publication)
                _print(found)


def verdicts_of(paper: Paper) -> list[FigureVerdict]:
    """Every figure of `paper`, predicted on all processors."""
    asked = [(figure.quantity, run) for figure in paper.figures for run in figure.runs]
    with ProcessPoolExecutor(min(len(asked), os.cpu_count() or 1)) as pool:
        answers = iter(list(pool.map(_answer, *zip(*asked, strict=True))))
    return [verdict(figure, [next(answers) for _ in figure.runs]) for figure in paper.figures]


def _answer(quantity: FigureQuantity, run: PaperRun) -> Answer:
    """What is predicted for `run`; of several ways the first that fits, else the last."""
    try:
        if quantity is not FigureQuantity.THROUGHPUT:
            return _largest(quantity, run.ways[0])
        for way, tables in enumerate(run.ways):
            rate, fits = _rate(tables)
            if fits or way == len(run.ways) - 1:
                return rate, way
    except (MistakeError, ScenarioError, BackendError, NoWayError) as error:
        return str(error)
    raise AssertionError("a run has a scenario")


def _largest(quantity: FigureQuantity, tables: Mapping[str, object]) -> Answer:
    answer = largest_of("scenario", from_tables(tables))
    found = answer.states if quantity is FigureQuantity.STATES else answer.found
    if found is None or found.fits is None:
        return "no size fits"
    return float(found.fits.parameters), 0


def _rate(tables: Mapping[str, object]) -> tuple[float, bool]:
    """TFLOP/s per GPU as model FLOPs count, and whether the run fits."""
    source = resolved("scenario", from_tables(tables))
    job = source.job()
    found = summary(job, source.simulation().run(job, seed=0))
    return found.model_tflops_per_gpu, found.fits


def verdict_object(found: FigureVerdict) -> dict[str, object]:
    """A figure of `zsim validate paper --json`."""
    return {
        "quantity": found.figure.quantity,
        "source": found.figure.source,
        "rows": len(found.figure.runs),
        "modelled": len(found.predicted),
        **errors_object(found.all),
        "judged": {
            "modelled": found.judged.rows if found.judged else 0,
            **errors_object(found.judged),
        },
        "order": list(found.order) if found.figure.ordered else None,
        "order_as_published": (
            found.order == found.published_order if found.figure.ordered else None
        ),
        "predictions": [_row_object(each) for each in found.predicted],
        "worst": [_row_object(each) for each in found.worst],
        "unmodelled": [{"row": label, "reason": reason} for label, reason in found.unmodelled],
    }


def _row_object(each: Predicted) -> dict[str, object]:
    return {
        "row": each.run.label,
        "judged": not each.run.fitted,
        "way": each.way,
        "published": each.run.published,
        "predicted": each.value,
        "error": each.off,
    }


def _print(verdicts: list[FigureVerdict]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    table.add_column("figure", no_wrap=True)
    for name in ("rows", "median", "mean", "90 %", "worst"):
        table.add_column(name, justify="right")
    for found in verdicts:
        errors = found.judged
        if errors is not None:
            worst = max(abs(each.off) for each in found.predicted if not each.run.fitted)
            values = (errors.median, errors.mean, errors.p90, worst)
            table.add_row(
                found.figure.name, str(errors.rows), *(f"{value:.1%}" for value in values)
            )
    Console(width=100, highlight=False).print(table)
    for found in verdicts:
        rows = len(found.figure.runs)
        print(f"{found.figure.name}: {len(found.predicted)} of {rows} rows are modelled")
        for label, reason in found.unmodelled:
            print(f"  not {label}: {reason}")
        for each in found.worst:
            print(f"  {_line(found, each)}")
        if found.figure.ordered:
            said = "as published" if found.order == found.published_order else "not as published"
            print(f"  from the smallest: {' < '.join(found.order)}, {said}")


def _line(found: FigureVerdict, each: Predicted) -> str:
    quantity, notes = found.figure.quantity, ""
    if each.way:
        notes += ", with what needs less memory"
    if each.run.fitted:
        notes += ", used for fitting"
    given, said = shown(each.run.published, quantity), shown(each.value, quantity)
    return f"{each.run.label}: published {given}, predicted {said}, {each.off:+.1%}{notes}"
