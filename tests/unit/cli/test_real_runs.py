"""`zsim run --backend torch`: real ranks from the command line, and what is refused before."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from command_answers import without_notice
from kept_losses import kept_losses

from zsim.backend.backend import BackendTraits, Job, RunFailedError
from zsim.backend.document import decode_trace
from zsim.cli.main import answer
from zsim_torch.supervise.progress_record import ProgressRecord

ZSIM = Path(sys.executable).parent / "zsim"


def lines_of(capsys: pytest.CaptureFixture[str], *words: str | Path) -> Iterator[str]:
    """The one line of a refused run on the torch backend."""
    assert answer(["run", *map(str, words), "--backend", "torch"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    yield from captured.err.splitlines()


REFUSED = {
    "zero_100b": "zsim: ranks: 400 must be at most 64 on one machine; say --ranks N, or start with",
    "zero_table1 --ranks 2": "zsim: model: there are no torch modules for 7500000000 parameters",
    "gpt3_175b --ranks 4": "zsim: model.layers: 96 needs ",
    "gpt3_175b": "zsim: ranks: 512 must be at most 64 on one machine; say --ranks N",
    f"tiny --set model.vocab_size=9 --data {__file__}": "zsim: model.vocab_size: 9 must be",
    "tiny --data /no/such.txt": "zsim: data: /no/such.txt: no such file or directory",
    "tiny --data /dev/null": "zsim: data: /dev/null is empty",
}


@pytest.mark.matrix(24)
@pytest.mark.parametrize("words", REFUSED)
def test_what_cannot_run_here_is_one_line_with_the_field_to_change(
    words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (line,) = lines_of(capsys, *words.split())
    assert line.startswith(REFUSED[words])


@pytest.mark.one_commit_in(9)
def test_real_ranks_learn_a_text_and_hold_what_the_book_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, trace = tmp_path / "text.txt", tmp_path / "trace.json"
    data.write_text("to be or not to be " * 40, "utf-8")
    words = "run tiny --backend torch --ranks 2 --steps 8 --set train.learning_rate=0.01 --json"
    assert answer([*words.split(), "--data", str(data), "--trace", str(trace)]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    run = json.loads(printed.out)
    assert run["losses"][-1] < run["losses"][0] - 1  # from ln(256) = 5.5; the text is a short loop
    observed = run["observed"]
    assert observed["live_bytes_peak/state"] == observed["booked_bytes_peak/state"]
    assert run["error"]["text"] == "measured"
    assert run["mfu"] == 0  # nothing is known of this machine's peak
    written = decode_trace(trace.read_text("utf-8"))
    assert [rank.rank for rank in written.ranks] == [0, 1]


@pytest.mark.one_commit_in(6)
def test_a_schedule_from_a_file_is_trained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "schedule.json"
    options = ["--set", "parallel.data=1", "--set", "train.steps=2"]
    assert answer(["plan", "tiny", *options, "--schedule", str(path)]) == 0
    capsys.readouterr()
    assert answer(["run", str(path), "--backend", "torch", "--json"]) == 0
    first, second = json.loads(capsys.readouterr().out)["losses"]
    assert first > second


@contextmanager
def training(folder: Path) -> Generator["subprocess.Popen[str]"]:
    """A real run that goes on in a session of its own, some of its steps done."""
    words = ["run", "tiny", "--backend", "torch", "--ranks", "2", "--steps", "100000"]
    with subprocess.Popen(
        [ZSIM, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "TMPDIR": str(folder), "OMP_NUM_THREADS": "1"},
    ) as running:
        try:
            for _ in range(6000):
                if len(kept_losses(folder)) > 4:
                    break
                assert running.poll() is None
                time.sleep(0.01)
            yield running
        finally:
            running.kill()


def need_none_left(session: int) -> None:
    """Wait for the server of the ranks, which ends by itself soon after."""
    for _ in range(100):
        try:
            os.killpg(session, 0)
        except ProcessLookupError:
            return
        time.sleep(0.1)
    pytest.fail("a process of its session is left")


@pytest.mark.one_commit_in(24)
def test_an_interrupted_run_leaves_no_rank_behind_and_says_where_its_losses_are(
    tmp_path: Path,
) -> None:
    with training(tmp_path) as running:
        running.send_signal(signal.SIGINT)
        _, error = running.communicate(timeout=250)
    assert running.returncode == 130
    steps = len({step for step, _, _ in kept_losses(tmp_path)})
    (path,) = tmp_path.glob("zsim-losses-*.csv")
    told = without_notice(error)
    assert told == f"zsim: losses of {steps} steps are in {path}\nzsim: interrupted\n"
    need_none_left(running.pid)


@pytest.mark.one_commit_in(24)
def test_a_run_whose_rank_is_killed_leaves_nothing_and_says_where_its_losses_are(
    tmp_path: Path,
) -> None:
    with training(tmp_path) as running:
        (note,) = tmp_path.glob("zsim-ranks-*/rank1.note")
        os.kill(ProgressRecord(note).read().pid, signal.SIGKILL)
        _, error = running.communicate(timeout=250)
    assert running.returncode == 3
    (path,) = tmp_path.glob("zsim-losses-*.csv")
    steps = len({step for step, _, _ in kept_losses(tmp_path)})
    told = without_notice(error)
    assert told.startswith("zsim: rank 1: killed by SIGKILL")
    assert told.endswith(f"; losses of {steps} steps are in {path}\n")
    assert told.count("\n") == 1
    need_none_left(running.pid)
    left = sorted(each.name[:12] for each in tmp_path.glob("zsim-*"))  # torch leaves a cache there
    assert left == ["zsim-failure", "zsim-losses-"]


class Dying:
    """A backend whose rank 2 dies."""

    name = "dying"
    traits = BackendTraits()

    def refusal(self, job: Job) -> str | None:
        return None

    def run(self, job: Job, *, seed: int) -> None:
        raise RunFailedError("rank 2: killed by SIGKILL\nrank 0: lost its peer")


def test_a_run_that_dies_is_exit_code_3_and_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zsim.api.launch.load_backend", lambda name: Dying)
    assert answer(["run", "tiny", "--backend", "dying"]) == 3
    line = capsys.readouterr().err
    assert line.startswith("zsim: rank 2: killed by SIGKILL rank 0: lost its peer (details: ")
    path = Path(line.rsplit("details: ")[1].strip().removesuffix(")"))
    assert "RunFailedError" in path.read_text("utf-8")
    path.unlink()
