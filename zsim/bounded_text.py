"""TOML, JSON and XML that users give, read within one budget: values, depth, digits.

`zsim.files.input_file` bounds the size of a file. Here the work is bounded: the time of each parser
is in proportion to the bytes, except for the forms that are refused beforehand.
"""

import json
import re
import tomllib
from collections.abc import Iterable, Mapping
from typing import Any, Final, cast
from xml.etree.ElementTree import Element, ParseError, fromstring

from zsim.limits import limits
from zsim.units import format_bytes

BITS_MAX: Final = 14_000
"""Bits of a whole number: Python writes at most 4,300 decimal digits."""

DEPTH: Final = "nested too deeply"
DIGITS: Final = "a number has too many digits"

LONG_KEY: Final = (
    r"""(?<![\w.\\-])(?:(?:[\w-]++|"(?:[^"\\\n]|\\.)*+"|'[^'\n]*+')[ \t]*+\.[ \t]*+){%d}"""
)
"""Dotted keys of TOML whose parser takes the square of their length; quoted ones have escapes."""


def bounded_toml(text: str) -> dict[str, Any]:
    """Return the tables of TOML `text`.

    Raises:
        ValueError: it is no TOML, or exceeds the budget; one line.
    """
    most = limits().config_bytes
    _need(
        len(text) <= most, f"has {format_bytes(len(text))}, must have at most {format_bytes(most)}"
    )
    if re.search(LONG_KEY % limits().config_depth, text):
        raise ValueError(DEPTH)
    try:
        found = tomllib.loads(text)
    except RecursionError:
        raise ValueError(DEPTH) from None
    except tomllib.TOMLDecodeError:
        raise
    except ValueError:
        raise ValueError(DIGITS) from None
    need_small(found)
    return found


def bounded_json(text: str) -> object:
    """Return the value of JSON `text`, of a configuration; no object has a key twice.

    Raises:
        ValueError: it is no JSON, or exceeds the budget; one line.
    """
    try:
        found: object = json.loads(text, object_pairs_hook=_without_repeats)
    except RecursionError:
        raise ValueError(DEPTH) from None
    need_small(found)
    return found


def bounded_xml(text: str) -> Element:
    """Return the root of XML `text`, which defines no entities.

    Raises:
        ValueError: it is no XML, or exceeds the budget; one line.
    """
    if "<!DOCTYPE" in text:  # where entities are defined, which may grow without end
        raise ValueError("must have no document type")
    try:
        root = fromstring(text)
    except ParseError as error:
        raise ValueError(str(error)) from None
    most = limits()
    level, depth, count = [root], 0, 0
    while level:
        depth, count = depth + 1, count + len(level)
        _need(count <= most.config_values, f"must have at most {most.config_values:,} elements")
        _need(depth <= most.config_depth, DEPTH)
        level = [inner for each in level for inner in each]
    return root


def need_small(*found: object) -> None:
    """Raise ValueError if parsed input has too many values, levels or digits.

    A list or mapping counts each time it is referenced, since readers visit it as often.
    """
    most = limits()
    many = f"must have at most {most.config_values:,} values"
    level, depth, count = [*found], 0, len(found)
    while level:
        depth += 1
        _need(depth <= most.config_depth, DEPTH)
        inner: list[object] = []
        for each in level:
            _need(not isinstance(each, int) or each.bit_length() <= BITS_MAX, DIGITS)
            if isinstance(each, Mapping):
                inner.extend(cast("Mapping[object, object]", each).values())
            elif isinstance(each, list):
                inner.extend(cast("list[object]", each))
            _need(count + len(inner) <= most.config_values, many)
        level, count = inner, count + len(inner)


def _need(is_small: bool, why: str) -> None:  # noqa: FBT001  (a condition)
    if not is_small:
        raise ValueError(why)


def _without_repeats(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError(f"{json.dumps(repeated(name for name, _ in pairs))[:60]} is repeated")
    return found


def repeated(names: Iterable[str]) -> str:
    """Return the first of `names` that has been there before; "" if none has."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            return name
        seen.add(name)
    return ""
