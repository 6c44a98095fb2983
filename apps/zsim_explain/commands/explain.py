"""`zsim explain TRACE...`."""

from pathlib import Path
from typing import Annotated

import typer

from zsim.cli.option import Code, Json
from zsim.cli.printing import print_answer


def explain(
    traces: Annotated[
        list[Path],
        typer.Argument(
            metavar="TRACE", help="Files of PyTorch's profiler, .json or .json.gz, one a rank."
        ),
    ],
    against: Annotated[
        list[Path] | None,
        typer.Option(metavar="TRACE", help="Trace of a faster run, to compare; may repeat."),
    ] = None,
    scenario: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Scenario that predicts the step, to compare."),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change the scenario; may repeat."),
    ] = None,
    json: Json = False,
) -> Code:
    """Say where the time of recorded training steps goes."""
    from zsim_explain.answer.explanation import explain as explain_traces

    found = explain_traces(traces, against=against or (), scenario=scenario, changes=settings)
    print_answer(found, as_json=json)
    return Code.DONE
