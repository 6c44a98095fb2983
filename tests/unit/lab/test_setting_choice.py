"""Choices among published settings: what is ranked first, beside what was fastest."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, composite

from zsim_lab.verdict.setting_choice import (
    LEAST_SETTINGS,
    NEAR,
    PublishedSetting,
    choices,
    ordered_pairs,
)

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
    ordered, pairs = ordered_pairs(right)
    assert ordered == pairs
    wrong = [
        replace(each, predicted_s=each.tokens**2 / each.step_s)
        for each in right
        if each.step_s is not None
    ]
    assert ordered_pairs(wrong) == (0, pairs)


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


def test_a_planner_does_not_choose_the_vocabulary_or_the_sequence_length() -> None:
    long = [setting(f"long {number}", step_s=2.0) for number in range(LEAST_SETTINGS)]
    long = [replace(each, sequence_length=8192, vocab_size=50_257) for each in long]
    short = [replace(each, sequence_length=512, step_s=1.0, predicted_s=9.0) for each in long]
    assert [choice.share for choice in choices([*long, *short])] == [1, 1]
    large = [replace(each, vocab_size=256_000, step_s=1.0, predicted_s=9.0) for each in long]
    assert [choice.share for choice in choices([*long, *large])] == [1, 1]


def test_a_vocabulary_that_is_padded_for_tensor_ranks_is_the_same() -> None:
    padded = [
        replace(setting(str(size), step_s=1.0), vocab_size=size)
        for size in (50_257, 50_688, 51_200)
    ]
    assert len({each.group for each in padded}) == 1


def test_pairs_count_if_their_rates_differ_by_more_than_a_tenth() -> None:
    fast, same, slow = (setting(f"{time}", step_s=time) for time in (1.0, 1.05, 2.0))
    right = replace(slow, predicted_s=1.5)
    assert ordered_pairs([fast, same, right]) == (2, 2)
    assert ordered_pairs([fast, same, replace(slow, predicted_s=0.5)]) == (0, 2)
    assert ordered_pairs([fast, replace(right, gpus=16)]) == (0, 0)
