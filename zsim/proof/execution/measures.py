"""Norms and tests for overflow: measures of the gradients of a rank."""

from collections.abc import Mapping, Sequence

import numpy as np

from zsim.proof.execution.contents import Contents
from zsim.proof.execution.cover import Cover, Words
from zsim.proof.execution.datum import Datum, Marks, chosen, either
from zsim.proof.execution.grid import RankArray
from zsim.proof.execution.moves import Moves
from zsim.proof.execution.pieces import Integers
from zsim.proof.execution.tensors import Tensors
from zsim.schedule.operation import Compute, Role, View
from zsim.specification.residues import Numbers, product, share, summed, total

Makes = list[Datum | None]


class Measures:
    """Measures gradients, and tracks each of them to the tests that it has to reach.

    `required` has a bit for each pair of a rank and a micro-batch, by piece of a parameter: it is
    set if a gradient was made. `trained` holds the trained parameters of the segments of each
    unit. The last place is for unknown gradients: without `judges`, each rank that tests some
    counts as one.
    """

    def __init__(
        self,
        tensors: Tensors,
        moves: Moves,
        contents: Contents,
        *,
        trained: Mapping[str, Sequence[Sequence[str]]],
        micro_batches: int,
    ) -> None:
        self.tensors = tensors
        self.moves = moves
        self.contents = contents
        self.trained = trained
        self.micro_batches = micro_batches
        grid = tensors.grid
        sizes = [len(grid.tracked[name].coordinates) for name in grid.axes]
        count = int(np.prod(sizes, dtype=np.int64))
        self._words = -(-count * micro_batches // 64)
        self._ranks = np.arange(count, dtype=np.uint64).reshape(sizes)
        self._own: dict[tuple[int, int], Words] = {}
        self._weights: dict[tuple[int, View], Numbers] = {}
        self.judges = True
        self.required = np.zeros((self._words, len(moves.names) + 1), np.uint64)

    def mark(self, ranks: RankArray, compute: Compute, gradients: Sequence[Datum]) -> None:
        """Mark new gradients with their parameters' pieces, ranks and micro-batch."""
        segments = self.trained.get(compute.unit, ())
        if compute.segment >= len(segments) or compute.micro_batch >= self.micro_batches:
            return
        words = self._bit(ranks, compute.micro_batch)
        every = np.bitwise_or.reduce(words.reshape(self._words, -1), axis=1)
        for parameter, datum in zip(segments[compute.segment], gradients, strict=False):
            first = self.moves.first(parameter)
            numbers = np.arange(first + 1, first + 1 + datum.count)
            datum.pieces = numbers.reshape(*(1,) * len(ranks.shape), datum.count)
            datum.words = np.broadcast_to(words, (*words.shape[:-1], datum.count))
            self.required[:, first : first + datum.count] |= every[:, np.newaxis]

    def _bit(self, ranks: RankArray, micro_batch: int) -> Words:
        """Return the bit of each rank of a class and a micro-batch, shape (words, ranks..., 1)."""
        key = (ranks.index, micro_batch)
        if key not in self._own:
            every = self._ranks[np.newaxis, ..., np.newaxis]
            numbers = self.contents.within(ranks, every)[0].astype(np.int64)
            bits = numbers * self.micro_batches + micro_batch
            words = np.zeros((self._words, *bits.shape), np.uint64)
            one = np.uint64(1) << (bits % 64).astype(np.uint64)
            np.put_along_axis(words, (bits // 64)[np.newaxis], one[np.newaxis], axis=0)
            self._own[key] = words
        return self._own[key]

    def weights(self, ranks: RankArray, view: View) -> Numbers:
        """Return the number of elements of each place in a norm, (2, ranks..., places).

        If a part represents those of several ranks, it is their mean.
        """
        key = (ranks.index, view)
        found = self._weights.get(key)
        if found is None:
            held = self.tensors.held(ranks, view.buffer)
            sizes = np.append(held.space.sizes * held.space.weights, 0)
            at = held.first[..., np.newaxis] + np.arange(held.width)
            inside = np.arange(held.width) < held.counts[..., np.newaxis]
            whole = np.where(inside, sizes[np.where(inside, at, -1)], 0)
            whole = whole * self._counted(ranks, view.buffer)
            index = self.tensors.index(ranks, view)
            if index.take is None:
                found = whole[..., index.low : index.high].astype(np.uint64)
            else:
                found = chosen(whole, index.take).astype(np.uint64)
            found = np.stack([found, found])
            mean = self._stands_for(ranks, view)
            if mean is not None:
                found = product(found, mean)
            self._weights[key] = found
        return found

    def _stands_for(self, ranks: RankArray, view: View) -> Numbers | None:
        """Return the share of one rank in the parts it represents, (2, ranks..., 1)."""
        axes = self.tensors.varies(ranks.program, view)
        found = None
        for place, along in enumerate(ranks.along):
            if along.name in axes and any(weight != 1 for weight in along.weights):
                shape = [1] * (len(ranks.shape) + 2)
                shape[1 + place] = -1
                shares = np.concatenate([share(each, 2) for each in along.weights], 1)
                own = shares.reshape(2, *shape[1:])
                found = own if found is None else product(found, own)
        return found

    def _counted(self, ranks: RankArray, name: str) -> Integers:
        """Return 1 for each place that a rank counts; copies count on the first rank only."""
        pieces = self.moves.pieces(ranks, name)
        buffer = ranks.program.by_name[name]
        copied: dict[str, tuple[str, ...]] = {}
        if buffer.layout is not None:
            layout = self.tensors.schedule.layout_by_name[buffer.layout]
            copied = {
                each.parameter: each.copies for each in layout.pieces if each.copies and each.size
            }
        if not copied:
            return np.ones((1,) * (len(ranks.shape) + 1), np.int64)
        found = np.ones((*ranks.shape, pieces.shape[-1]), np.int64)
        cut = self.contents.cut.parameters
        of: dict[tuple[str, ...], Marks] = {}
        for parameter, axes in copied.items():
            first = self.moves.first(parameter)
            marks = of.setdefault(axes, np.zeros(len(self.moves.names) + 1, bool))
            marks[first : first + len(cut[parameter])] = True
        for rank in np.ndindex(*ranks.shape):
            at = self.tensors.grid.at(ranks, rank)
            own = pieces[tuple(min(a, b - 1) for a, b in zip(rank, pieces.shape, strict=False))]
            for axes, is_copied in of.items():
                if any(at[axis] for axis in axes):
                    found[rank][is_copied[own]] = 0
        return found

    def norm(self, ranks: RankArray, compute: Compute, operands: Sequence[Datum]) -> Makes:
        """Return the sum of squares of the places that a rank counts."""
        dimensions = len(ranks.shape) + 2
        squares = np.zeros((2, *(1,) * (dimensions - 1)), np.uint64)
        undefined: Marks | None = None
        for operand, datum in zip(compute.operands, operands, strict=True):
            if operand.role is not Role.GRADIENT or not datum.count:
                continue
            weights = self.weights(ranks, operand.view)
            square = product(product(datum.values, datum.values), weights)
            squares = total(squares, summed(square, -1, keepdims=True))
            undefined = _more(undefined, datum, weights)
        return [
            Datum(squares, undefined) if operand.role is Role.OUTPUT else None
            for operand in compute.operands
        ]

    def finite(self, ranks: RankArray, compute: Compute, operands: Sequence[Datum]) -> Makes:
        """Return a verdict: zero, with the set of gradients that it covers."""
        count = len(self.moves.names) + 1
        none = np.zeros((self._words, *(1,) * len(ranks.shape), 0), np.uint64)
        covered = Cover(count).with_part(none[0].astype(np.int64), none)
        undefined: Marks | None = None
        for operand, datum in zip(compute.operands, operands, strict=True):
            if operand.role is not Role.GRADIENT or not datum.count:
                continue
            undefined = _more(undefined, datum, self.weights(ranks, operand.view))
            if datum.words is not None and datum.pieces is not None:
                covered = covered.with_part(datum.pieces, datum.words)
        if not self.judges:
            own = self._bit(ranks, 0)
            covered = covered.with_part(np.full((1,) * (own.ndim - 1), count), own)
            self.required[:, -1] |= np.bitwise_or.reduce(own.reshape(self._words, -1), axis=1)
        zero = np.zeros((2, *(1,) * (len(ranks.shape) + 1)), np.uint64)
        verdict = Datum(zero, undefined, covered=covered if undefined is None else None)
        return [verdict if operand.role is Role.OUTPUT else None for operand in compute.operands]

    def uncovered(self, covered: Words) -> str:
        """Return text that names the first gradient that a verdict does not cover on some rank."""
        shape = (self._words, *(1,) * (covered.ndim - 2), -1)
        left = self.required.reshape(shape) & ~covered
        if not left.any():
            return ""
        missing = np.bitwise_or.reduce(left.reshape(self._words, -1, left.shape[-1]), axis=1)
        word, piece = (int(each[0]) for each in np.nonzero(missing))
        bits = int(missing[word, piece])
        bit = word * 64 + (bits & -bits).bit_length() - 1
        rank, micro_batch = divmod(bit, self.micro_batches)
        name = self.moves.names[piece] if piece < len(self.moves.names) else "something"
        return f"the gradient of {name} on rank {rank}, micro-batch {micro_batch},"


def _more(undefined: Marks | None, datum: Datum, weights: Numbers) -> Marks | None:
    """Return the ranks on which a counted place is undefined."""
    if datum.undefined is None:
        return undefined
    counted = datum.undefined & weights.any(axis=0)
    bad = np.logical_or.reduce(counted, axis=-1, keepdims=True)
    if not bad.any():
        return undefined
    return either(undefined, bad)
