"""`zsim plan SCENARIO`."""

from pathlib import Path
from typing import Annotated

import typer

from zsim.shell.mistake import MistakeError
from zsim.shell.option import Code, Json, Scenario, Settings


def plan(
    scenario: Scenario,
    settings: Settings = None,
    schedule: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the schedule to this file, as JSON.")
    ] = None,
    json: Json = False,
) -> Code:
    """What it will hold and move: memory, bytes on the wire."""
    from zsim.document import encode
    from zsim.plan import plan as plan_of
    from zsim.shell.answer import plan_object, print_json, print_plan
    from zsim.shell.source import Changes, read
    from zsim.shell.written import answer_before, need_folder, write

    if schedule is not None:
        need_folder("--schedule", schedule)
    source = read(scenario, Changes(settings=tuple(settings or ())))
    document = source.document
    if document.model is None:
        raise MistakeError(f"{scenario}: model: missing; a plan needs it")
    found = plan_of(document.schedule, document.model)
    outputs = [] if schedule is None else [lambda: write(schedule, encode(document))]
    with answer_before(*outputs):
        if json:
            print_json(plan_object(source.title, found))
        else:
            print_plan(source.title, found)
    return Code.DONE
