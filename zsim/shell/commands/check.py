"""`zsim check SCENARIO`."""

from pathlib import Path
from typing import Annotated

import typer

from zsim.shell.mistake import MistakeError
from zsim.shell.option import Code, Json, Schedulish, Settings, at_least


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
    from zsim.api.proof import prove
    from zsim.api.scenario import find_scenario
    from zsim.shell.answer import explain_finding, print_json, print_proof
    from zsim.shell.source import Changes

    changes = Changes(settings=tuple(settings or ()), ranks=ranks)
    proof = prove(find_scenario(scenario).but(changes), against=against)
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
