"""Plug points: objects that installed packages register under a group of entry points."""

from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, EntryPoints, entry_points
from typing import TypeVar

from zsim.mistake import MistakeError

_Kind = TypeVar("_Kind")


class EntryPointError(MistakeError):
    """A registered object that cannot be used; the message names the group and the entry."""


@cache
def entries(group: str) -> tuple[EntryPoint, ...]:
    """Return the entry points of installed packages in `group`, sorted by name."""
    return tuple(sorted(_selection()(group=group)))


@cache
def _selection() -> Callable[..., EntryPoints]:
    """Return a function that selects entry points; cached, as reading all metadata takes 5 ms."""
    return entry_points().select


def duplicate(entry: EntryPoint) -> EntryPointError:
    """Return the error of an entry point whose name another one has."""
    return EntryPointError(
        f"{entry.group}: {entry.name!r} is registered more than once; remove one of the packages"
    )


def load(entry: EntryPoint) -> object:
    """Return the object of an entry point.

    Raises:
        EntryPointError: its module or its name in it does not exist; one line.
        ModuleNotFoundError: the module needs a package that is not installed.
    """
    return referred(entry.value, field=f"{entry.group}: {entry.name}")


def referred(reference: str, *, field: str) -> object:
    """Return the object of the text `module:name` or `module`; messages start with `field`.

    Raises:
        EntryPointError: there is no such module, or no such name in it; one line.
        ModuleNotFoundError: the module needs a package that is not installed.
    """
    given = f"{field}: {reference!r}"
    match = EntryPoint.pattern.match(reference)
    if match is None:
        raise EntryPointError(f"{given} must be module:name")
    module = match["module"]
    try:
        found: object = import_module(module)
    except ModuleNotFoundError as error:
        if not f"{module}.".startswith(f"{error.name}."):
            raise
        why = f"there is no module {error.name}; correct the name, or install its package"
        raise EntryPointError(f"{given}: {why}") from None
    for name in filter(None, (match["attr"] or "").split(".")):
        if not hasattr(found, name):
            from zsim.suggestion import close_name

            hint = close_name(name, dir(found))
            meant = f"did you mean {hint}?" if hint else "correct the name"
            raise EntryPointError(f"{given}: {module} has no {name}; {meant}")
        found = getattr(found, name)
    return found


def registered(
    group: str, kind: type[_Kind], shipped: Mapping[str, _Kind] | None = None
) -> dict[str, _Kind]:
    """Return objects by name: first `shipped`, then the objects registered under `group`.

    Raises:
        EntryPointError: a name is used twice, or a registered object is not a `kind`.
    """
    found = dict(shipped or {})
    for entry in entries(group):
        if entry.name in found:
            raise duplicate(entry)
        loaded = load(entry)
        if not isinstance(loaded, kind):
            raise EntryPointError(f"{group}: {entry.name!r}: {loaded!r} must be a {kind.__name__}")
        found[entry.name] = loaded
    return found
