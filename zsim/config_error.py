"""Turn pydantic's validation errors into short messages: field, value, allowed values."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from enum import Enum
from types import UnionType
from typing import Annotated, Literal, Union, cast, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails, InitErrorDetails, PydanticCustomError


class ConfigError(ValueError):
    """A configuration with wrong values; `args` has a `WrongField` or string for each.

    `str()` joins them into one line.
    """

    def __str__(self) -> str:
        return joined([str(each) for each in self.args])


def whole(value: object) -> object:
    """Return a float without fraction as an int, because TOML integers cannot be written 7.5e9."""
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
    "string_pattern_mismatch": "must match {pattern}",
    "model_type": "must be a table",
    "dict_type": "must be a table",
    "tuple_type": "must be a list",
    "model_attributes_type": "must be a table",
    "union_tag_invalid": "must be {expected_tags}",
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
"""Message for each of pydantic's error types."""

FORMS = ("float_type", "dict_type", "bool_type", "int_type")
"""Error types of a value that may have several types: pydantic reports one error for each type."""

KEY = "[key]"
"""Last element of pydantic's path if the key, not the value, is wrong."""

CONTRADICTION = "contradiction"
"""Error type of the errors made by `refusal`."""

Path = tuple[int | str, ...]


@dataclass(frozen=True, slots=True)
class WrongField:
    """A wrong field (empty for the whole file), with its value and the rule it breaks."""

    field: str
    why: str

    def __str__(self) -> str:
        return f"{self.field}: {self.why}" if self.field else self.why


MOST_SHOWN = 8
"""Maximum number of errors of a file in one message; the others are only counted."""


def line(errors: Sequence[ErrorDetails], root: type[BaseModel]) -> str:
    """Return `errors` of a `root` as one line."""
    return joined([str(each) for each in wrong_fields(errors, root)])


def joined(messages: Sequence[str]) -> str:
    """Join several messages into one line."""
    rest = len(messages) - MOST_SHOWN
    return "; also ".join(messages[:MOST_SHOWN]) + (f"; and {rest} more" if rest > 0 else "")


def wrong_fields(errors: Sequence[ErrorDetails], root: type[BaseModel]) -> list[WrongField]:
    """Return a message for each wrong field of a `root`.

    Unknown keys come first, since a misspelt key may explain a missing one. All missing keys share
    one message, the last.
    """
    strangers: list[WrongField] = []
    missing: list[str] = []
    groups: dict[Path, list[_Located]] = {}
    located = [_located(error, root) for error in errors]
    wrong_keys = {at.path[:-1] for at in located if at.path and at.path[-1] == KEY}
    for at in located:
        if any(at.path[: len(key)] == key and at.path[-1] != KEY for key in wrong_keys):
            continue  # the key above it is wrong already
        if at.kind == "extra_forbidden":
            *above, key = at.path
            meant = _elsewhere(key, root) if len(above) <= 1 else ""
            strangers.append(WrongField(_field(at.path), _unknown(key, at.fields, meant)))
        elif at.kind == "missing" and at.path and isinstance(at.path[-1], str):
            missing.append(_field(at.path))
        elif at.kind == "union_tag_not_found":
            missing.append(_field((*at.path, _tag(at.error))))
        else:
            groups.setdefault(at.path[: at.forms], []).append(at)
    messages = strangers + [_wrong_field(path, group) for path, group in groups.items()]
    return [*messages, WrongField(", ".join(missing), "missing")] if missing else messages


@dataclass(frozen=True, slots=True)
class _Located:
    """An error with the path of its field as a user writes it.

    Attributes:
        forms: length of the path of the value that may have several types; None if there is none.
        fields: allowed keys of the table that holds the last key of the path.
    """

    error: ErrorDetails
    path: Path
    forms: int | None
    fields: Collection[str]

    @property
    def kind(self) -> str:
        return self.error["type"]


def _wrong_field(path: Path, group: Sequence[_Located]) -> WrongField:
    """Return one message for a value, from the errors that pydantic reports for each type."""
    if group[0].kind == CONTRADICTION:
        return WrongField(_field(path), group[0].error["msg"])
    if group[0].kind == "union_tag_invalid":
        context = group[0].error.get("ctx") or {}
        why = f"{shown(context['tag'])} {_wording(group[0].error)}"
        return WrongField(_field((*path, _tag(group[0].error))), why)
    depths = [len(each.path) for each in group]
    deepest = [each for each in group if len(each.path) == max(depths)]
    first = min(deepest, key=lambda each: each.kind in FORMS)  # the innermost error
    given, wording = shown(first.error["input"]), _wording(first.error)
    if len(group) > 1 and first.kind in FORMS and first.path == path:
        ways = [_wording(each.error).removeprefix("must be ") for each in deepest]
        wording = f"must be {' or '.join(ways)}"
    if first.kind == "missing":  # an item of a list
        last = cast("int", first.path[-1])
        return WrongField(_field(first.path[:-1]), f"{given} must be a list of {last + 1} or more")
    field = _field(first.path[:-2] if first.path and first.path[-1] == KEY else first.path)
    if first.kind == "tuple_type" and isinstance(first.error["input"], dict):
        wording = f"{wording} of tables, each under [[{field}]]"
    return WrongField(field, wording if wording.startswith(given) else f"{given} {wording}")


def _tag(error: ErrorDetails) -> str:
    """Return the key that selects the kind of a table (pydantic's discriminator)."""
    return str((error.get("ctx") or {})["discriminator"]).strip("'")


def _wording(error: ErrorDetails) -> str:
    if error["type"] not in WORDING:
        return error["msg"]
    bounds = {name: whole(bound) for name, bound in (error.get("ctx") or {}).items()}
    return WORDING[error["type"]].format_map(bounds)


def _field(path: Path) -> str:
    return ".".join(
        key if key.isidentifier() or key.isdecimal() else repr(key) for key in map(str, path)
    )


def _located(error: ErrorDetails, root: type[BaseModel]) -> _Located:
    """Return `error` with the path that a user would write.

    pydantic's path also contains the name of the type after a value of several types, and the tag
    of a table of several kinds. Both are removed.
    """
    found: list[int | str] = []
    forms: int | None = None
    fields: Collection[str] = ()
    hint: object = root
    for key in error["loc"]:
        kinds = _kinds(hint)
        if len(kinds) == 1:
            found.append(key)
            fields = _fields_of(kinds[0])
            hint = _inside(kinds[0], key)
            continue
        tagged = next((kind for kind in kinds if _has_tag(kind, key)), None)
        if tagged is None:
            forms = len(found)
        hint = tagged or next((kind for kind in kinds if get_origin(kind) is dict), object)
    return _Located(error, tuple(found), forms, fields)


def _has_tag(kind: object, tag: int | str) -> bool:
    """Return True if `tag` is the discriminator value of the model class `kind`."""
    fields = kind.model_fields if isinstance(kind, type) and issubclass(kind, BaseModel) else {}
    words = (field.annotation for field in fields.values())
    return any(get_origin(each) is Literal and tag in get_args(each) for each in words)


def _fields_of(kind: object) -> Collection[str]:
    return kind.model_fields if isinstance(kind, type) and issubclass(kind, BaseModel) else ()


def _kinds(hint: object) -> list[object]:
    """Return the types that a value may have, without None."""
    bare = get_args(hint)[0] if get_origin(hint) is Annotated else hint
    if get_origin(bare) not in {Union, UnionType}:
        return [bare]
    return [kind for each in get_args(bare) if each is not type(None) for kind in _kinds(each)]


def _inside(kind: object, key: int | str) -> object:
    """Return the type of the value under `key` in a value of type `kind`."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        field = kind.model_fields.get(str(key))
        return object if field is None else field.annotation
    inner = get_args(kind)
    return inner[-1 if get_origin(kind) is dict else 0] if inner else object


def unknown(name: str, root: type[BaseModel]) -> str | None:
    """Return a message if a `root` has no field `name` (such as `zero.stage`), else None."""
    hint: object = root
    path = name.split(".")
    for depth, key in enumerate(path):
        inside = list(_flat(hint))
        if any(get_origin(kind) is dict for kind in inside):
            return None
        fields = {each: kind for kind in inside for each in _fields_of(kind)}
        if key not in fields:
            meant = _elsewhere(key, root) if depth <= 1 else ""
            return f"{'.'.join(path[: depth + 1])}: {_unknown(key, fields, meant)}"
        hint = _inside(fields[key], key)
    return None


def _flat(hint: object) -> Iterator[object]:
    """Yield a type and, recursively, its type arguments."""
    yield hint
    for each in get_args(hint):
        yield from _flat(each)


def _unknown(key: int | str, fields: Collection[str], elsewhere: str = "") -> str:
    """Return a message for an unknown key: a similar key first, then all allowed keys.

    `elsewhere` is a field of the same name in another table, or "".
    """
    close = [elsewhere] if elsewhere else get_close_matches(str(key), fields, n=1)
    meant = f"did you mean {close[0]}? " if close else ""
    return f"unknown key; {meant}allowed: {', '.join(fields)}"


def _elsewhere(key: int | str, root: type[BaseModel]) -> str:
    """Return the field of a table of `root` that is called `key`, such as `zero.stage`; else ""."""
    for name, field in root.model_fields.items():
        if any(str(key) in _fields_of(kind) for kind in _flat(field.annotation)):
            return f"{name}.{key}"
    return ""


def refusal(field: str, value: object, why: str) -> InitErrorDetails:
    """Return an error for a field (such as `zero.stage`) that contradicts other fields.

    The message is the value followed by `why`, or `why` alone if `value` is None.
    """
    messages = why if value is None else f"{shown(value)} {why}"
    kind = PydanticCustomError(CONTRADICTION, "{told}", {"told": messages})
    return InitErrorDetails(type=kind, loc=tuple(field.split(".")), input=value)


def refuse(found: Sequence[InitErrorDetails]) -> None:
    """Raise the errors in `found`, if any. For use in a pydantic validator.

    Raises:
        ValidationError: `found` is not empty.
    """
    if found:
        raise ValidationError.from_exception_data("", list(found))


def shown(value: object) -> str:
    """Return a value as TOML writes it, and None as JSON does, at most 60 characters long."""
    if isinstance(value, dict | BaseModel):
        return "a table"
    value = whole(value.value if isinstance(value, Enum) else value)
    names = {True: "true", False: "false", None: "null"}
    text = names[value] if value is None or isinstance(value, bool) else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def bare(value: object) -> str:
    """Return a value as TOML writes it, but words without quotes."""
    return value if isinstance(value, str) else shown(value)
