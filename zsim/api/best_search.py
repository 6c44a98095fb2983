"""`zsim.best`: the best setting for a model on GPUs that somebody has, and what it costs."""

from collections import Counter
from collections.abc import Iterable, Mapping
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf
from time import perf_counter  # noqa: TID251  (a search ends after the seconds that it is given)
from typing import Any, Final, Unpack

from zsim.api.answer import Progress, tell_nobody
from zsim.api.best_question import FABRIC_KEY, BestOptions, Question, question_of
from zsim.api.best_result import BestResult, LossReason
from zsim.api.scenario import Changed
from zsim.api.setting_bound import SettingBound
from zsim.api.setting_trial import Bounder, SettingOutcome, tried
from zsim.api.tried_setting import TriedSetting
from zsim.calibration.setting_choice import TIGHT
from zsim.planner.pipeline_orders import MEGATRON_CHUNK
from zsim.planner.search import Search, SettingBranch, Trial
from zsim.planner.space import RefusedSettings, SettingGroup
from zsim.workers.crew import cores, processes

SEARCH_S: Final = 40.0
"""Seconds of a search where nobody says how many."""


def best(
    model: str,
    gpus: str,
    changes: Changed = None,
    *,
    search_s: float = SEARCH_S,
    workers: int | None = None,
    progress: Progress | None = None,
    **options: Unpack[BestOptions],
) -> BestResult:
    """Search the best setting for a model on GPUs.

    Args:
        model: name of a published model, or the `config.json` of one on Hugging Face.
        gpus: so many of a GPU, or of a node: `128xh100`, `dgx2`.
        changes: values by key of a scenario, as `load` takes them; what they say is not sought.
        search_s: seconds after which nothing more is begun.
        workers: processes; all cores where nobody says.
        progress: told how much of the search is done, and of how much.
        options: what else may be said, as in `BestOptions`.

    Raises:
        MistakeError: it cannot be asked so.
    """
    question = question_of(model, gpus, changes, **options)
    return best_of(question, search_s=search_s, workers=workers, progress=progress)


def best_of(
    question: Question,
    *,
    search_s: float = SEARCH_S,
    workers: int | None = None,
    progress: Progress | None = None,
) -> BestResult:
    """Search the best setting for what is asked; what is not said is as in `best`."""
    begun = perf_counter()
    pool = _bounded(question)
    found = _searched(
        question,
        pool,
        search_s=search_s,
        workers=cores() if workers is None else workers,
        progress=progress or tell_nobody,
    )
    return replace(found, wall_time_s=perf_counter() - begun)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pool:
    """Groups of settings with their bounds, and those that cannot be.

    Bounds are of the defaults of a group until `lowered` has looked at its knobs.
    """

    bounder: Bounder
    groups: list[SettingGroup]
    bounds: list[SettingBound]
    refused: Counter[str]
    settings: int
    _lowered: set[int] = field(default_factory=set[int])

    def lowered(self, question: Question, place: int) -> SettingBound | None:
        """Return the bound of all settings of a group; None if it was asked before."""
        if place in self._lowered:
            return None
        self._lowered.add(place)
        group, default = self.groups[place], self.bounds[place]
        return self.bounder.least_of_all(default, group, partial(_scenario, question, group))


def _bounded(question: Question) -> _Pool:
    """Bound every group; what cannot be is told apart."""
    bounder = Bounder()
    groups: list[SettingGroup] = []
    bounds: list[SettingBound] = []
    refused: Counter[str] = Counter()
    settings = 0
    full: dict[object, SettingBound] = {}
    for each in question.space().groups():
        if isinstance(each, RefusedSettings):
            refused[each.why] += each.count
            settings += each.count
            continue
        settings += len(each.knobs)
        smaller = full.get(_without_batch(each)) or full.get(_without_batch(each, chunks=False))
        bound = smaller or bounder.bound_of_defaults(each, partial(_scenario, question, each))
        if bound.is_full:  # the bound on memory grows with the micro-batch, and with chunks
            full[_without_batch(each)] = bound
        if not bound.why_not and question.is_late(bound.kernels_s):
            bound = SettingBound(why_not="takes longer than --within even by its bound")
        if bound.why_not:
            refused[bound.why_not] += len(each.knobs)
        else:
            groups.append(each)
            bounds.append(bound)
    return _Pool(bounder=bounder, groups=groups, bounds=bounds, refused=refused, settings=settings)


def _scenario(question: Question, group: SettingGroup, number: int) -> dict[str, Any]:
    """Return the tables of a setting of a group."""
    return question.scenario(group.setting(number))


def _without_batch(group: SettingGroup, *, chunks: bool = True) -> object:
    """Return what groups have in common that differ in their micro-batch alone.

    Without `chunks` those of Megatron-LM may differ, too.
    """
    return group.fleet.gpus, tuple(
        (key, value)
        for key, value in group.changes.items()
        if not key.startswith("train.") and (chunks or key != MEGATRON_CHUNK)
    )


@dataclass(slots=True, kw_only=True)
class _Hunt:
    """A search that goes on: what was tried so far."""

    question: Question
    pool: _Pool
    search: Search
    progress: Progress
    tried: list[TriedSetting] = field(default_factory=list[TriedSetting])

    def go(self, executor: Executor, at_once: int, search_s: float) -> None:
        """Try settings, so many at once, until none can win or the time is over."""
        begun = perf_counter()
        until_s = begun + search_s
        flying: dict[Future[SettingOutcome], tuple[int, int]] = {}
        while True:
            while len(flying) < at_once and perf_counter() < until_s:
                pick = self.search.next()
                if pick is None and not flying:
                    pick = self._next_of_lowered(until_s)
                if pick is None:
                    break
                tables = _scenario(self.question, self.pool.groups[pick[0]], pick[1])
                none_fits = self.search.best == inf
                flying[executor.submit(tried, tables, times_tight=none_fits)] = pick
            if not flying:
                return
            for future in wait(flying, return_when=FIRST_COMPLETED).done:
                self._take(flying.pop(future), future.result())
            self.progress(min(perf_counter() - begun, search_s), search_s)

    def _next_of_lowered(self, until_s: float) -> tuple[int, int] | None:
        """Return what to try next where knobs lower the bounds of groups that lost by little."""
        for place in self.search.near():
            if perf_counter() >= until_s:
                return None
            self._lower(place)
        return self.search.next()

    def _lower(self, place: int) -> bool:
        """Tell the search the bound of all settings of a group, unless it was told before."""
        bound, group = self.pool.lowered(self.question, place), self.pool.groups[place]
        if bound is None:
            return False
        value = self.question.value(bound.step_time_s * bound.slower, group.fleet.gpus)
        self.search.lower_bound(place, value)
        return True

    def settle_gap(self) -> None:
        """Look at the knobs of the group whose bound the gap is from, until it stays."""
        while (place := self.search.lowest()) is not None and self._lower(place):
            pass

    def _take(self, pick: tuple[int, int], outcome: SettingOutcome) -> None:
        group, number = self.pool.groups[pick[0]], pick[1]
        gpus = group.fleet.gpus
        value = None
        if outcome.fits and outcome.step_time_s:
            value = self.question.value(outcome.step_time_s * outcome.slower, gpus)
        is_late = self.question.is_late(outcome.step_time_s)
        share = outcome.memory_bytes / outcome.usable_bytes if outcome.usable_bytes else 1.0
        trial = Trial(
            value=value,
            is_answer=value is not None and outcome.fits and not is_late,
            memory_bytes=outcome.memory_bytes,
            memory_share=share,
            is_tight=outcome.is_tight,
            keeps_too_much=outcome.keeps_too_much,
            keeps_nearly_all=outcome.keeps_nearly_all,
        )
        self.search.tell(*pick, trial)
        self.tried.append(
            TriedSetting(
                group=pick[0],
                changes=group.setting(number),
                gpus=gpus,
                outcome=outcome,
                value=value,
                is_late=is_late,
            )
        )

    def losses(self) -> tuple[LossReason, ...]:
        """Return why settings lost, and how many to each reason."""
        found = [LossReason("cannot be", why, count) for why, count in _alike(self.pool.refused)]
        search = self.search
        out = [place for place in range(len(self.pool.groups)) if search.is_bounded_out(place)]
        left = sum(
            len(self.pool.groups[place].knobs) - search.tried(place) - search.passed_over(place)
            for place in out
        )
        if left:
            found.append(
                LossReason("cannot win", "their lower bound is no better than the best", left)
            )
        over = sum(map(search.passed_over, range(len(self.pool.groups))))
        if over:
            why = "their knobs add to the memory of a setting that fills it"
            found.append(LossReason("cannot fit", why, over))
        simulated: Counter[str] = Counter()
        for each in self.tried:
            if each.outcome.refusal:
                simulated[each.outcome.refusal] += 1
            elif not each.outcome.fits:
                simulated["out of memory in the simulation"] += 1
            elif each.is_late:
                simulated["takes longer than --within"] += 1
            elif each.outcome.is_tight and search.best < inf:
                simulated[f"takes more than {TIGHT:.0%} of the memory, which may not do"] += 1
            elif each.outcome.slower >= MUCH and each.value != search.best:
                simulated["judged runs like it took much longer than predicted"] += 1
            elif each.value is not None and each.value > search.best:
                simulated[f"not the least {MEASURE[self.question.objective]}"] += 1
        found += [LossReason("simulated", why, count) for why, count in _alike(simulated)]
        if left := search.open_settings():
            found.append(LossReason("not reached", "the time for the search was over", left))
        return tuple(found)


MUCH: Final = 1.5
"""Judged runs that took so many times as long as predicted are said to have taken much longer."""

MEASURE: Final = {"time": "step time", "cost": "cost", "energy": "energy", "gpus": "GPUs"}


def _alike(reasons: Mapping[str, int]) -> Iterable[tuple[str, int]]:
    """Return reasons that differ in numbers alone as one, the commonest first."""
    words: dict[str, str] = {}
    counts: Counter[str] = Counter()
    for why, count in reasons.items():
        key = "".join("#" if letter.isdigit() else letter for letter in why.replace(",", ""))
        key = "#".join(part for part in key.split("#") if part)
        words.setdefault(key, why)
        counts[key] += count
    return [(words[key], count) for key, count in counts.most_common()]


def _searched(
    question: Question, pool: _Pool, *, search_s: float, workers: int, progress: Progress
) -> BestResult:
    branches = [
        SettingBranch(
            bound=question.value(bound.step_time_s * bound.slower, group.fleet.gpus),
            floor=question.value(bound.kernels_s * bound.slower, group.fleet.gpus),
            memory_bytes=bound.memory_bytes,
            settings=len(group.knobs),
            family=f"{group.family} {group.fleet.gpus} {dict(group.fleet.changes)}",
            likely=group.likely,
            is_judged=bound.is_judged,
            larger=group.larger,
        )
        for group, bound in zip(pool.groups, pool.bounds, strict=True)
    ]
    search = Search(branches, question.fleet.cluster.gpu.usable_bytes(1))
    hunt = _Hunt(question=question, pool=pool, search=search, progress=progress)
    with processes(workers) as executor:
        hunt.go(executor, workers, search_s)
    hunt.settle_gap()
    ranked = sorted(hunt.tried, key=lambda each: each.order)
    return BestResult(
        title=str(question.tables["title"]),
        objective=question.objective,
        settings=pool.settings,
        tried=tuple(ranked),
        losses=hunt.losses(),
        gap=hunt.search.gap,
        open_settings=hunt.search.open_settings(),
        tables=question.tables,
        sequences=question.sequences,
        sequence_length=question.sequence_length,
        gpu=question.fleet.cluster.gpu.name,
        tokens=question.tokens,
        price=question.price,
        bounded_s=min((bound.step_time_s for bound in pool.bounds), default=0.0),
        by_fabric=_by_fabric(question, ranked[0].changes) if ranked else {},
    )


def _by_fabric(question: Question, changes: Mapping[str, object]) -> dict[str, float]:
    """Return the step time of the best setting over each fabric that was asked for."""
    if FABRIC_KEY not in changes:
        return {}
    outcomes = {
        name: tried(question.scenario({**changes, FABRIC_KEY: name})) for name in question.fabrics
    }
    return {name: each.step_time_s for name, each in outcomes.items() if each.fits}
