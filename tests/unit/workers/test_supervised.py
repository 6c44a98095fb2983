"""Workers that die, hang or are stopped: each run ends, and a run that ends two workers failed."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from failing_workers import Unruly

from zsim.limits import USUAL
from zsim.scenario.resolved_scenario import ResolvedScenario
from zsim.workers.processes import InProcess
from zsim_study.study.outcome import Status
from zsim_study.workers import supervised
from zsim_study.workers.study_source import study_of
from zsim_study.workers.supervised import SupervisedWorkers
from zsim_study.workers.work import work_off
from zsim_study.workers.worker import FinishedRun, RunBatch
from zsim_study.workers.worker_pool import WorkerPool

RUNS = 8
MEMORY_BYTES = 4 * 10**9


@pytest.fixture(scope="module")
def runs() -> dict[str, ResolvedScenario]:
    """Runs with one schedule, called after their number of steps."""
    plan = study_of(
        {
            "question": "?",
            "base": {"scenario": "tiny"},
            "axis": [{"field": "train.steps", "values": [*range(1, RUNS + 1)]}],
            "goal": {"minimize": "step_time"},
        }
    ).plan
    return {str(run.resolved.steps): run.resolved for run in plan.runs if run.resolved}


def ended(
    runs: dict[str, ResolvedScenario], folder: Path, *, run_time_s: float = 30.0
) -> tuple[dict[str, FinishedRun], list[str]]:
    """How every run ended on two workers, and what was told."""
    found: dict[str, FinishedRun] = {}
    told: list[str] = []

    def keep(some: Sequence[tuple[str, FinishedRun]]) -> None:
        assert not found.keys() & dict(some).keys()  # none is answered twice
        found.update(some)

    limits = replace(USUAL, run_time_s=run_time_s)
    pool = SupervisedWorkers(2, MEMORY_BYTES)
    try:
        batch = RunBatch((), Unruly(folder), limits=limits)
        work_off(runs, WorkerPool(executor=pool, workers=2), batch, keep, tell=told.append)
    finally:
        pool.shutdown()
    assert found.keys() == runs.keys()
    return found, told


def statuses(found: dict[str, FinishedRun]) -> dict[str, Status]:
    return {key: each.outcome.status for key, each in found.items()}


RIGHT = {str(number): Status.NOT_MODELLED for number in range(1, RUNS + 1)}


@pytest.mark.matrix(9)
@pytest.mark.parametrize("how", ["kill once", "exit once", "stop once"])
def test_a_worker_that_is_lost_is_replaced_and_its_runs_run_again(
    runs: dict[str, ResolvedScenario], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr(supervised, "STOPPED_S", 1.0)
    (tmp_path / "2").write_text(how, "utf-8")
    (tmp_path / "7").write_text(how, "utf-8")
    found, told = ended(runs, tmp_path)
    assert statuses(found) == RIGHT
    why = {"kill": "killed by SIGKILL", "exit": "ended with status 7", "stop": "was stopped"}
    assert len(told) == 2
    assert all(why[how.split(maxsplit=1)[0]] in line for line in told)


@pytest.mark.matrix(15)
@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("kill", "2 workers were lost in it; of the last one: it was killed by SIGKILL"),
        ("exit", "2 workers were lost in it; of the last one: it ended with status 7"),
        ("hang", "2 workers were lost in it; of the last one: it said nothing for 2 s"),
        ("sleep", "time: it took longer than 1 s"),
        ("memory", "out of memory: the run needs more than a worker may have"),
    ],
)
def test_a_run_that_no_worker_ends_has_failed_and_the_others_have_not(
    runs: dict[str, ResolvedScenario],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    how: str,
    why: str,
) -> None:
    monkeypatch.setattr(supervised, "GRACE_S", 1.0)
    (tmp_path / "3").write_text(how, "utf-8")
    found, _ = ended(runs, tmp_path, run_time_s=1.0)
    assert statuses(found) == RIGHT | {"3": Status.FAILED}
    assert found["3"].outcome.reason.startswith(why)
    assert not found["3"].keep  # it is tried again by the next sweep


@pytest.mark.one_commit_in(15)
def test_a_worker_that_sleeps_without_a_moment_on_a_core_is_replaced_long_before_its_time(
    runs: dict[str, ResolvedScenario], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervised, "IDLE_S", 1.0)
    (tmp_path / "2").write_text("hang once", "utf-8")
    (tmp_path / "7").write_text("hang", "utf-8")
    (tmp_path / "4").write_text("work", "utf-8")
    found, told = ended(runs, tmp_path, run_time_s=1000.0)
    assert statuses(found) == RIGHT | {"7": Status.FAILED}
    assert "it did nothing for 1 s" in found["7"].outcome.reason
    assert told
    assert all("it did nothing for 1 s" in line for line in told)


@pytest.mark.parametrize("how", ["sleep", "memory"])
def test_time_and_memory_of_a_run_are_bounded_in_this_process_too(
    runs: dict[str, ResolvedScenario], tmp_path: Path, how: str
) -> None:
    (tmp_path / "3").write_text(how, "utf-8")
    found: dict[str, FinishedRun] = {}
    batch = RunBatch((), Unruly(tmp_path), limits=replace(USUAL, run_time_s=0.2))
    work_off(runs, WorkerPool(executor=InProcess(), workers=1), batch, found.update)
    assert statuses(found) == RIGHT | {"3": Status.FAILED}
