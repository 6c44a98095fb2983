"""`zsim run`: what its options ask for, its answer, and the files beside it."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from zsim.api.launch import RefutedError, run
from zsim.api.proof_result import findings_object
from zsim.api.run_result import RunResult
from zsim.api.scenario import find_scenario
from zsim.backend.backend import NoWayError
from zsim.cli.answer import print_findings, print_json, print_lines, print_title
from zsim.cli.spinner import spinner
from zsim.files.html_page import need_html
from zsim.files.picture import need_format
from zsim.files.source import Changes
from zsim.files.trace_file import need_trace
from zsim.files.written import Output, answer_before
from zsim.mistake import MistakeError


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What the command line of `zsim run` asks for."""

    source: str
    changes: Changes
    backend: str
    data: Path | None
    timeout_s: float | None
    poison: bool
    witness: bool
    seed: int
    trace: str | None
    timeline: Path | None
    report: Path | None
    check: bool
    as_json: bool


def print_run(request: Request) -> bool:
    """Run it and print the answer; return whether the answer is yes.

    Raises:
        MistakeError: it cannot be run as asked.
        RunFailedError: it began and could not end.
        UnwrittenError: a file cannot be written; the answer is printed.
    """
    _need_forms(request)
    scenario = find_scenario(request.source).but(request.changes)
    try:
        with spinner(f"{scenario.title} on {request.backend}"):
            result = run(
                scenario,
                backend=request.backend,
                seed=request.seed,
                check=request.check,
                data=request.data,
                timeout_s=request.timeout_s,
                poison=request.poison,
                witness=request.witness,
            )
    except RefutedError as refuted:
        if request.as_json:
            print_json(findings_object(refuted.findings))
        else:
            print_findings(refuted.schedule, refuted.findings)
        return False
    except NoWayError as cut:
        if request.as_json:
            print_json({"cut": str(cut)})
        else:
            print_title(scenario.title)
            print(f"cut off: {cut}")
        return False
    if os.environ.get("RANK", "0") != "0":  # of the ranks that torchrun started, the first speaks
        return True
    with spinner("looking for what would make it fit"):
        answer = result.to_dict() if request.as_json else result.facts()
    with answer_before(*_outputs(request, result)):
        if isinstance(answer, dict):
            print_json(answer)
        else:
            print_title(result.title)
            print_lines(answer)
    return result.fits


def _need_forms(request: Request) -> None:
    """Check that the files that are asked for can be written."""
    if request.trace is not None:
        need_trace("--trace", request.trace)
    elif request.witness:
        raise MistakeError("--witness: needs --trace, the file to write witnesses into")
    if request.timeline is not None:
        need_format("--timeline", request.timeline)
    if request.report is not None:
        need_html("--report", request.report)


def _outputs(request: Request, result: RunResult) -> Iterator[Output]:
    """Yield the files that are asked for: what happened as JSON, as a picture, as a page."""
    trace, picture, report = request.trace, request.timeline, request.report
    if trace is not None:
        yield lambda: result.trace(trace)
    if picture is not None:
        yield lambda: result.timeline(picture)
    if report is not None:
        yield lambda: result.report(report)
