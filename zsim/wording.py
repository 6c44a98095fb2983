"""What is wrong with a file that pydantic read, in our words: field, value, what is allowed."""

from collections.abc import Collection
from difflib import get_close_matches
from typing import get_args, get_origin

from pydantic import BaseModel
from pydantic_core import ErrorDetails


def whole(value: object) -> object:
    """7.5e9 is a whole number: TOML has no other short way to write it."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value


WORDING = {
    "missing": "missing",
    "int_type": "must be a whole number",
    "float_type": "must be a number",
    "finite_number": "must be a finite number",
    "bool_type": "must be true or false",
    "string_type": "must be a string",
    "model_type": "must be a table",
    "greater_than_equal": "must be at least {ge}",
    "greater_than": "must be more than {gt}",
    "less_than_equal": "must be at most {le}",
    "less_than": "must be less than {lt}",
    "enum": "must be {expected}",
    "literal_error": "must be {expected}",
    "value_error": "{error}",
}
"""pydantic's kinds of error in our words."""


def line(errors: list[ErrorDetails], root: type[BaseModel]) -> str:
    """The first of `errors` of a `root`; an unknown key goes first: it explains what is missing."""
    strangers = [error for error in errors if error["type"] == "extra_forbidden"]
    error = (strangers or errors)[0]
    path = error["loc"]
    field = ".".join(
        key if key.isidentifier() or key.isdecimal() else repr(key) for key in map(str, path)
    )
    if strangers:
        return f"{field}: {_unknown(path, root)}"
    bounds = {name: whole(bound) for name, bound in (error.get("ctx") or {}).items()}
    wording = WORDING.get(error["type"], error["msg"]).format_map(bounds)
    if error["type"] == "missing":
        return f"{field}: {wording}"
    return f"{field}: {shown(error['input'])} {wording}"


def unknown(name: str, root: type[BaseModel]) -> str | None:
    """Why a `root` has no field `name` (`zero.stage`), in one line; None if it has."""
    path = tuple(name.split("."))
    for depth, key in enumerate(path):
        fields = _fields_at(path[:depth], root)
        if fields is None:
            return None
        if key not in fields:
            return f"{'.'.join(path[: depth + 1])}: {_unknown(path[: depth + 1], root)}"
    return None


def _unknown(path: tuple[int | str, ...], root: type[BaseModel]) -> str:
    fields = _fields_at(path[:-1], root) or ()
    close = get_close_matches(str(path[-1]), fields, n=1)
    meant = f"did you mean {close[0]}? " if close else ""
    return f"unknown key; {meant}allowed: {', '.join(fields)}"


def _fields_at(path: tuple[int | str, ...], root: type[BaseModel]) -> Collection[str] | None:
    """Fields of the table at `path`; none of a value, None of a table with any keys."""
    table: type[BaseModel] = root
    for name in path:
        if isinstance(name, int):
            continue
        found = table.model_fields[name].annotation
        kinds = (*get_args(found), found)
        if any(get_origin(kind) is dict for kind in kinds):
            return None
        tables = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)]
        if not tables:
            return ()
        table = tables[0]
    return table.model_fields


def shown(value: object) -> str:
    """A value as TOML writes it, short enough for one line."""
    if isinstance(value, dict):
        return "a table"
    value = whole(value)
    text = {True: "true", False: "false"}[value] if isinstance(value, bool) else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
