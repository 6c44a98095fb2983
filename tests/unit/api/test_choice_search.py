"""The search of published settings that are ranked first leaves out only those that cannot be."""

from concurrent.futures import Future
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, composite

from zsim_lab.answer.choice_search import NOTHING, Rank, Row, predict_first
from zsim_lab.rows.published import Published
from zsim_lab.verdict.setting_choice import PublishedSetting, choices

RUN = Published(
    file="drawn",
    line=2,
    hardware="h100",
    model="8B",
    sequence_length=1024,
    scenario={},
    source="nowhere",
)


@composite
def drawn_groups(draw: DrawFn) -> tuple[list[PublishedSetting], list[Rank]]:
    """Draw predicted settings of two models, and ranks that these do not exceed."""
    drawn, highest = list[PublishedSetting](), list[Rank]()
    for number in range(draw(st.integers(10, 30))):
        known = PublishedSetting(
            publication="drawn",
            hardware="h100",
            model=draw(st.sampled_from(("1B", "8B"))),
            gpus=8,
            name=str(number),
            tokens=1024,
            step_s=draw(st.none() | st.integers(1, 9)),
            predicted_s=draw(st.none() | st.integers(1, 9)),
            slower=draw(st.sampled_from((1.0, 3.0))),
            is_tight=draw(st.booleans()),
        )
        drawn.append(known)
        rank = (True, known.rank[1] * draw(st.sampled_from((1.0, 1.5))))
        highest.append(NOTHING if known.predicted_s is None else rank)
    return drawn, highest


@pytest.mark.one_commit_in(6)
@settings(max_examples=50, deadline=None)
@given(drawn_groups(), st.integers(1, 3))
def test_what_is_chosen_is_what_predictions_of_all_rows_choose(
    case: tuple[list[PublishedSetting], list[Rank]], at_once: int
) -> None:
    rows, highest = case
    known = {each.name: each for each in rows}
    blank = [replace(each, predicted_s=None, slower=1.0, is_tight=False) for each in rows]
    groups: dict[object, tuple[list[Row], list[Rank]]] = {}
    for setting, rank in zip(blank, highest, strict=True):
        own, ranks = groups.setdefault(setting.group, ([], []))
        own.append((RUN, setting))
        ranks.append(rank)
    asked: list[str] = []
    told: list[tuple[int, int]] = []

    def predict(run: Published, setting: PublishedSetting) -> Future[PublishedSetting]:
        assert run is RUN
        asked.append(setting.name)
        future: Future[PublishedSetting] = Future()
        future.set_result(known[setting.name])
        return future

    found = predict_first(list(groups.values()), predict, at_once, lambda *each: told.append(each))
    assert len(asked) == len(set(asked))
    assert all(done <= of == len(rows) for done, of in told)
    every = {choice.chosen.group: choice for choice in choices(rows)}
    for choice in choices(found):
        best = every[choice.chosen.group]
        assert choice.chosen.rank == best.chosen.rank
        assert choice.of_all.rank == best.of_all.rank
        assert choice.best.name == best.best.name
        assert choice.is_good or choice.best.predicted_s == best.best.predicted_s
