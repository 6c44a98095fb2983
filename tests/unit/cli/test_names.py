"""Names that users choose: of any length, with marks of rich, pipes and links among them."""

import sys
from io import StringIO
from pathlib import Path

import pytest
from command_answers import Ask

from zsim.cli.option import Code
from zsim.cli.progress_bar import progress

LONG = "x" * 300

COMMANDS = (
    "run {}",
    "show {}",
    "check {}.toml",
    "check tiny --against {}",
    "compare {}.json tiny",
    "topology {}.toml",
    "topology dgx_a100 --fabric {}.csv",
    "sweep {}",
    "sweep fabric --store {}",
    "sweep fabric --csv {}",
    "run tiny --trace {}",
    "run tiny --trace {}/",
    "run tiny --report {}.html",
    "run tiny --timeline {}.svg",
    "run tiny --picture {}.svg",
    "run tiny --picture x.svg --figure {}",
    "sweep fabric --picture x.svg --figure {}",
    "run tiny --backend torch --data {}",
    "plan tiny --schedule {}",
    "calibrate --from {}",
    "validate network --data {}",
    "validate training --data {}",
    "validate --all-rows --data {}",
)


@pytest.mark.matrix(9)
@pytest.mark.parametrize("command", COMMANDS)
def test_a_name_of_300_letters_is_a_mistake_in_one_line(ask: Ask, command: str) -> None:
    code, out, error = ask(*command.format(LONG).split())
    assert (code, out, error.count("\n")) == (Code.MISTAKE, "", 1)
    assert "internal error" not in error


@pytest.mark.parametrize("name", ["[/]", "[bold", "a[/b]", "[link=x]", "\\[/x]", "[red]"])
def test_a_name_with_marks_is_shown_as_it_is(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    terminal = StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with progress(name, unit="runs") as told:
        told(1, 2)
    assert name in terminal.getvalue()


def test_a_link_to_itself_is_a_file_that_cannot_be_written(ask: Ask, tmp_path: Path) -> None:
    path = tmp_path / "loop.json"
    path.symlink_to(path)
    code, out, error = ask("plan", "tiny", "--schedule", path)
    assert code == Code.UNWRITTEN
    assert out
    assert error.startswith(f"zsim: done, but {path} could not be written: ")
