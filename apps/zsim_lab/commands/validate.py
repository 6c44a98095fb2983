"""The command `zsim validate`."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from zsim.cli.option import Code, Json
from zsim.cli.printing import answer_before, outputs, print_answer
from zsim.cli.progress_bar import progress
from zsim.mistake import MistakeError

if TYPE_CHECKING:
    from zsim_lab.answer.validation import Validation

NETWORK, TRAINING, MEMORY, PAPER = "network", "training", "memory", "paper"
PIPELINES, ERROR, BEST, EXPERTS, SEEDS = "pipelines", "error", "best", "experts", "seeds"
SHIPS = (PAPER, PIPELINES, SEEDS)
"""Kinds of validation whose published figures ship with zsim."""
NO_PICTURE = f"is for {TRAINING}, {MEMORY}, {PAPER} and {PIPELINES}"
PARTS = 20
KINDS = (NETWORK, TRAINING, MEMORY, *SHIPS, ERROR, BEST, EXPERTS)


def validate(
    what: Annotated[
        str, typer.Argument(metavar="|".join(KINDS), help="What is predicted.", show_default=False)
    ] = "",
    data: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder of published tables, in CSV."),
    ] = None,
    all_rows: Annotated[
        bool,
        typer.Option("--all-rows", help="Judge every row of all tables; none was fitted."),
    ] = False,
    left_out: Annotated[
        bool,
        typer.Option("--left-out", help="Fit without each cluster, and predict it; for network."),
    ] = False,
    json: Json = False,
    picture: Annotated[
        Path | None,
        typer.Option(metavar="FILE.svg", help="Draw predicted against published; SVG, PNG or PDF."),
    ] = None,
    to: Annotated[
        Path | None,
        typer.Option(metavar="FILE.json", help="Write the table that errors rest on, made again."),
    ] = None,
    table: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Predict this table again, not all; may repeat."),
    ] = None,
    resume: Annotated[
        Path | None,
        typer.Option(metavar="FILE.jsonl", help="Keep forecasts here, and do not repeat them."),
    ] = None,
    most: Annotated[
        int | None,
        typer.Option(metavar="N", help="Predict N further rows at most; needs --resume.", min=0),
    ] = None,
    simulated: Annotated[
        bool,
        typer.Option("--simulated", help="Run nothing on local ranks; for seeds."),
    ] = False,
) -> Code:
    """Compare predictions with published measurements."""
    _need_error(what, data, {"--to": to, "--table": table, "--resume": resume, "--most": most})
    for option, given, kind in (("left-out", left_out, NETWORK), ("simulated", simulated, SEEDS)):
        if given and (what != kind or all_rows):
            raise MistakeError(f"--{option}: is for {kind}")
    if all_rows:
        return _all_rows(what, data, picture, as_json=json)
    _need_data(what, data)
    if what == SEEDS:
        return _seeds(picture, real=not simulated, as_json=json)
    if what == ERROR:
        return _error(data, picture, to, (table or (), resume, most), as_json=json)
    if what == BEST:
        return _best(data, picture, as_json=json)
    if left_out and data is not None:
        return _left_out(data, picture, as_json=json)
    return _runs(what, data, picture, as_json=json)


def _runs(what: str, data: Path | None, picture: Path | None, *, as_json: bool) -> Code:
    """Compare predictions of one kind with the rows of a folder, or with shipped rows."""
    if what in (NETWORK, EXPERTS) and picture is not None:
        raise MistakeError(f"--picture: {picture}: {NO_PICTURE}")
    from zsim.api.output import FileKind, need_output

    need_output("--picture", picture, FileKind.PICTURE)
    found = _validated(what, data)
    with answer_before(outputs((picture, found.picture))):
        print_answer(found, as_json=as_json)
    return Code.DONE


def _seeds(picture: Path | None, *, real: bool, as_json: bool) -> Code:
    """Compare predictions with every claim and figure of the ZeRO papers."""
    if picture is not None:
        raise MistakeError(f"--picture: {picture}: {NO_PICTURE}")
    from zsim_lab.answer.seed_validation import validate_seeds

    with progress("figures of the ZeRO papers") as update:
        found = validate_seeds(real=real, progress=update if sys.stderr.isatty() else _say)
    print_answer(found, as_json=as_json)
    return Code.DONE


def _need_data(what: str, data: Path | None) -> None:
    """Raise MistakeError unless `what` is known, and has a folder if its figures do not ship."""
    if what not in KINDS:
        raise MistakeError(f"what: {what!r} must be one of {', '.join(KINDS)}")
    if what in SHIPS and data is not None:
        raise MistakeError(f"--data: {data}: {what} takes none, its figures ship")
    if what not in (*SHIPS, ERROR, BEST) and data is None:
        raise MistakeError(f"--data: missing; {what} needs a folder of published tables")


def _need_error(what: str, data: Path | None, given: Mapping[str, object]) -> None:
    """Raise MistakeError if an option of errors is given for another kind, or needs another one."""
    for option, value in given.items():
        if value is not None and (what != ERROR or data is None):
            shown = f"{option}: {value}" if isinstance(value, Path) else option
            raise MistakeError(f"{shown}: is only for `zsim validate {ERROR} --data FOLDER`")
    if given["--most"] is not None and given["--resume"] is None:
        raise MistakeError(f"--most: {given['--most']} needs --resume, which keeps the forecasts")


def _all_rows(what: str, data: Path | None, picture: Path | None, *, as_json: bool) -> Code:
    """Compare predictions with every row of all tables in a folder."""
    if what:
        raise MistakeError(f"--all-rows: judges all tables, not {what} alone")
    if data is None:
        raise MistakeError("--data: missing; --all-rows needs a folder of published tables")
    if picture is not None:
        raise MistakeError(f"--picture: {picture}: {NO_PICTURE}")
    from zsim_lab.answer.run_validation import validate_all_rows

    with progress(f"rows of {data}") as update:
        found = validate_all_rows(data, progress=update if sys.stderr.isatty() else _say)
    print_answer(found, as_json=as_json)
    return Code.DONE


def _left_out(data: Path, picture: Path | None, *, as_json: bool) -> Code:
    """Fit the tables of collectives without one cluster, predict that cluster; repeat for all."""
    if picture is not None:
        raise MistakeError(f"--picture: {picture}: {NO_PICTURE}")
    from zsim_lab.answer.network_validation import validate_left_out

    with progress(f"clusters of {data}") as update:
        found = validate_left_out(data, progress=update)
    print_answer(found, as_json=as_json)
    return Code.DONE


def _error(
    data: Path | None,
    picture: Path | None,
    to: Path | None,
    rows: tuple[Sequence[str], Path | None, int | None],
    *,
    as_json: bool,
) -> Code:
    """Check the printed error intervals against the shipped table, or a table rebuilt from data.

    `rows` are the tables to predict, the file that keeps forecasts, and the most rows.
    """
    if picture is not None:
        raise MistakeError(f"--picture: {picture}: {NO_PICTURE}")
    from zsim_lab.answer.error_validation import Selection, validate_error

    if data is None:
        print_answer(validate_error(), as_json=as_json)
        return Code.DONE
    tables, resume, most = rows
    selection = Selection(tables=tables, resume=resume, most=most)
    with progress(f"rows of {data}") as update:
        report = update if sys.stderr.isatty() else _say
        found = validate_error(data, selection=selection, progress=report)
    with answer_before(outputs((to, found.write))):
        print_answer(found, as_json=as_json)
    return Code.DONE


def _best(data: Path | None, picture: Path | None, *, as_json: bool) -> Code:
    """Check whether the best published settings rank first, for the shipped table or a folder."""
    if picture is not None:
        raise MistakeError(f"--picture: {picture}: {NO_PICTURE}")
    from zsim_lab.answer.choice_validation import validate_best

    with progress("published settings") as update:
        found = validate_best(data, progress=update if sys.stderr.isatty() else _say)
    print_answer(found, as_json=as_json)
    return Code.DONE


def _say(done: float, total: float) -> None:
    """Print progress on standard error at every twentieth: the work may take minutes."""
    if int(done * PARTS / total) > int((done - 1) * PARTS / total):
        print(f"{done:.0f} of {total:.0f} rows predicted", file=sys.stderr, flush=True)


def _validated(what: str, data: Path | None) -> "Validation":
    if data is None:
        from zsim_lab.answer.paper_validation import validate_papers

        return validate_papers(pipelines=what == PIPELINES)
    if what == NETWORK:
        from zsim_lab.answer.network_validation import validate_network

        return validate_network(data)
    if what == EXPERTS:
        from zsim_lab.answer.expert_validation import validate_experts

        return validate_experts(data)
    from zsim_lab.answer.run_validation import Quantity, validate_training

    return validate_training(data, Quantity.STEP_TIME if what == TRAINING else Quantity.MEMORY)
