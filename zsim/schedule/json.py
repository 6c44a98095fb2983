"""Convert frozen structs, dataclasses and tables to plain JSON values and back, by declared types.

A field that may hold several classes carries `"type": CLASS`. A class with a custom format has
`as_json()` and `from_json(value)`, which raises ValueError. A field with an empty value is omitted
if its default is empty too, and a field in `omitted_defaults` of its class at its default. Floats
are exact; infinity and NaN, which JSON does not have, are strings.
"""

import json
import math
import re
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields, is_dataclass
from datetime import date
from difflib import get_close_matches
from enum import Enum
from fractions import Fraction
from functools import cache, partial
from types import NoneType, UnionType
from typing import Any, Union, cast, get_args, get_origin, get_type_hints

from msgspec import NODEFAULT, Struct

from zsim.strategy.config_table import Table

TAG = "type"
Hint = Any
"""A type annotation: classes, `tuple[int, ...]` and `A | B` have no common type."""

NOT_FINITE = ("inf", "-inf", "nan")


class FieldError(ValueError):
    """Raised for an invalid value; `path` leads to the value from the outermost container."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why
        self.path: list[str | int] = []

    def under(self, key: str | int) -> "FieldError":
        """Return this error with `key`, the value's place in its container, added to the path."""
        self.path.insert(0, key)
        return self

    def __str__(self) -> str:
        path = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in self.path)
        return f"{path.removeprefix('.')}: {self.why}" if path else self.why


@dataclass(frozen=True, slots=True)
class Codec:
    """Encoder and decoder of one type; `decode` raises `FieldError`."""

    encode: Callable[[Any], Any]
    decode: Callable[[Any], Any]


def encode_value(value: object, hint: object) -> object:
    """Return `value`, of type `hint`, as JSON values."""
    return codec_of(hint).encode(value)


def decode_value(value: object, hint: object) -> object:
    """Return the value of type `hint` from which `encode_value` made `value`.

    Raises:
        FieldError: `value` does not fit `hint`; the error names the path inside.
    """
    return codec_of(hint).decode(value)


@cache
def codec_of(hint: Hint) -> Codec:
    """Return the codec of a type: scalars, enums, dataclasses, tables, tuples and unions of them.

    Raises:
        TypeError: the type has no JSON form.
    """
    if hint in _SCALARS:
        return _scalar(hint)
    if hint is Fraction:
        return Codec(str, _decode_fraction)
    if hint is date:
        return Codec(date.isoformat, _decode_date)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return _enum(hint)
    if isinstance(hint, type) and hasattr(hint, "from_json"):
        return Codec(lambda value: value.as_json(), partial(_from_json, hint))
    if len(kinds := _kinds(hint)) > 1:
        return _union(kinds)
    if _is_record(hint):
        return _record(hint)
    if _is_tuple(hint):
        return _tuple(get_args(hint))
    origin: Hint = get_origin(hint)
    if origin in (Union, UnionType):
        return _union(tuple(kind for each in get_args(hint) for kind in _kinds(each)))
    raise TypeError(f"no JSON form for {hint}")


def _from_json(kind: Hint, value: object) -> object:
    try:
        return kind.from_json(value)
    except ValueError as error:
        raise FieldError(str(error)) from None


def shown(value: object) -> str:
    """Return a JSON value as text for an error message: short, on one line."""
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return "a list"
    text = json.dumps(value, default=str)  # TOML has dates, which JSON has not
    return text if len(text) <= 60 else f"{text[:57]}..."


_SCALARS = {
    str: "a string",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    NoneType: "null",
}


def _scalar(kind: type) -> Codec:
    if kind is float:
        return Codec(_encode_float, _decode_float)

    def decode(value: object) -> object:
        if type(value) is not kind:
            raise FieldError(f"{shown(value)} must be {_SCALARS[kind]}")
        if type(value) is int and not -(2**63) <= value < 2**63:
            raise FieldError(f"{shown(value)} must have at most 64 bits")
        return value

    return Codec(lambda value: value, decode)


def _encode_float(value: float) -> float | str:
    return value if math.isfinite(value) else str(float(value))


def _decode_float(value: object) -> float:
    if type(value) is float or (type(value) is int and abs(value) <= 2**53):
        return float(value)
    if isinstance(value, str) and value in NOT_FINITE:
        return float(value)
    raise FieldError(f"{shown(value)} must be a number")


_FRACTION = re.compile(r"-?[0-9]+(/[0-9]+)?")
"""Accepted text of a fraction; no exponent, since a large one could take hours to compute."""


def _decode_fraction(value: object) -> Fraction:
    try:
        if isinstance(value, str) and _FRACTION.fullmatch(value):
            return Fraction(value)
    except (ValueError, ZeroDivisionError):
        pass
    raise FieldError(f'{shown(value)} must be a fraction such as "3/2"')


def _decode_date(value: object) -> date:
    try:
        if isinstance(value, str):
            return date.fromisoformat(value)
    except ValueError:
        pass
    raise FieldError(f'{shown(value)} must be a date such as "2026-01-31"')


def _enum(*kinds: type[Enum]) -> Codec:
    """Return the codec of a member of one of some enumerations without common values."""
    members = {member.value: member for kind in kinds for member in kind}

    def decode(value: object) -> Enum:
        if isinstance(value, str) and value in members:
            return members[value]
        raise FieldError(f"{shown(value)} must be one of {', '.join(members)}")

    return Codec(lambda member: member.value, decode)


def _tuple(items: tuple[Any, ...]) -> Codec:
    variadic = len(items) == 2 and items[1] is Ellipsis
    inner = [codec_of(item) for item in (items[:1] if variadic else items)]

    def encode(value: tuple[Any, ...]) -> list[Any]:
        codecs = inner * len(value) if variadic else inner
        return [codec.encode(item) for codec, item in zip(codecs, value, strict=True)]

    def decode(value: object) -> tuple[Any, ...]:
        if not isinstance(value, list):
            raise FieldError(f"{shown(value)} must be a list")
        given = cast("list[object]", value)
        codecs = inner * len(given) if variadic else inner
        if len(codecs) != len(given):
            raise FieldError(f"{len(given)} items, must be {len(codecs)}")
        decoded: list[object] = []
        try:
            for codec, item in zip(codecs, given, strict=True):
                decoded.append(codec.decode(item))
        except FieldError as error:
            raise error.under(len(decoded)) from None
        return tuple(decoded)

    return Codec(encode, decode)


def _union(kinds: tuple[Any, ...]) -> Codec:
    """Return the codec of a union: the JSON type selects plain types, the tag selects classes."""
    plain = [kind for kind in kinds if not _is_record(kind)]
    enums = [kind for kind in plain if isinstance(kind, type) and issubclass(kind, Enum)]
    members = _enum(*enums)
    if len(enums) == len(kinds):
        return members
    classes: dict[str, Hint] = {_class_name(kind): kind for kind in kinds if _is_record(kind)}
    if len(classes) == 1 and set(plain) == {NoneType}:
        (only,) = classes.values()
        record = codec_of(only)
        return Codec(
            lambda value: None if value is None else record.encode(value),
            lambda value: None if value is None else record.decode(value),
        )

    def encode(value: object) -> object:
        name = type(value).__name__
        if name in classes:
            return {TAG: name, **codec_of(classes[name]).encode(value)}
        for kind in plain:
            if _fits(value, kind):
                return codec_of(kind).encode(value)
        raise TypeError(f"{value!r} is none of {kinds}")

    def decode(value: object) -> object:
        if isinstance(value, dict) and classes:
            given = dict(cast("dict[str, object]", value))
            if TAG not in given:
                raise FieldError(f"missing; must be one of {', '.join(classes)}").under(TAG)
            name = given.pop(TAG)
            if not isinstance(name, str) or name not in classes:
                why = f"{shown(name)} must be one of {', '.join(classes)}"
                raise FieldError(why).under(TAG)
            return codec_of(classes[name]).decode(given)
        if len(enums) > 1 and isinstance(value, str) and str not in plain:
            return members.decode(value)
        for kind in plain:
            if _fits(value, kind):
                return codec_of(kind).decode(value)
        allowed = [_named(kind) for kind in plain] + ([f"an object with {TAG}"] if classes else [])
        raise FieldError(f"{shown(value)} must be {' or '.join(allowed)}")

    return Codec(encode, decode)


def _kinds(hint: Hint) -> tuple[Hint, ...]:
    """Return the classes that a base class represents if it lists them, else the type itself."""
    return tuple(hint.kinds()) if "kinds" in getattr(hint, "__dict__", ()) else (hint,)


def _fits(value: object, kind: Hint) -> bool:
    """Return True if `value`, decoded or not, can only be the member `kind` of a union."""
    if kind is float:
        return type(value) in (int, float) or value in NOT_FINITE
    if _is_tuple(kind):
        return isinstance(value, list | tuple)
    if issubclass(kind, Enum):
        return isinstance(value, str)
    return type(value) is kind


def _is_tuple(kind: Hint) -> bool:
    origin: Hint = get_origin(kind)
    return origin is tuple


def _class_name(kind: Hint) -> str:
    return str(kind.__name__)


def _named(kind: Hint) -> str:
    return _SCALARS.get(kind) or ("a list" if _is_tuple(kind) else _class_name(kind))


@dataclass(frozen=True, slots=True)
class _Slot:
    """One field of a record."""

    name: str
    codec: Codec
    required: bool
    omitted: object
    """The default if it is empty: a value equal to it is not written. Otherwise MISSING."""


def _is_record(kind: Hint) -> bool:
    return isinstance(kind, type) and (is_dataclass(kind) or issubclass(kind, Struct | Table))


def _fields(kind: Any) -> dict[str, tuple[bool, object]]:  # noqa: ANN401 (a class of either sort)
    """Return (required, default) of each field of a record by name; MISSING means no default."""
    if issubclass(kind, Table):
        return {
            name: (field.is_required(), MISSING if field.is_required() else field.default)
            for name, field in kind.model_fields.items()
        }
    if issubclass(kind, Struct):
        last = getattr(kind, "written_last", ())
        defaults = _defaults(kind)
        return {
            name: (defaults[name] is MISSING, defaults[name])
            for name in sorted(kind.__struct_fields__, key=lambda name: name in last)
        }
    return {
        field.name: (
            field.default is MISSING and field.default_factory is MISSING,
            field.default,
        )
        for field in fields(kind)
        if field.init
    }


def _defaults(kind: type[Struct]) -> dict[str, object]:
    """Return the default of each field of a struct; MISSING means none."""
    names, defaults = kind.__struct_fields__, kind.__struct_defaults__
    given = (*[NODEFAULT] * (len(names) - len(defaults)), *defaults)
    return {
        name: MISSING if default is NODEFAULT else default
        for name, default in zip(names, given, strict=True)
    }


def _slot(name: str, hint: Hint, *, required: bool, default: object, omits: bool = False) -> _Slot:
    empty = omits or default is None or default is False or default in ((), "")
    return _Slot(
        name=name,
        codec=codec_of(hint),
        required=required,
        omitted=default if empty else MISSING,
    )


def _record(kind: type) -> Codec:
    @cache
    def slots() -> tuple[_Slot, ...]:  # at first use, since Branch holds operations
        hints, omitted = get_type_hints(kind), getattr(kind, "omitted_defaults", ())
        return tuple(
            _slot(name, hints[name], required=required, default=default, omits=name in omitted)
            for name, (required, default) in _fields(kind).items()
        )

    def encode(value: object) -> dict[str, object]:
        made: dict[str, object] = {}
        for slot in slots():
            item = getattr(value, slot.name)
            if slot.omitted is MISSING or item != slot.omitted:
                made[slot.name] = slot.codec.encode(item)
        return made

    def decode(value: object) -> object:
        if not isinstance(value, dict):
            raise FieldError(f"{shown(value)} must be an object: {kind.__name__}")
        given = cast("dict[str, object]", value)
        decoded: dict[str, object] = {}
        for slot in slots():
            if slot.name in given:
                try:
                    decoded[slot.name] = slot.codec.decode(given[slot.name])
                except FieldError as error:
                    raise error.under(slot.name) from None
            elif slot.required:
                _refuse_unknown(kind, given)
                raise FieldError("missing").under(slot.name)
        if len(decoded) != len(given):
            _refuse_unknown(kind, given)
        try:
            return kind(**decoded)
        except ValueError as error:
            raise FieldError(str(error)) from None

    return Codec(encode, decode)


def _refuse_unknown(kind: type, given: dict[str, object]) -> None:
    names = list(_fields(kind))
    for key in given:
        if key not in names:
            close = get_close_matches(key, names, n=1)
            meant = f"did you mean {close[0]}? " if close else ""
            why = f"unknown key; {meant}{kind.__name__} has {', '.join(names)}"
            raise FieldError(why).under(key if key.isidentifier() else repr(key))
