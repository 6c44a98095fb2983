"""`zsim sweep STUDY`."""

import sys
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from zsim.cli.option import Code, Json, at_least, completed
from zsim.cli.printing import answer_before, noted_interrupt, outputs, print_answer
from zsim.cli.progress_bar import progress
from zsim.mistake import MistakeError, one_line

Study = Annotated[
    str,
    typer.Argument(
        metavar="STUDY",
        help="A study that ships (zsim list), or a file.",
        show_default=False,
        autocompletion=completed("study_names"),
    ),
]


Figure = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="What --picture draws: an axis, or changes. Default: the longest axis.",
    ),
]


def sweep(
    study: Study,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Print how many runs there are, and about how long they take."
        ),
    ] = False,
    store: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="SQLite file that keeps outcomes. Default: STUDY.sqlite."
        ),
    ] = None,
    csv: Annotated[Path | None, typer.Option(metavar="FILE", help="Write all runs as CSV.")] = None,
    report: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a page about the study: .html.")
    ] = None,
    picture: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw the runs: .svg, .png or .pdf.")
    ] = None,
    figure: Figure = None,
    workers: Annotated[
        int | None,
        typer.Option(metavar="N", parser=at_least(1), help="Processes. Default: all cores."),
    ] = None,
    scheduler: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="Run on the Dask cluster at this address.")
    ] = None,
    json: Json = False,
) -> Code:
    """Run a study: which of many runs is best, and why."""
    from zsim.api.output import FileKind, need_output, need_picture
    from zsim_study.answer.sweep_forecast import forecast_sweep
    from zsim_study.answer.sweep_result import figures_of, study_of
    from zsim_study.answer.sweep_result import sweep as run_study

    if workers is not None and scheduler is not None:
        raise MistakeError(
            f"--workers: {workers} cannot be combined with --scheduler, which has its own"
        )
    need_output("--report", report, FileKind.PAGE)
    need_output("--csv", csv, FileKind.ANY)
    asked = study_of(study)
    need_picture(picture, figure, figures_of(asked))
    store = store or Path(f"{asked.name}.sqlite")
    if dry_run:
        found = forecast_sweep(asked, store=store, workers=workers, scheduler=scheduler)
        print_answer(found, as_json=json)
        return Code.DONE
    with noted_interrupt(), progress(asked.name, unit="runs") as update:
        result = run_study(
            asked, store=store, workers=workers, scheduler=scheduler, progress=update, tell=_echo
        )
    draw = partial(result.picture, figure=figure)
    files = outputs((csv, result.csv), (report, result.report), (picture, draw))
    with answer_before([result.need_kept, *files]):
        print_answer(result, as_json=json)
    return Code.NO if result.best is None else Code.DONE


def _echo(line: str) -> None:
    print(one_line(line), file=sys.stderr, flush=True)
