"""`zsim.best`: the best setting for a model on GPUs that somebody has, and what it costs."""

import gc
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from os import PathLike
from time import perf_counter  # noqa: TID251  (a search ends after the seconds that it is given)
from typing import Any, Final

from zsim.api.answer import Progress, tell_nobody
from zsim.api.best_result import BestResult, Loss, TriedSetting
from zsim.api.gpu_fleet import GpuFleet, gpu_fleet, gpu_power_w
from zsim.api.scenario import Changed, as_settings
from zsim.api.setting_trial import NAME, Bounder, SettingBound, SettingOutcome, tried
from zsim.api.training_budget import JOULES_PER_KWH, SECONDS_PER_HOUR, Price, price_of
from zsim.files.source import with_files
from zsim.mistake import MistakeError, mistakes
from zsim.planner.search import Branch, Search, Trial
from zsim.planner.space import Fleet, RefusedSettings, RuntimeSpace, SettingGroup, Space, powers
from zsim.runtimes.registry import runtimes
from zsim.scenario.tables import Scenario, ScenarioError, from_tables
from zsim.scenario.toml import with_settings
from zsim.study.axis import changed, flat
from zsim.study.file import StudyError
from zsim.suggestion import one_of
from zsim.workers.crew import InProcess, cores

BATCH_TOKENS: Final = 4 * 2**20
"""Tokens of a step where nobody says how many: those of Llama 2 (arXiv 2307.09288, section 2.2)."""

SEARCH_S: Final = 40.0
"""Seconds of a search where nobody says how many."""

OBJECTIVES: Final = ("time", "cost", "energy", "gpus")

FOLLOWS: Final = {
    "train.global_batch_size": "say --batch",
    "train.gradient_accumulation_steps": "it follows from --batch",
    "cluster.nodes": "say --gpus",
    "parallel.data": "it follows from --gpus",
}
"""Keys that cannot be set, and what to say instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is asked: on which GPUs, of which batch, and what is the best.

    Attributes:
        tables: of a scenario without what is sought.
        fleet: the GPUs.
        sequences: of a step.
        sequence_length: tokens of each.
        objective: one of `OBJECTIVES`.
        tokens: of the training; None where nobody says.
        within_s: seconds that it may take.
        price: of a GPU.
        power_w: of a GPU.
        fixed: values by key that are not sought.
        runtimes: among which is chosen.
    """

    tables: Mapping[str, Any]
    fleet: GpuFleet
    sequences: int
    sequence_length: int
    objective: str
    tokens: int | None
    within_s: float | None
    price: Price | None
    power_w: int | None
    fixed: Mapping[str, object]
    runtimes: tuple[str, ...]

    @property
    def tokens_per_step(self) -> int:
        """Tokens of a step."""
        return self.sequences * self.sequence_length

    def value(self, step_time_s: float, gpus: int) -> float:
        """Return what is minimized; it grows with the time of a step."""
        match self.objective:
            case "time":
                return step_time_s
            case "gpus":
                return gpus + step_time_s / (1 + step_time_s)
            case "cost":
                assert self.price is not None  # asked for before
                return gpus * step_time_s / SECONDS_PER_HOUR * self.price.per_gpu_hour
            case _:
                assert self.power_w is not None
                return gpus * step_time_s * self.power_w / JOULES_PER_KWH

    def is_late(self, step_time_s: float) -> bool:
        """Tell whether the training would take longer than it may."""
        if self.within_s is None or self.tokens is None:
            return False
        return self.tokens / self.tokens_per_step * step_time_s > self.within_s

    def fleets(self) -> tuple[Fleet, ...]:
        """Return the GPUs that may be used: all of them for time; else also fewer, by halves."""
        per_node, gpus = self.fleet.cluster.gpus_per_node, self.fleet.gpus
        counts = [gpus]
        if self.objective != "time":
            counts = sorted({gpus, *powers(gpus, gpus)})
        return tuple(Fleet(gpus=count, gpus_per_node=min(per_node, count)) for count in counts)

    def space(self) -> Space:
        """Return all settings that are considered."""
        known = runtimes()
        return Space(
            runtimes=[
                RuntimeSpace(
                    name=name,
                    stages=known[name].options.stages,
                    has_replicas=known[name].options.has_replicas,
                    has_pipeline=known[name].options.has_pipeline,
                )
                for name in self.runtimes
            ],
            fleets=self.fleets(),
            sequences=self.sequences,
            fixed=self.fixed,
        )

    def scenario(self, changes: Mapping[str, object]) -> dict[str, Any]:
        """Return the tables of the scenario with a setting."""
        with mistakes(StudyError):
            return changed(self.tables, changes)


def best(
    model: str,
    gpus: str,
    changes: Changed = None,
    *,
    tokens: int | None = None,
    within_s: float | None = None,
    batch_tokens: int | None = None,
    objective: str = "time",
    price: float | None = None,
    prices: str | PathLike[str] | None = None,
    among: Sequence[str] = (),
    search_s: float = SEARCH_S,
    workers: int | None = None,
    progress: Progress | None = None,
) -> BestResult:
    """Search the best setting for a model on GPUs.

    Args:
        model: name of a published model, or the `config.json` of one on Hugging Face.
        gpus: so many of a GPU, or of a node: `128xh100`, `dgx2`.
        changes: values by key of a scenario, as `load` takes them; what they say is not sought.
        tokens: of the training, for days, money and energy.
        within_s: seconds that the training may take.
        batch_tokens: of a step; 4,194,304 where nobody says, or one sequence for each GPU.
        objective: "time", "cost", "energy" or "gpus"; all but the first may use fewer GPUs.
        price: of a GPU for an hour.
        prices: a file of such prices.
        among: names of the runtimes among which is chosen; all where nobody says.
        search_s: seconds after which nothing more is begun.
        workers: processes; all cores where nobody says.
        progress: told how much of the search is done, and of how much.

    Raises:
        MistakeError: it cannot be asked so.
    """
    question = _question(
        model,
        gpus,
        as_settings(changes),
        tokens=tokens,
        within_s=within_s,
        batch_tokens=batch_tokens,
        objective=objective,
        price=price,
        prices=prices,
        among=among,
    )
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


def _question(
    model: str,
    gpus: str,
    settings: tuple[str, ...],
    *,
    tokens: int | None,
    within_s: float | None,
    batch_tokens: int | None,
    objective: str,
    price: float | None,
    prices: str | PathLike[str] | None,
    among: Sequence[str],
) -> Question:
    """Settle what is asked.

    Raises:
        MistakeError: it cannot be asked so.
    """
    if objective not in OBJECTIVES:
        raise MistakeError(f"--objective: {one_of(objective, OBJECTIVES)}")
    if within_s is not None and tokens is None:
        raise MistakeError("--within: needs --tokens, of which it is the time")
    for name in among:
        if name not in runtimes():
            raise MistakeError(f"--runtime: {one_of(name, tuple(runtimes()))}")
    fleet = gpu_fleet(gpus)
    tables = _tables(model, fleet, settings)
    given = flat(tables)
    for key, instead in FOLLOWS.items():
        if key in given:
            raise MistakeError(f"--set: {key} is not for best: {instead}")
    scenario = _described(tables)
    length = scenario.model.sequence_length
    if length is None:
        raise MistakeError(f"model: {model!r} says no sequence_length: --set model.sequence_length=N")
    known = price_of(fleet.cluster.gpu.name, price, prices)
    if objective == "cost" and known is None:
        raise MistakeError("--objective: cost needs --price or --prices")
    power = gpu_power_w(fleet.cluster.gpu.name)
    if objective == "energy" and power is None:
        raise MistakeError(f"--objective: energy: no power of {fleet.cluster.gpu.name} is known")
    return Question(
        tables=tables,
        fleet=fleet,
        sequences=_sequences(batch_tokens, length, fleet.gpus),
        sequence_length=length,
        objective=objective,
        tokens=tokens,
        within_s=within_s,
        price=known,
        power_w=power,
        fixed={key: value for key, value in given.items() if key.startswith(SOUGHT)},
        runtimes=_among(among, given),
    )


SOUGHT: Final = ("zero.", "parallel.", "activations.checkpointing", "train.micro_batch_size")
"""Keys that are sought, unless a setting says what they are."""


def _among(among: Sequence[str], given: Mapping[str, object]) -> tuple[str, ...]:
    emulate = given.get("zero.emulate")
    if emulate is not None:
        return (str(emulate),)
    return tuple(dict.fromkeys(among)) or tuple(sorted(runtimes()))


def _tables(model: str, fleet: GpuFleet, settings: tuple[str, ...]) -> dict[str, Any]:
    """Return the tables of the scenario in which settings are sought."""
    key = "hf_config" if model.endswith(".json") else "name"
    base: dict[str, Any] = {
        "title": f"{model} on {fleet.title}",
        "model": {key: model},
        **fleet.tables,
        "train": {"precision": fleet.precision, "optimizer": "adam"},
    }
    with mistakes(ScenarioError):
        return with_settings(base, settings)


def _described(tables: Mapping[str, Any]) -> Scenario:
    """Return the scenario as far as it is known, with the shape of its model."""
    with mistakes(ScenarioError):
        scenario, _ = with_files(NAME, from_tables({"zero": {"stage": 3}, **tables}))
        return scenario


def _sequences(batch_tokens: int | None, length: int, gpus: int) -> int:
    """Return the sequences of a step.

    Raises:
        MistakeError: the tokens are no multiple of a sequence.
    """
    if batch_tokens is None:
        return max(BATCH_TOKENS // length // gpus, 1) * gpus
    if batch_tokens % length:
        below = batch_tokens // length * length
        near = f"{below:,} or {below + length:,}" if below else f"{length:,}"
        raise MistakeError(
            f"--batch: {batch_tokens:,} tokens must be a multiple of {length:,}, the tokens of a "
            f"sequence, such as {near}"
        )
    return batch_tokens // length


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pool:
    """Groups of settings with their bounds, and those that cannot be."""

    groups: list[SettingGroup]
    bounds: list[SettingBound]
    refused: Counter[str]
    settings: int


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
        smaller = full.get(_without_batch(each))
        bound = smaller or bounder.bound(question.scenario(each.setting(0)))
        if bound.is_full:  # the bound on memory grows with the micro-batch
            full[_without_batch(each)] = bound
        if not bound.why_not and question.is_late(bound.step_time_s):
            bound = SettingBound(why_not="takes longer than --within even by its bound")
        if bound.why_not:
            refused[bound.why_not] += len(each.knobs)
        else:
            groups.append(each)
            bounds.append(bound)
    return _Pool(groups=groups, bounds=bounds, refused=refused, settings=settings)


def _without_batch(group: SettingGroup) -> object:
    """Return what groups have in common that differ in their micro-batch alone."""
    return group.fleet.gpus, tuple(
        (key, value) for key, value in group.changes.items() if not key.startswith("train.")
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
                if pick is None:
                    break
                tables = self.question.scenario(self.pool.groups[pick[0]].setting(pick[1]))
                flying[executor.submit(tried, tables)] = pick
            if not flying:
                return
            for future in wait(flying, return_when=FIRST_COMPLETED).done:
                self._take(flying.pop(future), future.result())
            self.progress(min(perf_counter() - begun, search_s), search_s)

    def _take(self, pick: tuple[int, int], outcome: SettingOutcome) -> None:
        group, number = self.pool.groups[pick[0]], pick[1]
        gpus = group.fleet.gpus
        value = None
        if not outcome.refusal:
            value = self.question.value(outcome.step_time_s, gpus)
        is_late = self.question.is_late(outcome.step_time_s)
        share = outcome.memory_bytes / outcome.usable_bytes if outcome.usable_bytes else 1.0
        trial = Trial(
            value=value,
            is_answer=value is not None and outcome.fits and not is_late,
            memory_bytes=outcome.memory_bytes,
            memory_share=share,
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

    def losses(self) -> tuple[Loss, ...]:
        """Return why settings lost, and how many to each reason."""
        found = [Loss("cannot be", why, count) for why, count in _alike(self.pool.refused)]
        search = self.search
        out = [place for place in range(len(self.pool.groups)) if search.is_bounded_out(place)]
        left = sum(len(self.pool.groups[place].knobs) - search.tried(place) for place in out)
        if left:
            found.append(Loss("cannot win", "their lower bound is no better than the best", left))
        simulated: Counter[str] = Counter()
        for each in self.tried:
            if each.outcome.refusal:
                simulated[each.outcome.refusal] += 1
            elif not each.outcome.fits:
                simulated["out of memory in the simulation"] += 1
            elif each.is_late:
                simulated["takes longer than --within"] += 1
            elif each.value is not None and each.value > search.best:
                simulated[f"not the least {MEASURE[self.question.objective]}"] += 1
        found += [Loss("simulated", why, count) for why, count in _alike(simulated)]
        if left := search.open_settings():
            found.append(Loss("not reached", "the time for the search was over", left))
        return tuple(found)


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
        Branch(
            bound=question.value(bound.step_time_s, group.fleet.gpus),
            memory_bytes=bound.memory_bytes,
            settings=len(group.knobs),
            family=str(group.changes["zero.emulate"]),
        )
        for group, bound in zip(pool.groups, pool.bounds, strict=True)
    ]
    hunt = _Hunt(question=question, pool=pool, search=Search(branches), progress=progress)
    with _executor(workers) as executor:
        hunt.go(executor, workers, search_s)
    return BestResult(
        title=str(question.tables["title"]),
        objective=question.objective,
        settings=pool.settings,
        tried=tuple(sorted(hunt.tried, key=lambda each: each.order)),
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
    )


@contextmanager
def _executor(workers: int) -> Generator[Executor]:
    """Yield this process, or so many others."""
    if workers == 1:
        yield InProcess()
        return
    with ProcessPoolExecutor(workers, initializer=gc.disable) as pool:
        yield pool
