"""`zsim sweep STUDY`."""

from pathlib import Path
from typing import Annotated

import typer

from zsim.cli.option import Code, Json, at_least, study_names


def sweep(
    study: Annotated[
        str,
        typer.Argument(
            help="A study that ships (zsim list), or a file.",
            show_default=False,
            autocompletion=study_names,
        ),
    ],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say how many runs there are, and about how long.")
    ] = False,
    store: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Keep outcomes there, in SQLite. Default: STUDY.sqlite."),
    ] = None,
    csv: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write all runs there, as CSV.")
    ] = None,
    report: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a page about it there: .html.")
    ] = None,
    picture: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw the runs there: .svg or .png.")
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(metavar="N", parser=at_least(1), help="Processes. Default: all cores."),
    ] = None,
    scheduler: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="Run on the Dask cluster there instead.")
    ] = None,
    json: Json = False,
) -> Code:
    """Many runs of what-if: which is best, and why not the others."""
    from zsim.cli.sweep.sweep import Request, need_workers, print_sweep

    need_workers(workers, scheduler)
    request = Request(
        study=study,
        store=store,
        csv=csv,
        report=report,
        picture=picture,
        workers=workers,
        scheduler=scheduler,
        dry_run=dry_run,
        as_json=json,
    )
    return Code.DONE if print_sweep(request) else Code.NO
