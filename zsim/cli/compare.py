"""`zsim compare A B`."""

from typing import Annotated

import typer

from zsim.cli.option import Code, Json, Settings, completed, completed_keys
from zsim.cli.printing import print_answer
from zsim.cli.progress_bar import progress
from zsim.mistake import MistakeError


def compare(
    first: Annotated[
        str,
        typer.Argument(
            metavar="A",
            help="A scenario, schedule or trace (FILE.json).",
            show_default=False,
            autocompletion=completed("scenario_names"),
        ),
    ],
    second: Annotated[
        str | None,
        typer.Argument(
            metavar="B",
            help="Another one; without it A again.",
            show_default=False,
            autocompletion=completed("scenario_names"),
        ),
    ] = None,
    settings: Settings = None,
    but: Annotated[
        list[str] | None,
        typer.Option(
            "--but",
            metavar="KEY=VALUE",
            help="Change B alone. Many are allowed.",
            autocompletion=completed_keys,
        ),
    ] = None,
    json: Json = False,
) -> Code:
    """Compare two runs, the largest difference first."""
    from zsim.api.comparison import compare as compare_runs

    if second is None and not but:
        raise MistakeError("B: missing; give a second run, or with --but what changes in the first")
    with progress("two runs"):
        found = compare_runs(first, second, but, common=settings)
    print_answer(found, as_json=json)
    return Code.DONE
