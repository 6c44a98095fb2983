"""`zsim check SCENARIO`."""

from pathlib import Path
from typing import Annotated

import typer

from zsim.cli.option import Code, Json, Schedulish, Settings, at_least
from zsim.mistake import MistakeError


def check(
    scenario: Schedulish,
    settings: Settings = None,
    ranks: Annotated[
        int | None,
        typer.Option(metavar="N", parser=at_least(1), help="So many ranks, not the cluster's."),
    ] = None,
    against: Annotated[
        Path | None,
        typer.Option(
            metavar="TRACE", help="Whether this run, written by zsim run --trace, is one of it."
        ),
    ] = None,
    explain: Annotated[
        int | None,
        typer.Option(metavar="N", parser=at_least(1), help="Show finding N with its witness."),
    ] = None,
    json: Json = False,
) -> Code:
    """Prove a schedule: deadlocks, races, memory, values, volume."""
    from zsim.api.proof_result import check as checked
    from zsim.api.scenario import find_scenario
    from zsim.cli.answer import explain_finding, print_json, print_proof
    from zsim.files.source import Changes

    changes = Changes(settings=tuple(settings or ()), ranks=ranks)
    proof = checked(find_scenario(scenario).but(changes), against=against)
    findings = proof.findings
    if json:
        print_json(proof.to_dict())
    elif explain is None:
        print_proof(proof)
    elif explain <= len(findings):
        explain_finding(explain, findings[explain - 1])
    else:
        raise MistakeError(
            f"--explain: {explain} must be at most {len(findings)}, the findings there are"
        )
    return Code.NO if findings else Code.DONE
