"""Differences between two sequences: missing, unexpected, different or misplaced items."""

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

Item = tuple[Hashable, Hashable]
"""A key and a value."""


@dataclass(frozen=True, slots=True)
class Missing:
    """An item that is expected and absent."""

    key: Hashable


@dataclass(frozen=True, slots=True)
class Unexpected:
    """An item that is not expected, or occurs too often."""

    key: Hashable


@dataclass(frozen=True, slots=True)
class Differs:
    """An item with another value than expected."""

    key: Hashable
    expected: Hashable
    found: Hashable


@dataclass(frozen=True, slots=True)
class Disordered:
    """Adjacent items in another order; items around them are in order."""

    expected: tuple[Hashable, ...]
    found: tuple[Hashable, ...]


Difference = Missing | Unexpected | Differs | Disordered


def differences(expected: Sequence[Item], found: Sequence[Item]) -> list[Difference]:
    """Return every difference by itself. Keys may repeat. The time is linear in the lengths."""
    if expected == found:
        return []
    wanted, there = Counter(key for key, _ in expected), Counter(key for key, _ in found)
    missing, unexpected = wanted - there, there - wanted
    result: list[Difference] = [Missing(key) for key in missing.elements()]
    result += [Unexpected(key) for key in unexpected.elements()]
    ours, theirs = list(_first(expected, wanted & there)), list(_first(found, wanted & there))
    result += _disorders([key for key, _ in ours], [key for key, _ in theirs])
    said: dict[Hashable, list[Hashable]] = {}
    for key, value in theirs:
        said.setdefault(key, []).append(value)
    for key, value in ours:
        other = said[key].pop(0)
        if other != value:
            result.append(Differs(key, value, other))
    return result


def _first(items: Sequence[Item], counts: Counter[Hashable]) -> Iterator[Item]:
    """Yield, of each key, the first `counts[key]` items."""
    left = counts.copy()
    for item in items:
        if left[item[0]]:
            left[item[0]] -= 1
            yield item


def _disorders(expected: list[Hashable], found: list[Hashable]) -> Iterator[Disordered]:
    """Yield the shortest ranges such that the rest is in order."""
    balance: Counter[Hashable] = Counter()
    open_items = begin = 0
    for place, (ours, theirs) in enumerate(zip(expected, found, strict=True)):
        for key, change in ((ours, 1), (theirs, -1)):
            open_items += abs(balance[key] + change) - abs(balance[key])
            balance[key] += change
        if not open_items:
            if expected[begin : place + 1] != found[begin : place + 1]:
                yield Disordered(
                    tuple(expected[begin : place + 1]), tuple(found[begin : place + 1])
                )
            begin = place + 1
