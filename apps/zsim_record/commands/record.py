"""`zsim record --world N -- python train.py`."""

from functools import partial
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
    schedule: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write the step that the script repeats as a schedule, for zsim check: .json.",
        ),
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(
            metavar="SCENARIO",
            help="Scenario on whose cluster zsim run FILE.json is to simulate that schedule.",
        ),
    ] = None,
    json: Json = False,
    report: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a page of the findings: .html.")
    ] = None,
) -> Code:
    """Record a training script without a GPU; name its stream races."""
    from zsim.api.output import FileKind, need_output
    from zsim_record.script_recording import cluster_of
    from zsim_record.script_recording import record as record_script

    need_output("--report", report, FileKind.ANY)
    need_output("--schedule", schedule, FileKind.ANY)
    simulated_on = cluster_of(cluster, world, is_used=schedule is not None)
    result = record_script(
        command, world=world, ranks=rank or [0], cuda=cuda, lifts=schedule is not None
    )
    write_schedule = partial(result.write_schedule, cluster=simulated_on)
    with answer_before(outputs((report, result.report), (schedule, write_schedule))):
        print_answer(result, as_json=json)
    if result.failures:
        return Code.FAILED
    return Code.DONE if result.is_clean else Code.NO
