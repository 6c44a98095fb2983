"""Choices among published settings: what is ranked first, beside what was fastest."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, composite

from zsim_lab.verdict.setting_choice import LEAST_SETTINGS, NEAR, PublishedSetting, choices

TIMES = st.floats(0.1, 100)


@composite
def published_settings(draw: DrawFn) -> list[PublishedSetting]:
    """Draw settings of a few groups, some without a result or a prediction."""
    return [
        PublishedSetting(
            publication="drawn",
            hardware="h100",
            model=draw(st.sampled_from(("1B", "8B"))),
            gpus=draw(st.sampled_from((8, 64))),
            name=str(number),
            tokens=draw(st.sampled_from((1024, 2048))),
            step_s=draw(st.none() | TIMES),
            predicted_s=draw(st.none() | TIMES),
            slower=draw(st.sampled_from((1.0, 3.0))),
            is_tight=draw(st.booleans()),
        )
        for number in range(draw(st.integers(0, 60)))
    ]


@pytest.mark.one_commit_in(6)
@given(published_settings())
def test_a_choice_is_never_faster_than_the_best_of_its_group(
    settings: list[PublishedSetting],
) -> None:
    for choice in choices(settings):
        assert 0 < choice.share <= 1
        assert choice.chosen.group == choice.best.group == choice.of_all.group
        assert choice.settings >= LEAST_SETTINGS
        assert choice.is_good is (choice.share >= 1 - NEAR)


@pytest.mark.one_commit_in(6)
@given(published_settings())
def test_predictions_that_are_right_choose_the_best(settings: list[PublishedSetting]) -> None:
    right = [
        PublishedSetting(
            publication=each.publication,
            hardware=each.hardware,
            model=each.model,
            gpus=each.gpus,
            name=each.name,
            tokens=each.tokens,
            step_s=each.step_s,
            predicted_s=each.step_s,
        )
        for each in settings
    ]
    assert all(choice.share == 1 and choice.runs for choice in choices(right))


def setting(
    name: str, *, step_s: float, slower: float = 1.0, tight: bool = False
) -> PublishedSetting:
    """Return a setting that is predicted to take a second."""
    return PublishedSetting(
        publication="written",
        hardware="h100",
        model="8B",
        gpus=8,
        name=name,
        tokens=1024,
        step_s=step_s,
        predicted_s=1.0,
        slower=slower,
        is_tight=tight,
    )


SLOW = [setting(f"slow {number}", step_s=9.0, slower=9.0) for number in range(LEAST_SETTINGS)]


def test_memory_to_spare_and_what_judged_runs_took_decide_between_equal_predictions() -> None:
    (choice,) = choices(
        [*SLOW, setting("good", step_s=1.1), setting("tight", step_s=3, tight=True)]
    )
    assert choice.chosen.name == "good"
    (choice,) = choices([*SLOW, setting("tight", step_s=3, tight=True)])
    assert choice.chosen.name.startswith("slow")
