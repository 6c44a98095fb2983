"""`zsim compare A B`."""

import os
from typing import Annotated

import typer

from zsim.cli.option import Code, Json, Node, Settings, at_least, completed, completed_keys
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
    real: Annotated[
        bool,
        typer.Option("--real", help="Predict A on the ranks at hand, run it, compare both."),
    ] = False,
    ranks: Annotated[
        int | None,
        typer.Option(metavar="N", parser=at_least(1), help="Number of ranks (--real)."),
    ] = None,
    node: Node = None,
    steps: Annotated[
        int | None,
        typer.Option(metavar="N", parser=at_least(3), help="Steps that are really run (--real)."),
    ] = None,
    json: Json = False,
) -> Code:
    """Compare two runs, the largest difference first."""
    from zsim.api.comparison import compare as compare_runs

    if real:
        return _compare_real(first, second, but, settings, ranks, node, steps, as_json=json)
    for option, given in (("--ranks", ranks), ("--node", node), ("--steps", steps)):
        if given is not None:
            raise MistakeError(f"{option}: needs --real")
    if second is None and not but:
        raise MistakeError("B: missing; give a second run, or with --but what changes in the first")
    with progress("two runs"):
        found = compare_runs(first, second, but, common=settings)
    print_answer(found, as_json=json)
    return Code.DONE


def _compare_real(
    scenario: str,
    second: str | None,
    but: list[str] | None,
    settings: list[str] | None,
    ranks: int | None,
    node: str | None,
    steps: int | None,
    *,
    as_json: bool,
) -> Code:
    from zsim.api.real_comparison import STEPS, compare_with_real

    for option, given in (("B", second), ("--but", but)):
        if given:
            raise MistakeError(f"{option}: stands without --real, which compares A with itself")
    with progress("a prediction and a run"):
        found = compare_with_real(
            scenario, settings, ranks=ranks, node=node, steps=STEPS if steps is None else steps
        )
    if os.environ.get("RANK", "0") != "0":  # under torchrun, only the first rank prints
        return Code.DONE
    print_answer(found, as_json=as_json)
    return Code.DONE
