"""`zsim run SCENARIO`."""

from pathlib import Path
from typing import Annotated

import typer

from zsim.cli.option import (
    Code,
    Json,
    Schedulish,
    Settings,
    at_least,
    backend_names,
    more_than_nothing,
)

Timeout = Annotated[
    float | None,
    typer.Option(
        metavar="S",
        parser=more_than_nothing,
        help="Seconds without progress on any rank after which a run has failed (torch; 60).",
    ),
]
Poison = Annotated[
    bool,
    typer.Option(
        "--poison", help="No numbers in memory that is not valid, ranks late at random (torch)."
    ),
]

Witness = Annotated[
    bool,
    typer.Option(
        "--witness",
        help="Record in the trace what torch is seen to do; steps take longer (torch).",
    ),
]


def run(
    scenario: Schedulish,
    backend: Annotated[
        str, typer.Option(help="Where it runs: sim, torch or null.", autocompletion=backend_names)
    ] = "sim",
    ranks: Annotated[
        int | None,
        typer.Option(metavar="N", parser=at_least(1), help="So many ranks, not the cluster's."),
    ] = None,
    data: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Text to train on, bytes as tokens (torch).")
    ] = None,
    timeout: Timeout = None,
    poison: Poison = False,
    witness: Witness = False,
    settings: Settings = None,
    seed: Annotated[
        int, typer.Option(metavar="N", parser=at_least(0), help="Seed of all that is drawn.")
    ] = 0,
    steps: Annotated[
        int | None, typer.Option(metavar="N", parser=at_least(1), help="Optimizer steps.")
    ] = None,
    trace: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|FOLDER/",
            help="Write what happened, as PyTorch's profiler does; in FOLDER/ a file per rank.",
        ),
    ] = None,
    timeline: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw the last step there: .svg or .png.")
    ] = None,
    report: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a page about it there: .html.")
    ] = None,
    check: Annotated[
        bool, typer.Option("--check/--no-check", help="Prove the schedule before it runs.")
    ] = True,
    json: Json = False,
) -> Code:
    """Does it fit, how long does a step take, what bounds it."""
    from zsim.cli.running import Request, print_run
    from zsim.files.source import Changes

    request = Request(
        source=scenario,
        changes=Changes(settings=tuple(settings or ()), ranks=ranks, steps=steps),
        backend=backend,
        data=data,
        timeout_s=timeout,
        poison=poison,
        witness=witness,
        seed=seed,
        trace=trace,
        timeline=timeline,
        report=report,
        check=check,
        as_json=json,
    )
    return Code.DONE if print_run(request) else Code.NO
