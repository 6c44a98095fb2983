"""Errors of files that pydantic reads, in plain words: field, value, what is allowed."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from enum import Enum
from types import UnionType
from typing import Annotated, Literal, Union, cast, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails, InitErrorDetails, PydanticCustomError


class ConfigError(ValueError):
    """Values of a configuration that cannot be: for each a line with field, value, what is allowed.

    As text it is one line.
    """

    def __str__(self) -> str:
        return joined([str(each) for each in self.args])


def whole(value: object) -> object:
    """Return 7.5e9 as a whole number: TOML has no other short way to write it."""
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
"""pydantic's kinds of error in our words."""

FORMS = ("float_type", "dict_type", "bool_type", "int_type")
"""What a value of several forms is not, each by itself: pydantic tells one error for each form."""

KEY = "[key]"
"""What pydantic puts behind a key that is itself wrong."""

CONTRADICTION = "contradiction"
"""Kind of the errors of `refusal`."""

Path = tuple[int | str, ...]


@dataclass(frozen=True, slots=True)
class WrongField:
    """One thing that is wrong: the field, if it is not the whole, and its value with the rule."""

    field: str
    why: str

    def __str__(self) -> str:
        return f"{self.field}: {self.why}" if self.field else self.why


MOST_TOLD = 8
"""So many things that are wrong with a file are told in one line; of the others, how many."""


def line(errors: Sequence[ErrorDetails], root: type[BaseModel]) -> str:
    """Return all that is wrong with a `root` in one line."""
    return joined([str(each) for each in wrong_fields(errors, root)])


def joined(told: Sequence[str]) -> str:
    """Return several things that are wrong as one line."""
    rest = len(told) - MOST_TOLD
    return "; also ".join(told[:MOST_TOLD]) + (f"; and {rest} more" if rest > 0 else "")


def wrong_fields(errors: Sequence[ErrorDetails], root: type[BaseModel]) -> list[WrongField]:
    """Return what each of `errors` of a `root` says in words.

    Unknown keys go first, since one may explain a key that is missing; those are told as one.
    """
    strangers: list[WrongField] = []
    missing: list[str] = []
    groups: dict[Path, list[_Located]] = {}
    located = [_located(error, root) for error in errors]
    wrong_keys = {at.path[:-1] for at in located if at.path and at.path[-1] == KEY}
    for at in located:
        if any(at.path[: len(key)] == key and at.path[-1] != KEY for key in wrong_keys):
            continue  # it stands under a key that is wrong itself
        if at.kind == "extra_forbidden":
            meant = _elsewhere(at.path[-1], root) if len(at.path) == 1 else ""
            strangers.append(WrongField(_field(at.path), _unknown(at.path[-1], at.fields, meant)))
        elif at.kind == "missing" and at.path and isinstance(at.path[-1], str):
            missing.append(_field(at.path))
        elif at.kind == "union_tag_not_found":
            missing.append(_field((*at.path, _tag(at.error))))
        else:
            groups.setdefault(at.path[: at.forms], []).append(at)
    told = strangers + [_told(path, group) for path, group in groups.items()]
    return [*told, WrongField(", ".join(missing), "missing")] if missing else told


@dataclass(frozen=True, slots=True)
class _Located:
    """An error, its path, and how far down a value stands that may be of several forms.

    `fields` are those of the table that the last key of the path is in.
    """

    error: ErrorDetails
    path: Path
    forms: int | None
    fields: Collection[str]

    @property
    def kind(self) -> str:
        return self.error["type"]


def _told(path: Path, group: Sequence[_Located]) -> WrongField:
    """Return what is wrong with one value; pydantic tells of each form that it may have."""
    if group[0].kind == CONTRADICTION:
        return WrongField(_field(path), group[0].error["msg"])
    if group[0].kind == "union_tag_invalid":
        context = group[0].error.get("ctx") or {}
        why = f"{shown(context['tag'])} {_wording(group[0].error)}"
        return WrongField(_field((*path, _tag(group[0].error))), why)
    depths = [len(each.path) for each in group]
    deepest = [each for each in group if len(each.path) == max(depths)]
    first = min(deepest, key=lambda each: each.kind in FORMS)  # what is furthest inside
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
    """Return the key whose word says of which kind a table is."""
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
    """Return where an error is.

    pydantic's own path has the name of a form behind a value that may be of several, and the tag
    of a table of several kinds: those are left out.
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
    """Return whether a table says with the word `tag` that it is of this kind."""
    fields = kind.model_fields if isinstance(kind, type) and issubclass(kind, BaseModel) else {}
    words = (field.annotation for field in fields.values())
    return any(get_origin(each) is Literal and tag in get_args(each) for each in words)


def _fields_of(kind: object) -> Collection[str]:
    return kind.model_fields if isinstance(kind, type) and issubclass(kind, BaseModel) else ()


def _kinds(hint: object) -> list[object]:
    """Return the types that a value may have, beside none."""
    bare = get_args(hint)[0] if get_origin(hint) is Annotated else hint
    if get_origin(bare) not in {Union, UnionType}:
        return [bare]
    return [kind for each in get_args(bare) if each is not type(None) for kind in _kinds(each)]


def _inside(kind: object, key: int | str) -> object:
    """Return the type of what stands under `key` in a value of type `kind`."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        field = kind.model_fields.get(str(key))
        return object if field is None else field.annotation
    inner = get_args(kind)
    return inner[-1 if get_origin(kind) is dict else 0] if inner else object


def unknown(name: str, root: type[BaseModel]) -> str | None:
    """Return why a `root` has no field `name` (`zero.stage`), in one line; None if it has."""
    hint: object = root
    path = name.split(".")
    for depth, key in enumerate(path):
        inside = list(_flat(hint))
        if any(get_origin(kind) is dict for kind in inside):
            return None
        fields = {each: kind for kind in inside for each in _fields_of(kind)}
        if key not in fields:
            meant = "" if depth else _elsewhere(key, root)
            return f"{'.'.join(path[: depth + 1])}: {_unknown(key, fields, meant)}"
        hint = _inside(fields[key], key)
    return None


def _flat(hint: object) -> Iterator[object]:
    """Yield a type and those that it is put together from."""
    yield hint
    for each in get_args(hint):
        yield from _flat(each)


def _unknown(key: int | str, fields: Collection[str], elsewhere: str = "") -> str:
    """Return why a key is unknown, with a close key first; `elsewhere` is one of another table."""
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
    """Return the error of a field (`zero.stage`), inside what is validated, that others contradict.

    The line about it is the value and `why`; without a value, which is None then, `why` alone.
    """
    told = why if value is None else f"{shown(value)} {why}"
    kind = PydanticCustomError(CONTRADICTION, "{told}", {"told": told})
    return InitErrorDetails(type=kind, loc=tuple(field.split(".")), input=value)


def refuse(found: Sequence[InitErrorDetails]) -> None:
    """Return if nothing was found; for use in a validator of pydantic.

    Raises:
        ValidationError: something was.
    """
    if found:
        raise ValidationError.from_exception_data("", list(found))


def shown(value: object) -> str:
    """Return a value as TOML writes it, and None as JSON does, short enough for one line."""
    if isinstance(value, dict | BaseModel):
        return "a table"
    value = whole(value.value if isinstance(value, Enum) else value)
    names = {True: "true", False: "false", None: "null"}
    text = names[value] if value is None or isinstance(value, bool) else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def bare(value: object) -> str:
    """Return a value as TOML writes it, but words without quotes."""
    return value if isinstance(value, str) else shown(value)
