"""The work of a worker: make and check a schedule once, and try it on each cluster of a batch."""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from threading import Lock
from time import perf_counter  # noqa: TID251  (the user sees how long runs take)

from zsim.backend.backend import RunFailedError, simulator
from zsim.limits import USUAL, Limits, TimeLimitError, limits, using
from zsim.mistake import is_out_of_memory
from zsim.scenario.resolved_scenario import ResolvedScenario
from zsim.workers.limited_run import limited
from zsim_study.study.outcome import Status, StudyOutcome
from zsim_study.study.proved import Proved, proved
from zsim_study.workers.code_version import code_version

KEPT = 3
"""Schedules that a worker keeps: enough to reuse recent ones, few enough for large models."""

Maker = Callable[[ResolvedScenario], Proved | StudyOutcome]
"""Makes and checks the schedule of a scenario; must be importable in other processes."""


@dataclass(frozen=True, slots=True)
class RunBatch:
    """Runs with one schedule. `code` is the required code version; None is any."""

    scenarios: tuple[ResolvedScenario, ...]
    maker: Maker
    code: str | None = None
    limits: Limits = USUAL


@dataclass(frozen=True, slots=True)
class FinishedRun:
    """The outcome of one run, and its duration in seconds.

    Without `keep` it depends on the program more than on the run, and is not stored.
    """

    outcome: StudyOutcome
    seconds: float
    keep: bool = True


def simulated(resolved: ResolvedScenario) -> Proved | StudyOutcome:
    """Return the schedule of a scenario, to be tried in the simulation."""
    return proved(resolved, simulator)


def run_batch(batch: RunBatch) -> list[FinishedRun]:
    """Run all of `batch`, in order; an unexpected failure is returned as a failed run.

    Raises:
        RunFailedError: this process has other code than the sender of the batch.
    """
    return list(run_each(batch))


def run_each(batch: RunBatch, memory_bytes: int | None = None) -> Iterator[FinishedRun]:
    """Yield each run of `batch` when it ends, limited to `memory_bytes`; see `run_batch`."""
    if batch.code is not None and batch.code != code_version():
        raise RunFailedError("a worker has another version of zsim than this machine")
    for resolved in batch.scenarios:
        with _LOCK, using(batch.limits):  # a Dask worker may have several threads
            found = _run(resolved, batch.maker, memory_bytes)
        yield found


_LOCK = Lock()
_KNOWN: OrderedDict[tuple[Maker, Hashable], Proved | StudyOutcome] = OrderedDict()


def _run(resolved: ResolvedScenario, maker: Maker, memory_bytes: int | None) -> FinishedRun:
    begin = perf_counter()
    keep = True
    try:
        with limited(time_s=limits().run_time_s, memory_bytes=memory_bytes):
            outcome = _outcome(resolved, maker)
    except TimeLimitError as late:
        outcome, keep = StudyOutcome(status=Status.FAILED, reason=str(late)), False
    except Exception as error:
        reason = f"internal error: {type(error).__name__}: {error}"
        if is_out_of_memory(error):
            _KNOWN.clear()
            reason = "out of memory: the run needs more than a worker may have"
        outcome, keep = StudyOutcome(status=Status.FAILED, reason=" ".join(reason.split())), False
    return FinishedRun(outcome, perf_counter() - begin, keep)


def _outcome(resolved: ResolvedScenario, maker: Maker) -> StudyOutcome:
    """Return the outcome of a run; if memory runs out, drop kept schedules and try once more."""
    try:
        found = _made(resolved, maker)
        return found if isinstance(found, StudyOutcome) else found.tried(resolved)
    except Exception as error:
        if not (_KNOWN and is_out_of_memory(error)):
            raise
        _KNOWN.clear()
    found = _made(resolved, maker)
    return found if isinstance(found, StudyOutcome) else found.tried(resolved)


def _made(resolved: ResolvedScenario, maker: Maker) -> Proved | StudyOutcome:
    key = (maker, resolved.schedule_key)
    found = _KNOWN.get(key)
    if found is None:
        found = _KNOWN[key] = maker(resolved)
        while len(_KNOWN) > KEPT:
            _KNOWN.popitem(last=False)
    _KNOWN.move_to_end(key)
    return found
