"""Rows of published tables, as pydantic reads them: typed cells, or in one line why not.

A row that cannot be used is kept with the reason, and nothing is left out for being predicted
badly. A column that is missing is a fault of the whole table.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, TypeAlias, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

Cells: TypeAlias = Mapping[str, str]
"""A row as csv.DictReader gives it."""

Whole: TypeAlias = Annotated[int, Field(gt=0)]
Positive: TypeAlias = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Finite: TypeAlias = Annotated[float, Field(allow_inf_nan=False)]
_EMPTY = BeforeValidator(lambda cell: cell or None)
MaybeWhole: TypeAlias = Annotated[Whole | None, _EMPTY]
WholeOrOne: TypeAlias = Annotated[Whole, BeforeValidator(lambda cell: cell or 1)]
"""A degree, 1 where the cell is empty."""
MaybePositive: TypeAlias = Annotated[Positive | None, _EMPTY]
"""A number, or None where the cell is empty."""

REASONS = {
    "int_parsing": "is not a whole number",
    "float_parsing": "is not a number",
    "finite_number": "is not more than 0",
    "greater_than": "is not more than 0",
    "bool_parsing": "is neither true nor false",
}
"""Messages about a cell, by pydantic's kind of error."""


class MeasuredError(ValueError):
    """A table that is not what its name says: the message is one line."""


class NotModelledError(ValueError):
    """Why a row is not modelled, in one line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unmodelled:
    """A row that is not predicted, and why."""

    file: str
    row: int
    reason: str


class CsvRow(BaseModel):
    """A row of a table; columns without a field are not read."""

    model_config = ConfigDict(frozen=True, str_strip_whitespace=True)

    source: str


def must(be: Callable[[str], bool], fault: str) -> AfterValidator:
    """Return a validator of words; `fault` is what to say of others, {!r} being the word."""

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
        MeasuredError: columns are missing; all are named.
        NotModelledError: a cell is not what its column says; the first such column is named.
    """
    try:
        return model.model_validate(cells)
    except ValidationError as error:
        faults: list[Any] = list(error.errors(include_url=False))
    missing = [repr(fault["loc"][0]) for fault in faults if fault["type"] == "missing"]
    if missing:
        raise MeasuredError(f"{file}: no column {', '.join(missing)}")
    first = faults[0]
    if first["type"] == "value_error":  # of a validator of ours
        raise NotModelledError(str(first["ctx"]["error"]))
    reason = REASONS.get(first["type"], first["msg"])
    raise NotModelledError(f"{first['loc'][0]} {first['input']!r} {reason}")


def word(column: str, text: str, known: Mapping[str, Found]) -> Found:
    """Return what `known` has for the word in a cell.

    Raises:
        NotModelledError: it has nothing for it.
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
    """Return what `build` makes of the lines of `file`, and the lines of which it makes nothing.

    Args:
        file: the name of the table.
        rows: below the header, which is line 1.
        build: takes the number of a line, and its cells; may raise NotModelledError.
        check: the same of one of its results, which is then left out by itself.

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
