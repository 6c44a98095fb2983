"""`zsim run SCENARIO`."""

import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from zsim.cli.option import (
    Code,
    Json,
    Node,
    Price,
    Prices,
    Reliable,
    Schedulish,
    Settings,
    Tokens,
    at_least,
    completed,
    more_than_nothing,
    size,
)
from zsim.cli.printing import (
    Output,
    answer_before,
    noted_interrupt,
    outputs,
    print_answer,
    print_json,
)
from zsim.cli.progress_bar import progress
from zsim.mistake import MistakeError

if TYPE_CHECKING:
    from zsim.api.run_result import RunResult
    from zsim.api.scenario import LoadedScenario

ERROR = "error"
"""The only value that --explain accepts."""

Timeout = Annotated[
    float | None,
    typer.Option(
        metavar="S",
        parser=more_than_nothing,
        help="Seconds without progress on any rank before a run has failed (torch; 60).",
    ),
]
Poison = Annotated[
    bool,
    typer.Option(
        "--poison", help="Fill invalid memory with NaN and delay ranks at random (torch)."
    ),
]

Witness = Annotated[
    bool,
    typer.Option(
        "--witness",
        help="Record in the trace what torch does; steps take longer (torch).",
    ),
]

OffloadPath = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER",
        help="Folder for files that stand for NVMe, gone when the run is over (torch).",
    ),
]
DeviceBudget = Annotated[
    int | None,
    typer.Option(
        metavar="SIZE", parser=size, help="Memory of each rank's device, such as 256MB (torch)."
    ),
]

Backend = Annotated[
    str,
    typer.Option(help="Backend: sim, torch or null.", autocompletion=completed("backend_names")),
]
Ranks = Annotated[
    int | None,
    typer.Option(
        metavar="N", parser=at_least(1), help="Number of ranks, instead of the cluster's."
    ),
]
Data = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Text to train on, bytes as tokens (torch).")
]
Seed = Annotated[
    int, typer.Option(metavar="N", parser=at_least(0), help="Seed of the random numbers.")
]
Steps = Annotated[
    int | None, typer.Option(metavar="N", parser=at_least(1), help="Number of optimizer steps.")
]
Trace = Annotated[
    str | None,
    typer.Option(
        metavar="FILE|FOLDER/",
        help="Write a trace as PyTorch's profiler does; in FOLDER/ a file per rank.",
    ),
]
Chakra = Annotated[
    str | None,
    typer.Option(
        metavar="FOLDER", help="Write the last step as Chakra execution traces, a file per rank."
    ),
]
Timeline = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Draw the last step: .svg, .png or .pdf.")
]
Picture = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Draw a figure of the page: .svg, .png or .pdf."),
]
Figure = Annotated[
    str | None,
    typer.Option(
        metavar="NAME", help="What --picture draws: memory, time or network. Default: memory."
    ),
]
Report = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Write a page about the run: .html.")
]
ScheduleCluster = Annotated[
    str | None,
    typer.Option(
        metavar="SCENARIO",
        help="Scenario on whose cluster a schedule in JSON is simulated, with its faults.",
    ),
]
Check = Annotated[
    bool,
    typer.Option(
        "--check/--no-check",
        help="Prove the schedule before it runs; a large one, on two cores, while it is simulated.",
    ),
]


def _what(text: str) -> str:
    """Return `text` if --explain supports it, else raise BadParameter."""
    if text != ERROR:
        raise typer.BadParameter(f"{text!r} must be {ERROR}")
    return text


Explain = Annotated[
    str | None,
    typer.Option(metavar="WHAT", parser=_what, help="Say what a figure is made of: error."),
]


_Drawn = tuple[Path | None, str | None]
"""Path of a picture, and name of the figure in it."""


def run(
    scenario: Schedulish,
    backend: Backend = "sim",
    ranks: Ranks = None,
    node: Node = None,
    cluster: ScheduleCluster = None,
    data: Data = None,
    timeout: Timeout = None,
    poison: Poison = False,
    witness: Witness = False,
    offload_path: OffloadPath = None,
    device_budget: DeviceBudget = None,
    settings: Settings = None,
    seed: Seed = 0,
    steps: Steps = None,
    trace: Trace = None,
    chakra: Chakra = None,
    timeline: Timeline = None,
    picture: Picture = None,
    figure: Figure = None,
    report: Report = None,
    check: Check = True,
    tokens: Tokens = None,
    price: Price = None,
    prices: Prices = None,
    reliability: Reliable = None,
    explain: Explain = None,
    json: Json = False,
) -> Code:
    """Run a scenario: does it fit, how long is a step, and why."""
    from zsim.api import launch

    _need_outputs(trace, chakra, timeline, (picture, figure), report, witness=witness)
    trained = _need_tokens(tokens, price, prices, reliability)
    loaded = _placed(scenario, settings, ranks, steps, node, cluster, backend)
    try:
        with noted_interrupt(), progress(f"{scenario} on {backend}") as update:
            result = launch.run(
                loaded,
                backend=backend,
                seed=seed,
                check=check,
                forks=True,
                folds=not (trace or chakra or timeline or picture or report),
                progress=update,
                data=data,
                timeout_s=timeout,
                poison=poison,
                witness=witness,
                offload_path=offload_path,
                device_budget=device_budget,
            )
    except (launch.RefutedError, launch.NoRouteError) as no:
        return _answer_no(loaded.title, no, as_json=json)
    if _is_silent():
        return Code.DONE
    asked = result.of_tokens(trained, price=price, prices=prices, reliability=reliability)
    result = _with_remedies(asked)
    with answer_before(_files(result, trace, chakra, timeline, (picture, figure), report)):
        return _print(result, explain, as_json=json)


def _print(result: "RunResult", explain: str | None, *, as_json: bool) -> Code:
    """Print the answer, and the parts of its error if --explain is given; return the exit code."""
    print_answer(result, as_json=as_json)
    _explain(result, None if as_json else explain)
    return Code.DONE if result.fits else Code.NO


def _is_silent() -> bool:
    """Return True under torchrun, except on the first rank, which prints."""
    return os.environ.get("RANK", "0") != "0"


def _explain(result: "RunResult", what: str | None) -> None:
    """Print the parts of the step time's error below the answer, if --explain is given."""
    from zsim.api.answer_text import facts_text

    if what is None:
        return
    lines = result.explain_error() or [("explained", "the error is unknown, as its line says")]
    print(f"\n{facts_text(lines)}")


def _placed(
    scenario: str,
    settings: list[str] | None,
    ranks: int | None,
    steps: int | None,
    node: str | None,
    cluster: str | None,
    backend: str,
) -> "LoadedScenario":
    """Return the scenario with its settings on the requested hardware."""
    from zsim.api.placement import placed
    from zsim.api.scenario import load

    loaded = load(scenario, settings, ranks=ranks, steps=steps)
    return placed(loaded, node=node, cluster=cluster, backend=backend)


def _with_remedies(result: "RunResult") -> "RunResult":
    """Return `result` after it has computed the changes that would make it fit."""
    with progress("what would make it fit"):
        _ = result.remedies
    return result


def _need_tokens(
    tokens: str | None, price: float | None, prices: str | None, reliability: list[str] | None
) -> int | None:
    """Return the tokens of the training, or None.

    Raises:
        MistakeError: a price or reliability is given without tokens, or the reliability is wrong.
    """
    from zsim.api.goodput_answer import reliability_of
    from zsim.api.training_budget import tokens_of

    found = tokens_of(tokens)
    if found is None and (price is not None or prices is not None):
        raise MistakeError(f"--{'price' if prices is None else 'prices'}: needs --tokens")
    reliability_of(reliability)
    if found is None and reliability:
        raise MistakeError("--reliability: needs --tokens")
    return found


def _need_outputs(
    trace: str | None,
    chakra: str | None,
    timeline: Path | None,
    drawn: _Drawn,
    report: Path | None,
    *,
    witness: bool,
) -> None:
    """Raise MistakeError unless the requested files can be written."""
    from zsim.api.output import FileKind, need_output, need_picture
    from zsim.api.run_result import RUN_FIGURES

    need_output("--trace", trace, FileKind.TRACE)
    if witness and trace is None:
        raise MistakeError("--witness: needs --trace, the file to write witnesses into")
    need_output("--chakra", chakra, FileKind.CHAKRA)
    need_output("--timeline", timeline, FileKind.PICTURE)
    need_picture(*drawn, RUN_FIGURES)
    need_output("--report", report, FileKind.PAGE)


def _files(
    result: "RunResult",
    trace: str | None,
    chakra: str | None,
    timeline: Path | None,
    drawn: _Drawn,
    report: Path | None,
) -> list[Output]:
    """Return a writer for each requested file."""
    picture, figure = drawn
    draw = result.picture if figure is None else partial(result.picture, figure=figure)
    update = outputs((trace, result.trace), (chakra, result.chakra))
    return update + outputs((timeline, result.timeline), (picture, draw), (report, result.report))


def _answer_no(title: str, no: Exception, *, as_json: bool) -> Code:
    """Print why nothing ran (findings of the proof, or ranks without a route); return `Code.NO`."""
    from zsim.api.answer_text import title_text
    from zsim.api.launch import RefutedError

    if isinstance(no, RefutedError):
        print_answer(no.proof, as_json=as_json)
    elif as_json:
        print_json({"cut": str(no)})
    else:
        print(f"{title_text(title)}\ncut off: {no}")
    return Code.NO
