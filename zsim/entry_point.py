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
    """Return what installed packages register under `group`, by name."""
    return tuple(sorted(_selection()(group=group)))


@cache
def _selection() -> Callable[..., EntryPoints]:
    """Return how to select entry points; reading the metadata of all packages takes 5 ms."""
    return entry_points().select


def registered(
    group: str, kind: type[_Kind], shipped: Mapping[str, _Kind] | None = None
) -> dict[str, _Kind]:
    """Return the objects by name: those of zsim itself, then those registered under `group`.

    Raises:
        EntryPointError: a name is taken twice, or what is registered is no `kind`.
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
