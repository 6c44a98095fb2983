"""`zsim measure`."""

import os
from pathlib import Path
from typing import Annotated

import typer

from zsim.cli.option import Code, Json, at_least, more_than_nothing
from zsim.cli.printing import answer_before, outputs, print_answer
from zsim.cli.progress_bar import progress


def measure(
    ranks: Annotated[
        int | None,
        typer.Option(
            metavar="N", parser=at_least(1), help="Number of ranks; by default the GPUs, or 2."
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the machine as a node: .toml.")
    ] = None,
    drive: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Measure the drive below FOLDER too.")
    ] = None,
    seconds: Annotated[
        float,
        typer.Option(
            metavar="S",
            parser=more_than_nothing,
            help="Seconds of kernels and collectives, and at most as many of reference steps; all "
            "is measured once.",
        ),
    ] = 20.0,
    json: Json = False,
) -> Code:
    """Measure the ranks at hand, for predictions of them."""
    from zsim.api.output import FileKind, need_output
    from zsim_record.machine_measurement import measure as measure_machine

    need_output("--out", out, FileKind.ANY)
    with progress("ranks measured"):
        found = measure_machine(ranks=ranks, seconds=seconds, drive=drive)
    if os.environ.get("RANK", "0") != "0":  # under torchrun, only the first rank prints
        return Code.DONE
    with answer_before(outputs((out, found.write))):
        print_answer(found, as_json=json)
    return Code.DONE
