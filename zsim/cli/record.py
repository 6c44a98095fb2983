"""`zsim record --world N -- python train.py`."""

from pathlib import Path
from typing import Annotated

import typer

from zsim.cli.option import Code, Json, at_least
from zsim.cli.printing import answer_before, outputs, print_answer


def record(
    command: Annotated[
        list[str],
        typer.Argument(metavar="-- python SCRIPT [ARGUMENTS]", help="Training script to record."),
    ],
    world: Annotated[
        int, typer.Option(metavar="N", parser=at_least(1), help="Number of ranks to pretend.")
    ],
    rank: Annotated[
        list[int] | None,
        typer.Option(
            metavar="N",
            parser=at_least(0),
            help="Rank to record (0). Several are recorded in turn, and compared.",
        ),
    ] = None,
    cuda: Annotated[
        bool, typer.Option("--cuda", help='The script names "cuda" and torch.cuda.')
    ] = False,
    json: Json = False,
    report: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a page of the findings: .html.")
    ] = None,
) -> Code:
    """Record a training script without a GPU; name its stream races."""
    from zsim.api.output import FileKind, need_output
    from zsim.api.script_recording import record as record_script

    need_output("--report", report, FileKind.ANY)
    result = record_script(command, world=world, ranks=rank or [0], cuda=cuda)
    with answer_before(outputs((report, result.report))):
        print_answer(result, as_json=json)
    if result.failures:
        return Code.FAILED
    return Code.DONE if result.is_clean else Code.NO
