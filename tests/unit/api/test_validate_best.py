"""`zsim validate best`: what zsim ranks first among settings that others published."""

import pytest
from evidence_page import COMMAND, PAGE, SLOW, block
from generated_sections import sections

from zsim_lab.answer.choice_validation import ChoiceValidation, validate_best


@pytest.fixture(scope="module")
def found() -> ChoiceValidation:
    return validate_best()


@pytest.mark.one_commit_in(12)
def test_in_four_of_five_groups_the_choice_is_within_a_tenth_of_the_published_best(
    found: ChoiceValidation,
) -> None:
    assert len(found.choices) >= 10
    assert found.good >= 0.8 * len(found.choices)
    assert found.ordered >= 0.85 * found.pairs > 1000
    assert f"{found.ordered:,} of {found.pairs:,} pairs" in found.text()
    assert f"{found.good} of {len(found.choices)} groups" in found.text()
    missed = [each for each in found.choices if not each.is_good]
    assert all(each.best.name in found.text() for each in missed)


@pytest.mark.one_commit_in(12)
def test_the_page_of_evidence_shows_the_choices(found: ChoiceValidation) -> None:
    shown = dict(sections(PAGE.read_text("utf-8")))["choices"]
    assert shown == block(SLOW["choices"], found.text()), f"run: {COMMAND}"


@pytest.mark.one_commit_in(12)
def test_each_choice_is_told_with_what_was_published_and_predicted(
    found: ChoiceValidation,
) -> None:
    told = found.to_dict()
    assert told["good"] == found.good
    rows = told["choices"]
    assert isinstance(rows, list)
    for row in rows:
        assert row["settings"] >= 10
        assert 0 < row["share_of_best"] <= 1
        assert row["chosen"]["step_s"] >= 0
