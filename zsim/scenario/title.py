"""The title of a run: that of its scenario, and what was changed in it."""

import re
from collections.abc import Mapping, Sequence
from typing import cast

from zsim.scenario.resolved_scenario import ResolvedScenario
from zsim.scenario.tables import Scenario
from zsim.scenario.toml import apply
from zsim.units import format_count

FIELD = re.compile(r"\{(\w+(?:\.\w+)*)\}")
LARGE = 10**6
"""Larger numbers are words in a title: 7.5 billion."""


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


def filled(scenario: Scenario, resolved: ResolvedScenario | None) -> str:
    """Return the title of `scenario` with `{zero.stage}`, `{ranks}` and `{gpu}` filled in.

    So a title follows what runs. Of a scenario that cannot be, the hardware is a question mark.
    """
    settled = {"ranks": "?", "gpu": "?"}
    if resolved is not None:
        zero, gpu = resolved.strategy.zero, resolved.cluster.gpu.name.partition("-")[0]
        settled = {"ranks": str(resolved.strategy.ranks), "gpu": gpu, "zero.stage": str(zero.stage)}

    def value(found: re.Match[str]) -> str:
        if found[1] in settled:
            return settled[found[1]]
        value: object = scenario
        for name in found[1].split("."):
            value = getattr(value, name, None)
        if isinstance(value, int) and value >= LARGE:
            return format_count(value)
        return found[0] if value is None else str(value)

    return FIELD.sub(value, scenario.title)


def _at(tables: Mapping[str, object], key: str) -> object:
    """Return what `tables` have at `key`, None if nothing."""
    found: object = tables
    for name in key.split("."):
        found = cast("Mapping[str, object]", found).get(name) if isinstance(found, dict) else None
    return found
