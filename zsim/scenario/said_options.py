"""Options of another program's configuration as fields of a scenario."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from pydantic import ValidationError

from zsim.config_error import wrong_fields
from zsim.scenario.tables import Scenario, ScenarioError
from zsim.schedule.json import shown

Tables = dict[str, dict[str, Any]]
"""Tables of a scenario, with only the keys that are given."""


@dataclass(frozen=True, slots=True)
class Said:
    """An option of the file, and its value as a scenario field."""

    option: str
    value: object


def put(tables: Tables, field: str, what: Said, *, source: str) -> None:
    """Set `field` from the file of key `source`; if the scenario has it, they must agree.

    Raises:
        ScenarioError: they do not agree.
    """
    *path, name = field.split(".")
    table: dict[str, Any] = cast("dict[str, Any]", tables)
    for inner in path:
        table = table.setdefault(inner, {})
    if table.setdefault(name, what.value) != what.value:
        raise ScenarioError(
            f"{field}: {shown(table[name])} contradicts {source.rpartition('.')[2]}, "
            f"whose {what.option} means {shown(what.value)}"
        )


def said_tables(scenario: Scenario, names: Iterable[str], *, source: str) -> Tables:
    """Return the tables of `scenario` with only the given keys, except the key `source`."""
    key = source.rpartition(".")[2]
    return {
        name: getattr(scenario, name).model_dump(exclude_unset=True, exclude={key})
        for name in names
    }


def validated(
    scenario: Scenario, tables: Tables, said: Mapping[str, Said], *, source: str
) -> Scenario:
    """Return `scenario` with `tables`; an error names the option that gave the value.

    Raises:
        ScenarioError: a value is invalid.
    """
    read: dict[str, object] = {}
    wrong: list[str] = []
    for name, table in tables.items():
        kind = type(getattr(scenario, name))
        try:
            read[name] = kind.model_validate(table)
        except ValidationError as error:
            for each in wrong_fields(error.errors(include_url=False), kind):
                field = f"{name}.{each.field}"
                option = said[field].option if field in said else field
                wrong.append(f"{source}: {option}: {each.why}")
    if wrong:
        raise ScenarioError(*wrong)
    return scenario.model_copy(update=read)
