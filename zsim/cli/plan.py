"""`zsim plan SCENARIO`."""

from pathlib import Path
from typing import Annotated

import typer

from zsim.cli.option import Code, Json, Scenario, Settings
from zsim.cli.printing import answer_before, outputs, print_answer


def plan(
    scenario: Scenario,
    settings: Settings = None,
    schedule: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the schedule to this file, as JSON.")
    ] = None,
    json: Json = False,
) -> Code:
    """Show what a step holds and moves: memory, bytes on the wire."""
    from zsim.api.output import FileKind, need_output
    from zsim.api.scenario import load

    need_output("--schedule", schedule, FileKind.ANY)
    loaded = load(scenario, settings)
    planned = loaded.plan()
    with answer_before(outputs((schedule, loaded.write_schedule))):
        print_answer(planned, as_json=json)
    return Code.DONE
