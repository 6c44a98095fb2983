"""Contents of buffers while a schedule runs: exact numbers, and marks for each number.

The mark *undefined* means that the number was never written. If tests for overflow are followed,
other marks hold the gradients from which a number was made, so that a gradient that is not finite
can be traced to its test. A verdict, the outcome of such tests, is the set of gradients it covers.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zsim.proof.execution.cover import MIXED, Cover, Words
from zsim.proof.execution.pieces import Integers
from zsim.proof.execution.tensors import Index
from zsim.specification.residues import Numbers

Marks = NDArray[np.bool_]

Change = Callable[[Sequence[NDArray[Any]], int], NDArray[Any]]
"""Combines one array of each datum to one; the int is the number of dimensions before ranks."""


@dataclass(slots=True)
class Datum:
    """Numbers and their marks; a mark that no number has is None.

    Attributes:
        values: numbers, shape (2, ranks..., places).
        undefined: True for numbers never written, shape (ranks..., places).
        words: gradients from which numbers are made, a bit for each pair of a rank and a
            micro-batch, shape (words, ranks..., places).
        pieces: 1 + the number of the piece of a parameter, shape (ranks..., places); 0 for none.
        covered: the gradients that a verdict covers.
        parts: cache of slices that were read, by their first place and the place after the last.
    """

    values: Numbers
    undefined: Marks | None = None
    words: Words | None = None
    pieces: Integers | None = None
    covered: Cover | None = None
    parts: dict[tuple[int, int], "Datum"] | None = field(default=None, init=False, repr=False)

    @property
    def count(self) -> int:
        """The number of places."""
        return int(self.values.shape[-1])

    @property
    def is_marked(self) -> bool:
        """Whether it may have a mark."""
        return not (
            self.undefined is None
            and self.words is None
            and self.pieces is None
            and self.covered is None
        )


def changed(data: Sequence[Datum], change: Change, *, ranks_only: bool = False) -> Datum:
    """Apply `change` to numbers and marks; a mark that a datum does not have counts as zero.

    The verdict is kept only with `ranks_only`, since it refers to a whole buffer.
    """
    found = Datum(change([datum.values for datum in data], 1))
    undefined = _marks(data, [datum.undefined for datum in data], 0, change)
    if undefined is not None and undefined.any():
        found.undefined = undefined
    found.words = _marks(data, [datum.words for datum in data], 1, change)
    found.pieces = _marks(data, [datum.pieces for datum in data], 0, change)
    if ranks_only:
        verdicts = [None if datum.covered is None else datum.covered.whole for datum in data]
        covered = _marks(data, verdicts, 1, change)
        if covered is not None:
            found.covered = Cover(covered.shape[-1]).with_part(None, covered)
    return found


def _marks(
    data: Sequence[Datum], marks: Sequence[NDArray[Any] | None], lead: int, change: Change
) -> NDArray[Any] | None:
    known = next((each for each in marks if each is not None), None)
    if known is None:
        return None
    ones = (1,) * (known.ndim - lead - 1)
    filled = [
        np.zeros((*known.shape[:lead], *ones, datum.count), known.dtype) if each is None else each
        for datum, each in zip(data, marks, strict=True)
    ]
    return change(filled, lead)


def unwritten(dimensions: int, count: int) -> Datum:
    """Return `count` numbers that were never written."""
    return Datum(*_nothing(dimensions, count))


@lru_cache
def _nothing(dimensions: int, count: int) -> tuple[Numbers, Marks]:
    shape = (*(1,) * dimensions, count)
    return np.zeros((2, *shape), np.uint64), np.ones(shape, bool)


def either(one: Marks | None, other: Marks) -> Marks:
    """Return the logical or of two marks."""
    if one is None:
        return other
    found: Marks = np.logical_or(one, other)
    return found


def anywhere(*data: Datum) -> Marks | None:
    """Return the ranks on which any place of any operand is undefined, shape (ranks..., 1)."""
    found: Marks | None = None
    for datum in data:
        if datum.undefined is not None and datum.undefined.any():
            some: Marks = np.logical_or.reduce(datum.undefined, axis=-1, keepdims=True)
            found = either(found, some)
    return found


def like(data: Sequence[Datum], values: Numbers) -> Datum:
    """Return new numbers with the marks of the numbers they were made from, place by place."""
    found = Datum(values)
    for datum in data:
        if datum.undefined is not None:
            found.undefined = either(found.undefined, datum.undefined)
        if datum.words is None or datum.pieces is None:
            continue
        if found.words is None or found.pieces is None:
            found.words, found.pieces = datum.words, datum.pieces
        else:
            one, other = found.pieces, datum.pieces
            either_one = np.where((one == 0) | (one == other), other, MIXED)
            found.pieces = np.where(other == 0, one, either_one)
            found.words = found.words | datum.words
    return found


def chosen(array: NDArray[Any], take: Integers) -> NDArray[Any]:
    """Return `array` at indices `take` of the last dimension; zero for negative indices."""
    if take.size == take.shape[-1] and array.shape[-1]:
        places = take.reshape(-1)
        found = array[..., places]
        if bool((places < 0).any()):
            found[..., places < 0] = 0
        return found
    lead = array.ndim - take.ndim
    index = take.reshape(*(1,) * lead, *take.shape)
    if not array.shape[-1]:
        shape = np.broadcast_shapes(array.shape[:-1], index.shape[:-1])
        return np.zeros((*shape, take.shape[-1]), array.dtype)
    found = np.take_along_axis(array, index, axis=-1)
    if bool((take < 0).any()):
        found[np.broadcast_to(index < 0, found.shape)] = 0
    return found


def first(datum: Datum, count: int) -> Datum:
    """Return the first `count` numbers, with zeros after the last one."""
    take = np.where(np.arange(count) < datum.count, np.arange(count), -1)
    return changed((datum,), lambda arrays, _: chosen(arrays[0], take))


def read(datum: Datum, index: Index) -> Datum:
    """Return the content of a view of a buffer."""
    if index.is_whole:
        return datum
    take = index.take
    if take is not None:
        return changed((datum,), lambda arrays, _: chosen(arrays[0], take))
    place = (..., slice(index.low, index.high))
    if datum.undefined is None and datum.words is None:
        if datum.parts is None:
            datum.parts = {}
        found = datum.parts.get((index.low, index.high))
        if found is None:
            found = datum.parts[index.low, index.high] = Datum(datum.values[place])
        return found
    return changed((datum,), lambda arrays, _: arrays[0][place])


def written(datum: Datum, parts: Sequence[tuple[Index, Datum]]) -> Datum:
    """Return the content of a buffer after writes to its views, in order."""
    if len(parts) > 1 and all(index.take is None and not new.is_marked for index, new in parts):
        return _all_written(datum, parts)
    for index, new in parts:
        datum = changed((datum, new), partial(_put, index=index))
    return datum


def _all_written(datum: Datum, parts: Sequence[tuple[Index, Datum]]) -> Datum:
    """Write slices without marks, so that every array is copied once."""
    where = [index for index, _ in parts]
    return changed((datum, *[new for _, new in parts]), partial(_put_all, where=where))


def _put_all(arrays: Sequence[NDArray[Any]], _: int, *, where: Sequence[Index]) -> NDArray[Any]:
    """Return a copy of the first array with slices replaced by the other arrays."""
    array, *parts = arrays
    leads = {each.shape[:-1] for each in arrays}
    lead = leads.pop() if len(leads) == 1 else np.broadcast_shapes(*leads, array.shape[:-1])
    found = np.empty((*lead, array.shape[-1]), array.dtype)
    found[...] = array
    for index, part in zip(where, parts, strict=True):
        found[..., index.low : index.high] = part
    return found


def _put(arrays: Sequence[NDArray[Any]], _: int, *, index: Index) -> NDArray[Any]:
    """Return a copy of an array with a view replaced; the shape of ranks is broadcast."""
    (array, new), take = arrays, index.take
    if take is None:
        lead = np.broadcast_shapes(array.shape[:-1], new.shape[:-1])
        found = np.empty((*lead, array.shape[-1]), array.dtype)
        found[...] = array
        found[..., index.low : index.high] = new
        return found
    ahead = array.ndim - take.ndim
    places = take.reshape(*(1,) * ahead, *take.shape)
    lead = np.broadcast_shapes(array.shape[:-1], new.shape[:-1], places.shape[:-1])
    found = np.empty((*lead, array.shape[-1] + 1), array.dtype)  # the last: index -1, no place
    found[..., :-1] = array
    where = np.broadcast_to(places, (*lead, take.shape[-1]))
    np.put_along_axis(found, where, np.broadcast_to(new, (*lead, take.shape[-1])), axis=-1)
    return found[..., :-1]
