"""Search for the published settings that zsim ranks first, without predicting every setting."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field, replace
from math import inf

from zsim.api.answer import Progress
from zsim.api.forecast import collect_garbage, first_that_fits
from zsim.api.run_forecast import Quantity, RunForecast
from zsim.prediction.closest_runs import slower
from zsim.prediction.evidence import judged_runs
from zsim.prediction.memory_margin import is_tight
from zsim.prediction.run_features import RunFeatures
from zsim.workers.processes import cores, processes
from zsim_lab.answer.judged_figures import scenario_features
from zsim_lab.rows.published import Published
from zsim_lab.verdict.judged_rows import sweep_of
from zsim_lab.verdict.setting_choice import PublishedSetting, choices
from zsim_plan.answer.setting_trial import Bounder

Rank = tuple[bool, float]

NOTHING: Rank = (False, 0.0)
"""Rank of a setting that is predicted not to fit."""

Row = tuple[Published, PublishedSetting]
"""A published run, and its setting without a prediction."""


@dataclass(slots=True)
class _GroupSearch:
    """The search in one group; `highest` has an upper bound of the rank of each row.

    Two settings are sought: the one ranked first among those with a measured step, and among all.
    """

    rows: Sequence[Row]
    highest: Sequence[Rank]
    left: list[int] = field(init=False)
    found: list[PublishedSetting] = field(init=False)

    def __post_init__(self) -> None:
        self.found = [setting for _, setting in self.rows]
        can_be = [place for place, rank in enumerate(self.highest) if rank > NOTHING]
        self.left = sorted(can_be, key=lambda place: self.highest[place])

    @property
    def open_rows(self) -> int:
        """Rows without a prediction that may still be ranked first."""
        return sum(map(self._may_be_first, self.left))

    def next(self) -> int | None:
        """Return the row with the highest bound to predict next; None if none may be first."""
        for place in reversed(self.left):
            if self._may_be_first(place):
                return place
        return None

    def missed_best(self) -> int | None:
        """Return the fastest row if it has no prediction and zsim chooses another; else None."""
        (choice,) = choices(self.found) or (None,)
        if choice is None or choice.is_good or choice.best.predicted_s is not None:
            return None
        place = self.found.index(choice.best)
        return place if place in self.left else None

    def _may_be_first(self, place: int) -> bool:
        """Return True if a row may be ranked first, among all rows or among those with a result."""
        highest, has_result = self.highest[place], self.found[place].step_s is not None
        of_all = max((each.rank for each in self.found), default=NOTHING)
        known = (each.rank for each in self.found if each.step_s is not None)
        return highest > of_all or (has_result and highest > max(known, default=NOTHING))


def predicted(rows: Iterable[Row], progress: Progress) -> list[PublishedSetting]:
    """Return settings by group; predict those that may be ranked first in their group.

    `progress` receives the number of rows that need no prediction any more, and of all rows.
    """
    groups: defaultdict[object, list[Row]] = defaultdict(list)
    for row in rows:
        groups[row[1].group].append(row)
    with processes(workers := cores()) as executor:
        bounded = executor.map(highest_ranks, groups.values())
        ranks = list(zip(groups.values(), bounded, strict=True))

        def predict(run: Published, setting: PublishedSetting) -> Future[PublishedSetting]:
            return executor.submit(ranked, run, setting)

        return predict_first(ranks, predict, workers, progress)


def predict_first(
    groups: Sequence[tuple[Sequence[Row], Sequence[Rank]]],
    predict: Callable[[Published, PublishedSetting], Future[PublishedSetting]],
    at_once: int,
    progress: Progress,
) -> list[PublishedSetting]:
    """Return settings by group; predict those that may be ranked first in their group.

    A group is a pair of rows and upper bounds of their ranks; `at_once` predictions run at once.
    """
    searches = [_GroupSearch(rows, highest) for rows, highest in groups]
    found = _Predictions(searches, predict, progress)
    found.until_none(at_once, _GroupSearch.next)
    found.until_none(at_once, _GroupSearch.missed_best)
    return [each for search in searches for each in search.found]


@dataclass(slots=True)
class _Predictions:
    """Predictions of all groups, a few at a time."""

    searches: Sequence[_GroupSearch]
    predict: Callable[[Published, PublishedSetting], Future[PublishedSetting]]
    progress: Progress
    flying: dict[Future[PublishedSetting], tuple[_GroupSearch, int]] = field(
        default_factory=dict[Future[PublishedSetting], tuple[_GroupSearch, int]]
    )

    def until_none(self, at_once: int, pick: Callable[[_GroupSearch], int | None]) -> None:
        """Predict the rows that `pick` chooses in each group, until it returns None for all."""
        waiting = list(self.searches)
        while waiting or self.flying:
            while waiting and len(self.flying) < at_once:
                search = waiting.pop(0)
                if (place := pick(search)) is not None:
                    search.left.remove(place)
                    self.flying[self.predict(*search.rows[place])] = (search, place)
            for future in wait(self.flying, return_when=FIRST_COMPLETED).done:
                search, place = self.flying.pop(future)
                search.found[place] = future.result()
                waiting.append(search)
            rows = sum(len(search.rows) for search in self.searches)
            left = len(self.flying) + sum(each.open_rows for each in self.searches)
            self.progress(rows - left, rows)


def highest_ranks(rows: Sequence[Row]) -> list[Rank]:
    """Return an upper bound of the rank of each row, from lower bounds of its step time."""
    bounder = Bounder()

    def of(run: Published, tokens: int) -> Rank:
        least_s = inf
        for tables in run.alternatives:
            bound = bounder.bound(tables)
            if not bound.why_not:
                least_s = min(least_s, bound.step_time_s * _slower(run, tables))
        return NOTHING if least_s in {0.0, inf} else (True, tokens / least_s)

    return [of(run, setting.tokens) for run, setting in rows]


def ranked(run: Published, setting: PublishedSetting) -> PublishedSetting:
    """Return a setting with its prediction; a failed run has one only if predicted to fit."""
    collect_garbage()
    if run.failed:
        fit = first_that_fits(run.alternatives, None)
        if not isinstance(fit, RunForecast) or not fit.fits:
            return setting
    made = first_that_fits(run.alternatives, Quantity.STEP_TIME)
    if not isinstance(made, RunForecast) or not (made.fits or not run.failed):
        return setting
    return replace(
        setting,
        predicted_s=made.step_time_s,
        is_tight=is_tight(made.needed_bytes, made.usable_bytes),
        slower=_slower(run, run.alternatives[made.alternative]),
    )


def slower_elsewhere(features: RunFeatures, sweep: str) -> float:
    """Return by how much similar runs of other sweeps were slower than predicted, as a factor."""
    return slower(features, [each for each in judged_runs() if each.sweep != sweep])


def _slower(run: Published, tables: Mapping[str, object]) -> float:
    features = scenario_features(tables)
    return slower_elsewhere(features, sweep_of(run)) if isinstance(features, RunFeatures) else 1.0
