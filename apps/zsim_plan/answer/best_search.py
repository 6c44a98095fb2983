"""`zsim.best`: search for the best setting of a model on given GPUs."""

from collections import Counter, deque
from collections.abc import Iterable, Mapping
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field, replace
from itertools import chain
from math import inf
from time import (
    perf_counter,  # noqa: TID251  (how long a search took is reported)
    process_time,
)
from typing import Any, Final, Unpack

from zsim.api.answer import Progress, tell_nobody
from zsim.api.scenario import Changed
from zsim.prediction.error_rule import SURE
from zsim.prediction.memory_margin import TIGHT
from zsim.runtimes.lookup import search_of
from zsim.workers.processes import cores, processes
from zsim_plan.answer.best_question import FABRIC_KEY, BestOptions, Question, question_of
from zsim_plan.answer.best_result import BestResult, LossReason
from zsim_plan.answer.setting_pool import SettingPool
from zsim_plan.answer.setting_trial import SettingOutcome, tried
from zsim_plan.answer.tried_setting import TriedSetting
from zsim_plan.search.plain_settings import plain_settings
from zsim_plan.search.search import Search, Trial

OPERATIONS: Final = 3_000_000
"""Default limit of a search, in operations."""

STOP_S: Final = 1800.0
"""Limit of processor time in seconds, at which a search stops unfinished."""

LEAST_OPERATIONS: Final = 4_000
"""Minimum number of operations counted per setting: reading its scenario is as much work."""

OFFLOADS_LEFT_OUT: Final = "states or checkpoints off the GPU, and other settings fit without"

AHEAD: Final = 8
"""Number of settings in flight: chosen before the result of the first of them is used.

It does not depend on the number of workers, of which at most this many are busy.
"""


def best(
    model: str,
    gpus: str,
    changes: Changed = None,
    *,
    operations: int = OPERATIONS,
    workers: int | None = None,
    stop_s: float = STOP_S,
    progress: Progress | None = None,
    **options: Unpack[BestOptions],
) -> BestResult:
    """Search for the best setting of a model on GPUs.

    The result depends only on the question and `operations`: it is the same on every machine, and
    with any number of workers.

    Args:
        model: name of a published model, or path of a Hugging Face `config.json`.
        gpus: number and name of the GPU or the node: `128xh100`, `dgx2`.
        changes: values by key of a scenario, as in `load`; the search keeps these values fixed.
        operations: limit of the operations of all schedules; no setting is simulated beyond it.
        workers: number of processes; default all cores.
        stop_s: limit of processor time in seconds, at which the search stops unfinished.
        progress: callback that receives the work done and the total work.
        options: other options, see `BestOptions`.

    Raises:
        MistakeError: an argument is unknown, is missing, or contradicts another.
        TypeError: an option is unknown.
    """
    for name in options.keys() - BestOptions.__annotations__.keys():
        instead = "; a search is limited by operations" if name == "search_s" else ""
        raise TypeError(f"best() got an unexpected keyword argument {name!r}{instead}")
    question = question_of(model, gpus, changes, **options)
    return best_of(
        question, operations=operations, workers=workers, stop_s=stop_s, progress=progress
    )


def best_of(
    question: Question,
    *,
    operations: int = OPERATIONS,
    workers: int | None = None,
    stop_s: float = STOP_S,
    progress: Progress | None = None,
) -> BestResult:
    """Search for the best setting of `question`; the other arguments are those of `best`."""
    begun = perf_counter()
    hunt = _hunt_of(question, operations, stop_s, progress or tell_nobody)
    at_once = min(cores() if workers is None else workers, AHEAD)
    with processes(at_once) as executor:
        hunt.go(executor)
    hunt.settle_gap()
    return replace(_result(hunt), wall_time_s=perf_counter() - begun)


@dataclass(slots=True, kw_only=True)
class _Hunt:
    """A running search and its results so far.

    Attributes:
        most_operations: limit of operations; no setting is simulated beyond it.
        stop_s: limit of processor time of the simulations in seconds.
        operations: operations of the settings simulated so far.
        seconds: processor time of these simulations.
        is_stopped: True if the search reached `stop_s`.
    """

    question: Question
    pool: SettingPool
    search: Search
    plain: frozenset[int]
    most_operations: int
    stop_s: float
    progress: Progress
    tried: list[TriedSetting] = field(default_factory=list[TriedSetting])
    operations: int = 0
    seconds: float = 0.0
    is_stopped: bool = False

    def go(self, executor: Executor) -> None:
        """Simulate settings until none can win or the operations are used up.

        Results are processed in the order in which settings were chosen, so that the choice of
        settings does not depend on which simulation finishes first.
        """
        flying: deque[tuple[tuple[int, int], Future[tuple[SettingOutcome, float]]]] = deque()
        while True:
            while len(flying) < AHEAD and not self._is_over():
                pick = self.search.next()
                if pick is None and not flying:
                    pick = self._next_of_others()
                if pick is None:
                    break
                none_fits = self.search.best == inf
                tables = self.pool.tables(*pick)
                flying.append((pick, executor.submit(_timed, tables, times_tight=none_fits)))
            if not flying:
                return
            chosen, future = flying.popleft()
            self._take(chosen, *future.result())
            done = min(self.operations, self.most_operations)
            self.progress(done, self.most_operations)

    def _is_over(self) -> bool:
        """Return True if no more settings may be simulated."""
        if self.operations >= self.most_operations:
            return True
        self.is_stopped = self.seconds >= self.stop_s
        return self.is_stopped

    def _next_of_others(self) -> tuple[int, int] | None:
        """Return the setting to try next when no branch is left that can win; None if none is.

        If nothing fits so far, add the settings with offload. Else compute tighter lower bounds
        of groups that lost by little: their knobs may win.
        """
        if self.search.best == inf and self.pool.held_back:
            known = len(self.pool.groups)
            self.pool.release()
            self.search.add(self.pool.branches(known))
            return self.search.next()
        for place in self.search.near():
            self._lower(place)
        return self.search.next()

    def _lower(self, place: int) -> bool:
        """Lower the bound of a group to that of all its knobs; return False if already lowered."""
        bound, group = self.pool.lowered(place), self.pool.groups[place]
        if bound is None:
            return False
        value = self.question.value(bound.step_time_s * bound.slower, group.fleet.gpus)
        self.search.lower_bound(place, value)
        return True

    def settle_gap(self) -> None:
        """Lower the bound of the group that determines the gap, until the gap stays the same."""
        while (place := self.search.lowest()) is not None and self._lower(place):
            pass

    def _take(self, pick: tuple[int, int], outcome: SettingOutcome, seconds: float) -> None:
        self.operations += max(outcome.operations, LEAST_OPERATIONS)
        self.seconds += seconds
        group, number = self.pool.groups[pick[0]], pick[1]
        gpus = group.fleet.gpus
        value = None
        if outcome.fits and outcome.step_time_s:
            value = self.question.value(outcome.step_time_s * outcome.slower, gpus)
        is_late = self.question.is_late(outcome.step_time_s, gpus)
        share = outcome.memory_bytes / outcome.usable_bytes if outcome.usable_bytes else 1.0
        trial = Trial(
            value=value,
            is_answer=value is not None and outcome.fits and not is_late,
            memory_bytes=outcome.memory_bytes,
            memory_share=share,
            is_unsure=outcome.fits and not outcome.is_sure,
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
                is_plain=number == 0 and pick[0] in self.plain,
            )
        )

    def losses(self) -> tuple[LossReason, ...]:
        """Return the reasons why settings lost, with the number of settings for each."""
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
        simulated = Counter(filter(None, map(self._loss, self.tried)))
        found += [LossReason("simulated", why, count) for why, count in _alike(simulated)]
        left = search.open_settings()
        if held_back := sum(len(group.knobs) for group in self.pool.held_back):
            if search.best < inf:
                found.append(LossReason("left out", OFFLOADS_LEFT_OUT, held_back))
            else:
                left += held_back
        if left:
            found.append(LossReason("not reached", "the search ended before", left))
        return tuple(found)

    def _loss(self, each: TriedSetting) -> str:
        """Return why a simulated setting lost; empty if it is the best."""
        best = min(self.tried, key=lambda one: one.order)
        if each.outcome.refusal:
            return each.outcome.refusal
        if not each.outcome.fits:
            return "out of memory in the simulation"
        if each.is_late:
            return "takes longer than --within"
        if each.value == best.value:
            return ""
        if each.outcome.is_tight:
            return f"takes more than {TIGHT:.0%} of the memory, which may not do"
        if best.outcome.is_sure and not each.outcome.is_sure:
            return f"fits with a probability below {SURE:.0%}"
        if each.outcome.slower >= MUCH:
            return "published runs of its kind took much longer than predicted"
        return f"not the least {MEASURE[self.question.objective]}"


MUCH: Final = 1.5
"""Minimum ratio of published to predicted times at which published runs count as much slower."""

MEASURE: Final = {"time": "step time", "cost": "cost", "energy": "energy", "gpus": "GPUs"}


def _alike(reasons: Mapping[str, int]) -> Iterable[tuple[str, int]]:
    """Merge reasons that differ only in numbers; return them with counts, the most common first."""
    words: dict[str, str] = {}
    counts: Counter[str] = Counter()
    for why, count in reasons.items():
        key = "".join("#" if letter.isdigit() else letter for letter in why.replace(",", ""))
        key = "#".join(part for part in key.split("#") if part)
        words.setdefault(key, why)
        counts[key] += count
    return [(words[key], count) for key, count in counts.most_common()]


def _timed(tables: Mapping[str, Any], *, times_tight: bool) -> tuple[SettingOutcome, float]:
    """Return the result of simulating a setting, and its processor time in seconds."""
    begun = process_time()
    outcome = tried(tables, times_tight=times_tight)
    return outcome, process_time() - begun


def _hunt_of(question: Question, most_operations: int, stop_s: float, progress: Progress) -> _Hunt:
    """Return a search in which no setting has been simulated yet."""
    pool = SettingPool(question)
    always, *others = plain_settings(pool.groups)
    search = Search(
        pool.branches(),
        question.fleet.cluster.gpu.usable_bytes(1),
        always=always,
        first=[*chain(*others)],
        holds_back=bool(pool.held_back),
    )
    first = {place for place in always if search_of(pool.groups[place].runtime).comes_first}
    return _Hunt(
        question=question,
        pool=pool,
        search=search,
        plain=frozenset(first),
        most_operations=most_operations,
        stop_s=stop_s,
        progress=progress,
    )


def _result(hunt: _Hunt) -> BestResult:
    question, pool = hunt.question, hunt.pool
    ranked = sorted(hunt.tried, key=lambda each: each.order)
    return BestResult(
        title=str(question.tables["title"]),
        objective=question.objective,
        settings=pool.settings,
        tried=tuple(ranked),
        losses=hunt.losses(),
        gap=hunt.search.gap,
        open_settings=hunt.search.open_settings(),
        left_out=sum(len(group.knobs) for group in pool.held_back),
        operations=hunt.operations,
        is_stopped=hunt.is_stopped,
        tables=question.tables,
        sequences=question.sequences,
        sequence_length=question.sequence_length,
        gpu=question.fleet.cluster.gpu.name,
        gpus_per_node=question.fleet.cluster.gpus_per_node,
        tokens=question.tokens,
        price=question.price,
        power_w=question.power_w,
        bounded_s=min((bound.step_time_s for bound in pool.bounds), default=0.0),
        by_fabric=_by_fabric(question, ranked[0].changes) if ranked else {},
        goodput_of=question.goodput,
    )


def _by_fabric(question: Question, changes: Mapping[str, object]) -> dict[str, float]:
    """Return the step time of the best setting on each candidate fabric, if it fits there."""
    if FABRIC_KEY not in changes:
        return {}
    outcomes = {
        name: tried(question.scenario({**changes, FABRIC_KEY: name})) for name in question.fabrics
    }
    return {name: each.step_time_s for name, each in outcomes.items() if each.fits}
