"""Frozen dataclasses that are as fast to construct as others.

The `__init__` of a frozen dataclass stores each field by a call of `object.__setattr__`, which is
most of its cost: a schedule of a trillion parameters has 60,000 such objects.
"""

from collections.abc import Callable, Sequence
from dataclasses import MISSING, fields
from typing import Any, TypeVar

Made = TypeVar("Made")


FEW = 4
"""Up to this number of fields, storing each by its slot is faster than changing the class."""

_SET_CLASS = object.__dict__["__class__"].__set__


def quick_init(kind: type[Made]) -> type[Made]:
    """Replace the `__init__` of a frozen dataclass with slots by one that is twice as fast.

    It writes to slots directly. With more than `FEW` fields, the object has a class with the same
    slots that is not frozen while they are set.

    Raises:
        TypeError: a field is not an argument, or has a default factory.
    """
    name = kind.__name__
    known: dict[str, Any] = {"_set_class": _SET_CLASS, "_open": _opened(kind), "_kind": kind}
    by_place: list[str] = []
    by_name: list[str] = []
    stored: list[str] = []
    every = fields(kind)  # type: ignore[arg-type]
    for field in every:
        if not field.init or field.default_factory is not MISSING:
            raise TypeError(f"{name}.{field.name}: only fields that are given, or have one default")
        default = "" if field.default is MISSING else f"=_default_{field.name}"
        known[f"_default_{field.name}"] = field.default
        known[f"_set_{field.name}"] = getattr(kind, field.name).__set__
        (by_name if field.kw_only else by_place).append(field.name + default)
        by_slot = f"_set_{field.name}(self, {field.name})"
        opened = f"self.{field.name} = {field.name}"
        stored.append(f"  {by_slot if len(every) <= FEW else opened}")
    if len(every) > FEW:
        stored = ["  _set_class(self, _open)", *stored, "  self.__class__ = _kind"]
    taken = ["self", *by_place, *(["*", *by_name] if by_name else [])]
    checks = ["  self.__post_init__()"] if hasattr(kind, "__post_init__") else []
    lines = [f"def __init__({', '.join(taken)}):", *stored, *checks]
    exec("\n".join(lines), known)  # as dataclasses do
    made = known["__init__"]
    made.__qualname__ = f"{kind.__qualname__}.__init__"
    made.__annotations__ = kind.__init__.__annotations__
    type.__setattr__(kind, "__init__", made)
    return kind


def quick_maker(kind: type[Made]) -> Callable[..., Made]:
    """Return a function that creates objects of a class with `quick_init` from all fields in order.

    It needs a third of the time, for places that create a hundred thousand objects.
    """
    names = [field.name for field in fields(kind)]  # type: ignore[arg-type]
    return _maker(kind, names, [f"  self.{name} = {name}" for name in names])


def quick_replacer(kind: type[Made], *names: str) -> Callable[..., Made]:
    """Return a function that copies an object of a frozen class with slots, with other fields.

    Its arguments are the object, then the fields `names` in order. `dataclasses.replace`, which
    looks up the fields on each call, is ten times as slow.

    Raises:
        TypeError: the class has no such field.
    """
    every = [field.name for field in fields(kind)]  # type: ignore[arg-type]
    if unknown := set(names).difference(every):
        raise TypeError(f"{kind.__name__}: takes no {sorted(unknown)}")
    stored = [f"  self.{name} = {name if name in names else f'_old.{name}'}" for name in every]
    return _maker(kind, ["_old", *names], stored)


def _maker(kind: type[Made], taken: Sequence[str], stored: Sequence[str]) -> Callable[..., Made]:
    """Return a function with arguments `taken` that creates an object by the lines `stored`."""
    opened = _opened(kind)
    known: dict[str, Any] = {"_new": opened.__new__, "_open": opened, "_kind": kind}
    lines = [
        f"def make({', '.join(taken)}):",
        "  self = _new(_open)",
        *stored,
        "  self.__class__ = _kind",
        *(["  self.__post_init__()"] if hasattr(kind, "__post_init__") else []),
        "  return self",
    ]
    exec("\n".join(lines), known)  # as above
    found: Callable[..., Made] = known["make"]
    return found


def _opened(kind: type) -> type:
    """Return a class with the same slots whose objects are not frozen."""
    own = {key: kind.__dict__[key] for key in ("__slots__", "__module__")}
    generic = {"__setattr__": object.__setattr__, "__delattr__": object.__delattr__}
    return type(kind.__name__, kind.__bases__, {**own, **generic})
