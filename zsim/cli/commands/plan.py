"""`zsim plan SCENARIO`."""

from pathlib import Path
from typing import Annotated

import typer

from zsim.cli.option import Code, Json, Scenario, Settings


def plan(
    scenario: Scenario,
    settings: Settings = None,
    schedule: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the schedule to this file, as JSON.")
    ] = None,
    json: Json = False,
) -> Code:
    """What it will hold and move: memory, bytes on the wire."""
    from zsim.api.scenario import find_scenario
    from zsim.backend.document import encode
    from zsim.cli.answer import plan_object, print_json, print_plan
    from zsim.files.source import Changes
    from zsim.files.written import answer_before, need_folder, write

    if schedule is not None:
        need_folder("--schedule", schedule)
    found = find_scenario(scenario).but(Changes(settings=tuple(settings or ())))
    planned = found.plan()
    outputs = [] if schedule is None else [lambda: write(schedule, encode(found.document))]
    with answer_before(*outputs):
        if json:
            print_json(plan_object(found.title, planned))
        else:
            print_plan(found.title, planned)
    return Code.DONE
