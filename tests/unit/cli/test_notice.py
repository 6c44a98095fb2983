"""Commands that take long say so on standard error."""

import os
import subprocess
import sys
from collections.abc import Iterator
from itertools import chain, repeat
from pathlib import Path
from time import sleep

import pytest

from zsim.cli.notice import delegate, noticed, silence

ZSIM = Path(sys.executable).parent / "zsim"
LINE = "zsim check: still working; Ctrl-C ends it\n"


@pytest.fixture(autouse=True)
def looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zsim.cli.notice.LOOK_S", 0.001)


def asked_until_the_end(seconds: Iterator[float]) -> None:
    """Work until the notice has read all `seconds`."""
    left = list(seconds)
    with noticed("check", lambda: left.pop(0) if len(left) > 1 else left[0]):
        while len(left) > 1:
            sleep(0.001)
        sleep(0.02)


def test_a_command_that_works_for_three_seconds_says_so_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    left, printed = [0.5, 2.9, 3.0, 3.5], ""
    with noticed("check", lambda: left.pop(0) if len(left) > 1 else left[0]):
        while not printed:
            sleep(0.001)
            printed = capsys.readouterr().err
    assert printed + capsys.readouterr().err == LINE


def test_a_command_that_waits_for_the_machine_prints_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked_until_the_end(chain(repeat(0.4, 50), [2.9]))
    assert capsys.readouterr().err == ""


def test_waiting_counts_once_other_processes_work(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("zsim.cli.notice.LONG_S", 0.005)
    printed = ""
    with noticed("check", lambda: 0.0):
        delegate()
        while not printed:
            sleep(0.001)
            printed = capsys.readouterr().err
    assert printed == LINE


def test_a_progress_bar_takes_the_place_of_the_notice(capsys: pytest.CaptureFixture[str]) -> None:
    silenced = False
    with noticed("check", lambda: 10.0 if silenced else 0.0):
        silence()
        silenced = True
        sleep(0.02)
    assert capsys.readouterr().err == ""


@pytest.mark.one_commit_in(12)
@pytest.mark.parametrize(("rank", "printed"), [("0", 1), ("3", 0)])
def test_a_piped_command_says_once_that_it_works_also_under_torchrun(
    rank: str, printed: int
) -> None:
    program = (
        "import sys, zsim.cli.main as main, zsim.cli.notice as notice; notice.LONG_S = 0.01;"
        "notice.LOOK_S = 0.01; sys.argv = ['zsim', 'plan', 'tiny']; main.main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"RANK": rank},
    )
    assert done.stderr == printed * "zsim plan: still working; Ctrl-C ends it\n"
    assert done.stdout.startswith("Tiny: ")
