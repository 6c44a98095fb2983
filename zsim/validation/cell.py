"""Cells of a table of published runs, read; what cannot be used is why its row is not modelled."""

from collections.abc import Mapping
from math import isfinite
from typing import TypeVar

Row = Mapping[str, str]

Found = TypeVar("Found")


class NotModelledError(ValueError):
    """Why a row is not modelled, in one line."""


def number(row: Row, column: str) -> float | None:
    """The number in a cell; None if the cell is empty.

    Raises:
        NotModelledError: it is no number, or is not more than 0.
        KeyError: there is no such column.
    """
    text = row[column].strip()
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        raise NotModelledError(f"{column} {text!r} is not a number") from None
    if not isfinite(value) or value <= 0:
        raise NotModelledError(f"{column} {text!r} is not more than 0")
    return value


def whole(row: Row, column: str) -> int:
    """The whole number in a cell.

    Raises:
        NotModelledError: there is none.
        KeyError: there is no such column.
    """
    value = number(row, column)
    if value is None or value != int(value):
        raise NotModelledError(f"{column} {row[column]!r} is not a whole number")
    return int(value)


def flag(row: Row, column: str) -> bool:
    """Whether a cell says so.

    Raises:
        NotModelledError: it says neither.
        KeyError: there is no such column.
    """
    text = row[column].strip().lower()
    known = {"true": True, "y": True, "yes": True, "false": False, "n": False, "no": False}
    if text not in known:
        raise NotModelledError(f"{column} {row[column]!r} is neither true nor false")
    return known[text]


def word(row: Row, column: str, known: Mapping[str, Found]) -> Found:
    """What `known` has for the word in a cell.

    Raises:
        NotModelledError: it has nothing for it.
        KeyError: there is no such column.
    """
    text = row[column].strip()
    if text not in known:
        raise NotModelledError(f"{column} {text!r} is not one of {', '.join(known)}")
    return known[text]
