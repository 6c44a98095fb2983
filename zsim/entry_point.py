"""Plug points: objects that installed packages register under a group of entry points."""

from collections.abc import Callable, Mapping
from functools import cache
from importlib.metadata import EntryPoint, EntryPoints, entry_points
from typing import TypeVar

_Kind = TypeVar("_Kind")


class EntryPointError(ValueError):
    """A registered object that cannot be used; the message names the group and the entry."""


@cache
def entries(group: str) -> tuple[EntryPoint, ...]:
    """Return the entry points of installed packages in `group`, sorted by name."""
    return tuple(sorted(_selection()(group=group)))


@cache
def _selection() -> Callable[..., EntryPoints]:
    """Return a function that selects entry points; cached, as reading all metadata takes 5 ms."""
    return entry_points().select


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
            raise EntryPointError(f"{group}: {entry.name!r} is registered more than once")
        loaded = entry.load()
        if not isinstance(loaded, kind):
            raise EntryPointError(f"{group}: {entry.name!r}: {loaded!r} must be a {kind.__name__}")
        found[entry.name] = loaded
    return found
