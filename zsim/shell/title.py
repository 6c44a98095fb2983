"""The title of a run: that of its scenario, and what the command line changed in it."""

from collections.abc import Mapping, Sequence
from typing import cast

from zsim.setting import apply


def title_of(
    title: str, written: Mapping[str, object], settings: Sequence[str], ranks: int | None = None
) -> str:
    """Return the title of a run of the scenario in the tables `written` with `settings` on top.

    A key that `settings` leave as it was is not named, nor is the title itself.
    """
    changed: dict[str, str] = {}
    for setting in settings:
        path, _, value = setting.partition("=")
        key = ".".join(name.strip() for name in path.split("."))
        given: dict[str, object] = {}
        apply(given, setting)
        changed.pop(key, None)  # of several for one key the last counts
        if key != "title" and _at(given, key) != _at(written, key):
            changed[key] = f"{key} = {' '.join(value.split())}"
    if ranks is not None:
        changed["ranks"] = f"ranks = {ranks}"
    return f"{title}, with {', '.join(changed.values())}" if changed else title


def _at(tables: Mapping[str, object], key: str) -> object:
    """Return what `tables` have at `key`, None if nothing."""
    found: object = tables
    for name in key.split("."):
        found = cast("Mapping[str, object]", found).get(name) if isinstance(found, dict) else None
    return found
