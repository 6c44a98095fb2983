"""Values of options of a configuration: numbers and flags.

Each function raises ValueError with the allowed values.
"""

import math
from contextlib import suppress


def read_number(value: object) -> float:
    """Return a finite number; strings may contain one, as in "2e8"."""
    number = math.nan
    if isinstance(value, int | float | str) and not isinstance(value, bool):
        with suppress(ValueError, OverflowError):
            number = float(value)
    if not math.isfinite(number):
        raise ValueError("must be a number")
    return number


def read_whole(value: object, *, least: int = 0, most: int = 2**63 - 1) -> int:
    """Return a whole number; 5e8 and "2e8" are accepted."""
    number = value if isinstance(value, int) and not isinstance(value, bool) else read_number(value)
    if number != int(number) or not least <= number <= most:
        raise ValueError(f"must be a whole number from {least} to {most}")
    return int(number)


def read_flag(value: object) -> bool:
    """Return a flag, also from a string."""
    found = {"true": True, "false": False}.get(str(value).lower())
    if found is None or not isinstance(value, bool | str):
        raise ValueError("must be true or false")
    return found


def read_clip(value: object) -> float | None:
    """Return the maximum norm; None for 0, with which DeepSpeed does not clip."""
    return read_number(value) or None


def read_pair(value: object) -> tuple[float, float]:
    """Return two numbers."""
    first, second = value if isinstance(value, list) and len(value) == 2 else (None, None)
    if first is None or second is None:
        raise ValueError("must be two numbers")
    return read_number(first), read_number(second)
