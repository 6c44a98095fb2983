"""`zsim.best`: search for the best setting of a model on given GPUs."""

from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain
from math import inf
from threading import Lock
from time import (
    perf_counter,  # noqa: TID251  (how long a search took is reported)
    process_time,
)
from typing import Any, Final, TypedDict, Unpack, cast

from zsim.api.answer import Progress, ignore_progress
from zsim.api.scenario import Changed
from zsim.prediction.error_rule import SURE
from zsim.prediction.memory_margin import TIGHT
from zsim.units import format_seconds
from zsim.workers.dask_cluster import dask_cluster
from zsim.workers.processes import cores, processes
from zsim_plan.answer.best_question import FABRIC_KEY, BestOptions, Question, question_of
from zsim_plan.answer.best_result import BestResult, LossReason
from zsim_plan.answer.more_gpus import more_gpus
from zsim_plan.answer.search_text import may_exist
from zsim_plan.answer.setting_bound import LATE
from zsim_plan.answer.setting_pool import SettingPool
from zsim_plan.answer.setting_trial import SettingOutcome, sure_bytes, tried
from zsim_plan.answer.tried_setting import TriedSetting
from zsim_plan.search.plain_settings import plain_settings
from zsim_plan.search.search import Search, Trial

OPERATIONS: Final = 3_000_000
"""Default limit of a search, in operations."""

STOP_S: Final = 1800.0
"""Limit of processor time in seconds, at which a search stops unfinished.

It is a safety stop, and longer for a search of more than the default operations."""

LEAST_OPERATIONS: Final = 4_000
"""Minimum number of operations counted per setting: reading its scenario is as much work."""

OFFLOADS_LEFT_OUT: Final = "states or checkpoints off the GPU, and other settings fit without"

AHEAD: Final = 8
"""Number of settings in flight: chosen before the result of the first of them is used.

It does not depend on the number of workers, of which at most this many are busy.
"""


Note = Callable[[Callable[[], str]], object]
"""Callback that receives a function, which returns the result so far in one line."""

_Flying = tuple[tuple[int, int], "Future[tuple[SettingOutcome, float]]"]
"""The group and number of a setting, and its running simulation."""


class SearchOptions(TypedDict, total=False):
    """Options of a search, in addition to the question; none changes what is found.

    Attributes:
        workers: number of processes; default all cores.
        scheduler: address of a Dask scheduler whose workers simulate: `host:8786`.
        stop_s: limit of processor time in seconds, at which the search stops unfinished; default
            `STOP_S`, and longer for more than the default operations.
        progress: callback that receives the work done and the total work.
        note: callback that receives a function, which returns the result so far as text.
        may_interrupt: return the result so far at Ctrl-C, if there is one.
    """

    workers: int | None
    scheduler: str | None
    stop_s: float | None
    progress: Progress | None
    note: Note | None
    may_interrupt: bool


class AllOptions(BestOptions, SearchOptions, total=False):
    """Options of the question and of the search."""


def best(
    model: str,
    gpus: str,
    changes: Changed = None,
    *,
    operations: int = OPERATIONS,
    **options: Unpack[AllOptions],
) -> BestResult:
    """Search for the best setting of a model on GPUs.

    The result depends only on the question and `operations`: it is the same on every machine, and
    with any number of workers.

    Args:
        model: name of a published model, or path of a Hugging Face `config.json`.
        gpus: number and name of the GPU or the node: `128xh100`, `dgx2`.
        changes: values by key of a scenario, as in `load`; the search keeps these values fixed.
        operations: limit of the operations of all schedules; no setting is simulated beyond it.
        options: other options, see `AllOptions`.

    Raises:
        MistakeError: an argument is unknown, is missing, or contradicts another.
        TypeError: an option is unknown.
    """
    of_search = SearchOptions.__annotations__
    for name in options.keys() - BestOptions.__annotations__.keys() - of_search.keys():
        instead = "; a search is limited by operations" if name == "search_s" else ""
        raise TypeError(f"best() got an unexpected keyword argument {name!r}{instead}")
    asked = {name: value for name, value in options.items() if name not in of_search}
    search = {name: value for name, value in options.items() if name in of_search}
    question = question_of(model, gpus, changes, **cast("BestOptions", asked))
    return best_of(question, operations=operations, **cast("SearchOptions", search))


def best_of(
    question: Question, *, operations: int = OPERATIONS, **options: Unpack[SearchOptions]
) -> BestResult:
    """Search for the best setting of `question`; the other arguments are those of `best`."""
    begun = perf_counter()
    hunt = _new_search(question, operations, options)
    workers = options.get("workers")
    at_once = min(cores() if workers is None else workers, AHEAD)
    try:
        with _executor(at_once, options.get("scheduler")) as executor:
            hunt.go(executor)
        hunt.settle_gap()
    except KeyboardInterrupt:
        if not (options.get("may_interrupt") and hunt.tried):
            raise
        hunt.interrupt()
    return replace(_result(hunt), wall_time_s=perf_counter() - begun)


@dataclass(slots=True, kw_only=True)
class _SearchRun:
    """A running search and its results so far.

    Attributes:
        most_operations: limit of operations; no setting is simulated beyond it.
        stop_s: limit of processor time of the simulations in seconds.
        operations: operations of the settings simulated so far.
        of_families: operations of the last setting that was simulated, by its family.
        seconds: processor time of these simulations.
        note: callback for the result so far.
        is_stopped: True if the search reached `stop_s`.
        is_interrupted: True if the user ended the search.
    """

    question: Question
    pool: SettingPool
    search: Search
    most_operations: int
    stop_s: float
    progress: Progress
    note: Note
    plain: set[int] = field(default_factory=set[int])
    tried: list[TriedSetting] = field(default_factory=list[TriedSetting])
    operations: int = 0
    of_families: dict[str, int] = field(default_factory=dict[str, int])
    seconds: float = 0.0
    is_stopped: bool = False
    is_interrupted: bool = False

    def go(self, executor: Executor) -> None:
        """Simulate settings until none can win or the operations are used up.

        Results are processed in the order in which settings were chosen, so that the choice of
        settings does not depend on which simulation finishes first.
        """
        self.search.sharper = self._sharper
        self._begin(executor)
        flying: deque[_Flying] = deque()
        while True:
            while len(flying) < AHEAD and not self._is_over(each for each, _ in flying):
                pick = self.search.next()
                if pick is None and not flying:
                    pick = self._next_of_others(executor)
                if pick is None:
                    break
                if (full := self.pool.full(*pick)) is not None:
                    self._take(pick, full, 0.0)
                    continue
                flying.append(self._submitted(executor, pick))
            if not flying:
                return
            self._take_first(flying)

    def _begin(self, executor: Executor) -> None:
        """Simulate plain settings while the bounds of the others are computed.

        All their results are used before any other setting is chosen. For the fewest GPUs, settings
        of few GPUs are bounded first, and no others while one of them may win.
        """
        if self.question.objective == "gpus":
            self.pool.bound_more_gpus(executor)
            plain = plain_settings(self.pool.groups)
            self.plain |= {*plain[0]}
            self._extend(first=[*chain(*plain)])
            return
        flying = self._fly_plain(executor)
        while flying and self.search.best == inf:
            self._take_first(flying)
        self.pool.sure_only = self.search.best < inf
        for _ in self.pool.bound_others(executor):
            self._take_ended(flying)
        always, *others = plain_settings(self.pool.groups)
        first = chain(*others) if self.plain else chain(always, *others)
        self._extend(first=[*first])
        while flying:
            self._take_first(flying)

    def _fly_plain(self, executor: Executor) -> deque[_Flying]:
        """Start to simulate plain settings, and return the running simulations.

        After the first has ended, plain settings that cannot win are put off.
        """
        flying: deque[_Flying] = deque()
        places = self.pool.plain()
        if (first := next(places, None)) is None:
            return flying
        self._fly(executor, flying, first)
        others = [*places]  # bounded meanwhile
        self._take_first(flying)
        self._extend()
        for place in others:
            if self.search.is_bounded_out(place):
                self.plain.add(place)
                self._extend(later=[place])
            else:
                self._fly(executor, flying, place)
        return flying

    def _fly(self, executor: Executor, flying: deque[_Flying], place: int) -> None:
        """Start to simulate the plain setting of a group."""
        self._extend(always=[place])
        pick = self.search.next()
        assert pick is not None
        self.plain.add(place)
        flying.append(self._submitted(executor, pick))

    def _extend(
        self,
        *,
        always: Sequence[int] = (),
        first: Sequence[int] = (),
        later: Sequence[int] = (),
    ) -> None:
        """Add the groups that got bounds to the search, and those to try next."""
        known = len(self.search.branches)
        self.search.extend(self.pool.branches(known), always=always, first=first, later=later)

    def interrupt(self) -> None:
        """End the search with the results so far."""
        self.is_interrupted = True
        self._extend()

    def _submitted(self, executor: Executor, pick: tuple[int, int]) -> _Flying:
        tables, none_fits = self.pool.tables(*pick), self.search.best == inf
        is_row = pick[0] in self.plain or bool(self.pool.unbounded)
        return pick, executor.submit(_timed, tables, times_unsure=none_fits or is_row)

    def _take_ended(self, flying: deque[_Flying]) -> None:
        """Use the results of simulations that have ended, in the order of their choice."""
        while flying and flying[0][1].done():
            self._take_first(flying)

    def _take_first(self, flying: deque[_Flying]) -> None:
        """Wait for the simulation that was chosen first, and use its result."""
        chosen, future = flying.popleft()
        self._take(chosen, *future.result())
        self.search.sharpen_lowest()
        self.progress(min(self.operations, self.most_operations), self.most_operations)
        self.note(self.text)

    def text(self) -> str:
        """Return the result so far in one line."""
        simulated = f"{len(self.tried):,} of {self.pool.settings:,} settings simulated"
        best = min(self.tried, key=lambda each: each.order, default=None)
        if best is None or not best.is_answer:
            return f"{simulated}, none fits so far"
        seconds = format_seconds(best.outcome.step_time_s)
        found = f"{simulated}, best so far {seconds} a step: {best.description()}"
        if self.pool.unbounded or self.search.best == inf:
            return found
        return f"{found}; {may_exist(self.question.objective, self.search.gap)}"

    def _is_over(self, running: Iterable[tuple[int, int]]) -> bool:
        """Return True if no setting other than those `running` may be simulated."""
        expected = sum(map(self._expected_operations, running))
        if self.operations + expected >= self.most_operations:
            return True
        self.is_stopped = self.seconds >= self.stop_s
        return self.is_stopped

    def _expected_operations(self, pick: tuple[int, int]) -> int:
        """Return the operations of the last setting of the same family, else the most of any."""
        most = max(self.of_families.values(), default=LEAST_OPERATIONS)
        return self.of_families.get(self.search.branches[pick[0]].family, most)

    def _next_of_others(self, executor: Executor) -> tuple[int, int] | None:
        """Return the setting to try next when no branch is left that can win; None if none is.

        If nothing fits so far, add settings of more GPUs if there are any, then the settings
        with offload. Else compute tighter lower bounds of groups that lost by little: their knobs
        may win.
        """
        if self.search.best == inf and self.pool.bound_more_gpus(executor):
            self.search.seek_least_again()
            self._extend()
            return self.search.next()
        if self.search.best == inf and self.pool.held_back:
            known = len(self.pool.groups)
            self.pool.release(executor)
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
        if self.search.best < inf and self.question.objective == "gpus":
            self.pool.leave_more_gpus()
            self._extend()
        self.search.sharpen_lowest()
        while (place := self.search.lowest()) is not None and self._lower(place):
            self.search.sharpen_lowest()

    def _sharper(self, place: int) -> float:
        """Return a tighter bound of a group, as a value."""
        bound, group = self.pool.sharpened(place), self.pool.groups[place]
        return self.question.value(bound.step_time_s * bound.slower, group.fleet.gpus)

    def _take(self, pick: tuple[int, int], outcome: SettingOutcome, seconds: float) -> None:
        operations = max(outcome.operations, LEAST_OPERATIONS)
        self.operations += operations
        self.of_families[self.search.branches[pick[0]].family] = operations
        self.seconds += seconds
        group, number = self.pool.groups[pick[0]], pick[1]
        gpus = group.fleet.gpus
        value = None
        if outcome.fits and outcome.step_time_s:
            value = self.question.value(outcome.step_time_s * outcome.slower, gpus)
        is_late = self.question.is_late(outcome.step_time_s, gpus)
        usable = sure_bytes(outcome.usable_bytes)
        share = outcome.memory_bytes / usable if usable else 1.0
        trial = Trial(
            value=value,
            is_answer=value is not None and outcome.fits and not is_late,
            memory_bytes=outcome.memory_bytes,
            memory_share=share,
            is_unsure=outcome.fits and not outcome.is_sure,
            keeps_too_much=outcome.keeps_too_much,
            keeps_nearly_all=outcome.keeps_nearly_all,
        )
        self.search.record(*pick, trial)
        self.tried.append(
            TriedSetting(
                group=pick[0],
                changes=group.setting(number),
                gpus=gpus,
                outcome=outcome,
                value=value,
                is_late=is_late,
                is_plain=number == 0 and pick[0] in self.plain and group.comes_first,
            )
        )

    def losses(self) -> tuple[LossReason, ...]:
        """Return the reasons why settings lost, with the number of settings for each."""
        found = [
            LossReason("cannot be", why, count) for why, count in _merged_reasons(self.pool.refused)
        ]
        search = self.search
        out = [place for place in range(len(self.pool.groups)) if search.is_bounded_out(place)]
        slow = [place for place in out if not search.branches[place].is_unsure]
        if left := self._left_of(slow):
            found.append(
                LossReason("cannot win", "their lower bound is no better than the best", left)
            )
        if left := self.unsure_settings():
            why = f"fit with a probability below {SURE:.0%} by the bound of their memory"
            found.append(LossReason("cannot win", why, left))
        over = sum(map(search.passed_over, range(len(self.pool.groups))))
        if over:
            why = "their knobs add to the memory of a setting that fills it"
            found.append(LossReason("cannot fit", why, over))
        simulated = Counter(filter(None, map(self._loss, self.tried)))
        found += [LossReason("simulated", why, count) for why, count in _merged_reasons(simulated)]
        left = self.open_settings()
        if held_back := sum(len(group.knobs) for group in self.pool.held_back):
            if search.best < inf:
                found.append(LossReason("left out", OFFLOADS_LEFT_OUT, held_back))
            else:
                left += held_back
        if left:
            found.append(LossReason("not reached", "the search ended before", left))
        return tuple(found)

    def _left_of(self, places: Iterable[int]) -> int:
        """Return the number of settings of groups that were neither simulated nor passed over."""
        search = self.search
        return sum(
            len(self.pool.groups[place].knobs) - search.tried(place) - search.passed_over(place)
            for place in places
        )

    def unsure_settings(self) -> int:
        """Return the number of settings not simulated, since they may not fit and others do."""
        branches = self.search.branches
        unsure = [place for place, branch in enumerate(branches) if branch.is_unsure]
        return 0 if self.search.best == inf else self._left_of(unsure)

    def open_settings(self) -> int:
        """Return the number of settings that were not simulated and may be better."""
        unbounded = sum(len(group.knobs) for group in self.pool.unbounded.values())
        return self.search.open_settings() + unbounded

    def _loss(self, each: TriedSetting) -> str:
        """Return why a simulated setting lost; empty if it is the best."""
        best = min(self.tried, key=lambda one: one.order)
        if each.outcome.refusal:
            return each.outcome.refusal
        if not each.outcome.fits:
            return "out of memory in the simulation"
        if each.is_late:
            return LATE
        if each.value == best.value:
            return ""
        if best.outcome.is_sure and each.outcome.keeps_to_be_unsure:
            return f"fits with a probability below {SURE:.0%}"
        if each.outcome.is_tight:
            return f"leaves less than {1 - TIGHT:.0%} of the memory free; real runs may run out"
        if best.outcome.is_sure and not each.outcome.is_sure:
            return f"fits with a probability below {SURE:.0%}"
        if each.outcome.slower >= MUCH:
            return "published runs of its kind took much longer than predicted"
        return f"not the least {MEASURE[self.question.objective]}"


MUCH: Final = 1.5
"""Minimum ratio of published to predicted times at which published runs count as much slower."""

MEASURE: Final = {"time": "step time", "cost": "cost", "energy": "energy", "gpus": "GPUs"}


def _merged_reasons(reasons: Mapping[str, int]) -> Iterable[tuple[str, int]]:
    """Merge reasons that differ only in numbers; return them with counts, the most common first."""
    words: dict[str, str] = {}
    counts: Counter[str] = Counter()
    for why, count in reasons.items():
        key = "".join("#" if letter.isdigit() else letter for letter in why.replace(",", ""))
        key = "#".join(part for part in key.split("#") if part)
        words.setdefault(key, why)
        counts[key] += count
    return [(words[key], count) for key, count in counts.most_common()]


def _note_nothing(_text: Callable[[], str]) -> None:
    """Ignore the result so far."""


@contextmanager
def _executor(workers: int, scheduler: str | None) -> Generator[Executor]:
    """Yield an executor on processes of this machine, or on the Dask cluster at `scheduler`."""
    if scheduler is None:
        with processes(workers) as executor:
            yield executor
    else:
        with dask_cluster(scheduler) as cluster:
            yield cluster.executor


def _timed(tables: Mapping[str, Any], *, times_unsure: bool) -> tuple[SettingOutcome, float]:
    """Return the result of simulating a setting, and its processor time in seconds."""
    with _LOCK:  # a Dask worker may have several threads
        begun = process_time()
        outcome = tried(tables, times_unsure=times_unsure)
        return outcome, process_time() - begun


_LOCK = Lock()


def _new_search(question: Question, most_operations: int, options: SearchOptions) -> _SearchRun:
    """Return a search in which no setting has been simulated yet."""
    pool, stop_s = SettingPool(question), options.get("stop_s")
    usable = round(sure_bytes(question.fleet.cluster.gpu.usable_bytes(1)))
    return _SearchRun(
        question=question,
        pool=pool,
        search=Search([], usable, holds_back=bool(pool.held_back)),
        most_operations=most_operations,
        stop_s=STOP_S * max(1.0, most_operations / OPERATIONS) if stop_s is None else stop_s,
        progress=options.get("progress") or ignore_progress,
        note=options.get("note") or _note_nothing,
    )


def _result(hunt: _SearchRun) -> BestResult:
    question, pool = hunt.question, hunt.pool
    ranked = sorted(hunt.tried, key=lambda each: each.order)
    is_over = not (hunt.is_interrupted or any(each.is_answer for each in ranked))
    return BestResult(
        title=str(question.tables["title"]),
        objective=question.objective,
        settings=pool.settings,
        tried=tuple(ranked),
        losses=hunt.losses(),
        gap=1.0 if pool.unbounded else hunt.search.gap,
        open_settings=hunt.open_settings(),
        unsure_settings=hunt.unsure_settings(),
        left_out=sum(len(group.knobs) for group in pool.held_back),
        operations=hunt.operations,
        is_stopped=hunt.is_stopped,
        is_interrupted=hunt.is_interrupted,
        tables=question.tables,
        sequences=question.sequences,
        sequence_length=question.sequence_length,
        gpu=question.fleet.cluster.gpu.name,
        gpus_per_node=question.fleet.cluster.gpus_per_node,
        nodes_per_domain=question.fleet.cluster.nodes_per_domain,
        tokens=question.tokens,
        price=question.price,
        power_w=question.power_w,
        bounded_s=min((each.step_time_s for each in pool.bounds if each.step_time_s), default=0.0),
        by_fabric=_by_fabric(question, ranked[0].changes) if ranked else {},
        goodput_of=question.goodput,
        enough=more_gpus(question) if is_over else "",
    )


def _by_fabric(question: Question, changes: Mapping[str, object]) -> dict[str, float]:
    """Return the step time of the best setting on each candidate fabric, if it fits there."""
    if FABRIC_KEY not in changes:
        return {}
    outcomes = {
        name: tried(question.scenario({**changes, FABRIC_KEY: name})) for name in question.fabrics
    }
    return {name: each.step_time_s for name, each in outcomes.items() if each.fits}
