"""docs/studies.md says what happens, and the studies that ship can be planned."""

import re
import tomllib
from pathlib import Path

import pytest

import zsim_scenarios
from zsim.cli.main import answer
from zsim_study.study.file import AxisTable, GoalTable, StudyFile, WhereTable, parse
from zsim_study.workers.study_source import study_of

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "studies.md").read_text("utf-8")
BLOCK = re.compile(r"^```console\n\$ zsim ([^\n]+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
CONSOLE = dict(BLOCK.findall(PAGE))


@pytest.mark.one_commit_in(15)
@pytest.mark.parametrize("command", CONSOLE)
def test_a_study_answers_what_the_page_shows(
    command: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert answer([*command.split(), "--workers", "1"]) == 0
    printed = capsys.readouterr().out
    assert "\n".join(line.rstrip() for line in printed.splitlines()) == CONSOLE[command].rstrip()


def test_the_study_shown_is_the_one_that_ships() -> None:
    (shown,) = re.findall(r"^```toml\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    assert parse(shown) == parse(zsim_scenarios.study_text("nics"))


def test_every_key_of_a_study_is_on_the_page() -> None:
    for table in (StudyFile, AxisTable, WhereTable, GoalTable):
        for key in table.model_fields:
            assert f"`{key}`" in PAGE or f"[{key}]" in PAGE


@pytest.mark.parametrize("name", zsim_scenarios.study_names())
def test_a_study_that_ships_can_be_planned(name: str) -> None:
    plan = study_of(name).plan
    assert all(run.resolved is not None for run in plan.runs)
    assert len(tomllib.loads(zsim_scenarios.study_text(name))["question"]) <= 70


def test_a_study_that_ships_is_listed_and_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert answer(["list"]) == 0
    assert "  nics      How many InfiniBand NICs does ZeRO-100B need?\n" in capsys.readouterr().out
    assert answer(["show", "nics"]) == 0
    assert capsys.readouterr().out == zsim_scenarios.study_text("nics")


def test_an_unknown_study_is_a_lookup_error_with_those_that_ship() -> None:
    with pytest.raises(LookupError, match=r"'abacus' must be one of .*nics"):
        zsim_scenarios.study_text("abacus")
