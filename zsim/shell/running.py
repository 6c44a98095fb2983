"""`zsim run`: prove the schedule, run it on a backend, sum up what happened."""

import os
import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from inspect import signature
from pathlib import Path
from time import perf_counter  # noqa: TID251  (how long the run took is part of the answer)
from typing import Final

from zsim.backend import Backend, BackendError, Job, NoWayError, load
from zsim.check import check
from zsim.cluster import Cluster, Gpu, Link
from zsim.fault import Jitter
from zsim.remedy import Remedy
from zsim.shell.answer import findings_object, print_findings, print_json, print_title
from zsim.shell.installed import fitted_for
from zsim.shell.mistake import MistakeError, mistakes
from zsim.shell.outcome import Outcome, outcome_object, print_outcome
from zsim.shell.page import need_html
from zsim.shell.picture import need_format, write_picture
from zsim.shell.remedy import remedies_of
from zsim.shell.reporting import write_report
from zsim.shell.source import Changes, Source, read
from zsim.shell.traced import need_trace, write_trace
from zsim.shell.written import Output, answer_before, unwritten
from zsim.summary import summary
from zsim.timeline import TimelineError, timeline
from zsim.trace import Trace

OPERATIONS_MAX: Final = 2_000_000
"""What a run without processes may issue on all steps: a trace holds each, at about 0.4 kB."""

SIMULATED: Final = ("sim", "null")
"""Backends that compute no values."""

RANKS_MAX: Final = 1_000_000
"""Ranks of a run, told apart or not: at 0.75 kB each, what a laptop holds."""


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


def run(request: Request) -> bool:
    """Run it and print the answer; whether the answer is yes.

    Raises:
        MistakeError: it cannot be run as asked.
        RunFailedError: it began and could not end.
        UnwrittenError: a file cannot be written; the answer is printed.
    """
    _need_forms(request)
    changes = request.changes
    joined = os.environ.get("WORLD_SIZE", "")
    if request.backend == "torch" and changes.ranks is None and joined.isdecimal():
        changes = replace(changes, ranks=int(joined))  # torchrun started so many
    source = read(request.source, changes)
    job = source.job()
    settings, trouble = _settings(request, source)
    backend = _backend(request, settings | trouble)
    _need_bounded(request.backend, source, job)
    if request.backend == "torch":
        job = replace(job, cluster=_this_machine(job.schedule.mesh.size))
    if request.check and not _is_proved(request, source, job):
        return False
    started = perf_counter()
    try:
        with mistakes(BackendError), _spinner(f"{source.title} on {request.backend}"):
            trace = backend.run(job, seed=request.seed)
            healthy = _backend(request, settings).run(job, seed=request.seed) if trouble else None
    except NoWayError as cut:
        if request.as_json:
            print_json({"cut": str(cut)})
        else:
            print_title(source.title)
            print(f"cut off: {cut}")
        return False
    wall_time_s = perf_counter() - started
    if os.environ.get("RANK", "0") != "0":  # of the ranks that torchrun started, the first speaks
        return True
    outcome = Outcome(
        title=source.title,
        job=job,
        trace=trace,
        summary=summary(job, trace),
        wall_time_s=wall_time_s,
        healthy_step_time_s=summary(job, healthy).step_time_s if healthy is not None else None,
        remedies=_remedies(request, changes, trace),
        fitted=fitted_for(job.cluster) if trace.backend == "sim" else (),
    )
    with answer_before(*_outputs(request, outcome)):
        if request.as_json:
            print_json(outcome_object(outcome))
        else:
            print_outcome(outcome)
    return outcome.summary.fits


def _is_proved(request: Request, source: Source, job: Job) -> bool:
    """Print the findings of the schedule, if it has any; return whether it has none.

    No figure of a simulation depends on values, and zsim's own schedules are tested for them.
    """
    compares = not source.is_scenario or request.backend not in SIMULATED
    findings = check(job.schedule, job.model, compares=compares)
    if findings and request.as_json:
        print_json(findings_object(findings))
    elif findings:
        print_findings(job.schedule, findings)
    return not findings


def _remedies(request: Request, changes: Changes, trace: Trace) -> tuple[Remedy, ...] | None:
    """What would make a simulated run fit; None if it fits, or is none."""
    if trace.out_of_memory is None or request.backend != "sim":
        return None

    def backend(source: Source) -> Backend:
        settings, trouble = _settings(request, source)
        return _backend(request, settings | trouble)

    with _spinner("looking for what would make it fit"):
        return remedies_of(request.source, changes, backend, request.seed)


def _need_forms(request: Request) -> None:
    """Return if files are asked for that can be written."""
    if request.trace is not None:
        need_trace(request.trace)
    elif request.witness:
        raise MistakeError("--witness: needs --trace, the file to write witnesses into")
    if request.timeline is not None:
        need_format("--timeline", request.timeline)
    if request.report is not None:
        need_html("--report", request.report)


def _outputs(request: Request, outcome: Outcome) -> Iterator[Output]:
    """Yield the files that are asked for: what happened as JSON, as a picture, as a page."""
    trace, picture, report = request.trace, request.timeline, request.report
    if trace is not None:
        yield lambda: write_trace(trace, outcome.job, outcome.trace)
    if picture is not None:
        yield lambda: _draw(picture, outcome)
    if report is not None:
        yield lambda: write_report(report, outcome)


def _draw(path: Path, outcome: Outcome) -> None:
    try:
        drawn = timeline(outcome.job.schedule, outcome.job.model, outcome.trace)
    except TimelineError as error:
        raise unwritten(path, str(error)) from None
    write_picture("--timeline", path, drawn)


def _settings(request: Request, source: Source) -> tuple[dict[str, object], dict[str, object]]:
    """Settings of the backend, and those that are trouble: a healthy run goes without them."""
    settings: dict[str, object] = {}
    if request.data is not None:
        settings["data"] = request.data
    if request.timeout_s is not None:
        settings["timeout_s"] = request.timeout_s
    if request.poison:
        settings["poison"] = True
    if request.witness:
        settings["witness"] = True
    if source.decision is not None:
        settings["decision"] = source.decision
    trouble: dict[str, object] = {}
    if source.faults or source.neighbours:
        trouble = {"faults": source.faults, "neighbours": source.neighbours}
    return settings, trouble


def _backend(request: Request, settings: dict[str, object]) -> Backend:
    with mistakes(BackendError):
        kind = load(request.backend)
    known = signature(kind).parameters
    without = {
        "data": f"--data: {request.data}: backend {request.backend} reads no data",
        "timeout_s": f"--timeout: {request.timeout_s}: backend {request.backend} waits for nobody",
        "poison": f"--poison: backend {request.backend} has no memory to poison",
        "witness": f"--witness: backend {request.backend} runs nothing that could be watched",
        "faults": f"fault, neighbour: backend {request.backend} simulates none",
        "decision": f"network.algorithm: backend {request.backend} takes its own",
    }
    for setting, why in without.items():
        if setting in settings and setting not in known:
            raise MistakeError(why)
    with mistakes(ValueError):
        return kind(**settings)


def _need_bounded(backend: str, source: Source, job: Job) -> None:
    """A slip of an exponent in the numbers of ranks and steps is told, not computed."""
    if backend == "torch":
        return
    ranks = job.schedule.mesh.size
    if ranks > RANKS_MAX:
        raise MistakeError(f"ranks: {ranks} must be at most {RANKS_MAX:,}")
    longest = max(len(program.by_id) for program in job.schedule.programs)
    apart = ranks if any(isinstance(each, Jitter) for each in source.faults) else 1
    if longest * apart * job.steps > OPERATIONS_MAX:
        each = f"{longest:,} operations" + (f" on {apart:,} ranks, each by itself" * (apart > 1))
        raise MistakeError(
            f"steps: {job.steps} steps of {each} must be at most {OPERATIONS_MAX:,} in all"
        )


def _this_machine(ranks: int) -> Cluster:
    """What real ranks run on: nothing is known of its rates and links, and nothing is predicted."""
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // ranks
    unknown = Link(bytes_per_s=1)
    return Cluster(
        name="this machine",
        nodes=1,
        gpus_per_node=ranks,
        gpu=Gpu(name="rank", memory_bytes=memory_bytes, memory_bytes_per_s=1, rates=()),
        switch_link=unknown,
        nics_per_node=1,
        nic_link=unknown,
    )


@contextmanager
def _spinner(what: str) -> Generator[None]:
    """Something that moves while the run goes on, on a terminal only."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console
    from rich.markup import escape

    with Console(stderr=True).status(escape(what)):
        yield
