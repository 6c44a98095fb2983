"""`zsim validate WHAT`."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from zsim.cli.option import Code, Json
from zsim.cli.printing import answer_before, outputs, print_answer
from zsim.mistake import MistakeError

if TYPE_CHECKING:
    from zsim.api.answer import Answer

NETWORK, TRAINING, MEMORY, PAPER = "network", "training", "memory", "paper"
KINDS = (NETWORK, TRAINING, MEMORY, PAPER)


def validate(
    what: Annotated[str, typer.Argument(metavar="|".join(KINDS), help="What is predicted.")],
    data: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder of published tables, in CSV; for all but paper."),
    ] = None,
    json: Json = False,
    picture: Annotated[
        Path | None,
        typer.Option(metavar="FILE.svg", help="Draw predicted against published; SVG or PNG."),
    ] = None,
) -> Code:
    """Compare predictions with published measurements."""
    from zsim.api.output import FileKind, need_output

    if what not in KINDS:
        raise MistakeError(f"what: {what!r} must be one of {', '.join(KINDS)}")
    if what == PAPER and data is not None:
        raise MistakeError(f"--data: {data}: {PAPER} takes none, its figures ship")
    if what != PAPER and data is None:
        raise MistakeError(f"--data: missing; {what} needs a folder of published tables")
    if what == NETWORK and picture is not None:
        raise MistakeError(f"--picture: {picture}: is for {TRAINING}, {MEMORY} and {PAPER}")
    need_output("--picture", picture, FileKind.PICTURE)
    found, draw = _validated(what, data)
    with answer_before(outputs((picture, draw))):
        print_answer(found, as_json=json)
    return Code.DONE


def _validated(what: str, data: Path | None) -> "tuple[Answer, Callable[[Path | str], object]]":
    """Return the answer, and what draws it."""
    if data is None:
        from zsim.api.paper_validation import validate_papers

        papers = validate_papers()
        return papers, papers.picture
    if what == NETWORK:
        from zsim.api.network_validation import validate_network

        return validate_network(data), str  # which is not asked for a picture
    from zsim.api.training_validation import Quantity, validate_training

    quantity = Quantity.STEP_TIME if what == TRAINING else Quantity.MEMORY
    runs = validate_training(data, quantity)
    return runs, runs.picture
