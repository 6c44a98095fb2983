"""Scenarios in Python: `zsim.load` reads one, changes it, and reports errors in one line."""

import json
import shlex
from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from numbers import Integral, Real
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from zsim.api.notebook import facts_html
from zsim.api.setting_notes import setting_notes
from zsim.files.output_file import need_folder, write
from zsim.files.source import (
    Changes,
    Source,
    described,
    print_ignored,
    schedule_source,
    scheduled,
    settled,
    tables_or_schedule,
)
from zsim.mistake import MistakeError
from zsim.scenario.tables import Scenario, ScenarioError
from zsim.scenario.title import filled, template_of, title_of
from zsim.scenario.toml import NONE, setting_value, with_settings
from zsim.strategy.activations import Checkpointing
from zsim.strategy.config_table import Table
from zsim.units import format_count

if TYPE_CHECKING:
    from zsim.api.pipeline_fold import MicroBatchFold
    from zsim.api.plan_result import PlanResult
    from zsim.backend.backend import Job
    from zsim.backend.document import Document
    from zsim.cluster.cluster import Cluster
    from zsim.model.model import Model
    from zsim.scenario.resolved_scenario import ResolvedScenario
    from zsim.scenario.settled_keys import SettledKey
    from zsim.schedule.schedule import Schedule
    from zsim.strategy.strategy import Strategy

TABLES = "scenario"
"""Name in messages for a scenario given as tables."""

Changed: TypeAlias = Mapping[str, object] | Iterable[str] | None
"""Values by key, or settings as on the command line: `"zero.stage=3"`."""


@dataclass(frozen=True, kw_only=True)
class LoadedScenario:
    """A scenario, or a schedule from a JSON file, after reading; an immutable value.

    Derived objects (`job`, `schedule`, `model`, `cluster`) are built at the first access.

    Attributes:
        name: name or path that was loaded; it starts messages about the scenario.
        tables: the tables of the file, without changes; None for a schedule.
        changes: the changes made to it.
        checked: the validated tables with all changes; None for a schedule.
        schedule_json: content of the schedule file; None for a scenario.
    """

    name: str
    tables: Mapping[str, object] | None = field(repr=False)
    changes: Changes
    checked: Scenario | None = field(default=None, repr=False)
    schedule_json: str | None = field(default=None, repr=False)

    @property
    def scenario(self) -> Scenario:
        """The validated tables with all changes.

        Raises:
            MistakeError: this is a schedule.
        """
        if self.checked is None:
            raise MistakeError(f"{self.name}: a schedule; only a scenario has tables")
        return self.checked

    @cached_property
    def source(self) -> Source:
        """The resolved scenario, with its schedule.

        Raises:
            MistakeError: fields contradict each other, or a named file cannot be read.
        """
        if self.schedule_json is not None:
            return schedule_source(self.name, self.schedule_json, self.changes)
        return replace(scheduled(self.name, self.resolved), title=self.title)

    @cached_property
    def resolved(self) -> "ResolvedScenario":
        """The scenario with every number determined; the first access prints ignored options.

        Raises:
            MistakeError: as `source`.
        """
        found, ignored = self._settled
        cluster, mode = found.cluster, found.strategy.activations.checkpointing
        if mode is Checkpointing.SELECTIVE or cluster.gpus_per_node % cluster.nics_per_node:
            ignored = "; ".join(filter(None, (ignored, *setting_notes(found))))
        print_ignored(ignored)
        return found

    def folds(self) -> "Iterator[MicroBatchFold]":
        """Return the ways to simulate some micro-batches of a pipeline instead of all.

        Raises:
            MistakeError: as `source`.
        """
        if self.schedule_json is not None or self._settled[0].strategy.parallel.pipeline == 1:
            return iter(())
        from zsim.api.pipeline_fold import folds_of

        return folds_of(self.resolved)

    def shortest_fold(self) -> "tuple[MicroBatchFold, Source] | None":
        """Return the shortest fold and its source, for a step that is too large to write.

        Raises:
            MistakeError: as `source`, except for the size of the step.
        """
        fold = next(self.folds(), None)
        return None if fold is None else (fold, self.of_micro_batches(fold.simulated))

    def of_micro_batches(self, count: int) -> Source:
        """Return the source with `count` micro-batches in a step, whatever the scenario says.

        Raises:
            MistakeError: as `source`.
        """
        found = self.resolved
        strategy = found.strategy
        train = strategy.train.model_copy(update={"gradient_accumulation_steps": count})
        changed = strategy.model_copy(update={"train": train})
        source = scheduled(self.name, replace(found, strategy=changed))
        return replace(source, title=self.title)

    @cached_property
    def _settled(self) -> "tuple[ResolvedScenario, str]":
        return settled(self.name, self.scenario, ranks=self.changes.ranks)

    @cached_property
    def title(self) -> str:
        """The title of the file, with the changes made to it."""
        if self.tables is None:
            return self.source.title
        try:
            found, _ = self._settled
        except MistakeError:
            found = None
        changes = self.changes
        template = template_of(self.scenario.title, changes.all_settings)
        title = filled(self.scenario.model_copy(update={"title": template}), found)
        return title_of(title, self.tables, changes.all_settings, changes.ranks)

    @property
    def document(self) -> "Document":
        """The schedule, with the model, cluster and faults of its run, if known."""
        return self.source.document

    @property
    def job(self) -> "Job":
        """The job for a backend; it excludes faults, neighbours and `network.algorithm`."""
        return self.source.job()

    @property
    def schedule(self) -> "Schedule":
        """The schedule of every rank."""
        return self.document.schedule

    @property
    def strategy(self) -> "Strategy":
        """The strategy of sharding and training; for a schedule, that in its contract.

        Raises:
            MistakeError: the contract of a schedule has no strategy.
        """
        if self.schedule_json is None:
            return self._settled[0].strategy
        strategy = self.schedule.contract.strategy
        if strategy is None:
            raise MistakeError(f"{self.name}: a schedule that says no strategy")
        return strategy

    @property
    def model(self) -> "Model":
        """The model to train."""
        return self.job.model

    @property
    def cluster(self) -> "Cluster":
        """The cluster of the run."""
        return self.job.cluster

    def changed(
        self,
        changes: "Changed" = None,
        *,
        ranks: int | None = None,
        steps: int | None = None,
    ) -> "LoadedScenario":
        """Return this scenario with `changes` by key, as in `load`.

        Raises:
            MistakeError: a key or value is wrong.
        """
        return load(self, changes, ranks=ranks, steps=steps)

    def to_dict(self) -> dict[str, Any]:
        """Return its tables with all changes; `load` accepts them."""
        if self.tables is None:
            raise MistakeError(f"{self.name}: a schedule; only a scenario has tables")
        return with_settings(self.tables, self.changes.all_settings)

    def settled_keys(self) -> "tuple[SettledKey, ...]":
        """Return every key with its value and its origin: a change, the scenario or a default.

        Raises:
            MistakeError: the scenario cannot be resolved, or it is a schedule.
        """
        from zsim.scenario.settled_keys import settled_keys

        if self.tables is None:
            raise MistakeError(f"{self.name}: a schedule; only a scenario has tables")
        return settled_keys(self.tables, self.changes.all_settings, self._settled[0])

    def command(self, verb: str, options: Iterable[str] = ()) -> str:
        """Return the command line, quoted for a shell, that runs `verb` on this scenario."""
        changes = self.changes
        words = ["zsim", verb, self.name]
        for setting in changes.settings:
            words += ["--set", setting]
        for name, number in (("--ranks", changes.ranks), ("--steps", changes.steps)):
            words += [] if number is None else [name, str(number)]
        return shlex.join([*words, *options])

    def plan(self) -> "PlanResult":
        """Return the memory and communication of a rank in a step, in bytes, from the schedule.

        Raises:
            MistakeError: the scenario cannot be resolved, or it is a schedule without a model.
        """
        from zsim.analysis.schedule_plan import lengthened
        from zsim.api.plan_result import PlanResult, plan_of

        try:
            made = plan_of(self.name, self.document)
            return PlanResult(title=self.title, plan=made)
        except MistakeError:
            large = self.shortest_fold()
            if large is None:
                raise
            fold, source = large
            less = self.of_micro_batches(fold.simulated - fold.turn)
            few, fewer = (plan_of(self.name, each.document) for each in (source, less))
            found = lengthened(few, fewer, fold.times)
            if found is None:
                raise
            return PlanResult(title=self.title, plan=found, folded=fold)

    def write_schedule(self, path: str | PathLike[str]) -> None:
        """Write the schedule to `path` as JSON; `load` reads it, with an identical run.

        Raises:
            MistakeError: the folder does not exist.
            UnwrittenError: the file cannot be written.
        """
        from zsim.backend.document import encode

        need_folder("schedule", Path(path))
        write(Path(path), encode(self.document))

    def __str__(self) -> str:
        return self.title

    def _repr_html_(self) -> str:
        tables = {} if self.tables is None else self.to_dict()
        facts = [
            (name, ", ".join(f"{key} = {_shown(each)}" for key, each in table.items()))
            for name, table in tables.items()
            if isinstance(table, dict)
        ]
        return facts_html(self.title, facts or [("operations", format_count(self._operations))])

    @property
    def _operations(self) -> int:
        return sum(len(program.step) for program in self.schedule.programs)


def load(
    scenario: LoadedScenario | str | PathLike[str] | Mapping[str, object],
    changes: Changed = None,
    *,
    ranks: int | None = None,
    steps: int | None = None,
) -> LoadedScenario:
    """Load a scenario: the name of a preset, a TOML file, or a dict of tables.

    A JSON file is a schedule that `zsim plan --schedule` wrote. `load("llama2_7b",
    {"zero.stage": 3, "cluster.nodes": 8})` changes two keys. Sizes and times have units
    (`"80 GB"`); None removes a key.

    Args:
        scenario: name, path or tables; a loaded scenario is changed further.
        changes: values by key that replace values of the scenario; or settings as on the
            command line (`["zero.stage=3"]`).
        ranks: number of ranks; default that of the cluster.
        steps: optimizer steps of a run.

    Raises:
        MistakeError: it does not exist or is invalid; the message is one line with field,
            value and allowed values, as on the command line.
    """
    settings = as_settings(changes)
    if isinstance(scenario, LoadedScenario):
        if not settings and ranks is None and steps is None:
            return scenario
        name, before = scenario.name, scenario.changes
        read = scenario.schedule_json or scenario.tables or {}
    else:
        (name, read), before = _found(scenario), Changes()
    asked = Changes(
        settings=(*before.settings, *settings),
        ranks=before.ranks if ranks is None else ranks,
        steps=before.steps if steps is None else steps,
    )
    if isinstance(read, str):
        loaded = LoadedScenario(name=name, tables=None, changes=asked, schedule_json=read)
        _ = loaded.source  # report its errors now
        return loaded
    checked = described(name, read, asked)
    return LoadedScenario(name=name, tables=read, changes=asked, checked=checked)


def _found(
    scenario: str | PathLike[str] | Mapping[str, object],
) -> tuple[str, Mapping[str, object] | str]:
    """Return the name of the scenario, and its tables or the JSON of a schedule.

    Raises:
        MistakeError: it does not exist, or it cannot be read.
    """
    match scenario:
        case Mapping():
            return TABLES, deepcopy(dict(scenario))
        case str() | PathLike():
            return fspath(scenario), tables_or_schedule(fspath(scenario))
        case _:
            raise MistakeError(
                f"scenario: {scenario!r} must be a name, a path, or tables by name in a dict"
            )


def as_settings(changes: Changed) -> tuple[str, ...]:
    """Return `changes` in the form of the command line.

    Raises:
        MistakeError: a value has a type that scenarios do not support.
    """
    if changes is None:
        return ()
    if isinstance(changes, Mapping):
        pairs = cast("Mapping[str, object]", changes).items()
        return tuple(as_setting(key, value) for key, value in pairs)
    return (changes,) if isinstance(changes, str) else tuple(changes)


def setting_keys() -> list[str]:
    """Return all keys of scenarios with their tables, such as `zero.stage`."""
    return [
        f"{name}.{key}"
        for name, field in Scenario.model_fields.items()
        if isinstance(field.annotation, type) and issubclass(field.annotation, Table)
        for key in field.annotation.model_fields
    ]


def scenario_text(tables: Mapping[str, object], above: str = "") -> str:
    """Return the tables of a scenario as TOML.

    Raises:
        MistakeError: TOML cannot represent a value.
    """
    plain = {key: value for key, value in tables.items() if not isinstance(value, Mapping)}
    lines = [f"[{above}]"] if above and plain else []
    for key, value in plain.items():
        text = toml_value(value)
        if text is None:
            raise MistakeError(f"{above}.{key}: {value!r} has no form in a scenario")
        lines.append(f"{key} = {text}")
    parts = ["\n".join(lines)] if lines else []
    for key, value in tables.items():
        if isinstance(value, Mapping):
            inner = cast("Mapping[str, object]", value)
            parts.append(scenario_text(inner, f"{above}.{key}" if above else key).rstrip("\n"))
    return "\n\n".join(part for part in parts if part) + "\n"


def as_setting(key: str, value: object) -> str:
    """Return `key` set to `value` in the form of the command line: `zero.stage=3`.

    Raises:
        MistakeError: scenarios do not support a value of this type.
    """
    if value is None:
        return f"{key}={NONE}"
    text = toml_value(value)
    if text is None:
        raise MistakeError(
            f"{key}: {value!r} must be a number, a string, true or false, a list, or None"
        )
    return f"{key}={value if isinstance(value, str) and _is_read_bare(value) else text}"


def _is_read_bare(text: str) -> bool:
    """Return True if the command line reads `text` without quotes as the same string."""
    try:
        return text != NONE and setting_value(text, text.strip()) == text
    except ScenarioError:
        return False


def toml_value(value: object) -> str | None:
    """Return `value` as one line of TOML; None if TOML cannot represent it."""
    match value:
        case bool():
            return "true" if value else "false"
        case Enum():
            return toml_value(value.value)
        case str() | PathLike():
            return json.dumps(fspath(value), ensure_ascii=False).replace("\x7f", "\\u007f")
        case Integral():
            return str(int(value))
        case Real():
            return repr(float(value))
        case list() | tuple():
            items = [toml_value(item) for item in cast("list[object]", value)]
            return None if None in items else f"[{', '.join(map(str, items))}]"
        case dict():
            pairs = cast("dict[str, object]", value).items()
            each = [(toml_value(str(key)), toml_value(item)) for key, item in pairs]
            if any(text is None for _, text in each):
                return None
            return f"{{{', '.join(f'{name} = {text}' for name, text in each)}}}"
        case _:
            return None


def _shown(value: object) -> str:
    return value if isinstance(value, str) else toml_value(value) or str(value)
