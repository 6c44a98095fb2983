"""Pareto front of several figures that are all minimized."""

from collections.abc import Sequence


def front(figures: Sequence[tuple[float, ...]]) -> list[int]:
    """Return the indices of the Pareto front, sorted by the first figure.

    Of equal entries, only the first is kept.
    """
    order = sorted(range(len(figures)), key=lambda place: (figures[place], place))
    found: list[int] = []
    for place in order:
        if not any(_covers(figures[other], figures[place]) for other in found):
            found.append(place)
    return found


def _covers(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
    return all(mine <= its for mine, its in zip(one, other, strict=True))
