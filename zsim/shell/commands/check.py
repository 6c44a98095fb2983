"""`zsim check SCENARIO`."""

from dataclasses import replace
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
    from zsim.check import prove, refinement
    from zsim.shell.answer import explain_finding, print_json, print_proof, proof_object
    from zsim.shell.source import Changes, read
    from zsim.shell.traced import read_trace

    changes = Changes(settings=tuple(settings or ()), ranks=ranks)
    document = read(scenario, changes).document
    trace = None if against is None else read_trace(against)
    proof = prove(document.schedule, document.model)
    findings = proof.findings
    if trace is not None:
        found = refinement.examine(document.schedule, trace)
        findings = (*findings, *found)
        proved, not_shown = refinement.says(trace, found)
        proof = replace(
            proof,
            proved=(*proof.proved, *proved),
            not_shown=(*proof.not_shown, *not_shown),
        )
    if json:
        print_json(proof_object(proof, findings))
    elif explain is None:
        print_proof(document.schedule, proof, findings)
    elif explain <= len(findings):
        explain_finding(explain, findings[explain - 1])
    else:
        raise MistakeError(
            f"--explain: {explain} must be at most {len(findings)}, the findings there are"
        )
    return Code.NO if findings else Code.DONE
