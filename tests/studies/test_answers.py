"""Each page of a study that ships says what the study answers, and a conclusion from that alone.

After a change that means to change an answer: `zsim sweep NAME` prints what the page shows.
"""

import re
import tomllib
from pathlib import Path

import pytest

import zsim_scenarios
from zsim.shell.cli import answer

pytestmark = pytest.mark.studies

PAGES = Path(__file__).parents[2] / "docs" / "studies"
FIGURE = re.compile(r"[0-9][0-9.,]*(?:%| s| ms| GB)(?![0-9A-Za-z])")
"""A number with its unit."""

SENTENCE = re.compile(r"\.(?:\s+(?=[A-Z])|$)")


def parts(name: str) -> tuple[str, str]:
    """The conclusion of a page, and what stands under its command."""
    page = (PAGES / f"{name}.md").read_text("utf-8")
    conclusion = page.partition("## Conclusion\n")[2].partition("## Answer")[0]
    shown = page.partition(f"$ zsim sweep {name}\n")[2].partition("```")[0]
    return " ".join(conclusion.split()), shown.rstrip()


def test_every_study_that_ships_has_a_page_with_its_question() -> None:
    assert {path.stem for path in PAGES.glob("*.md")} == set(zsim_scenarios.study_names())
    for name in zsim_scenarios.study_names():
        question = tomllib.loads(zsim_scenarios.study_text(name))["question"]
        assert (PAGES / f"{name}.md").read_text("utf-8").startswith(f"# {question}\n")


@pytest.mark.parametrize("name", zsim_scenarios.study_names())
def test_a_page_shows_what_its_study_answers(
    name: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert answer(["sweep", name]) == 0
    printed = capsys.readouterr().out
    assert "\n".join(line.rstrip() for line in printed.splitlines()) == parts(name)[1]


@pytest.mark.parametrize("name", zsim_scenarios.study_names())
def test_a_conclusion_has_three_sentences_with_figures_of_the_answer(name: str) -> None:
    conclusion, shown = parts(name)
    assert len(SENTENCE.findall(conclusion)) == 3
    given = set(FIGURE.findall(zsim_scenarios.study_text(name)))
    figures = FIGURE.findall(conclusion)
    assert figures
    known = set(FIGURE.findall(shown)) | given
    assert [each for each in figures if each not in known] == []
