"""Two sequences side by side: what one lacks, has too much of, says otherwise, or has elsewhere."""

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

Item = tuple[Hashable, Hashable]
"""What it is, and what is said of it."""


@dataclass(frozen=True, slots=True)
class Missing:
    """An item that is expected and is not there."""

    key: Hashable


@dataclass(frozen=True, slots=True)
class Unexpected:
    """An item that is there, or once more than it may be."""

    key: Hashable


@dataclass(frozen=True, slots=True)
class Differs:
    """An item of which something else is said than is expected."""

    key: Hashable
    expected: Hashable
    found: Hashable


@dataclass(frozen=True, slots=True)
class Disordered:
    """Items next to each other that stand in another order; those around them stand right."""

    expected: tuple[Hashable, ...]
    found: tuple[Hashable, ...]


Difference = Missing | Unexpected | Differs | Disordered


def differences(expected: Sequence[Item], found: Sequence[Item]) -> list[Difference]:
    """Return every difference by itself. Keys may repeat. Takes time linear in the lengths."""
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
    """Yield, of each key, the first so many."""
    left = counts.copy()
    for item in items:
        if left[item[0]]:
            left[item[0]] -= 1
            yield item


def _disorders(expected: list[Hashable], found: list[Hashable]) -> Iterator[Disordered]:
    """Yield the shortest stretches of which the rest is in order."""
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
