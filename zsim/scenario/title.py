"""The title of a run: that of its scenario, with the changes to it."""

import re
from collections.abc import Mapping, Sequence
from typing import cast

from zsim.scenario.resolved_scenario import ResolvedScenario
from zsim.scenario.tables import Scenario
from zsim.scenario.toml import apply, names_model, setting_value
from zsim.units import format_count

FIELD = re.compile(r"\{(\w+(?:\.\w+)*)\}")
LARGE = 10**6
"""Numbers from here on are written as words in a title: 7.5 billion."""


def title_of(
    title: str, written: Mapping[str, object], settings: Sequence[str], ranks: int | None = None
) -> str:
    """Return the title of a run of the scenario in the tables `written` with `settings` on top.

    Omit keys that `settings` do not change, the title itself, and a model, which `title` names.
    """
    changed: dict[str, str] = {}
    for setting in settings:
        path, _, value = setting.partition("=")
        if names_model(setting):
            continue  # the title is of that model
        key = ".".join(name.strip() for name in path.split("."))
        given: dict[str, object] = {}
        apply(given, setting)
        changed.pop(key, None)  # of several settings for one key the last counts
        if key != "title" and _at(given, key) != _at(written, key):
            changed[key] = f"{key} = {' '.join(value.split())}"
    if ranks is not None:
        changed["ranks"] = f"ranks = {ranks}"
    return f"{title}, with {', '.join(changed.values())}" if changed else title


def template_of(title: str, settings: Sequence[str]) -> str:
    """Return `title`, or the default title of another model if one of `settings` names it.

    A title in a file may name the model of that file.
    """
    named = [setting.partition("=")[2] for setting in settings if names_model(setting)]
    said = any(setting.partition("=")[0].strip() == "title" for setting in settings)
    if not named or said:
        return title
    model = setting_value(f"model={named[-1]}", named[-1].strip())
    return f"{model}: ZeRO stage {{zero.stage}} on {{ranks}} {{gpu}}"


def filled(scenario: Scenario, resolved: ResolvedScenario | None) -> str:
    """Return the title of `scenario` with `{zero.stage}`, `{ranks}` and `{gpu}` filled in.

    So the title matches the run. Without a resolved scenario, the hardware is a question mark.
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
    """Return the value of `tables` at `key`, or None."""
    found: object = tables
    for name in key.split("."):
        found = cast("Mapping[str, object]", found).get(name) if isinstance(found, dict) else None
    return found
