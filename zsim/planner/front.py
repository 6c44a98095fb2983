"""Settings that nothing beats: the Pareto front of several figures, all of which are minimized."""

from collections.abc import Sequence


def front(figures: Sequence[tuple[float, ...]]) -> list[int]:
    """Return the places of those that no other is at least as good as in all; best first figure.

    Of equal ones the first stays.
    """
    order = sorted(range(len(figures)), key=lambda place: (figures[place], place))
    found: list[int] = []
    for place in order:
        if not any(_covers(figures[other], figures[place]) for other in found):
            found.append(place)
    return found


def _covers(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
    return all(mine <= its for mine, its in zip(one, other, strict=True))
