"""Tables of a configuration file, and the types of their fields: units, counts, ranges.

A table is an immutable pydantic model. From Python, an invalid field raises a `ConfigError` of one
line. Errors of tables inside a file are reported together, as worded in `zsim.config_error`.
"""

import fractions
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, Strict, ValidationError

from zsim.config_error import ConfigError, line, whole
from zsim.units import (
    UnitError,
    parse_bandwidth,
    parse_ratio,
    parse_size,
    parse_time,
)


def _size(value: object) -> object:
    if not isinstance(value, str):
        raise ValueError('must be a size with its unit, such as "32 GB"')  # noqa: TRY004 (pydantic)
    try:
        return parse_size(value)
    except UnitError:
        bits = "; bits are not accepted" if value.rstrip().endswith("b") else ""
        raise ValueError(f'must be a size such as "32 GB" or "80 GiB"{bits}') from None


def _ratio(value: object) -> object:
    try:
        return parse_ratio(value)
    except UnitError:
        raise ValueError('must be a ratio of more than 0, such as 2 or "3/2"') from None


def _bandwidth(value: object) -> object:
    try:
        return parse_bandwidth(str(value))
    except UnitError:
        raise ValueError('must be a bandwidth such as "10 GB/s"') from None


def _time(value: object) -> object:
    if value == "0" or (value == 0 and not isinstance(value, bool)):
        return 0
    try:
        return parse_time(str(value))
    except UnitError:
        raise ValueError('must be a time such as "1.5 s"') from None


LARGEST = 2**60
"""Upper limit of every count in a file, which catches mistyped exponents."""

Whole = Annotated[int, Strict(), Field(ge=0, le=LARGEST), BeforeValidator(whole)]
Count = Annotated[int, Strict(), Field(ge=1, le=LARGEST), BeforeValidator(whole)]
Repeat = Annotated[int, Strict(), Field(ge=1, le=100_000), BeforeValidator(whole)]
WholeNumber = Annotated[int, Strict(), Field(ge=0, le=LARGEST), BeforeValidator(whole)]
Size = Annotated[int, Field(ge=1), BeforeValidator(_size)]
Bandwidth = Annotated[int, Field(ge=1), BeforeValidator(_bandwidth)]
Time = Annotated[int, Field(ge=0), BeforeValidator(_time)]
Ratio = Annotated[fractions.Fraction, BeforeValidator(_ratio)]
Flag = Annotated[bool, Strict()]
Real = Annotated[float, Strict(), Field(allow_inf_nan=False)]
NotNegative = Annotated[float, Strict(), Field(ge=0, allow_inf_nan=False)]
Positive = Annotated[float, Strict(), Field(gt=0, allow_inf_nan=False)]
Fraction = Annotated[float, Strict(), Field(ge=0, lt=1)]

if TYPE_CHECKING:
    _Table = BaseModel
else:

    class _OneLineErrors(type(BaseModel)):
        """Metaclass that reports the validation errors of a table in one line."""

        def __call__(cls, *args: object, **fields: object) -> object:
            try:
                return super().__call__(*args, **fields)
            except ValidationError as error:
                raise ConfigError(line(error.errors(include_url=False), cls)) from None

    class _Table(BaseModel, metaclass=_OneLineErrors):
        pass


class Table(_Table):
    """A table of a configuration file; unknown keys are rejected."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @classmethod
    def of(cls, values: Mapping[str, object]) -> Self:
        """Return the table with these values by key (`zero.stage`) and defaults for the others.

        Raises:
            ConfigError: a key is unknown, or a value is invalid.
        """
        return cls(**_changed(None, values))

    def but(self, changes: Mapping[str, object] | None = None, /, **fields: object) -> Self:
        """Return this table with other values by key (`zero.stage`); None resets a key.

        Raises:
            ConfigError: a key is unknown, or a value is invalid.
        """
        return type(self)(**_changed(self, {**(changes or {}), **fields}))

    def given(self, kind: "type[Table]") -> dict[str, object]:
        """Return the values of this table that were set explicitly and are fields of `kind`."""
        names = self.model_fields_set & kind.model_fields.keys()
        return {name: getattr(self, name) for name in names}


def _changed(table: object, changes: Mapping[str, object]) -> dict[str, Any]:
    made: dict[str, Any] = table.given(type(table)) if isinstance(table, Table) else {}
    inner: dict[str, dict[str, object]] = {}
    for key, value in changes.items():
        name, dot, rest = key.partition(".")
        if dot:
            inner.setdefault(name, {})[rest] = value
        elif value is None:
            made.pop(name, None)
        else:
            made[name] = value
    for name, each in inner.items():
        made[name] = _changed(getattr(table, name, None), each)
    return made
