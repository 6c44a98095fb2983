"""Tables of a topology file: quantities with units, sources, and one line per error."""

from enum import StrEnum
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from zsim.cluster.cluster import Link
from zsim.config_error import line, shown
from zsim.units import (
    UnitError,
    parse_bandwidth,
    parse_power,
    parse_rate,
    parse_size,
    parse_time,
)


class Part(StrEnum):
    """Kind of object that a file describes."""

    SYSTEM = "topology"
    NODE = "node"
    FABRIC = "fabric"
    GPU = "gpu"


class TopologyError(ValueError):
    """A description that cannot be read; the message starts with the key."""


class UnknownTopologyError(TopologyError, LookupError):
    """There is no known part of this kind and name."""

    def __init__(self, message: str, part: Part = Part.SYSTEM) -> None:
        super().__init__(message)
        self.part = part


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise UnitError(f"{shown(value)} is not a quantity with its unit, in quotes")
    return value


Size = Annotated[int, BeforeValidator(lambda value: parse_size(_text(value)))]
Bandwidth = Annotated[int, BeforeValidator(lambda value: parse_bandwidth(_text(value)))]
FlopRate = Annotated[int, BeforeValidator(lambda value: parse_rate(_text(value)))]
Power = Annotated[int, BeforeValidator(lambda value: parse_power(_text(value)))]
Time = Annotated[int, BeforeValidator(lambda value: parse_time(_text(value)))]
Count = Annotated[int, Field(ge=1, le=65536, strict=True)]


class Plain(BaseModel):
    """A table of the file; unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class FileTable(Plain):
    """A table of numbers with an optional source; all packaged tables have one."""

    source: str | None = None


class LinkTable(FileTable):
    """One link. `quoted` is the vendor's number, for readers of the file."""

    bandwidth_per_direction: Bandwidth
    quoted: str | None = None
    latency: Time = 0
    latency_source: str | None = None

    def link(self) -> Link:
        """Return the link that the table describes."""
        return Link(bytes_per_s=self.bandwidth_per_direction, latency_ps=self.latency)


_File = TypeVar("_File", bound=Plain)


def read(kind: type[_File], name: str, table: dict[str, Any]) -> _File:
    """Return `table` validated as `kind`.

    Raises:
        TopologyError: a key is unknown, missing or has a wrong value; one line that starts with
            `name`.
    """
    try:
        return kind.model_validate(table)
    except ValidationError as error:
        raise TopologyError(f"{name}: {line(error.errors(include_url=False), kind)}") from None


def cites(table: dict[str, Any], path: str = "") -> list[tuple[str, str]]:
    """Return pairs of key and source, also of nested tables."""
    found: list[tuple[str, str]] = []
    for key, value in table.items():
        where = f"{path}.{key}" if path else key
        if isinstance(value, dict):
            found += cites(value, where)
        elif key == "source":
            found.append((path, value))
        elif key.endswith("_source"):
            found.append((where.removesuffix("_source"), value))
    return found
