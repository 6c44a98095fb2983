"""Scenarios in TOML text, with settings such as `zero.stage=3` in place of values of the text."""

from collections.abc import Iterable, Mapping
from copy import deepcopy
from enum import Enum
from typing import Any, Final, cast, get_args, get_type_hints

from zsim.bounded_text import bounded_toml
from zsim.scenario.model_catalogue import without_shape
from zsim.scenario.tables import Scenario, ScenarioError, from_tables, need_field
from zsim.strategy.config_table import Table
from zsim.strategy.runtime_options import names as runtime_names
from zsim.strategy.runtime_options import registered

NONE = "none"
"""Value that removes a key."""


def parse(text: str, settings: Iterable[str] = ()) -> Scenario:
    """Return the scenario in TOML `text`, with `settings` (`zero.stage=3`) on top.

    Raises:
        ScenarioError: it cannot be used.
    """
    return from_tables(with_settings(tables_of(text), settings))


def tables_of(text: str) -> dict[str, Any]:
    """Return the tables of a scenario in TOML `text`, without validation.

    Raises:
        ScenarioError: it is not TOML, or empty.
    """
    try:
        data = bounded_toml(text)
    except ValueError as error:
        raise ScenarioError(f"not TOML: {error}") from None
    if not data:
        raise ScenarioError(f"empty; a scenario has {', '.join(Scenario.model_fields)}")
    return data


MODEL_KEYS: Final = ("model.name", "model.hf_config")
"""Keys that give a whole shape."""


def with_settings(tables: Mapping[str, object], settings: Iterable[str]) -> dict[str, Any]:
    """Return a copy of `tables` with `settings` (`zero.stage=3`) in place of their values.

    A setting that names a model replaces the shape in `tables`, but not keys about training.

    Raises:
        ScenarioError: one of them is not a setting.
    """
    settings = list(settings)
    changed = deepcopy(dict(tables))
    if any(map(names_model, settings)) and isinstance(model := changed.get("model"), dict):
        changed["model"] = without_shape(cast("dict[str, object]", model))
    for setting in settings:
        apply(changed, setting)
    return changed


def names_model(setting: str) -> bool:
    """Return True if `setting` names a whole model: one that ships, or a config.json."""
    key, _, value = setting.partition("=")
    return key.replace(" ", "") in MODEL_KEYS and value.strip() != NONE


def apply(data: dict[str, Any], setting: str) -> None:
    """Set the key that `setting` names (`zero.stage=3`) in `data`; a bare word is a string.

    `none` removes the key or table, unless the field has a choice of that name.

    Raises:
        ScenarioError: it is not a setting.
    """
    path, equals, text = setting.partition("=")
    names = [name.strip() for name in path.split(".")]
    if not equals or not all(names):
        raise ScenarioError(f"--set: {setting!r} must be KEY=VALUE, such as zero.stage=3")
    if text.strip() == NONE and not _has_choice(names, NONE):
        _take_away(data, names)
        return
    table = data
    for name in names[:-1]:
        inner = table.setdefault(name, {})
        if not isinstance(inner, dict):
            raise ScenarioError(f"--set: {path.strip()!r}: {name} is a value, not a table")
        table = cast("dict[str, Any]", inner)
    table[names[-1]] = setting_value(setting, text.strip())


def _take_away(data: dict[str, Any], names: list[str]) -> None:
    need_field(".".join(names))
    table: Any = data
    for name in names[:-1]:
        table = table.get(name) if isinstance(table, dict) else None
    if isinstance(table, dict):
        table.pop(names[-1], None)


def _has_choice(names: list[str], choice: str) -> bool:
    """Return True if `choice` is an allowed value of the field `names`."""
    hint: object = Scenario
    for name in names:
        fields = hint.model_fields if isinstance(hint, type) and issubclass(hint, Table) else {}
        hint = fields[name].annotation if name in fields else None
    if names[0] == "zero" and len(names) == 3 and names[1] in runtime_names():
        hint = get_type_hints(registered()[names[1]].options).get(names[2])
    for each in (hint, *get_args(hint)):
        words = list(each) if isinstance(each, type) and issubclass(each, Enum) else get_args(each)
        if choice in (*words, each):
            return True
    return False


def setting_value(setting: str, text: str) -> object:
    """Return the value of `text`, which follows the `=` of `setting`.

    Raises:
        ScenarioError: `text` is not a value.
    """
    try:
        found = bounded_toml(f"value = {text}")
    except ValueError:
        if not text or text[0] in "\"'[{":
            raise ScenarioError(f"--set: {setting!r}: the value is not TOML") from None
        return text
    if len(found) != 1:
        raise ScenarioError(f"--set: {setting!r} must be one KEY=VALUE")
    return found["value"]
