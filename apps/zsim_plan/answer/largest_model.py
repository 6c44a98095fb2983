"""Search for the largest model that fits, with few trials.

Memory grows almost linearly with the number of layers or parameters, so two trials estimate the
limit. Bisection between the largest size that fits and the smallest that does not confirms it. With
a caching allocator a size may not fit although a larger one does. So the search finds a size that
fits whose next larger size does not.
"""

from collections.abc import Callable
from dataclasses import dataclass

from zsim.analysis.memory_footprint import Footprint


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """A size that was tried (number of layers or parameters) and its memory footprint."""

    size: int
    parameters: int
    footprint: Footprint

    def fits(self, room: float = 1.0) -> bool:
        """Return True if it fits within the fraction `room` of the usable memory."""
        taken = self.footprint
        if not taken.fits or room >= 1 or not taken.usable_bytes:
            return taken.fits
        return taken.taken_bytes <= room * taken.usable_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Largest:
    """The largest size that fits, and the next one, which does not.

    Attributes:
        fits: None if not even the smallest size does.
        refused: None if all sizes up to the maximum fit.
    """

    fits: Tried | None
    refused: Tried | None


def largest(
    tried: Callable[[int], Tried],
    *,
    start: int,
    smallest: int,
    most: int,
    digits: int | None,
    room: float = 1.0,
) -> Largest:
    """Return the largest size between `smallest` and `most` that fits; the first trial is `start`.

    `tried` computes the footprint of a size. The two sizes of the result differ by 1, or with
    `digits` by 1 in the last of that number of leading digits. A size that needs more than the
    fraction `room` of a GPU's usable memory does not fit.
    """
    fits: Tried | None = None
    refused: Tried | None = None
    points: list[Tried] = []
    size, turn = start, 0
    while True:
        found = tried(size)
        points.append(found)
        if found.fits(room):
            fits = found
        else:
            refused = found
        low = smallest - 1 if fits is None else fits.size
        high = most + 1 if refused is None else refused.size
        step = 1 if digits is None else max(1, 10 ** (len(str(low)) - digits))
        if high - low <= step:
            return Largest(fits=fits, refused=refused)
        guess = _guess(points, fits, room)
        if fits is None or refused is None:
            if guess is None or not (guess > low if refused is None else guess < high):
                guess = size * 2 if refused is None else size // 2
        elif turn % 3 == 2 or guess is None:
            guess = (low + high) // 2
        elif turn % 3 == 1:  # the last guess is probably next to the limit
            guess = size + step if found is fits else size - step
        turn += fits is not None and refused is not None
        size = min(max(guess, low + step), high - step)


def _guess(points: list[Tried], fits: Tried | None, room: float) -> int | None:
    """Return the size that would fill the tightest memory, on lines through the last two sizes."""
    if len(points) < 2:
        return None
    before, last = points[-2:]
    beside = 0 if fits is None else fits.footprint.reserved_bytes - fits.footprint.allocated_bytes
    taken = last.footprint.allocated_bytes
    most = int(room * last.footprint.usable_bytes)
    lines = [(before.footprint.allocated_bytes, taken, most - beside)]
    earlier = {(each.tier, each.pinned): each.needed_bytes for each in before.footprint.tiers}
    lines += [
        (earlier[key], each.needed_bytes, each.capacity_bytes)
        for each in last.footprint.tiers
        if each.capacity_bytes is not None and (key := (each.tier, each.pinned)) in earlier
    ]
    grown = last.size - before.size
    sizes = [
        last.size + int((room - now) * grown / (now - then))
        for then, now, room in lines
        if (now - then) * grown > 0
    ]
    return min(sizes, default=None)
