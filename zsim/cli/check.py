"""`zsim check SCENARIO`."""

from pathlib import Path
from typing import Annotated

import typer

from zsim.cli.option import Code, Json, Schedulish, Settings, at_least
from zsim.cli.printing import print_answer


def check(
    scenario: Schedulish,
    settings: Settings = None,
    ranks: Annotated[
        int | None,
        typer.Option(
            metavar="N", parser=at_least(1), help="Number of ranks, instead of the cluster's."
        ),
    ] = None,
    against: Annotated[
        Path | None,
        typer.Option(
            metavar="TRACE",
            help="Prove that this run, written by zsim run --trace, follows the schedule.",
        ),
    ] = None,
    explain: Annotated[
        int | None,
        typer.Option(metavar="N", parser=at_least(1), help="Show finding N with its witness."),
    ] = None,
    json: Json = False,
) -> Code:
    """Prove a schedule: deadlocks, races, memory, values, volume."""
    from zsim.api.proof_result import check as proof_of
    from zsim.api.scenario import load

    proof = proof_of(load(scenario, settings, ranks=ranks), against=against)
    if explain is not None and not json:
        print(proof.explanation(explain))
    else:
        print_answer(proof, as_json=json)
    return Code.DONE if proof.is_right else Code.NO
