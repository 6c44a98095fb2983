"""Contents of buffers while a schedule is run: exact numbers, and the marks that go with them.

Beside each number stand two marks: *undefined*, nobody wrote it; and where tests for overflow are
followed, which gradients it was made of, so that a gradient that is not finite can be traced to
what tests it. A verdict, the outcome of such tests, is the set of gradients that it covers.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zsim.check.execution.pieces import Integers
from zsim.check.execution.tensors import Index
from zsim.specification.field import Numbers

Marks = NDArray[np.bool_]
Words = NDArray[np.uint64]

MIXED = -2
"""The number of the piece of a parameter where several were combined; none is -1."""


@dataclass(slots=True)
class Trail:
    """Of which gradients numbers are made.

    `words` has a bit for each pair of a rank and a micro-batch, shape (words, ranks..., places);
    `pieces` the number of the piece of a parameter, shape (ranks..., places).
    """

    words: Words
    pieces: Integers

    def moved(self, change: Callable[[NDArray[Any], int], NDArray[Any]]) -> "Trail":
        """Return the trail once `change` was done to its arrays, which have so many lanes first.

        What `change` leaves empty, as zero, is no piece.
        """
        return Trail(change(self.words, 1), change(self.pieces + 1, 0) - 1)


@dataclass(slots=True)
class Datum:
    """Numbers, shape (2, ranks..., places), and their marks.

    `undefined` has the shape (ranks..., places), or is None where all is defined. `covered` is of a
    verdict: a bit for each pair of a rank and a micro-batch, (words, ranks..., pieces).
    """

    values: Numbers
    undefined: Marks | None = None
    trail: Trail | None = None
    covered: Words | None = None

    @property
    def count(self) -> int:
        """Places."""
        return int(self.values.shape[-1])


def unwritten(dimensions: int, count: int) -> Datum:
    """Return what nobody wrote."""
    shape = (*(1,) * dimensions, count)
    return Datum(np.zeros((2, *shape), np.uint64), np.ones(shape, bool))


def either(one: Marks | None, other: Marks) -> Marks:
    """Return where one of two marks is set."""
    if one is None:
        return other
    found: Marks = np.logical_or(one, other)
    return found


def undefined_in(*data: Datum) -> Marks | None:
    """Return where any of the operands, combined place by place, is undefined."""
    found: Marks | None = None
    for datum in data:
        if datum.undefined is not None:
            found = either(found, datum.undefined)
    return found


def anywhere(*data: Datum) -> Marks | None:
    """Return on which ranks any place of any operand is undefined, shape (ranks..., 1)."""
    found: Marks | None = None
    for datum in data:
        if datum.undefined is not None and datum.undefined.any():
            some: Marks = np.logical_or.reduce(datum.undefined, axis=-1, keepdims=True)
            found = either(found, some)
    return found


def trail_of(*data: Datum) -> Trail | None:
    """Return of which gradients a combination of operands, place by place, is made."""
    found: Trail | None = None
    for datum in data:
        trail = datum.trail
        if trail is None:
            continue
        if found is None:
            found = trail
            continue
        one, other = found.pieces, trail.pieces
        pieces = np.where(other == -1, one, np.where((one == -1) | (one == other), other, MIXED))
        found = Trail(found.words | trail.words, pieces)
    return found


def chosen(array: NDArray[Any], take: Integers) -> NDArray[Any]:
    """Return numbers of the last dimension, on each rank others; zero where there is none."""
    lead = array.ndim - take.ndim
    index = take.reshape(*(1,) * lead, *take.shape)
    if not array.shape[-1]:
        shape = np.broadcast_shapes(array.shape[:-1], index.shape[:-1])
        return np.zeros((*shape, take.shape[-1]), array.dtype)
    found = np.take_along_axis(array, index, axis=-1)
    if bool((take < 0).any()):
        found[np.broadcast_to(index < 0, found.shape)] = 0
    return found


def read(datum: Datum, index: Index) -> Datum:
    """Return what a view of a buffer holds."""
    take = index.take
    if take is None:
        if index.low == 0 and index.high == datum.count:
            return datum
        place = (..., slice(index.low, index.high))
        undefined = datum.undefined
        if undefined is not None:
            undefined = undefined[place]
            if not undefined.any():
                undefined = None
        trail = datum.trail
        if trail is not None:
            trail = Trail(trail.words[place], trail.pieces[place])
        return Datum(datum.values[place], undefined, trail)
    trail = None if datum.trail is None else datum.trail.moved(lambda each, _: chosen(each, take))
    undefined = None if datum.undefined is None else chosen(datum.undefined, take)
    return Datum(chosen(datum.values, take), undefined, trail)


def written(datum: Datum, index: Index, new: Datum) -> Datum:
    """Return what a buffer holds once a view of it was written."""
    take = index.take
    if take is None and index.low == 0 and index.high == datum.count:
        return new
    values = _put(datum.values, index, new.values)
    undefined: Marks | None = None
    if datum.undefined is not None or new.undefined is not None:
        shape = (1,) * (datum.values.ndim - 2)
        old = datum.undefined
        old = np.zeros((*shape, datum.count), bool) if old is None else old
        now = new.undefined
        now = np.zeros((*shape, new.count), bool) if now is None else now
        undefined = _put(old, index, now)
        if not undefined.any():
            undefined = None
    trail: Trail | None = None
    if datum.trail is not None or new.trail is not None:
        one, other = _trail(datum, new), _trail(new, datum)
        trail = Trail(
            _put(one.words, index, other.words),
            _put(one.pieces, index, other.pieces),
        )
    return Datum(values, undefined, trail)  # a verdict is what a whole buffer holds


def _trail(datum: Datum, like: Datum) -> Trail:
    if datum.trail is not None:
        return datum.trail
    assert like.trail is not None
    shape = (*(1,) * (datum.values.ndim - 2), datum.count)
    words = np.zeros((len(like.trail.words), *shape), np.uint64)
    return Trail(words, np.full(shape, -1, np.int64))


def _put(array: NDArray, index: Index, new: NDArray) -> NDArray:  # type: ignore[type-arg]
    """Return a copy of `array` in which a view is `new`; ranks differ where they do in either."""
    take = index.take
    if take is None:
        lead = np.broadcast_shapes(array.shape[:-1], new.shape[:-1])
        found = np.empty((*lead, array.shape[-1]), array.dtype)
        found[...] = array
        found[..., index.low : index.high] = new
        return found
    ahead = array.ndim - take.ndim
    places = take.reshape(*(1,) * ahead, *take.shape)
    lead = np.broadcast_shapes(array.shape[:-1], new.shape[:-1], places.shape[:-1])
    found = np.empty((*lead, array.shape[-1] + 1), array.dtype)  # the last takes what is no place
    found[..., :-1] = array
    where = np.broadcast_to(places, (*lead, take.shape[-1]))
    np.put_along_axis(found, where, np.broadcast_to(new, (*lead, take.shape[-1])), axis=-1)
    return found[..., :-1]


def like(data: Sequence[Datum], values: Numbers) -> Datum:
    """Return new numbers with the marks of what they were made of, place by place."""
    return Datum(values, undefined_in(*data), trail_of(*data))
