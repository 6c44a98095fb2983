"""Limits on the command line, and `zsim.limited`, a context manager for limits in Python."""

from collections.abc import Callable, Mapping, Sequence
from typing import Final, cast

from zsim.limits import TimeLimitError
from zsim.mistake import MistakeError
from zsim.suggestion import one_of
from zsim.units import PICOSECONDS_PER_SECOND, parse_size, parse_time
from zsim.workers.limited_run import LimitChanges, free_memory_bytes, limited

__all__ = ["TimeLimitError", "chosen_limits", "limited"]


def chosen_limits(settings: Sequence[str]) -> LimitChanges:
    """Return limits from command-line settings: `memory=8 GB`, `time=60`, `operations=1e7`.

    The default limit of memory is the free memory of the machine.

    Raises:
        MistakeError: a limit is unknown, or its value is invalid.
    """
    given: dict[str, float] = {"memory_bytes": free_memory_bytes()}
    for setting in settings:
        key, _, value = (part.strip() for part in setting.partition("="))
        if key not in KEYS:
            raise MistakeError(f"--limit: {one_of(key, KEYS)}")
        name, parse = KEYS[key]
        try:
            given[name] = parse(value)
        except ValueError as error:
            raise MistakeError(f"--limit: {key}: {error}") from None
        if not 0 < given[name] < MOST:
            raise MistakeError(f"--limit: {key}: {value!r} must be more than 0 and less than 1e18")
    return cast("LimitChanges", given)


def _count(value: str) -> int:
    try:
        return int(float(value))
    except (ValueError, OverflowError):
        raise ValueError(f"{value!r} must be a whole number") from None


def _seconds(value: str) -> float:
    try:
        return float(value)
    except ValueError:
        return parse_time(value) / PICOSECONDS_PER_SECOND


KEYS: Final[Mapping[str, tuple[str, Callable[[str], float]]]] = {
    "operations": ("operations", _count),
    "ranks": ("ranks", _count),
    "runs": ("runs", _count),
    "file": ("file_bytes", parse_size),
    "config": ("config_bytes", parse_size),
    "values": ("config_values", _count),
    "depth": ("config_depth", _count),
    "memory": ("memory_bytes", parse_size),
    "time": ("time_s", _seconds),
    "run-memory": ("run_memory_bytes", parse_size),
    "run-time": ("run_time_s", _seconds),
}
"""Limits on the command line: the field, and the function that parses a value."""

MOST: Final = 1e18
