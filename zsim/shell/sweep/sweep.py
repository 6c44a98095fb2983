"""`zsim sweep`: what is left of a study is run and kept; then it says what came out."""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from zsim.backend import RunFailedError
from zsim.outline import Outline
from zsim.report.chart import chart
from zsim.report.study import study_page
from zsim.shell.answer import print_json
from zsim.shell.mistake import MistakeError, mistakes, one_line
from zsim.shell.page import need_html, render
from zsim.shell.picture import need_format, write_picture
from zsim.shell.sweep.code_version import code_version
from zsim.shell.sweep.executor import cores, crew
from zsim.shell.sweep.forecast import forecast, print_forecast
from zsim.shell.sweep.printed import print_result, result_object
from zsim.shell.sweep.progress import progress
from zsim.shell.sweep.source import Study, read
from zsim.shell.sweep.store import Store, opened
from zsim.shell.sweep.table import csv_text
from zsim.shell.sweep.work import keys_of, left_of, work_off
from zsim.shell.sweep.worker import Batch, Done, simulated
from zsim.shell.written import Output, answer_before, need_folder, write
from zsim.study.file import StudyError
from zsim.study.outcome import Outcome
from zsim.study.result import StudyResult, result_of

Known = dict[str, Outcome]
"""Outcomes by key."""


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


def sweep(request: Request) -> bool:
    """Run what is left of the study and print the answer; whether some run meets the goal.

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
    with opened(path) as store:
        result = _result(request, study, store, path)
    with answer_before(*_outputs(request, result)):
        if request.as_json:
            print_json(result_object(result))
        else:
            print_result(result, path)
    return bool(result.ranking.accepted)


def _outputs(request: Request, result: StudyResult) -> Iterator[Output]:
    """Yield the files that are asked for."""
    csv, report, drawing = request.csv, request.report, request.picture
    if csv is not None:
        yield lambda: write(csv, csv_text(result))
    if report is not None:
        yield lambda: write(report, render(study_page(result)))
    if drawing is not None:
        yield lambda: write_picture("--picture", drawing, chart(result))


def _forecast(request: Request, study: Study, path: Path) -> bool:
    keys, known = keys_of(study.plan.runs, code_version()), Known()
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


def _result(request: Request, study: Study, store: Store, path: Path) -> StudyResult:
    runs = study.plan.runs
    keys = keys_of(runs, code_version())
    known = store.get(tuple(dict.fromkeys(keys.values())))
    left = left_of(runs, keys, known)
    try:
        _work(request, keys, store, left=left, known=known)
    except KeyboardInterrupt:
        print(one_line(_go_on(known, keys, path)), file=sys.stderr)
        raise
    except RunFailedError as error:
        raise RunFailedError(f"{error}; {_go_on(known, keys, path)}") from error
    outcomes = {name: known[key] for name, key in keys.items()}
    with mistakes(StudyError, prefix=f"{request.study}: "):
        return result_of(study.plan, outcomes)


def _work(
    request: Request, keys: dict[str, str], store: Store, *, left: dict[str, Outline], known: Known
) -> None:
    """Run what is left; outcomes go into the store and into `known`."""
    if not left:
        return
    names = {key: name for name, key in keys.items()}
    workers = min(request.workers or cores(), len(left))
    with (
        crew(workers, request.scheduler) as found,
        progress(len(names), len(names) - len(left)) as advance,
    ):

        def keep(done: Sequence[tuple[str, Done]]) -> None:
            store.put(
                (key, names[key], each.outcome, each.seconds) for key, each in done if each.keep
            )
            known.update({key: each.outcome for key, each in done})
            advance(len(done))

        how = Batch((), simulated, code_version() if found.remote else None)
        work_off(left, found, how, keep)


def _go_on(known: Known, keys: dict[str, str], path: Path) -> str:
    """How much is kept, and what to do to have the rest."""
    done = len(set(keys.values()) & set(known))
    return f"{done:,} of {len(set(keys.values())):,} runs are in {path}; the same command goes on"


def need_workers(workers: int | None, scheduler: str | None) -> None:
    """Raise unless at most one of the two is given.

    Raises:
        MistakeError: the workers of a scheduler are its own.
    """
    if workers is not None and scheduler is not None:
        raise MistakeError(f"--workers: {workers} stands without --scheduler, which has its own")
