"""Lines on standard error about the best setting so far, and Ctrl-C."""

from collections.abc import Callable
from typing import Any

import pytest

from zsim.cli import progress_bar
from zsim.cli.main import answer
from zsim.cli.notice import noticed
from zsim.cli.progress_bar import FIRST_NOTE_S, NOTE_S, progress
from zsim_plan.answer import best_search
from zsim_plan.answer.setting_trial import SettingOutcome, tried

ASKED = (
    *("best", "llama3.2-1b", "--gpus", "4xh100", "--batch", "2048", "--runtime", "fsdp2"),
    *("--workers", "1"),
    *(
        word
        for key in ("model.layers=2", "model.sequence_length=256", "model.vocab_size=1000")
        for word in ("--set", key)
    ),
    *("--set", "parallel.tensor=1", "--set", "parallel.pipeline=1"),
)


def interrupted_after(count: int) -> Callable[..., SettingOutcome]:
    """Return `tried` that is interrupted, as by Ctrl-C, at the simulation after `count`."""
    calls = iter(range(count))

    def simulate(tables: dict[str, Any], **how: bool) -> SettingOutcome:
        if next(calls, None) is None:
            raise KeyboardInterrupt
        return tried(tables, **how)

    return simulate


@pytest.mark.parametrize("count", [1, 5])
def test_ctrl_c_prints_the_answer_so_far(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], count: int
) -> None:
    monkeypatch.setattr(best_search, "tried", interrupted_after(count))
    assert answer([*ASKED]) == 130
    first, title, best = capsys.readouterr().out.splitlines()[:3]
    assert first.startswith("search unfinished: ")
    assert first.endswith("it was interrupted, continue with the same command")
    assert title == "llama3.2-1b on 4 H100"
    assert best.startswith("best        FSDP2, ZeRO-3")


@pytest.mark.parametrize("count", [1, 30])
def test_ctrl_c_prints_the_clusters_that_were_compared_so_far(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], count: int
) -> None:
    """Ctrl-C comes in the first search, or in a later one."""
    monkeypatch.setattr(best_search, "tried", interrupted_after(count))
    assert answer([*ASKED, "--or", "4xa100", "--or", "4xh200"]) == 130
    title, *facts = capsys.readouterr().out.splitlines()
    assert title == "llama3.2-1b on 4xh100 or 4xa100 or 4xh200"
    assert facts[0].startswith("best ")
    assert any(line.split() == ["4xh200", "not", "searched:", "interrupted"] for line in facts)


def test_ctrl_c_before_the_first_result_prints_no_answer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(best_search, "tried", interrupted_after(0))
    assert answer([*ASKED]) == 130
    assert capsys.readouterr().out == ""


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that shows the first number of a list."""
    now = [0.0]
    monkeypatch.setattr(progress_bar, "monotonic", lambda: now[0])
    return now


def test_a_result_so_far_is_printed_once_in_ten_seconds(
    clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    with noticed("best", lambda: 0.0), progress("a search") as told:
        for tenth in range(300):
            clock[0] = tenth / 10
            told(tenth, 300)
            told.note(lambda: f"best after {clock[0]:g} s")
    times = (FIRST_NOTE_S, FIRST_NOTE_S + NOTE_S, FIRST_NOTE_S + 2 * NOTE_S)
    lines = [f"zsim: best after {each:g} s" for each in times]
    assert capsys.readouterr().err.splitlines() == lines


def test_a_caller_in_python_gets_no_lines_about_results_so_far(
    clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    with progress("a search") as told:
        clock[0] = 100.0
        told.note(lambda: "best")
    assert capsys.readouterr().err == ""
