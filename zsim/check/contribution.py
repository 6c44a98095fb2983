"""What a sum has been made of: which micro-batches, each by all of its uses or by some.

A tensor that two segments make a gradient of is summed from two uses of each micro-batch; those of
one micro-batch that are complete are one whole. Micro-batches stand as intervals, since a step adds
one after the other: a sum over thousands costs no more than one over two.
"""

from collections.abc import Iterable

Part = tuple[int, int, int]
"""A contribution: micro-batch, number of the use, uses."""

Use = tuple[int, int]
"""The number of a use, and how many uses there are."""

Batches = tuple[tuple[int, int], ...]
"""Micro-batches: from the first to before the second, in ascending order and apart."""

Parts = tuple[tuple[Use, Batches], ...]
"""The micro-batches of each use, in ascending order of uses; a use without any is left out."""

UNCOUNTED = 0
"""Uses of a tensor of which it is not known how many there are."""

WHOLE: Use = (0, 1)
"""A micro-batch with all of its uses."""


def alone(part: Part) -> Parts:
    """One contribution."""
    batch, use, uses = part
    return (((use, uses), ((batch, batch + 1),)),)


def whole(batches: Iterable[int]) -> Parts:
    """Micro-batches with all of their uses."""
    found: Batches = ()
    for batch in sorted(batches):
        found = _joined(found, ((batch, batch + 1),))
    return ((WHOLE, found),) if found else ()


def summed(one: Parts, other: Parts) -> Parts:
    """Contributions of both; uses of a micro-batch that are all there are one whole."""
    found = dict(one)
    for use, batches in other:
        found[use] = _joined(found.get(use, ()), batches)
    for uses in {uses for _, uses in found if uses > 1}:
        own = [(use, uses) for use in range(uses)]
        if not all(use in found for use in own):
            continue
        complete = found[own[0]]
        for use in own[1:]:
            complete = _common(complete, found[use])
        if complete:
            found[WHOLE] = _joined(found.get(WHOLE, ()), complete)
            for use in own:
                found[use] = _without(found[use], complete)
    return tuple(sorted((use, batches) for use, batches in found.items() if batches))


def repeated(one: Parts, other: Parts) -> int | None:
    """The first micro-batch of which a contribution is in both; nothing if there is none."""
    found = [
        shared[0][0]
        for mine, batches in one
        for its, others in other
        if mine[1] != UNCOUNTED and (mine == its or 1 in (mine[1], its[1]))
        if (shared := _common(batches, others))
    ]
    return min(found, default=None)


def batches_of(parts: Parts) -> list[int]:
    """Every micro-batch of which there is something, in ascending order."""
    found: Batches = ()
    for _, batches in parts:
        found = _joined(found, batches)
    return [batch for start, end in found for batch in range(start, end)]


def _joined(one: Batches, other: Batches) -> Batches:
    if not one or not other:
        return one or other
    (start, end), (low, high) = one[-1], other[0]
    if end == low:
        return (*one[:-1], (start, high), *other[1:])
    if end < low:
        return one + other
    found: list[tuple[int, int]] = []
    for low, high in sorted(one + other):
        if found and low <= found[-1][1]:
            found[-1] = (found[-1][0], max(high, found[-1][1]))
        else:
            found.append((low, high))
    return tuple(found)


def _common(one: Batches, other: Batches) -> Batches:
    if not one or not other or one[-1][1] <= other[0][0] or other[-1][1] <= one[0][0]:
        return ()
    found: list[tuple[int, int]] = []
    mine = its = 0
    while mine < len(one) and its < len(other):
        low, high = max(one[mine][0], other[its][0]), min(one[mine][1], other[its][1])
        if low < high:
            found.append((low, high))
        if one[mine][1] < other[its][1]:
            mine += 1
        else:
            its += 1
    return tuple(found)


def _without(one: Batches, taken: Batches) -> Batches:
    """What of `one` is not in `taken`, all of which is in it."""
    edges = sorted(edge for span in (*one, *taken) for edge in span)
    spans = zip(edges[::2], edges[1::2], strict=True)
    return tuple((low, high) for low, high in spans if low < high)
