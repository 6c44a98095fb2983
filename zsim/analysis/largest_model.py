"""The largest model that fits: a search over its size, with as few tries as its growth allows.

Memory grows with the number of layers or parameters almost on a line, so two sizes say where the
limit is; halving what is left between the largest that fits and the smallest that does not makes
sure of it. A caching allocator may refuse a size and serve a larger one; found is a size that fits
beside one that does not.
"""

from collections.abc import Callable
from dataclasses import dataclass

from zsim.analysis.memory_footprint import Footprint


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """A size that was tried: layers or parameters, and what it takes."""

    size: int
    parameters: int
    footprint: Footprint

    def fits(self, room: float = 1.0) -> bool:
        """Return whether it fits, and takes no more than a share `room` of the usable memory."""
        taken = self.footprint
        if not taken.fits or room >= 1 or not taken.usable_bytes:
            return taken.fits
        return taken.taken_bytes <= room * taken.usable_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Largest:
    """The largest size that fits, and the next one, which does not.

    Attributes:
        fits: None if not even the smallest size does.
        refused: None if every size fits that can be asked for.
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
    """Search from `start` on, between `smallest` and `most`.

    `tried` says what a size takes. The two sizes that are found differ by 1, or with `digits` by
    1 in the last of so many digits. What takes more than a share `room` of the usable memory of a
    GPU does not fit.
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
        elif turn % 3 == 1:  # a good guess stands beside the limit
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
