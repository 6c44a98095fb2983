"""Sets of gradients that verdicts cover: a bit for each rank and micro-batch, by piece.

A rank has a verdict for each of its blocks of gradients, and one step has hundreds of them. Their
sets are stored separately until `whole` is needed, since the whole set is as large as the model.
"""

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from zsim.proof.execution.pieces import Integers

Words = NDArray[np.uint64]
"""Sets of pairs of a rank and a micro-batch, a bit for each, shape (words, ranks..., places)."""

MIXED = 2**62
"""Stands for the number of a piece if several pieces were combined."""

Part = tuple[Integers | None, Words]
"""Numbers of pieces from 1 on with their sets, place by place; None for the sets of all pieces."""


@dataclass(frozen=True, eq=False)
class Cover:
    """The union of `parts`, for a model that is split into `count` pieces."""

    count: int
    parts: tuple[Part, ...] = ()

    def with_part(self, pieces: Integers | None, words: Words) -> "Cover":
        """Return the set with one more part."""
        return replace(self, parts=(*self.parts, (pieces, words)))

    def __or__(self, other: "Cover") -> "Cover":
        """Return the union of both sets."""
        return replace(self, parts=(*self.parts, *other.parts))

    @cached_property
    def whole(self) -> Words:
        """The sets of all pieces, shape (words, ranks..., pieces)."""
        arrays = [each for part in self.parts for each in part if each is not None]
        lead = np.broadcast_shapes(*(each.shape[:-1] for each in arrays))
        found = np.zeros((*lead, self.count + 1), np.uint64)  # the last: no piece, or several
        for pieces, words in self.parts:
            if pieces is None:
                found[..., :-1] |= words
                continue
            others = (pieces == 0) | (pieces == MIXED)
            where = np.where(others, self.count, pieces - 1)[np.newaxis]
            where = np.broadcast_to(where, (*lead, where.shape[-1]))
            old = np.take_along_axis(found, where, axis=-1)
            np.put_along_axis(found, where, old | words, axis=-1)
        return found[..., :-1]
