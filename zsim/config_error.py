"""What is wrong with a file that pydantic read, in our words: field, value, what is allowed."""

from collections.abc import Collection, Sequence
from difflib import get_close_matches
from types import UnionType
from typing import Annotated, Union, get_args, get_origin

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
    "int_parsing_size": "must be a whole number of fewer digits",
    "float_type": "must be a number",
    "finite_number": "must be a finite number",
    "bool_type": "must be true or false",
    "string_type": "must be a string",
    "string_pattern_mismatch": "must match {pattern}",
    "model_type": "must be a table",
    "dict_type": "must be a table",
    "tuple_type": "must be a list",
    "too_short": "must be a list of {min_length} or more",
    "too_long": "must be a list of at most {max_length}",
    "greater_than_equal": "must be at least {ge}",
    "greater_than": "must be more than {gt}",
    "less_than_equal": "must be at most {le}",
    "less_than": "must be less than {lt}",
    "enum": "must be {expected}",
    "literal_error": "must be {expected}",
    "value_error": "{error}",
}
"""pydantic's kinds of error in our words."""

FORMS = ("float_type", "dict_type")
"""What a value of several forms is not, each by itself: pydantic tells one error for each form."""

KEY = "[key]"
"""What pydantic puts behind a key that is itself wrong."""

Path = tuple[int | str, ...]


def line(errors: Sequence[ErrorDetails], root: type[BaseModel]) -> str:
    """Return the first of `errors` of a `root` in words, or all keys that are missing.

    An unknown key goes first: it explains what is missing.
    """
    strangers = [error for error in errors if error["type"] == "extra_forbidden"]
    if strangers:
        path, _ = _path(strangers[0], root)
        return f"{_field(path)}: {_unknown(path, root)}"
    first = errors[0]
    path, forms = _path(first, root)
    if forms is not None:  # of what is wrong with each form, what is furthest inside
        alike = [error for error in errors if _path(error, root)[0][:forms] == path[:forms]]
        depths = {id(error): len(_path(error, root)[0]) for error in alike}
        told = sorted(alike, key=lambda error: (-depths[id(error)], error["type"] in FORMS))
        first, (path, _) = told[0], _path(told[0], root)
        if first["type"] in FORMS and depths[id(first)] == forms:
            ways = [_wording(error).removeprefix("must be ") for error in told]
            return f"{_field(path)}: {shown(first['input'])} must be {' or '.join(ways)}"
    if not path:  # what stands for the whole
        return f"{shown(first['input'])} {_wording(first)}"
    if first["type"] == "missing" and isinstance(path[-1], int):
        return (
            f"{_field(path[:-1])}: {shown(first['input'])} must be a list of {path[-1] + 1} or more"
        )
    field = _field(path[:-2] if path[-1] == KEY else path)
    if first["type"] == "missing":
        missing = [_field(_path(each, root)[0]) for each in errors if each["type"] == "missing"]
        return f"{', '.join(missing)}: missing"
    given, wording = shown(first["input"]), _wording(first)
    if first["type"] == "tuple_type" and isinstance(first["input"], dict):
        wording = f"{wording} of tables, each under [[{field}]]"
    return f"{field}: {wording if wording.startswith(given) else f'{given} {wording}'}"


def _wording(error: ErrorDetails) -> str:
    bounds = {name: whole(bound) for name, bound in (error.get("ctx") or {}).items()}
    return WORDING.get(error["type"], error["msg"]).format_map(bounds)


def _field(path: Path) -> str:
    return ".".join(
        key if key.isidentifier() or key.isdecimal() else repr(key) for key in map(str, path)
    )


def _path(error: ErrorDetails, root: type[BaseModel]) -> tuple[Path, int | None]:
    """Where an error is, and how far down a value stands that may be of several forms.

    pydantic's own path has the name of a form behind such a value: that is left out.
    """
    found: list[int | str] = []
    forms: int | None = None
    hint: object = root
    for key in error["loc"]:
        kinds = _kinds(hint)
        if len(kinds) > 1:
            forms = len(found)
            hint = next((kind for kind in kinds if get_origin(kind) is dict), object)
        else:
            found.append(key)
            hint = _inside(kinds[0], key)
    return tuple(found), forms


def _kinds(hint: object) -> list[object]:
    """The types that a value may have, beside none."""
    bare = get_args(hint)[0] if get_origin(hint) is Annotated else hint
    if get_origin(bare) not in {Union, UnionType}:
        return [bare]
    return [kind for each in get_args(bare) if each is not type(None) for kind in _kinds(each)]


def _inside(kind: object, key: int | str) -> object:
    """The type of what stands under `key` in a value of type `kind`."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        field = kind.model_fields.get(str(key))
        return object if field is None else field.annotation
    inner = get_args(kind)
    return inner[-1 if get_origin(kind) is dict else 0] if inner else object


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


def _unknown(path: Path, root: type[BaseModel]) -> str:
    fields = _fields_at(path[:-1], root) or ()
    close = get_close_matches(str(path[-1]), fields, n=1)
    meant = f"did you mean {close[0]}? " if close else ""
    return f"unknown key; {meant}allowed: {', '.join(fields)}"


def _fields_at(path: Path, root: type[BaseModel]) -> Collection[str] | None:
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
