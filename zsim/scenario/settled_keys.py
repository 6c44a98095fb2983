"""Every key of a scenario that ran: its value, and what set it: the file, a change, a default."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import cast

from zsim.runtimes.registry import runtimes
from zsim.scenario.resolved_scenario import ResolvedScenario
from zsim.scenario.toml import with_settings
from zsim.strategy.precision import Precision


class Origin(StrEnum):
    """What set a key."""

    CHANGED = "changed"
    SCENARIO = "scenario"
    DEFAULT = "default"


@dataclass(frozen=True, slots=True)
class SettledKey:
    """A key with its table (`zero.stage`), the value that it has, and what set it."""

    key: str
    value: object
    origin: Origin

    @property
    def is_changed(self) -> bool:
        """True if a change set it."""
        return self.origin is Origin.CHANGED


def settled_keys(
    tables: Mapping[str, object], settings: Sequence[str], resolved: ResolvedScenario
) -> tuple[SettledKey, ...]:
    """Return the keys of `tables` with `settings` on top, then those that `resolved` adds to them.

    Those that were changed come first. A key that a setting leaves as it was counts as the
    scenario's. Defaults that are nothing, and the title, are left out.
    """
    written = dict(_flat(tables))
    found = [
        SettledKey(key, value, Origin.CHANGED if _is_new(key, value, written) else Origin.SCENARIO)
        for key, value in _flat(with_settings(tables, settings))
        if key != "title"
    ]
    known = {each.key for each in found}
    for key, value in _flat(_defaults(resolved)):
        is_said = any(key == name or key.startswith(f"{name}.") for name in known)
        if not is_said and value not in (None, []):
            found.append(SettledKey(key, value, Origin.DEFAULT))
    return tuple(sorted(found, key=lambda each: not each.is_changed))


def _defaults(resolved: ResolvedScenario) -> dict[str, object]:
    """Return what a scenario comes to, without knobs that say nothing about it.

    The knobs of zsim's own stages say nothing about a runtime that is emulated, those of offload
    nothing where all states are on the device, a loss scale nothing about other formats than fp16.
    """
    strategy = resolved.strategy
    tables = strategy.model_dump(mode="json")
    runtime = strategy.zero.emulate
    if runtime is not None:
        name = next(name for name, each in runtimes().items() if isinstance(runtime, each.options))
        options = {name: runtime.model_dump(mode="json")}
        tables["zero"] = {"stage": strategy.zero.stage, **options}
    if not strategy.offload.uses_host:
        del tables["offload"]
    if strategy.train.precision is not Precision.FP16:
        del tables["train"]["loss_scale"]
    return {"model": resolved.shape.model_dump(mode="json", exclude_none=True), **tables}


def _is_new(key: str, value: object, written: Mapping[str, object]) -> bool:
    return key not in written or written[key] != value


def _flat(tables: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    """Yield each key of nested tables with the names of its tables before it."""
    for name, value in tables.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict) and value:
            yield from _flat(cast("dict[str, object]", value), f"{key}.")
        else:
            yield key, value
