"""Changes of a scenario: values by field, applied to its tables."""

from collections.abc import Mapping
from typing import Any, cast

from zsim.scenario.tables import ScenarioError

Changes = Mapping[str, object]
"""Values by field of a scenario, such as `zero.stage`."""


def changed(tables: Mapping[str, Any], changes: Changes) -> dict[str, Any]:
    """Return a copy of scenario `tables` with `changes`; unchanged tables are shared.

    Raises:
        ScenarioError: a change refers to a field inside a value that is not a table.
    """
    found = dict(tables)
    for field, value in changes.items():
        *path, last = field.split(".")
        table = found
        for name in path:
            inner = table.get(name, {})
            if not isinstance(inner, dict):
                raise ScenarioError(f"{field}: {name} is a value, not a table")
            table[name] = dict(cast("dict[str, Any]", inner))
            table = table[name]
        table[last] = value
    return found


def flat(tables: Mapping[str, Any], above: str = "") -> dict[str, object]:
    """Flatten nested tables into values by field; a list of tables is one value."""
    found: dict[str, object] = {}
    for name, value in tables.items():
        field = f"{above}{name}"
        if isinstance(value, dict):
            found |= flat(cast("dict[str, Any]", value), f"{field}.")
        else:
            found[field] = value
    return found
