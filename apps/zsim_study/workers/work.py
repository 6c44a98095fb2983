"""The remaining runs of a study, run in batches by an executor; each result is kept at once."""

from collections import Counter, deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import (
    FIRST_COMPLETED,
    BrokenExecutor,
    CancelledError,
    Executor,
    Future,
    wait,
)
from dataclasses import dataclass, field, replace

from zsim.backend.backend import RunFailedError
from zsim.scenario.resolved_scenario import ResolvedScenario
from zsim_study.study.outcome import Status, StudyOutcome
from zsim_study.study.study_plan import StudyRun, key_of
from zsim_study.workers.supervised import BatchLostError
from zsim_study.workers.worker import FinishedRun, RunBatch, run_batch
from zsim_study.workers.worker_pool import WorkerPool

BATCH_S = 0.5
"""Target duration of a batch in seconds: work lost by a kill, against the cost of sending."""

FIRST_BATCH, LARGEST_BATCH = 4, 200
LOST_MAX = 2
"""Number of workers lost in a run after which it has failed."""

LOOK_S = 5.0
"""Interval in seconds at which workers are checked while no batch ends."""

KILLED = "KilledWorker"
"""Name of Dask's error for a task in which `allowed-failures` workers died."""

AHEAD = 2
"""Batches in flight for each worker: one runs, one waits."""

_Sent = list[tuple[str, ResolvedScenario]]
Keep = Callable[[Sequence[tuple[str, FinishedRun]]], None]
"""Called with keys and outcomes of the runs of a finished batch."""


@dataclass(slots=True)
class _ScheduleGroup:
    """Runs with one schedule that were not sent yet."""

    waiting: deque[tuple[str, ResolvedScenario]] = field(
        default_factory=deque[tuple[str, ResolvedScenario]]
    )
    seconds: float = 0.0
    count: int = 0

    def take(self) -> list[tuple[str, ResolvedScenario]]:
        """Return the next runs, as many as should fill the duration of a batch."""
        size = FIRST_BATCH
        if self.count:
            size = int(BATCH_S / max(self.seconds / self.count, BATCH_S / LARGEST_BATCH))
        return [self.waiting.popleft() for _ in range(min(max(1, size), len(self.waiting)))]


def keys_of(runs: Sequence[StudyRun], code: str) -> dict[str, str]:
    """Return the key of every valid run, by name."""
    return {run.name: key_of(run.resolved, code) for run in runs if run.resolved is not None}


def left_of(
    runs: Sequence[StudyRun], keys: Mapping[str, str], known: Mapping[str, object]
) -> dict[str, ResolvedScenario]:
    """Return the scenarios that remain to run, by key; equal runs are run once."""
    return {
        keys[run.name]: run.resolved
        for run in runs
        if run.resolved is not None and keys[run.name] not in known
    }


def work_off(
    left: Mapping[str, ResolvedScenario],
    worker_pool: WorkerPool,
    batch: RunBatch,
    keep: Keep,
    *,
    tell: Callable[[str], object] = str,
) -> None:
    """Run the scenarios in `left`; `batch`, without scenarios, is the template of batches.

    `tell` is called with messages about lost workers. Runs with one schedule follow each other, so
    that a worker makes it once. A run in which two workers were lost has failed; other runs of
    their batches run again.

    Raises:
        RunFailedError: no worker is available, or one has other code.
    """
    work = _Work(worker_pool=worker_pool, batch=batch, keep=keep, tell=tell)
    groups: dict[Hashable, _ScheduleGroup] = {}
    for key, resolved in left.items():
        groups.setdefault(resolved.schedule_key, _ScheduleGroup()).waiting.append((key, resolved))
    work.queue.extend(groups.values())
    while work.queue or work.flying:
        while work.queue and len(work.flying) < AHEAD * worker_pool.workers:
            if work.send().done():
                break  # this process runs the batch itself: keep its outcomes before the next
        done = wait(work.flying, timeout=LOOK_S, return_when=FIRST_COMPLETED).done
        for future in done:
            work.receive(future)
        if not done and (why := worker_pool.lost()):
            raise RunFailedError(why)


@dataclass(slots=True, kw_only=True)
class _Work:
    """Waiting groups of runs, and batches in flight."""

    worker_pool: WorkerPool
    batch: RunBatch
    keep: Keep
    tell: Callable[[str], object]
    queue: deque[_ScheduleGroup] = field(default_factory=deque[_ScheduleGroup])
    flying: dict["Future[list[FinishedRun]]", tuple[_ScheduleGroup, _Sent]] = field(
        default_factory=dict["Future[list[FinishedRun]]", tuple[_ScheduleGroup, _Sent]]
    )
    lost_in: Counter[str] = field(default_factory=Counter[str])

    def send(self) -> "Future[list[FinishedRun]]":
        """Send the next batch."""
        group = self.queue[0]
        some = group.take()
        if not group.waiting:
            self.queue.popleft()
        scenarios = tuple([resolved for _, resolved in some])
        future = _submitted(self.worker_pool.executor, replace(self.batch, scenarios=scenarios))
        self.flying[future] = (group, some)
        return future

    def receive(self, future: "Future[list[FinishedRun]]") -> None:
        """Keep the results of a batch; send its lost runs again."""
        group, sent = self.flying.pop(future)
        try:
            found = _result(future)
        except BatchLostError as lost:
            found = lost.done or []
            self._again(sent[len(found) :], lost, is_known=lost.done is not None)
        group.seconds += sum(each.seconds for each in found[1:])  # the first run makes the schedule
        group.count += max(len(found) - 1, 0)
        self.keep([(key, each) for (key, _), each in zip(sent, found, strict=False)])

    def _again(self, rest: _Sent, lost: BatchLostError, *, is_known: bool) -> None:
        """Send `rest` again; its first run is blamed if known, or if it is the only one."""
        if rest and lost.is_to_blame and (is_known or len(rest) == 1):
            key, _ = rest[0]
            self.lost_in[key] += 1
            if self.lost_in[key] >= LOST_MAX:
                reason = f"{LOST_MAX} workers were lost in it; of the last one: {lost}"
                outcome = StudyOutcome(status=Status.FAILED, reason=reason)
                self.keep([(key, FinishedRun(outcome, 0.0, keep=False))])
                rest = rest[1:]
        if rest:
            self.tell(f"a worker was lost, {len(rest)} of its runs run again: {lost}")
        for each in rest:  # each alone, to identify the run that loses a worker
            self.queue.appendleft(_ScheduleGroup(waiting=deque([each])))


def _submitted(executor: Executor, batch: RunBatch) -> "Future[list[FinishedRun]]":
    try:
        return executor.submit(run_batch, batch)
    except (BrokenExecutor, EOFError, OSError) as error:  # EOFError: a worker could not start
        raise RunFailedError(f"a worker died: {type(error).__name__}: {error}") from error


def _result(future: "Future[list[FinishedRun]]") -> list[FinishedRun]:
    """Return the finished runs of a batch.

    Raises:
        BatchLostError: its worker is lost.
        RunFailedError: all workers are lost, or one has other code.
    """
    try:
        error = future.exception()
    except CancelledError:
        raise RunFailedError("the scheduler is gone: it has cancelled what was running") from None
    if error is None:
        return future.result()
    if isinstance(error, BatchLostError | RunFailedError):
        raise error
    if type(error).__name__ == KILLED:
        raise BatchLostError(f"{KILLED}: {error}", done=None, is_to_blame=True) from error
    raise RunFailedError(f"a worker died: {type(error).__name__}: {error}") from error
