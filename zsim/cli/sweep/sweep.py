"""`zsim sweep`: what is left of a study is run and kept; then it says what came out."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from zsim.api.sweep_result import SweepResult, sweep
from zsim.cli.answer import print_json
from zsim.cli.sweep.forecast import forecast, print_forecast
from zsim.cli.sweep.printed import print_result
from zsim.cli.sweep.progress import progress
from zsim.files.html_page import need_html
from zsim.files.picture import need_format
from zsim.files.written import Output, answer_before, need_folder
from zsim.mistake import MistakeError, one_line
from zsim.study.outcome import StudyOutcome
from zsim.workers.code_version import code_version
from zsim.workers.crew import cores, crew
from zsim.workers.store import opened
from zsim.workers.study_source import Study, read
from zsim.workers.work import keys_of, left_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What the command line of `zsim sweep` asks for; without workers all cores work."""

    study: str
    store: Path | None
    csv: Path | None
    report: Path | None
    picture: Path | None
    workers: int | None
    scheduler: str | None
    dry_run: bool
    as_json: bool


def print_sweep(request: Request) -> bool:
    """Run what is left of the study and print the answer; return whether some run meets the goal.

    Raises:
        MistakeError: the study, the store or the scheduler cannot be used.
        RunFailedError: a worker died; what was done is kept.
        KeyboardInterrupt: likewise.
        UnwrittenError: a file cannot be written; the answer is printed.
    """
    if request.report is not None:
        need_html("--report", request.report)
    if request.picture is not None:
        need_format("--picture", request.picture)
    if request.csv is not None:
        need_folder("--csv", request.csv)
    study = read(request.study)
    path = request.store or Path(f"{study.name}.sqlite")
    if request.dry_run:
        return _forecast(request, study, path)
    try:
        with progress() as told:
            result = sweep(
                study,
                store=path,
                workers=request.workers or cores(),
                scheduler=request.scheduler,
                progress=told,
            )
    except KeyboardInterrupt as stopped:
        if str(stopped):  # what is kept, where some runs are done
            print(one_line(str(stopped)), file=sys.stderr)
        raise
    with answer_before(*_outputs(request, result)):
        if request.as_json:
            print_json(result.to_dict())
        else:
            print_result(result.study, path)
    return result.best is not None


def _outputs(request: Request, result: SweepResult) -> Iterator[Output]:
    """Yield the files that are asked for."""
    csv, report, drawing = request.csv, request.report, request.picture
    if csv is not None:
        yield lambda: result.csv(csv)
    if report is not None:
        yield lambda: result.report(report)
    if drawing is not None:
        yield lambda: result.picture(drawing)


def _forecast(request: Request, study: Study, path: Path) -> bool:
    keys, known = keys_of(study.plan.runs, code_version()), dict[str, StudyOutcome]()
    if path.exists():
        with opened(path) as store:
            known = store.get(tuple(keys.values()))
    left = left_of(study.plan.runs, keys, known)
    workers = request.workers or cores()
    if request.scheduler is not None:
        with crew(workers, request.scheduler) as there:
            workers = there.workers
    found = forecast(study.plan, left, workers)
    print_forecast(found, as_json=request.as_json)
    return True


def need_workers(workers: int | None, scheduler: str | None) -> None:
    """Raise unless at most one of the two is given.

    Raises:
        MistakeError: the workers of a scheduler are its own.
    """
    if workers is not None and scheduler is not None:
        raise MistakeError(f"--workers: {workers} stands without --scheduler, which has its own")
