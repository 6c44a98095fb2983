"""Scenarios from Python: `zsim.load` reads one, changes it, and tells what is wrong in one line."""

import json
import shlex
from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from numbers import Integral, Real
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from zsim.api.notebook import facts_html
from zsim.files.source import (
    Changes,
    Source,
    described,
    schedule_source,
    scheduled,
    settled,
    tables_or_schedule,
    tell_ignored,
)
from zsim.files.written import need_folder, write
from zsim.mistake import MistakeError
from zsim.scenario.tables import Scenario, ScenarioError
from zsim.scenario.title import filled, template_of, title_of
from zsim.scenario.toml import NONE, setting_value, with_settings
from zsim.strategy.config_table import Table
from zsim.units import format_count

if TYPE_CHECKING:
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
"""Name in messages of a scenario that is given as tables."""

Changed: TypeAlias = Mapping[str, object] | Iterable[str] | None
"""Values by key, or settings as the command line has them: `"zero.stage=3"`."""


@dataclass(frozen=True, kw_only=True)
class LoadedScenario:
    """A scenario, or a schedule in a JSON file, that was found and read; an immutable value.

    What it comes to (`job`, `schedule`, `model`, `cluster`) is made when it is first asked for.

    Attributes:
        name: what it was loaded as; the first word of messages about it.
        tables: the scenario as its file has it, without changes; None of a schedule.
        changes: what was changed in it.
        checked: the tables with all changes, every key looked at; None of a schedule.
        schedule_json: the schedule in the file; None of a scenario.
    """

    name: str
    tables: Mapping[str, object] | None = field(repr=False)
    changes: Changes
    checked: Scenario | None = field(default=None, repr=False)
    schedule_json: str | None = field(default=None, repr=False)

    @property
    def scenario(self) -> Scenario:
        """The tables with all changes.

        Raises:
            MistakeError: this is a schedule.
        """
        if self.checked is None:
            raise MistakeError(f"{self.name}: a schedule; only a scenario has tables")
        return self.checked

    @cached_property
    def source(self) -> Source:
        """Everything settled, and the schedule made.

        Raises:
            MistakeError: fields contradict each other, or a file that is named cannot be read.
        """
        if self.schedule_json is not None:
            return schedule_source(self.name, self.schedule_json, self.changes)
        found, ignored = self._settled
        tell_ignored(ignored)
        document = scheduled(self.name, found)
        return Source(name=self.name, title=self.title, document=document, scenario=found)

    @cached_property
    def _settled(self) -> "tuple[ResolvedScenario, str]":
        return settled(self.name, self.scenario, ranks=self.changes.ranks)

    @cached_property
    def title(self) -> str:
        """The title of the file, and what was changed in it."""
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
        """The schedule and everything that its run needs, if known."""
        return self.source.document

    @property
    def job(self) -> "Job":
        """The job of a backend; faults, neighbours and `network.algorithm` are not in it."""
        return self.source.job()

    @property
    def schedule(self) -> "Schedule":
        """The schedule of every rank."""
        return self.document.schedule

    @property
    def strategy(self) -> "Strategy":
        """How the model is sharded and trained; of a schedule what its contract says.

        Raises:
            MistakeError: a schedule that says none.
        """
        if self.schedule_json is None:
            return self._settled[0].strategy
        strategy = self.schedule.contract.strategy
        if strategy is None:
            raise MistakeError(f"{self.name}: a schedule that says no strategy")
        return strategy

    @property
    def model(self) -> "Model":
        """The model that is trained."""
        return self.job.model

    @property
    def cluster(self) -> "Cluster":
        """The cluster that it runs on."""
        return self.job.cluster

    def changed(
        self,
        changes: "Changed" = None,
        *,
        ranks: int | None = None,
        steps: int | None = None,
    ) -> "LoadedScenario":
        """Return this scenario with `changes` by key, as `load` takes them.

        Raises:
            MistakeError: a key or value is wrong.
        """
        return load(self, changes, ranks=ranks, steps=steps)

    def to_dict(self) -> dict[str, Any]:
        """Return its tables with all changes, as `load` takes them."""
        if self.tables is None:
            raise MistakeError(f"{self.name}: a schedule; only a scenario has tables")
        return with_settings(self.tables, self.changes.all_settings)

    def settled_keys(self) -> "tuple[SettledKey, ...]":
        """Return every key with its value and what set it: a change, the scenario, a default.

        Raises:
            MistakeError: it cannot be settled, or is a schedule.
        """
        from zsim.scenario.settled_keys import settled_keys

        if self.tables is None:
            raise MistakeError(f"{self.name}: a schedule; only a scenario has tables")
        return settled_keys(self.tables, self.changes.all_settings, self._settled[0])

    def command(self, verb: str, options: Iterable[str] = ()) -> str:
        """Return the command line that does `verb` with this scenario, as a shell takes it."""
        changes = self.changes
        words = ["zsim", verb, self.name]
        for setting in changes.settings:
            words += ["--set", setting]
        for name, number in (("--ranks", changes.ranks), ("--steps", changes.steps)):
            words += [] if number is None else [name, str(number)]
        return shlex.join([*words, *options])

    def plan(self) -> "PlanResult":
        """Return what a rank holds and sends in a step, in bytes, read off the schedule.

        Raises:
            MistakeError: it cannot be settled, or is a schedule without a model.
        """
        from zsim.analysis.schedule_plan import plan
        from zsim.api.plan_result import PlanResult

        if self.document.model is None:
            raise MistakeError(f"{self.name}: model: missing; a plan needs it")
        return PlanResult(title=self.title, plan=plan(self.schedule, self.document.model))

    def write_schedule(self, path: str | PathLike[str]) -> None:
        """Write the schedule to `path` as JSON; `load` reads it, and its run equals this one's.

        Raises:
            MistakeError: there is no such folder.
            UnwrittenError: it cannot be written.
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
    """Load a scenario: the name of one that ships, a file in TOML, or its tables.

    A file in JSON is a schedule that `zsim plan --schedule` wrote. `load("llama2_7b",
    {"zero.stage": 3, "cluster.nodes": 8})` changes two keys; sizes and times have units
    (`"80 GB"`), and None takes a key away.

    Args:
        scenario: what to load; a loaded one is changed.
        changes: values by key, on top of what the scenario says; or settings as the command line
            has them (`["zero.stage=3"]`).
        ranks: so many ranks instead of those of the cluster.
        steps: optimizer steps of a run.

    Raises:
        MistakeError: there is none, or it cannot be used: one line with field, value, and what is
            allowed, as the command line has it.
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
        _ = loaded.source  # what is wrong with it is told now
        return loaded
    checked = described(name, read, asked)
    return LoadedScenario(name=name, tables=read, changes=asked, checked=checked)


def _found(
    scenario: str | PathLike[str] | Mapping[str, object],
) -> tuple[str, Mapping[str, object] | str]:
    """Return the name of what `load` loads, and its tables, or the schedule in JSON.

    Raises:
        MistakeError: there is none, or it cannot be read.
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
    """Return `changes` as the command line has them.

    Raises:
        MistakeError: no scenario has a value of such a type.
    """
    if changes is None:
        return ()
    if isinstance(changes, Mapping):
        pairs = cast("Mapping[str, object]", changes).items()
        return tuple(as_setting(key, value) for key, value in pairs)
    return (changes,) if isinstance(changes, str) else tuple(changes)


def setting_keys() -> list[str]:
    """Return the keys of scenarios, with their tables: `zero.stage`."""
    return [
        f"{name}.{key}"
        for name, field in Scenario.model_fields.items()
        if isinstance(field.annotation, type) and issubclass(field.annotation, Table)
        for key in field.annotation.model_fields
    ]


def scenario_text(tables: Mapping[str, object], above: str = "") -> str:
    """Return the tables of a scenario as TOML.

    Raises:
        MistakeError: TOML has no form for a value.
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
    """Return `key` set to `value` as the command line has it: `zero.stage=3`.

    Raises:
        MistakeError: no scenario has a value of that type.
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
    """Tell whether the command line reads `text` without quotes as the same string."""
    try:
        return text != NONE and setting_value(text, text.strip()) == text
    except ScenarioError:
        return False


def toml_value(value: object) -> str | None:
    """Return `value` as TOML, on one line; None if it has no such form."""
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
