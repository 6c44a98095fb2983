"""The README says what happens: its commands are run, its outputs compared, its links followed."""

import json
import re
import shlex
from itertools import pairwise
from pathlib import Path

import pytest
from page_commands import Command, steps

from zsim.api.training_budget import batch_of, tokens_of
from zsim.cli.main import answer
from zsim_plan.answer.best_question import question_of

ROOT = Path(__file__).parents[3]
README = (ROOT / "README.md").read_text("utf-8")
LINES_MAX = 250
"""A README is read in one go; other pages have the rest."""


def blocks(language: str) -> list[str]:
    """Contents of the fenced blocks in `language`."""
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)


def behind(command: str) -> str:
    """What `make run` runs, by the Makefile; any other command is itself."""
    if command != "make run":
        return command
    recipe = re.search(
        r"^run:.*\n\t@?\.venv-run/bin/(.+)$", (ROOT / "Makefile").read_text("utf-8"), re.M
    )
    assert recipe is not None
    return recipe.group(1)


COMMANDS = {each.words: each.prints for each in steps(README) if isinstance(each, Command)}


@pytest.mark.matrix(12)
@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_prints_what_the_readme_shows(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    program, *words = shlex.split(behind(command))
    assert program == "zsim"
    answer(words)
    captured = capsys.readouterr()
    output = captured.out + captured.err
    assert "\n".join(line.rstrip() for line in output.splitlines()) == COMMANDS[command]


def test_the_readme_is_short() -> None:
    assert len(README.splitlines()) <= LINES_MAX


def test_the_two_commands_are_shown() -> None:
    assert "make run" in COMMANDS
    assert any(block.startswith("$ make test\n") for block in blocks("text"))


@pytest.mark.one_commit_in(6)
def test_the_picture_of_the_first_screen_is_that_of_its_command(tmp_path: Path) -> None:
    first = next(iter(COMMANDS)).split()
    assert first[:2] == ["zsim", "run"]
    (picture,) = re.findall(r"!\[[^]]*\]\(([^)]+)\)", README.split("\n## ")[0])
    path = tmp_path / "step.svg"
    assert answer([*first[1:3], "--no-check", "--timeline", str(path)]) == 0
    assert path.read_text("utf-8") == (ROOT / picture).read_text("utf-8")


def test_each_question_of_a_planner_is_asked_in_words_that_the_command_takes() -> None:
    asked = re.findall(r"^\|[^|]*\? \| `(zsim best [^`]*)`", README, re.MULTILINE)
    assert len(asked) == 5
    for words in asked:
        program, _, model, *options = shlex.split(words)
        assert program == "zsim"
        given = dict(zip(options[::2], options[1::2], strict=True))
        settings = [value for name, value in pairwise(options) if name == "--set"]
        question = question_of(
            model,
            given["--gpus"],
            settings,
            batch_tokens=batch_of(given.get("--batch")),
            tokens=tokens_of(given.get("--tokens")),
            price=float(given["--price"]) if "--price" in given else None,
        )
        assert question.fleet.gpus >= 4


@pytest.mark.one_commit_in(4)
def test_the_table_of_evidence_is_what_validation_measures(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert answer(["validate", "error", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    expected = [
        ("step time", found["step_time"][0]),
        ("step time, runtimes that another publication has", found["step_time"][3]),
        ("ratio of two step times, one choice changed", found["ratio"][1]),
    ]
    for name, each in expected:
        cells = (
            name,
            f"{each['rows']:,}",
            f"{each['groups']}",
            f"{each['inside']:.0%}".replace("%", " %"),
            f"{each['inside_groups']:.0%}".replace("%", " %"),
            f"±{each['half_width']:.0%}".replace("%", " %"),
        )
        assert f"| {' | '.join(cells)} |" in README
    assert f"a Brier score of {found['fits']['brier']:.3f}" in README


def test_every_link_leads_somewhere() -> None:
    targets = re.findall(r"\]\(([^)#]+)\)", README)
    local = [target for target in targets if not target.startswith("https://")]
    assert local
    assert [target for target in local if not (ROOT / target).exists()] == []
