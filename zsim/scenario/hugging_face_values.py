"""Values in a `config.json`: numbers and flags, and what is refused of them."""

from zsim.scenario.tables import ScenarioError

Config = dict[str, object]
Fields = dict[str, object]


def number(config: Config, name: str, default: int | None = None) -> int:
    """Return a positive whole number, or the default where there is none."""
    value = config.get(name)
    if value is None:
        value = default
    if value is None:
        raise ScenarioError(f"model.hf_config: {name}: missing")
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ScenarioError(f"model.hf_config: {name}: {value!r} must be a positive whole number")
    return value


def flag(config: Config, name: str, *, default: bool) -> bool:
    """Return a flag, or the default where there is none."""
    value = config.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise ScenarioError(f"model.hf_config: {name}: {value!r} must be true or false")
    return value


def must(config: Config, name: str, allowed: tuple[object, ...]) -> None:
    """Refuse what is not modelled; the first of `allowed` is what a missing key means.

    Raises:
        ScenarioError: the value is none of `allowed`.
    """
    value = config.get(name, allowed[0])
    if value not in allowed:
        shown = " or ".join(str(each) for each in allowed)
        raise ScenarioError(f"model.hf_config: {name}: {value!r} is not modelled, only {shown}")
