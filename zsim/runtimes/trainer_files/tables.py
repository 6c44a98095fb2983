"""Options of another program's configuration as tables of a scenario."""

from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, cast

from zsim.config_error import ConfigError
from zsim.schedule.json import shown

Tables = dict[str, dict[str, Any]]
"""Tables of a scenario, with only the keys that are given."""


class TrainerFileError(ConfigError):
    """A file of a trainer that cannot be used, in one line: field, value, problem."""


@dataclass(frozen=True, slots=True)
class FileOption:
    """An option of the file, and its value as a scenario field."""

    option: str
    value: object


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenTables:
    """A scenario that names a file.

    Attributes:
        tables: its tables with the keys that it gives, without the key of the file: `model`,
            `parallel`, `zero`, `activations` and `train`.
        shape_of: returns the keys of `[model]` of a model that ships, by its name.
        is_sized: the scenario gives the number of GPUs, which then overrides that of the file.
        nodes: number of nodes that the scenario gives; None if it gives none.
    """

    tables: Mapping[str, Mapping[str, Any]]
    shape_of: Callable[[str], Mapping[str, object]]
    is_sized: bool = False
    nodes: int | None = None

    def value(self, table: str, key: str, default: object = None) -> Any:  # noqa: ANN401  (any)
        """Return the value of a key, or its default."""
        return self.tables[table].get(key, default)

    def copied(self, *names: str) -> Tables:
        """Return copies of some tables, to complete."""
        return {name: deepcopy(dict(self.tables[name])) for name in names}


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadTables:
    """A scenario completed from a file.

    Attributes:
        tables: the completed tables.
        origins: the options that gave values, by field of the scenario.
        ignored: options that zsim does not follow, each with the difference.
        assumed: values that neither the file nor the scenario gives, each with its source.
        ranks: number of ranks, unless the scenario defines it; None if the file does not.
        machines: number of machines of these ranks; None if the file does not give it.
    """

    tables: Tables
    origins: Mapping[str, FileOption] = field(default_factory=dict[str, FileOption])
    ignored: tuple[str, ...] = ()
    assumed: tuple[str, ...] = ()
    ranks: int | None = None
    machines: int | None = None


def put(tables: Tables, field: str, what: FileOption, *, source: str) -> None:
    """Set `field` from the file of key `source`; if the scenario has it, they must agree.

    Raises:
        TrainerFileError: they do not agree.
    """
    *path, name = field.split(".")
    table: dict[str, Any] = cast("dict[str, Any]", tables)
    for inner in path:
        table = table.setdefault(inner, {})
    if table.setdefault(name, what.value) != what.value:
        raise TrainerFileError(
            f"{field}: {shown(table[name])} contradicts {source.rpartition('.')[2]}, "
            f"whose {what.option} means {shown(what.value)}"
        )


def put_all(tables: Tables, origins: Iterable[tuple[str, FileOption]], *, source: str) -> None:
    """Set fields from the file of key `source`.

    Raises:
        TrainerFileError: the scenario has another value.
    """
    for name, what in origins:
        put(tables, name, what, source=source)
