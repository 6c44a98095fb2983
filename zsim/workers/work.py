"""The runs that are left of a study, batch by batch through an executor, each kept as it ends."""

from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Executor, Future, wait
from dataclasses import dataclass, field

from zsim.backend.backend import RunFailedError
from zsim.scenario.resolved_scenario import ResolvedScenario
from zsim.study.study_plan import StudyRun, key_of
from zsim.workers.crew import Crew
from zsim.workers.worker import FinishedRun, RunBatch, run_batch

BATCH_S = 0.5
"""Seconds that a batch should take: what a kill costs at most, against what sending it costs."""

FIRST_BATCH, LARGEST_BATCH = 4, 200
AHEAD = 2
"""Batches in flight for each worker: one runs, one waits."""

Keep = Callable[[Sequence[tuple[str, FinishedRun]]], None]
"""Told keys and outcomes of the runs of a batch that is done."""


@dataclass(slots=True)
class _ScheduleGroup:
    """Runs with one schedule that were not sent yet."""

    waiting: deque[tuple[str, ResolvedScenario]] = field(
        default_factory=deque[tuple[str, ResolvedScenario]]
    )
    seconds: float = 0.0
    count: int = 0

    def take(self) -> list[tuple[str, ResolvedScenario]]:
        """Return the next runs: so many as should take the time of a batch."""
        size = FIRST_BATCH
        if self.count:
            size = int(BATCH_S / max(self.seconds / self.count, BATCH_S / LARGEST_BATCH))
        return [self.waiting.popleft() for _ in range(min(max(1, size), len(self.waiting)))]


def keys_of(runs: Sequence[StudyRun], code: str) -> dict[str, str]:
    """Return the key of every run that can be, by name."""
    return {run.name: key_of(run.resolved, code) for run in runs if run.resolved is not None}


def left_of(
    runs: Sequence[StudyRun], keys: Mapping[str, str], known: Mapping[str, object]
) -> dict[str, ResolvedScenario]:
    """Return what is left to run, by key: equal runs once."""
    return {
        keys[run.name]: run.resolved
        for run in runs
        if run.resolved is not None and keys[run.name] not in known
    }


def work_off(left: Mapping[str, ResolvedScenario], crew: Crew, batch: RunBatch, keep: Keep) -> None:
    """Run what is left; `batch`, without runs, says how.

    Runs with one schedule follow each other, so that a worker makes it once.

    Raises:
        RunFailedError: a worker died, or has other code.
    """
    groups: dict[Hashable, _ScheduleGroup] = {}
    for key, resolved in left.items():
        groups.setdefault(resolved.schedule_key, _ScheduleGroup()).waiting.append((key, resolved))
    queue = deque(groups.values())
    flying: dict[Future[list[FinishedRun]], tuple[_ScheduleGroup, list[str]]] = {}
    while queue or flying:
        while queue and len(flying) < AHEAD * crew.workers:
            group = queue[0]
            some = group.take()
            if not group.waiting:
                queue.popleft()
            sent = RunBatch(tuple([resolved for _, resolved in some]), batch.maker, batch.code)
            future = _submitted(crew.executor, sent)
            flying[future] = (group, [key for key, _ in some])
            if future.done():
                break  # this process runs it itself: its outcomes are kept before the next
        for future in wait(flying, return_when=FIRST_COMPLETED).done:
            group, keys = flying.pop(future)
            found = _result(future)
            group.seconds += sum(each.seconds for each in found[1:])  # the first one makes it
            group.count += len(found) - 1
            keep(list(zip(keys, found, strict=True)))


def _submitted(executor: Executor, batch: RunBatch) -> "Future[list[FinishedRun]]":
    try:
        return executor.submit(run_batch, batch)
    except (BrokenExecutor, EOFError, OSError) as error:  # EOFError: one could not be started
        raise RunFailedError(f"a worker died: {type(error).__name__}: {error}") from error


def _result(future: "Future[list[FinishedRun]]") -> list[FinishedRun]:
    error = future.exception()
    if isinstance(error, RunFailedError):
        raise error
    if error is not None:
        raise RunFailedError(f"a worker died: {type(error).__name__}: {error}") from error
    return future.result()
