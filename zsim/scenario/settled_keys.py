"""Every key of a resolved scenario: its value and its origin: the file, a change, a default."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import cast

from zsim.runtimes.lookup import runtimes
from zsim.scenario.resolved_scenario import ResolvedScenario
from zsim.scenario.toml import with_settings
from zsim.strategy.precision import Precision


class Origin(StrEnum):
    """Where the value of a key comes from."""

    CHANGED = "changed"
    SCENARIO = "scenario"
    DEFAULT = "default"


@dataclass(frozen=True, slots=True)
class SettledKey:
    """A key with its table (`zero.stage`), its value, and its origin."""

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
    """Return the keys of `tables` with `settings` on top, then the defaults of `resolved`.

    Changed keys come first. A key whose setting does not change its value counts as the scenario's.
    Empty defaults and the title are omitted.
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
    """Return the resolved values of a scenario, without knobs that have no effect on it.

    An emulated runtime does not use the knobs of zsim's own stages. Offload knobs have no effect if
    all states are on the device, and a loss scale only affects fp16.
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
    """Yield each key of nested tables, prefixed with the names of its tables."""
    for name, value in tables.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict) and value:
            yield from _flat(cast("dict[str, object]", value), f"{key}.")
        else:
            yield key, value
