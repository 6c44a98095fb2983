"""Parse and format quantities, which are integers: bytes, picoseconds, and rates per second.

"450 GB/s" is 450e9 bytes per second. Bits ("Gb/s") are refused to prevent errors by a factor of
eight. GiB is 2**30, GB is 10**9.
"""

import re
from contextlib import suppress
from fractions import Fraction

PICOSECONDS_PER_SECOND = 10**12


class UnitError(ValueError):
    """A quantity is invalid; the message gives an example or the allowed range."""


_PREFIX = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15}
_BINARY = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
_SIZE = {f"{prefix}B": Fraction(factor) for prefix, factor in (_PREFIX | _BINARY).items()}
_BANDWIDTH = {f"{unit}/s": factor for unit, factor in _SIZE.items()}
_TIME = {
    "s": Fraction(10**12),
    "ms": Fraction(10**9),
    "us": Fraction(10**6),
    "ns": Fraction(10**3),
    "ps": Fraction(1),
}
_DURATION = {
    "s": Fraction(1),
    "min": Fraction(60),
    "h": Fraction(3600),
    "day": Fraction(86_400),
    "days": Fraction(86_400),
    "weeks": Fraction(604_800),
}
_POWER = {"W": Fraction(1), "kW": Fraction(10**3)}
_THOUSANDS = {"k": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_RATE = {f"{prefix}FLOP/s": Fraction(factor) for prefix, factor in _PREFIX.items()}
_EXPONENT = r"[eE][+-]?[0-9]{1,3}"  # a longer one would be computed for hours
_NUMBER = re.compile(rf"\s*([0-9]+(?:\.[0-9]*)?(?:{_EXPONENT})?)\s*(\S.*?)\s*$")
_RATIO = re.compile(rf"[0-9]+/[0-9]+|[0-9]*\.?[0-9]*(?:{_EXPONENT})?")
LARGEST = 10**30
"""Largest quantity, in bytes, bytes per second, picoseconds or operations per second."""

LETTERS_MAX = 1000
"""Maximum number of characters of a number; Python parses at most 4,300 digits."""

RATIO_MAX = 10**9
"""Largest ratio; the smallest is its inverse."""


def _parse(text: str, units: dict[str, Fraction], example: str) -> int:
    match = _NUMBER.match(text)
    unit = match.group(2) if match else None
    if match is None or unit not in units:
        hint = ""
        if unit is not None and unit.rstrip("/s").endswith("b"):
            hint = "; bits are not accepted, write bytes"
        raise UnitError(f"{text!r} is not a quantity such as {example!r}{hint}")
    number = match.group(1)
    exact = Fraction(number) * units[unit] if len(number) <= LETTERS_MAX else LARGEST + 1
    if exact > LARGEST:
        raise UnitError(f"{text!r} is too large: a quantity has at most {len(str(LARGEST))} digits")
    return round(exact)


def parse_size(text: str) -> int:
    """Return the bytes in `text`, such as "32 GB" or "80 GiB".

    Raises:
        UnitError: `text` is not a size.
    """
    return _parse(text, _SIZE, "32 GB")


def parse_bandwidth(text: str) -> int:
    """Return the bytes per second in `text`, such as "450 GB/s".

    Raises:
        UnitError: `text` is not a bandwidth in bytes per second.
    """
    return _parse(text, _BANDWIDTH, "450 GB/s")


def parse_time(text: str) -> int:
    """Return the picoseconds in `text`, such as "2.5 us".

    Raises:
        UnitError: `text` is not a time.
    """
    return _parse(text, _TIME, "2.5 us")


def parse_rate(text: str) -> int:
    """Return the floating-point operations per second in `text`, such as "125 TFLOP/s".

    Raises:
        UnitError: `text` is not a rate.
    """
    return _parse(text, _RATE, "125 TFLOP/s")


def parse_duration(text: str) -> int:
    """Return the seconds in `text`, such as "30 days".

    Raises:
        UnitError: `text` is not a duration.
    """
    return _parse(text, _DURATION, "30 days")


def parse_power(text: str) -> int:
    """Return the watts in `text`, such as "700 W".

    Raises:
        UnitError: `text` is not a power.
    """
    return _parse(text, _POWER, "700 W")


def parse_tokens(text: str) -> int:
    """Return the tokens in `text`: 15e12, or "15T".

    Raises:
        UnitError: `text` is not a whole number of more than 0.
    """
    found = Fraction(0)
    number, factor = text.strip().replace(",", ""), 1
    if number[-1:] in _THOUSANDS:
        number, factor = number[:-1].strip(), _THOUSANDS[number[-1]]
    if _RATIO.fullmatch(number) and "/" not in number:
        with suppress(ValueError, ZeroDivisionError):
            found = Fraction(number) * factor
    if found.denominator != 1 or not 1 <= found <= LARGEST:
        raise UnitError(f"{text!r} must be a whole number of tokens, such as 15e12 or 15T")
    return int(found)


def parse_ratio(value: object) -> Fraction:
    """Return a ratio such as 2, 1.5 or "3/2", from 1e-9 to 1e9.

    Raises:
        UnitError: `value` is not such a ratio.
    """
    found = Fraction(0)
    if isinstance(value, int | float | str) and not isinstance(value, bool):
        with suppress(ValueError, ZeroDivisionError):
            text = str(value).strip()
            found = Fraction(text) if _RATIO.fullmatch(text) else found
    if found <= 0:
        raise UnitError(f'{value!r} is not a ratio of more than 0, such as 2 or "3/2"')
    if not Fraction(1, RATIO_MAX) <= found <= RATIO_MAX:
        raise UnitError(f"{value!r} is not a ratio from 1e-9 to 1e9")
    return found


def format_bytes(size_bytes: int) -> str:
    """Return `size_bytes` with three digits and a decimal prefix: "31.4 GB"."""
    return f"{_scaled(size_bytes)}B"


def format_rate(per_second: float) -> str:
    """Return `per_second` with three digits and a decimal prefix: "38.7 TFLOP/s"."""
    return f"{_scaled(per_second)}FLOP/s"


def format_count(count: int) -> str:
    """Return `count` with four digits and a word: "14.42 billion"."""
    for factor, word in ((10**12, " trillion"), (10**9, " billion"), (10**6, " million")):
        if count >= factor:
            return f"{count / factor:.4g}{word}"
    return f"{count:,}"


def _scaled(number: float) -> str:
    for prefix in ("", "k", "M", "G", "T"):
        if abs(number) < 999.5:
            return f"{number:.3g} {prefix}"
        number /= 1000
    return f"{number:.3g} P"


def format_seconds(seconds: float) -> str:
    """Return `seconds` with three digits and a fitting unit: "1.23 s", "45.6 ms", "1,540 s"."""
    if seconds >= 1000:
        return f"{seconds:,.0f} s"
    for factor, unit in ((1.0, "s"), (1e3, "ms"), (1e6, "us")):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"
