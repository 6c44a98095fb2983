"""Rows of published tables, validated by pydantic: typed cells, or a reason in one line.

An unusable row is kept with the reason, and no row is excluded because of a large error. A missing
column is an error of the whole table.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, TypeAlias, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

Cells: TypeAlias = Mapping[str, str]
"""A row from csv.DictReader."""

Whole: TypeAlias = Annotated[int, Field(gt=0)]
Positive: TypeAlias = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Finite: TypeAlias = Annotated[float, Field(allow_inf_nan=False)]
_EMPTY = BeforeValidator(lambda cell: cell or None)
MaybeWhole: TypeAlias = Annotated[Whole | None, _EMPTY]
WholeOrOne: TypeAlias = Annotated[Whole, BeforeValidator(lambda cell: cell or 1)]
"""A degree; 1 if the cell is empty."""
MaybePositive: TypeAlias = Annotated[Positive | None, _EMPTY]
"""A number; None if the cell is empty."""

REASONS = {
    "int_parsing": "is not a whole number",
    "float_parsing": "is not a number",
    "finite_number": "is not more than 0",
    "greater_than": "is not more than 0",
    "bool_parsing": "is neither true nor false",
}
"""Messages about a cell, by pydantic's kind of error."""


class MeasuredError(ValueError):
    """A table that does not match its name; the message is one line."""


class NotModelledError(ValueError):
    """Reason why a row is not modelled, in one line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unmodelled:
    """A row without a prediction, and the reason."""

    file: str
    row: int
    reason: str


class CsvRow(BaseModel):
    """A row of a table; columns without a field are ignored."""

    model_config = ConfigDict(frozen=True, str_strip_whitespace=True)

    source: str


def must(be: Callable[[str], bool], fault: str) -> AfterValidator:
    """Return a validator of words; `fault` is the message for others, with {!r} for the word."""

    def check(text: str) -> str:
        if not be(text):
            raise ValueError(fault.format(text))
        return text

    return AfterValidator(check)


AnyRow = TypeVar("AnyRow", bound=CsvRow)
Found = TypeVar("Found")


def parsed(file: str, model: type[AnyRow], cells: Cells) -> AnyRow:
    """Return the `cells` of a row of `file` with their types.

    Raises:
        MeasuredError: columns are missing; the message lists all of them.
        NotModelledError: a cell is invalid; the message names the first such column.
    """
    try:
        return model.model_validate(cells)
    except ValidationError as error:
        faults: list[Any] = list(error.errors(include_url=False))
    missing = [repr(fault["loc"][0]) for fault in faults if fault["type"] == "missing"]
    if missing:
        raise MeasuredError(f"{file}: no column {', '.join(missing)}")
    first = faults[0]
    if first["type"] == "value_error":  # raised by a validator of this package
        raise NotModelledError(str(first["ctx"]["error"]))
    reason = REASONS.get(first["type"], first["msg"])
    raise NotModelledError(f"{first['loc'][0]} {first['input']!r} {reason}")


def word(column: str, text: str, known: Mapping[str, Found]) -> Found:
    """Return the value in `known` of the word in a cell.

    Raises:
        NotModelledError: `known` does not have the word.
    """
    if text not in known:
        raise NotModelledError(f"{column} {text!r} is not one of {', '.join(known)}")
    return known[text]


def read_rows(
    file: str,
    rows: Iterable[Cells],
    build: Callable[[int, Cells], Iterable[Found]],
    check: Callable[[Found], None],
) -> tuple[list[Found], list[Unmodelled]]:
    """Return the results of `build` for the lines of `file`, and the lines without a result.

    Args:
        file: the name of the table.
        rows: rows below the header, which is line 1.
        build: function of the line number and its cells; may raise NotModelledError.
        check: function of one result; may raise NotModelledError to exclude that result.

    Raises:
        MeasuredError: a column is missing.
    """
    found: list[Found] = []
    left: list[Unmodelled] = []
    for line, cells in enumerate(rows, start=2):
        try:
            for each in build(line, cells):
                try:
                    check(each)
                except NotModelledError as reason:
                    left.append(Unmodelled(file=file, row=line, reason=str(reason)))
                else:
                    found.append(each)
        except NotModelledError as reason:
            left.append(Unmodelled(file=file, row=line, reason=str(reason)))
    return found, left
