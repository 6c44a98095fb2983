"""Expand a study into runs: every combination with its resolved scenario, before simulation."""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import reduce
from hashlib import sha256
from math import prod
from typing import Any, cast

from zsim.config_error import shown
from zsim.limits import limits
from zsim.scenario.changes import changed
from zsim.scenario.fault_injection import AbsentHardwareError
from zsim.scenario.resolved_scenario import ResolvedScenario
from zsim.scenario.tables import Scenario, ScenarioError, from_tables
from zsim_study.study.axis import Combination, StudyAxis, axes_of, combinations
from zsim_study.study.condition import Condition, condition
from zsim_study.study.file import StudyError, StudyFile
from zsim_study.study.fixed import BATCH, Fixed, held
from zsim_study.study.goal import COST, Goal, goal_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """Functions that read files and resolve a scenario; all raise `ScenarioError`.

    Attributes:
        configured: returns the scenario with the settings from the files that it names.
        replicas: returns the number of replicas that share the global batch.
        resolve: determines every number of the scenario.
    """

    configured: Callable[[Scenario], Scenario]
    replicas: Callable[[Scenario], int]
    resolve: Callable[[Scenario], ResolvedScenario]


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyRun:
    """One combination of a study.

    Attributes:
        name: such as `stage=3, NICs=8`.
        labels: its choice on each axis.
        values: values by field: those that the axes set, and the field that is minimized.
        resolved: the resolved scenario; None if it is impossible.
        impossible: why it is impossible, in one line.
    """

    name: str
    labels: tuple[str, ...]
    values: Mapping[str, object]
    resolved: ResolvedScenario | None
    impossible: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyPlan:
    """All runs of a study.

    `held` describes in one line the batch that is held fixed. `dropped` is the number of
    combinations that are not run.
    """

    question: str
    axes: tuple[StudyAxis, ...]
    goal: Goal
    held: str
    runs: tuple[StudyRun, ...]
    dropped: int


def planned(study: StudyFile, base: Mapping[str, Any], reader: Reader) -> StudyPlan:
    """Return the runs of `study` on the scenario in the tables of `base`.

    Raises:
        StudyError: a field or value is not allowed, a fault names absent hardware, a choice is
            impossible in every combination, or no combination is left to run.
    """
    axes = axes_of(study.axis)
    count = prod(len(axis.choices) for axis in axes)
    if count > limits().combinations:
        raise StudyError(f"axis: {count:,} combinations must be at most {limits().combinations:,}")
    goal = goal_of(study.goal, [axis.name for axis in axes])
    planner = _Planner(axes=axes, goal=goal, base=base, reader=reader)
    keep, drop = _conditions(study, axes)
    batch = planner.fixed() if study.hold == "global_batch" else None
    runs: list[StudyRun] = []
    count = 0
    for combination in combinations(axes):
        count += 1
        scenario = planner.scenario(combination)
        if planner.stays(keep, drop, combination, scenario):
            runs.append(planner.run(combination, scenario, batch))
    if not runs:
        raise StudyError(f"where: drops all {count} combinations")
    _refuse_impossible(axes, runs)
    need_values(goal, runs)
    return StudyPlan(
        question=study.question,
        axes=axes,
        goal=goal,
        held=_held(axes, batch),
        runs=tuple(runs),
        dropped=count - len(runs),
    )


def need_values(goal: Goal, runs: Sequence[StudyRun]) -> None:
    """Raise StudyError unless every possible run has a value to minimize.

    Raises:
        StudyError: the minimized field is not a number in a run, or its GPU has no price.
    """
    for run in runs:
        gpu = "" if run.resolved is None else run.resolved.cluster.gpu.name
        value = 0 if goal.field is None else run.values.get(goal.field)
        if run.resolved is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise StudyError(
                f"goal.minimize: {goal.field} is {shown(value)} in {run.name}, no number"
            )
        if goal.minimize == COST and goal.price(gpu) is None:
            raise StudyError(f"goal.price_per_gpu_hour: {gpu} of {run.name} has no price")


def key_of(resolved: ResolvedScenario, code: str) -> str:
    """Return the cache key of an outcome: a hash of the resolved scenario and the code version.

    The sources that the cluster cites are not part of the key.
    """
    told = replace(resolved, cluster=replace(resolved.cluster, cites=()))
    return sha256(f"{code}\n{told!r}".encode()).hexdigest()


def found_in(scenario: Scenario, name: str) -> object:
    """Return the value of a field such as `zero.stage`, or its default."""
    return reduce(_inner, name.split("."), cast("object", scenario))


def _inner(table: object, name: str) -> object:
    if isinstance(table, Mapping):
        return cast("Mapping[str, object]", table).get(name)
    return None if table is None else getattr(table, name)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Planner:
    """Makes runs of combinations; runs with equal schedules share one shape and strategy."""

    axes: Sequence[StudyAxis]
    goal: Goal
    base: Mapping[str, Any]
    reader: Reader
    firsts: dict[Hashable, ResolvedScenario] = field(
        default_factory=dict[Hashable, ResolvedScenario]
    )

    def scenario(self, combination: Combination) -> Scenario:
        """Return the scenario of a combination, before any batch is held fixed."""
        try:
            tables = changed(self.base, combination.changes)
            return self.reader.configured(from_tables(tables))
        except (ScenarioError, StudyError) as error:
            raise StudyError(f"{combination.named(self.axes)}: {error}") from None

    def stays(
        self,
        keep: Sequence[Condition],
        drop: Sequence[Condition],
        combination: Combination,
        scenario: Scenario,
    ) -> bool:
        """Return True if the conditions keep the combination."""
        names = [axis.name for axis in self.axes]
        labels = dict(zip(names, combination.labels, strict=True))

        def find(name: str) -> object:
            return labels[name] if name in labels else found_in(scenario, name)

        try:
            return all(each.holds(find) for each in keep) and not any(
                each.holds(find) for each in drop
            )
        except StudyError as error:
            raise StudyError(f"where: {combination.named(self.axes)}: {error}") from None

    def fixed(self) -> Fixed | None:
        """Return the batch to hold fixed: that of the base, or of the first valid combination.

        Return None if no scenario can be resolved.
        """
        for scenario in self._scenarios():
            try:
                resolved = self.reader.resolve(scenario)
                replicas = self.reader.replicas(scenario)
            except ScenarioError:
                continue
            micro = resolved.micro_batch_size
            share = micro * resolved.strategy.train.gradient_accumulation_steps
            return Fixed(global_batch=share * replicas, micro_batch=micro)
        return None

    def _scenarios(self) -> Iterator[Scenario]:
        """Yield the base if it is a valid scenario, then the scenario of each combination."""
        with suppress(ScenarioError):
            yield self.reader.configured(from_tables(self.base))
        yield from map(self.scenario, combinations(self.axes))

    def run(self, combination: Combination, scenario: Scenario, batch: Fixed | None) -> StudyRun:
        """Return the run of a combination, with `batch` held fixed unless it is None."""
        values = dict(combination.changes)
        if self.goal.field is not None:
            values[self.goal.field] = found_in(scenario, self.goal.field)
        name, labels = combination.named(self.axes), combination.labels
        try:
            if batch is not None:
                replicas = self.reader.replicas(scenario)
                train = held(scenario.train, batch, replicas, combination.changes)
                scenario = scenario.model_copy(update={"train": train})
            resolved = self.reader.resolve(scenario)
        except AbsentHardwareError as error:
            raise StudyError(f"{name}: {error}") from None
        except ScenarioError as error:
            return StudyRun(
                name=name, labels=labels, values=values, resolved=None, impossible=str(error)
            )
        first = self.firsts.setdefault(resolved.schedule_key, resolved)
        alike = replace(resolved, shape=first.shape, strategy=first.strategy)
        return StudyRun(name=name, labels=labels, values=values, resolved=alike)


def _conditions(
    study: StudyFile, axes: Sequence[StudyAxis]
) -> tuple[list[Condition], list[Condition]]:
    """Return the conditions that must hold and the conditions that must not."""
    names = [axis.name for axis in axes]
    found: list[list[Condition]] = []
    for key, texts in (("keep", study.where.keep), ("drop", study.where.drop)):
        try:
            found.append([condition(text, names) for text in texts])
        except StudyError as error:
            raise StudyError(f"where.{key}: {error}") from None
    return found[0], found[1]


def _refuse_impossible(axes: Sequence[StudyAxis], runs: Sequence[StudyRun]) -> None:
    """Raise StudyError if a choice is impossible in every combination."""
    for index, axis in enumerate(axes):
        for choice in axis.choices:
            found = [run for run in runs if run.labels[index] == choice.label]
            if found and all(run.resolved is None for run in found):
                raise StudyError(f"{axis.name}={choice.label}: {found[0].impossible}")


def _held(axes: Sequence[StudyAxis], batch: Fixed | None) -> str:
    """Return one line on the batch that all runs share."""
    fields = {name for axis in axes for name in axis.fields}
    micro, steps, total = (f"train.{name}" in fields for name in BATCH)
    if batch is None:
        return "nothing; each run has the global batch that its fields say"
    if total or (micro and steps):
        return "nothing; the axes say the global batch"
    if micro:
        follows = "gradient accumulation follows the micro-batch"
    elif steps:
        follows = "the micro-batch follows gradient accumulation"
    else:
        follows = "gradient accumulation makes up for replicas, the micro-batch shrinks if it must"
    return f"the global batch, {batch.global_batch:,} sequences a step: {follows}"
