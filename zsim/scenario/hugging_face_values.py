"""Values in a `config.json`: numbers, flags, and checks of unsupported values."""

from zsim.config_error import bare, shown
from zsim.scenario.tables import ScenarioError

Config = dict[str, object]
Fields = dict[str, object]


def number(config: Config, name: str, default: int | None = None) -> int:
    """Return a positive whole number, or the default if it is not given."""
    value = config.get(name)
    if value is None:
        value = default
    if value is None:
        raise ScenarioError(f"model.hf_config: {name}: missing")
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        why = f"{shown(value)} must be a positive whole number"
        raise ScenarioError(f"model.hf_config: {name}: {why}")
    return value


def flag(config: Config, name: str, *, default: bool) -> bool:
    """Return a flag, or the default if it is not given."""
    value = config.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise ScenarioError(f"model.hf_config: {name}: {shown(value)} must be true or false")
    return value


def must(config: Config, name: str, allowed: tuple[object, ...]) -> None:
    """Raise ScenarioError unless a value is in `allowed`, whose first is the default.

    Raises:
        ScenarioError: the value is not modelled.
    """
    value = config.get(name, allowed[0])
    if value not in allowed:
        known = " or ".join(bare(each) for each in allowed)
        raise ScenarioError(
            f"model.hf_config: {name}: {shown(value)} is not modelled, only {known}"
        )
