"""A rank that is killed or stopped, at every phase: the others end, and the line says where."""

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
from command_answers import without_notice
from kept_losses import kept_losses
from rank_jobs import strike, sum_of_ranks

import zsim_topologies
from zsim.backend.backend import Job
from zsim.model.architecture import GPT
from zsim.model.gpt import gpt
from zsim.runtimes.registry import make_schedule
from zsim.schedule.operation import Operation, walk
from zsim.strategy.strategy import Parallel, Strategy, Zero
from zsim.strategy.train import Train
from zsim_torch.supervise import ranks
from zsim_torch.supervise.diagnosis import is_stopped
from zsim_torch.supervise.progress_record import LastProgress, ProgressRecord
from zsim_torch.supervise.rank_failure import Cause, RankFailedError
from zsim_torch.supervise.ranks import RankPool

pytestmark = pytest.mark.timeout(1200)  # a guard: three ranks start slowly on a busy machine

ZSIM = Path(sys.executable).with_name("zsim")
SHAPE = GPT(layers=1, hidden_size=8, attention_heads=1, sequence_length=8, vocab_size=256)
STRUCK = 1
RANKS = 3


def _job() -> Job:
    strategy = Strategy(
        parallel=Parallel(data=RANKS),
        zero=Zero(stage=3),
        train=Train(gradient_accumulation_steps=2),
    )
    model = gpt(SHAPE, micro_batch_size=1)
    return Job(
        schedule=make_schedule(model, strategy),
        model=model,
        cluster=zsim_topologies.load("dgx_a100_infiniband"),
        steps=3,
    )


JOB = _job()


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """Where a rank is struck: at the operation `at`, by itself or with it in flight."""

    at: str
    in_flight: bool = False

    @property
    def seen(self) -> str:
        """What the line says that it was last seen at."""
        if self.at == "end":
            return "the run is over"
        if not self.at:
            return "starting a job"
        return self.at if self.at.startswith("setup") else f"{self.at} in step 1"


def _first(program: tuple[Operation, ...], kind: str, action: str = "") -> str:
    for operation in walk(program):
        if type(operation).__name__ == kind and action in ("", getattr(operation, "action", "")):
            return operation.id
    raise LookupError(kind)


PROGRAM = JOB.schedule.programs[0]
PHASES = {
    "start": Phase(at=""),
    "setup": Phase(at=_first(PROGRAM.setup, "Compute")),
    "forward": Phase(at=_first(PROGRAM.step, "Compute", "forward")),
    "collective": Phase(at=_first(PROGRAM.step, "AllGather"), in_flight=True),
    "backward": Phase(at=_first(PROGRAM.step, "Compute", "backward")),
    "optimizer": Phase(at=_first(PROGRAM.step, "Compute", "update")),
    "end": Phase(at="end"),
}


PATIENT_S = 3600.0
"""Time without progress in which no rank fails, however busy the machine is."""


class Clock:
    """Clock of the pool: time passes once a rank is stopped and all others wait for it.

    So a rank is judged by its work. `sleep` takes its time.
    """

    sleep = staticmethod(time.sleep)

    def __init__(self) -> None:
        self.pool: RankPool | None = None
        self.all_wait = False
        self._now_s = 0.0

    def monotonic(self) -> float:
        """Return the time, a second later at each look while it passes."""
        self._now_s += self._passes()
        return self._now_s

    def _passes(self) -> bool:
        # Only processes and notes that the pool keeps say what ranks do.
        running = None if self.pool is None else self.pool._running  # pyright: ignore[reportPrivateUsage]
        if running is None or len(running.processes) < RANKS:
            return False
        pid = running.processes[STRUCK].pid
        others = [each for rank, each in enumerate(running.progress) if rank != STRUCK]
        stopped = pid is not None and is_stopped(pid)
        return stopped and (
            not self.all_wait or all(each.read().wait is not None for each in others)
        )


@pytest.fixture(scope="module")
def clock() -> Iterator[Clock]:
    made = Clock()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranks, "time", made)
        yield made


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory, clock: Clock) -> Iterator[RankPool]:
    folder = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(folder))
        with RankPool(RANKS, timeout_s=PATIENT_S) as made:
            clock.pool = made
            yield made


def failed(pool: RankPool, phase: Phase, how: signal.Signals) -> tuple[RankFailedError, str]:
    with pytest.raises(RankFailedError) as caught:
        pool.run(strike, JOB, STRUCK, phase.at, how, phase.in_flight)
    path = Path(caught.value.details)
    text = path.read_text("utf-8")
    path.unlink()
    assert list(path.parent.glob("zsim-*")) == []
    return caught.value, text


@pytest.mark.matrix(21)
@pytest.mark.parametrize("name", PHASES)
def test_a_killed_rank_is_named_with_what_it_did(pool: RankPool, name: str) -> None:
    pool.timeout_s = PATIENT_S
    error, text = failed(pool, PHASES[name], signal.SIGKILL)
    assert (error.rank, error.cause) == (STRUCK, Cause.DIED)
    assert str(error).startswith("rank 1: killed by SIGKILL (out of memory, or by hand), last seen")
    assert f"last seen: {PHASES[name].seen}" in str(error)
    assert "rank 0 was last seen: " in text


IN_CI = ("collective", "backward")


@pytest.mark.matrix(6)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in IN_CI else pytest.mark.long) for name in PHASES]
)
def test_a_stopped_rank_is_named_with_those_that_wait_for_it(
    pool: RankPool, clock: Clock, name: str
) -> None:
    pool.timeout_s = PATIENT_S
    pool.run(sum_of_ranks)  # collectives of fresh ranks have all that time
    pool.timeout_s = 4.0  # by the clock of the test
    clock.all_wait = PHASES[name].seen.endswith("in step 1")
    error, text = failed(pool, PHASES[name], signal.SIGSTOP)
    assert (error.rank, error.cause) == (STRUCK, Cause.HUNG)
    seen = f"rank 1: stopped by a signal, no progress for 4 s, last seen: {PHASES[name].seen}"
    assert str(error).startswith(seen)
    if PHASES[name].seen.endswith("in step 1"):
        waits = (
            r"; (rank 0 waits|rank 2 waits|ranks 0 and 2 wait) for step/\S+ where rank 1 is missing"
        )
        assert re.search(waits, str(error))
        assert re.search(r"rank [02] was last seen: .* where rank 1 is missing", text)
    pool.timeout_s = PATIENT_S
    assert pool.run(sum_of_ranks) == (3.0, 3.0, 3.0)


def processes_with(mark: str) -> list[int]:
    """Processes whose environment has `mark`: what a run has started, orphans included."""
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                environment = (entry / "environ").read_bytes()
                state = (entry / "stat").read_text("utf-8").rpartition(")")[2].split()[0]
            except OSError:
                continue
            if mark.encode() in environment and state != "Z":
                found.append(int(entry.name))
    return found


def until(what: Callable[[], bool]) -> None:
    """Wait until `what` holds, however long: a machine may be busy, and a test has a limit."""
    while not what():
        time.sleep(0.02)


class Running:
    """`zsim run` on three ranks, for long."""

    def __init__(self, folder: Path, *, timeout_s: int = 3600) -> None:
        self.folder = folder
        self.mark = f"{folder.name}-{os.getpid()}"
        words = ["run", "tiny", "--backend", "torch", "--ranks", str(RANKS), "--steps", "100000"]
        self.process = subprocess.Popen(
            [ZSIM, *words, "--timeout", str(timeout_s)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "ZSIM_TEST_MARK": self.mark, "TMPDIR": str(folder)},
            start_new_session=True,
        )

    def note(self, rank: int) -> LastProgress:
        """What a rank says of itself; nothing before it begins."""
        for path in self.folder.glob(f"zsim-ranks-*/rank{rank}.note"):
            with suppress(OSError, ValueError):
                record = ProgressRecord(path)
                note = record.read()
                record.close()
                return note
        return LastProgress(count=0, text="")

    def strike(self, rank: int, when: str, how: signal.Signals) -> None:
        """Send `how` to a rank that has come to `when`; fail if the run ends before."""
        until(
            lambda: (
                (self.note(rank).pid > 0 and when in self.note(rank).text)
                or self.process.poll() is not None
            )
        )
        assert self.process.poll() is None, self.process.communicate()
        os.kill(self.note(rank).pid, how)

    def end(self) -> tuple[int, str]:
        """Exit code and what was said, when it has ended and left nothing."""
        out, error = self.process.communicate()
        assert out == ""
        until(lambda: not processes_with(self.mark))
        until(lambda: not list(self.folder.glob("zsim-ranks-*")))
        return self.process.returncode, without_notice(error)


@pytest.mark.parametrize(
    ("when", "seen"),
    [
        pytest.param("", r".*", id="start", marks=pytest.mark.long),
        # a rank that is killed while it writes its note leaves a torn one
        pytest.param("in step", r"step/\S+( in step \d+)?.*?", id="step", marks=pytest.mark.long),
    ],
)
def test_a_run_whose_rank_is_killed_ends_with_one_line_and_nothing_left(
    tmp_path: Path, when: str, seen: str
) -> None:
    running = Running(tmp_path)
    running.strike(STRUCK, when, signal.SIGKILL)
    code, line = running.end()
    assert code == 3
    killed = rf"zsim: rank 1: killed by SIGKILL \(out of memory, or by hand\), last seen: {seen}"
    assert re.fullmatch(rf"{killed}(; ranks? .*)? \(details: \S+\)\n", line)
    (left,) = tmp_path.glob("zsim-*")  # torch leaves a cache there
    assert left.name.startswith("zsim-failure-")


@pytest.mark.long  # the set time bounds a start too, which is slow on a busy machine
def test_a_run_whose_rank_is_stopped_ends_after_the_set_time(tmp_path: Path) -> None:
    running = Running(tmp_path, timeout_s=100)
    running.strike(STRUCK, "in step", signal.SIGSTOP)
    code, line = running.end()
    assert code == 3
    stopped = (
        r"zsim: rank 1: stopped by a signal, no progress for 100\S* s, last seen: step/\S+ in step"
    )
    waits = r"(rank 0 waits|rank 2 waits|ranks 0 and 2 wait) for step/\S+ where rank 1 is missing"
    assert re.match(rf"{stopped} \d+; {waits}", line)


@pytest.mark.one_commit_in(24)
def test_a_killed_program_leaves_its_losses_and_no_rank_not_even_a_stopped_one(
    tmp_path: Path,
) -> None:
    running = Running(tmp_path)
    ended = running.process.poll
    until(lambda: len(kept_losses(tmp_path)) > 2 * RANKS or ended() is not None)
    assert ended() is None, running.process.communicate()
    for rank in range(RANKS):
        running.strike(rank, "", signal.SIGSTOP)
    running.process.kill()
    code, line = running.end()
    assert (code, line) == (-signal.SIGKILL, "")
    (left,) = tmp_path.glob("zsim-*")  # torch leaves a cache there
    assert left.name.startswith("zsim-losses-")
    losses = kept_losses(tmp_path)
    steps = sorted({step for step, _, _ in losses})
    assert steps == [*range(len(steps))]
    assert {rank for _, rank, _ in losses} == set(range(RANKS))
    assert losses[0][2] == pytest.approx(5.545, abs=0.3)  # ln(256): bytes are tokens
