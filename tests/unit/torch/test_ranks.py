import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from rank_jobs import (
    exit_on,
    hang_in_a_collective,
    hang_on,
    kill_on,
    pid_after_child,
    place_and_threads,
    raise_on,
    return_a_lambda,
    slow_but_moving,
    start_ranks_inside,
    step_when_it_is_told,
    stop_on,
    sum_of_ranks,
)

from zsim.backend.backend import RunFailedError
from zsim_torch.supervise import orphan_reaper
from zsim_torch.supervise.orphan_reaper import OrphanReaper
from zsim_torch.supervise.process_group import DeviceChoice
from zsim_torch.supervise.progress_record import ProgressRecord, note
from zsim_torch.supervise.rank_failure import Cause, RankFailedError
from zsim_torch.supervise.ranks import RankPool, run_ranks


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(3, timeout_s=60) as made:
        yield made


@pytest.fixture
def impatient(pool: RankPool, monkeypatch: pytest.MonkeyPatch) -> RankPool:
    """The pool with a short time-out, its ranks started and this module imported by them."""
    pool.run(sum_of_ranks)
    monkeypatch.setattr(pool, "timeout_s", 1.0)
    return pool


def details(error: RankFailedError) -> str:
    path = Path(error.details)
    text = path.read_text("utf-8")
    path.unlink()
    return text


def failure(pool: RankPool, function: object, *arguments: object) -> tuple[RankFailedError, str]:
    assert callable(function)
    with pytest.raises(RankFailedError) as caught:
        pool.run(function, *arguments)
    return caught.value, details(caught.value)


def processes_with(mark: str) -> list[int]:
    """Processes whose environment has `mark`: what a run has started, orphans included."""
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                environment = (entry / "environ").read_bytes()
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            except OSError:
                continue
            if mark.encode() in environment and state != "Z":
                found.append(int(entry.name))
    return found


def none_left(mark: str) -> bool:
    """Whether all are gone within five seconds."""
    for _ in range(100):
        if not processes_with(mark):
            return True
        time.sleep(0.05)
    return False


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def test_results_come_back_by_rank(pool: RankPool) -> None:
    assert pool.run(place_and_threads) == ((0, 3, 1), (1, 3, 1), (2, 3, 1))
    assert pool.run(sum_of_ranks) == (3.0, 3.0, 3.0)  # 0 + 1 + 2


def test_one_rank_is_a_run_as_well() -> None:
    assert run_ranks(sum_of_ranks, ranks=1) == (0.0,)


def test_a_pool_keeps_its_processes_from_job_to_job(pool: RankPool) -> None:
    assert pool.run(os.getpid) == pool.run(os.getpid)


def test_steps_are_told_while_the_ranks_go_on(pool: RankPool, tmp_path: Path) -> None:
    told: list[int] = []

    def tell(steps: int) -> None:
        told.append(steps)
        (tmp_path / str(steps)).touch()

    pool.run(step_when_it_is_told, str(tmp_path), on_steps=tell)
    assert told == [1, 2, 3]


def test_an_error_is_told_with_its_rank_in_one_line(pool: RankPool) -> None:
    error, text = failure(pool, raise_on, 2, "weights have no shape\nand more")
    first = str(error).splitlines()
    assert len(first) == 1
    assert first[0].startswith("rank 2: ValueError: weights have no shape (details: ")
    assert (error.rank, error.cause) == (2, Cause.RAISED)
    assert isinstance(error, RunFailedError)
    assert "and more" in text
    assert "in raise_on" in text


@pytest.mark.one_commit_in(6)
def test_the_error_of_the_origin_comes_before_those_of_its_peers(pool: RankPool) -> None:
    """The peers see their connections close; whichever is noticed first, rank 1 is to blame."""
    for _ in range(5):
        error, _text = failure(pool, raise_on, 1, "mine")
        assert (error.rank, error.cause) == (1, Cause.RAISED)


@pytest.mark.one_commit_in(6)
def test_a_killed_rank_is_named_with_its_signal(pool: RankPool) -> None:
    for _ in range(3):
        error, text = failure(pool, kill_on, 1)
        assert (error.rank, error.cause) == (1, Cause.DIED)
        assert str(error).startswith("rank 1: killed by SIGKILL")
        assert "the last words" in text


def test_a_rank_that_leaves_is_named_with_its_status(pool: RankPool) -> None:
    error, _ = failure(pool, exit_on, 0, 7)
    assert str(error).startswith("rank 0: ended with status 7 before its work was done")


def test_a_rank_that_calls_exit_has_failed(pool: RankPool) -> None:
    error, _ = failure(pool, sys.exit, 3)
    assert "SystemExit: 3" in str(error)


@pytest.mark.one_commit_in(6)
@pytest.mark.timeout(30)
def test_a_hang_ends_within_the_set_time_and_names_the_rank_the_others_wait_for(
    impatient: RankPool,
) -> None:
    error, text = failure(impatient, hang_on, 1)
    assert (error.rank, error.cause) == (1, Cause.HUNG)
    assert "rank 1: no progress for 1 s, last seen: step 0: a long sleep" in str(error)
    assert "in hang_on" in text
    assert "rank 2 was last seen: step 0: before the collective" in text


@pytest.mark.one_commit_in(6)
def test_a_rank_that_was_stopped_is_the_one_that_the_others_wait_for(impatient: RankPool) -> None:
    error, _ = failure(impatient, stop_on, 2)
    assert (error.rank, error.cause) == (2, Cause.HUNG)


@pytest.mark.one_commit_in(6)
def test_a_collective_that_one_rank_leaves_out_is_a_hang(impatient: RankPool) -> None:
    error, _ = failure(impatient, hang_in_a_collective, 2)
    assert error.cause is Cause.HUNG
    assert error.rank in (0, 1)


@pytest.mark.one_commit_in(9)
def test_a_slow_run_that_makes_progress_is_no_hang(impatient: RankPool) -> None:
    assert impatient.run(slow_but_moving, 2 * impatient.timeout_s) == (0, 1, 2)


@pytest.mark.one_commit_in(6)
def test_a_pool_works_again_after_each_failure(pool: RankPool) -> None:
    failure(pool, kill_on, 0)
    assert pool.run(sum_of_ranks) == (3.0, 3.0, 3.0)
    failure(pool, raise_on, 0, "again")
    assert pool.run(sum_of_ranks) == (3.0, 3.0, 3.0)


def test_a_result_that_cannot_be_pickled_is_an_error_of_the_rank(pool: RankPool) -> None:
    error, _ = failure(pool, return_a_lambda)
    assert error.cause is Cause.RAISED
    assert "lambda" in str(error)


@pytest.mark.one_commit_in(6)
def test_a_function_that_cannot_be_pickled_leaves_the_pool_usable(pool: RankPool) -> None:
    with pytest.raises((pickle.PicklingError, AttributeError)):
        pool.run(lambda: None)
    assert pool.run(sum_of_ranks) == (3.0, 3.0, 3.0)


def test_a_rank_may_not_start_ranks(pool: RankPool) -> None:
    error, _ = failure(pool, start_ranks_inside)
    assert "a rank cannot start ranks" in str(error)


def test_no_process_and_no_file_is_left_when_a_pool_closes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    pool = RankPool(2)
    pids = pool.run(pid_after_child)
    children = [
        int(pid)
        for parent in pids
        for pid in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    ]
    assert len(children) == 2
    pool.close()
    assert not any(alive(pid) for pid in pids)
    assert list(tmp_path.iterdir()) == []
    assert not any(alive(pid) for pid in children)


@pytest.mark.parametrize(
    ("ranks", "timeout_s", "message"),
    [(0, 1.0, "ranks: 0 must be at least 1"), (1, 0.0, "timeout_s: 0.0 must be more than 0")],
)
def test_impossible_pools_are_refused(ranks: int, timeout_s: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RankPool(ranks, timeout_s=timeout_s)


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks for a device that is not there")
def test_cuda_without_a_device_is_an_error_that_says_so() -> None:
    with pytest.raises(RankFailedError) as caught:
        run_ranks(sum_of_ranks, ranks=2, device=DeviceChoice.CUDA)
    details(caught.value)
    assert "device: cuda needs a device for each of 2 local ranks" in str(caught.value)


SCRIPT = """
import os, signal, sys, time
from zsim_torch.supervise.ranks import RankPool, run_ranks

def wait():
    print("ready", flush=True)
    time.sleep(100)

def add(one, other):
    print("adding")
    return one + other

if __name__ == "__main__":
    match sys.argv[1]:
        case "wait":
            run_ranks(wait, ranks=2)
        case "add":
            print(run_ranks(add, 1, 2, ranks=2))
            pool = RankPool(2)  # forgotten: nobody closes it
            pool.run(add, 1, 2)
        case "interrupt":
            try:
                run_ranks(wait, ranks=2)
            except KeyboardInterrupt:
                print("interrupted", flush=True)
                sys.exit(130)
"""


def script(tmp_path: Path, *arguments: str) -> tuple[str, subprocess.Popen[str]]:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    mark = f"ZSIM_TEST_MARK={os.getpid()}-{arguments[0]}"
    name, _, value = mark.partition("=")
    process = subprocess.Popen(
        [sys.executable, str(path), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, name: value, "TMPDIR": str(tmp_path)},
        start_new_session=True,
    )
    return mark, process


@pytest.mark.one_commit_in(24)
def test_a_script_gives_its_own_functions_to_ranks_and_may_forget_to_close_its_pool(
    tmp_path: Path,
) -> None:
    mark, process = script(tmp_path, "add")
    out, err = process.communicate(timeout=250)
    # Of the pool that is forgotten, as of the other one, rank 0 alone prints.
    assert (out, err, process.returncode) == ("adding\n(3, 3)\nadding\n", "", 0)
    assert none_left(mark)
    assert [path.name for path in tmp_path.iterdir()] == ["script.py"]


@pytest.mark.one_commit_in(24)
def test_ranks_end_with_the_program_that_started_them(tmp_path: Path) -> None:
    """Asked to end; a program that is killed is among the struck ranks."""
    mark, process = script(tmp_path, "wait")
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    assert len(processes_with(mark)) >= 4  # program, server, two ranks
    process.terminate()
    process.communicate(timeout=250)
    assert none_left(mark)


@pytest.mark.one_commit_in(24)
def test_an_interrupt_ends_the_run_without_noise(tmp_path: Path) -> None:
    mark, process = script(tmp_path, "interrupt")
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: the whole foreground group
    out, err = process.communicate(timeout=250)
    assert (out, err, process.returncode) == ("interrupted\n", "", 130)
    assert none_left(mark)
    assert [path.name for path in tmp_path.iterdir()] == ["script.py"]


def test_the_last_line_of_a_rank_can_be_read_from_outside(tmp_path: Path) -> None:
    writer, reader = ProgressRecord(tmp_path / "note"), ProgressRecord(tmp_path / "note")
    assert (reader.read().count, reader.read().text) == (0, "")
    writer.write("a long line " * 100)
    writer.write("short")
    assert (reader.read().count, reader.read().text) == (2, "short")
    writer.close()
    reader.close()


def test_a_note_outside_of_a_rank_does_nothing() -> None:
    note("nobody reads this")


def test_a_reaper_that_is_stopped_does_not_hold_a_run_that_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(orphan_reaper, "_FAREWELL_S", 0.2)
    pids: list[int] = []
    start = OrphanReaper.mind

    def minded(self: OrphanReaper, pid: int) -> None:
        pids.append(self.pid)
        start(self, pid)

    monkeypatch.setattr(OrphanReaper, "mind", minded)
    with RankPool(1) as pool:
        assert pool.run(os.getpid) != ()
        os.kill(pids[0], signal.SIGSTOP)
    assert not Path(f"/proc/{pids[0]}").exists()
