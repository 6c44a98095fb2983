"""Each page of a study that ships says what the study answers, and a conclusion from that alone.

After a change that means to change an answer: `python tests/support/study_pages.py NAME`.
"""

import re
import tomllib

import pytest
from study_pages import PAGES, answered, shown

import zsim_scenarios

pytestmark = pytest.mark.studies

FIGURE = re.compile(r"[0-9][0-9.,]*(?:%| s| ms| GB)(?![0-9A-Za-z])")
"""A number with its unit."""

SENTENCE = re.compile(r"\.(?:\s+(?=[A-Z])|$)")


def conclusion_of(name: str) -> str:
    page = (PAGES / f"{name}.md").read_text("utf-8")
    return " ".join(page.partition("## Conclusion\n")[2].partition("![")[0].split())


def test_every_study_that_ships_has_a_page_with_its_question() -> None:
    assert {path.stem for path in PAGES.glob("*.md")} == set(zsim_scenarios.study_names())
    for name in zsim_scenarios.study_names():
        question = tomllib.loads(zsim_scenarios.study_text(name))["question"]
        assert (PAGES / f"{name}.md").read_text("utf-8").startswith(f"# {question}\n")


@pytest.mark.parametrize("name", zsim_scenarios.study_names())
def test_a_page_shows_what_its_study_answers(name: str) -> None:
    said, picture = answered(name)
    assert said == shown(PAGES / f"{name}.md", name)
    assert picture == (PAGES / f"{name}.svg").read_text("utf-8")


@pytest.mark.parametrize("name", zsim_scenarios.study_names())
def test_a_conclusion_has_three_sentences_with_figures_of_the_answer(name: str) -> None:
    conclusion = conclusion_of(name)
    assert len(SENTENCE.findall(conclusion)) == 3
    given = set(FIGURE.findall(zsim_scenarios.study_text(name)))
    figures = FIGURE.findall(conclusion)
    assert figures
    known = set(FIGURE.findall(shown(PAGES / f"{name}.md", name))) | given
    assert [each for each in figures if each not in known] == []
