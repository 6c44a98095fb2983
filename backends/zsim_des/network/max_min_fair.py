"""Max-min fair rates of activities that share links, in exact arithmetic."""

from collections.abc import Sequence
from fractions import Fraction

Shape = tuple[tuple[int, Fraction], ...]
"""Load of an activity: pairs of link number and bytes on it for each byte of progress."""


def fair_rates(
    shapes: Sequence[Shape], capacities: Sequence[int | Fraction]
) -> tuple[Fraction, ...]:
    """Return the bytes of progress per second of each activity, max-min fair.

    Progressive filling: all rates rise together until a link is full. The activities on that link
    keep their rate, the others continue to rise. So no rate can rise without lowering one that is
    not larger. Source: Bertsekas and Gallager 1992, "Data Networks", section 6.5.2.

    Every activity must use at least one link.
    """
    if len(shapes) == 1:
        return (min(Fraction(capacities[link]) / taken for link, taken in shapes[0]),)
    left: dict[int, Fraction] = {}
    pressure: dict[int, Fraction] = {}
    for shape in shapes:
        for link, taken in shape:
            left[link] = Fraction(capacities[link])
            pressure[link] = pressure.get(link, Fraction(0)) + taken
    rates: dict[int, Fraction] = {}
    while len(rates) < len(shapes):
        level = min(left[link] / pressure[link] for link in left if pressure[link])
        full = {link for link in left if pressure[link] and left[link] == level * pressure[link]}
        for index, shape in enumerate(shapes):
            if index in rates or full.isdisjoint(link for link, _ in shape):
                continue
            rates[index] = level
            for link, taken in shape:
                left[link] -= level * taken
                pressure[link] -= taken
    return tuple(rates[index] for index in range(len(shapes)))
