"""Branch and bound finds the least value, and says how much better what was not tried may be."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, composite

from zsim_plan.search.front import front
from zsim_plan.search.search import FRONT_STEP, GAP_EVERY, LEAST_MOST, Search, SettingBranch, Trial

Outcomes = list[list[float | None]]
Values = Sequence[Sequence[float | None]]
"""Outcome of each setting of each branch; None if it does not fit."""


@composite
def branches_and_values(draw: DrawFn) -> tuple[list[SettingBranch], Outcomes]:
    branches: list[SettingBranch] = []
    values: list[list[float | None]] = []
    for number in range(draw(st.integers(1, 12))):
        bound = draw(st.floats(1, 100))
        own = draw(st.lists(st.none() | st.floats(1, 3).map(bound.__mul__), min_size=1, max_size=5))
        values.append(own)
        memory = draw(st.integers(1, 100))
        branches.append(
            SettingBranch(
                bound=bound, memory_bytes=memory, settings=len(own), family=str(number % 3)
            )
        )
    return branches, values


def searched(
    branches: list[SettingBranch], values: Values, most: int = 10**6
) -> tuple[Search, list[tuple[int, int]]]:
    search, picks = Search(branches, usable_bytes=100), list[tuple[int, int]]()
    while len(picks) < most and (pick := search.next()) is not None:
        picks.append(pick)
        value = values[pick[0]][pick[1]]
        memory = branches[pick[0]].memory_bytes
        search.record(*pick, Trial(value=value, is_answer=value is not None, memory_bytes=memory))
    return search, picks


@pytest.mark.one_commit_in(6)
@settings(max_examples=50)
@given(branches_and_values())
def test_the_best_value_is_found_within_the_tolerance(
    case: tuple[list[SettingBranch], Outcomes],
) -> None:
    branches, values = case
    search, _ = searched(branches, values)
    known = [value for own in values for value in own if value is not None]
    if known:
        assert search.best <= min(known) / (1 - search.tolerance)
        assert search.open_settings() == 0


@pytest.mark.one_commit_in(6)
@settings(max_examples=50)
@given(branches_and_values())
def test_no_setting_is_tried_twice(
    case: tuple[list[SettingBranch], Outcomes],
) -> None:
    _, picks = searched(*case)
    assert len(set(picks)) == len(picks)


@pytest.mark.one_commit_in(6)
@settings(max_examples=50)
@given(branches_and_values(), st.integers(0, 8))
def test_nothing_that_was_not_tried_is_better_by_more_than_the_gap(
    case: tuple[list[SettingBranch], Outcomes], most: int
) -> None:
    branches, values = case
    search, picks = searched(branches, values, most)
    left = [
        value
        for place, own in enumerate(values)
        for number, value in enumerate(own)
        if value is not None and (place, number) not in picks
    ]
    if left and search.best < float("inf"):
        assert min(left) >= search.best * (1 - search.gap) * (1 - 1e-9)
    if left and search.best == float("inf"):
        assert search.gap == 1.0


def test_a_branch_whose_bound_is_above_the_best_is_never_tried() -> None:
    branches = [
        SettingBranch(bound=10.0, memory_bytes=1, settings=1, family="a"),
        SettingBranch(bound=20.0, memory_bytes=1, settings=3, family="a"),
    ]
    search, picks = searched(branches, [[12.0], [21.0, 22.0, 23.0]])
    assert picks == [(0, 0)]
    assert search.is_bounded_out(1)
    assert search.tried(1) == 0


def test_the_first_setting_of_a_branch_is_awaited_before_the_others() -> None:
    search = Search(
        [SettingBranch(bound=1.0, memory_bytes=1, settings=2, family="a")], usable_bytes=10
    )
    assert search.next() == (0, 0)
    assert search.next() is None
    search.record(0, 0, Trial(value=2.0, is_answer=True, memory_bytes=1))
    assert search.next() == (0, 1)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=12))
def test_a_front_has_what_nothing_else_covers(points: list[tuple[float, float]]) -> None:
    kept = {points[place] for place in front(points)}
    for point in points:
        covered = any(
            other != point and other[0] <= point[0] and other[1] <= point[1] for other in points
        )
        assert (point in kept) is not covered


def test_settings_that_keep_as_much_as_one_that_keeps_too_much_are_passed_over() -> None:
    larger: list[frozenset[int]] = [frozenset({1, 3}), frozenset({3}), frozenset(), frozenset()]
    branch = SettingBranch(bound=1.0, memory_bytes=1, settings=4, family="one", larger=larger)
    search = Search([branch], usable_bytes=1)
    tried: list[int] = []
    while (pick := search.next()) is not None:
        tried.append(pick[1])
        search.record(*pick, Trial(value=None, is_answer=False, keeps_too_much=pick[1] == 0))
    assert tried == [0, 2]
    assert search.passed_over(0) == 2
    assert search.open_settings() == 0


def test_a_setting_that_may_not_fit_is_no_best_to_bound_by() -> None:
    branches = [
        SettingBranch(bound=bound, memory_bytes=1, settings=1, family="one") for bound in (1.0, 2.0)
    ]
    search = Search(branches, usable_bytes=1)
    for value in (1.0, 3.0):
        pick = search.next()
        assert pick is not None
        search.record(*pick, Trial(value=value, is_answer=True, is_unsure=value == 1.0))
    assert search.best == 3.0


def test_settings_that_keep_as_much_as_one_at_the_edge_of_memory_wait_until_another_fits() -> None:
    larger: list[frozenset[int]] = [frozenset({1, 3}), frozenset({3}), frozenset(), frozenset()]
    tight = SettingBranch(bound=1.0, memory_bytes=1, settings=4, family="one", larger=larger)
    other = SettingBranch(bound=1.1, memory_bytes=1, settings=1, family="two")
    search = Search([tight, other], usable_bytes=100)
    at_edge = Trial(
        value=1.0, is_answer=True, is_unsure=True, keeps_nearly_all=True, memory_bytes=99
    )
    search.record(0, 0, at_edge)
    assert search.passed_over(0) == 0
    search.record(1, 0, Trial(value=1.2, is_answer=True, memory_bytes=50, memory_share=0.5))
    assert search.passed_over(0) == 2


@pytest.mark.parametrize("fits", [False, True])
def test_settings_are_tried_that_add_to_one_whose_buffers_of_collectives_fill_the_memory(
    fits: bool,
) -> None:
    branch = SettingBranch(
        bound=1.0, memory_bytes=1, settings=2, family="one", larger=[frozenset({1}), frozenset()]
    )
    other = SettingBranch(bound=1.1, memory_bytes=1, settings=1, family="two")
    search = Search([branch, other], usable_bytes=100)
    search.record(1, 0, Trial(value=1.2, is_answer=True, memory_bytes=50))
    search.record(0, 0, Trial(value=1.0 if fits else None, is_answer=fits, is_unsure=fits))
    assert search.passed_over(0) == 0


def test_plain_settings_are_tried_first_also_where_they_cannot_win() -> None:
    branches = [
        SettingBranch(bound=bound, memory_bytes=1, settings=2, family="one")
        for bound in (1.0, 5.0, 9.0, 9.0)
    ]
    search = Search(branches, usable_bytes=10, always=(1, 2), first=(3, 1))
    assert [search.next(), search.next()] == [(1, 0), (2, 0)]
    for place in (1, 2):
        search.record(place, 0, Trial(value=6.0 + place, is_answer=True, memory_bytes=1))
    assert search.next() == (0, 0)  # 3 cannot win, and 1 was tried


@pytest.mark.one_commit_in(6)
@settings(max_examples=50)
@given(branches_and_values(), st.data())
def test_sharper_bounds_save_trials_and_keep_the_best(
    case: tuple[list[SettingBranch], Outcomes], data: st.DataObject
) -> None:
    branches, values = case
    known = [[each for each in own if each is not None] for own in values]
    sharp = [
        data.draw(st.floats(branch.bound, max(branch.bound, min(own, default=branch.bound))))
        for branch, own in zip(branches, known, strict=True)
    ]
    asked: list[int] = []

    def sharper(place: int) -> float:
        asked.append(place)
        return sharp[place]

    search, picks = Search(branches, usable_bytes=100, sharper=sharper), list[tuple[int, int]]()
    fitting: list[int] = []
    while (pick := search.next()) is not None:
        value = values[pick[0]][pick[1]]
        memory = branches[pick[0]].memory_bytes
        best = search.best
        least = min((branches[place].memory_bytes for place in fitting), default=0)
        picks.append(pick)
        fitting += [pick[0]] if value is not None else []
        search.record(*pick, Trial(value=value, is_answer=value is not None, memory_bytes=memory))
        if memory > FRONT_STEP * least:  # else it may be tried for its memory
            assert best == float("inf") or sharp[pick[0]] < best
    assert len(set(asked)) == len(asked)
    every = [each for own in known for each in own]
    if every:
        assert search.best <= min(every) / (1 - search.tolerance)
        assert search.gap <= search.tolerance


def test_plain_settings_that_cannot_win_are_tried_after_those_that_may() -> None:
    branches = [
        SettingBranch(bound=bound, memory_bytes=1, settings=1, family="one")
        for bound in (1.0, 2.0, 9.0)
    ]
    search = Search(branches[:1], usable_bytes=10, always=(0,))
    assert search.next() == (0, 0)
    search.record(0, 0, Trial(value=4.0, is_answer=True, memory_bytes=1))
    search.extend(branches[1:], later=(2,))
    assert search.next() == (1, 0)
    search.record(1, 0, Trial(value=2.5, is_answer=True, memory_bytes=1))
    assert [search.next(), search.next()] == [(2, 0), None]


@given(st.floats(1.0, 1e6), st.booleans())
def test_of_settings_that_promise_as_much_the_cheapest_to_simulate_is_tried_first(
    cost: float, is_first: bool
) -> None:
    branches = [
        SettingBranch(bound=1.0, memory_bytes=1, settings=1, family="cheap"),
        SettingBranch(bound=1.0, memory_bytes=1, settings=1, family="costly", cost=1.01 * cost),
    ]
    search = Search(branches if is_first else branches[::-1], usable_bytes=10)
    search.record(*(search.next() or (0, 0)), Trial(value=None, is_answer=False))
    assert search.branches[(search.next() or (0, 0))[0]].family == "costly"


@given(st.integers(1, 12), st.integers(0, 12), st.booleans())
def test_plain_settings_that_do_not_fit_alternate_with_the_settings_of_least_memory(
    large: int, place: int, holds_back: bool
) -> None:
    branches = [
        SettingBranch(bound=1.0, memory_bytes=90 + each, settings=1, family="large")
        for each in range(large)
    ]
    place = min(place, large)
    branches.insert(place, SettingBranch(bound=9.0, memory_bytes=50, settings=1, family="small"))
    plain = [each for each in range(len(branches)) if each != place]
    search = Search(branches, usable_bytes=100, first=plain, holds_back=holds_back)
    picks: list[int] = []
    while search.best == float("inf") and (pick := search.next()) is not None:
        picks.append(pick[0])
        value = 9.0 if pick[0] == place else None
        search.record(*pick, Trial(value=value, is_answer=value is not None, memory_bytes=120))
    assert place in picks[:2]


def test_plain_settings_are_still_tried_between_settings_of_least_memory() -> None:
    branches = [
        SettingBranch(bound=1.0, memory_bytes=10 - each, settings=1, family=str(each))
        for each in range(10)
    ]
    search = Search(branches, usable_bytes=100, first=(0, 1, 2, 3), holds_back=True)
    picks: list[int] = []
    while (pick := search.next()) is not None:
        picks.append(pick[0])
        search.record(*pick, Trial(value=None, is_answer=False, memory_bytes=120))
    assert picks == [9, 0, 8, 1, 7, 2, 6, 3, 5, 4]


@given(st.integers(1, 40), st.booleans())
def test_branches_are_held_back_until_the_smallest_of_each_family_did_not_fit(
    count: int, one_fits: bool
) -> None:
    branches = [
        SettingBranch(bound=1.0 + each, memory_bytes=50 - each, settings=2, family=str(each // 2))
        for each in range(count)
    ]
    search = Search(branches, usable_bytes=100, holds_back=True)
    tried: list[int] = []
    while (pick := search.next()) is not None and search.best == float("inf"):
        tried.append(pick[0])
        fits = one_fits and len(tried) == 3
        value = 2.0 if fits else None
        search.record(*pick, Trial(value=value, is_answer=fits, memory_bytes=99))
    families = [branches[place].family for place in tried]
    assert len(families) == len(set(families)) <= LEAST_MOST
    assert all(
        branches[place].memory_bytes
        == min(each.memory_bytes for each in branches if each.family == family)
        for place, family in zip(tried, families, strict=True)
    )
    if search.best < float("inf"):
        return
    assert len(tried) == min(LEAST_MOST, -(-count // 2))
    search.add([SettingBranch(bound=0.5, memory_bytes=1, settings=1, family="offload")])
    picks = {search.next(), search.next()}
    assert (count, 0) in picks
    assert search.open_settings() == 2 * count - len(tried) + 1


@given(branches_and_values(), st.sets(st.integers(0, 11)))
def test_branches_that_cannot_surely_fit_are_left_once_a_setting_surely_fits(
    case: tuple[list[SettingBranch], Outcomes], unsure: set[int]
) -> None:
    branches, values = case
    marked = [replace(each, is_unsure=place in unsure) for place, each in enumerate(branches)]
    search = Search(marked, usable_bytes=100)
    while (pick := search.next()) is not None:
        place, number = pick
        assert search.best == float("inf") or not marked[place].is_unsure
        value, is_unsure = values[place][number], marked[place].is_unsure
        search.record(*pick, Trial(value=value, is_answer=value is not None, is_unsure=is_unsure))
    sure = [
        value
        for own, branch in zip(values, marked, strict=True)
        for value in own
        if value is not None and not branch.is_unsure
    ]
    assert search.best <= min(sure, default=float("inf")) / (1 - search.tolerance)
    assert search.open_settings() == 0
    if sure:
        assert search.gap <= search.tolerance


def test_the_lowest_bound_is_tried_soon_even_if_it_is_expected_not_to_fit() -> None:
    tight = SettingBranch(bound=1.8, memory_bytes=99, settings=1, family="tight")
    others = [
        SettingBranch(bound=2.0, memory_bytes=1, settings=1, family="others") for _ in range(12)
    ]
    search = Search([*others, tight], usable_bytes=100)
    picks: list[int] = []
    while len(picks) < 2 * GAP_EVERY and (pick := search.next()) is not None:
        picks.append(pick[0])
        fits = pick[0] != len(others)
        search.record(
            *pick,
            Trial(value=3.0 if fits else None, is_answer=fits, memory_bytes=1 if fits else 120),
        )
    assert len(others) in picks
    assert search.gap == pytest.approx(1 / 3)
