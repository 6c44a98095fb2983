"""Fills and copies on exact numbers."""

from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zsim.proof.execution.collective_runner import UnfollowedError
from zsim.proof.execution.datum import Datum, Marks, changed, chosen, like
from zsim.proof.execution.grid import RankArray
from zsim.proof.execution.pieces import Integers
from zsim.proof.execution.tensors import NOTHING, Tensors
from zsim.schedule.operation import Copy, Fill
from zsim.specification.residues import Numbers, added, number, product, share, total


class Moves:
    """Fills and copies of the ranks of a class."""

    def __init__(self, tensors: Tensors) -> None:
        self.tensors = tensors
        self._pieces: dict[tuple[int, str, str, int], Integers] = {}
        self._maps: dict[tuple[int, str, str], tuple[Integers, NDArray[np.bool_]]] = {}
        self._named: dict[str, tuple[dict[int, int], int]] = {}
        self.numbers, self.names = self._number_pieces()
        self.constants: list[Numbers] = []
        self.scaled: list[Numbers] = []
        self._filled: dict[tuple[Fraction, tuple[int, ...]], Numbers] = {}

    def _number_pieces(self) -> tuple[dict[tuple[str, int], int], list[str]]:
        """Assign numbers to the pieces of all parameters, by parameter and start."""
        numbers: dict[tuple[str, int], int] = {}
        names: list[str] = []
        for key, space in self.tensors.spaces.by_key.items():
            if key[0] == "parameter":
                for start in space.starts.tolist():
                    numbers[key[1], start] = len(names)
                    names.append(key[1])
        return numbers, names

    def first(self, parameter: str) -> int:
        """Return the number of the first piece of a parameter; 0 if it has no elements."""
        return self.numbers.get((parameter, 0), 0)

    def pieces(self, ranks: RankArray, name: str) -> Integers:
        """Return the piece of a parameter at each place of a buffer, on every rank.

        Padding and buffers without layout have NOTHING.
        """
        held, buffer = self.tensors.held(ranks, name), self.tensors.buffer(ranks.program, name)
        layout = buffer.layout
        key = (ranks.index, layout or "", buffer.shard or "", held.width)
        found = self._pieces.get(key)
        if found is not None:
            return found
        whole = np.full(held.space.count + 1, NOTHING, np.int64)
        if layout is not None:
            whole[:-1] = self._of_layout(layout)
        at = held.first[..., np.newaxis] + np.arange(held.width)
        inside = np.arange(held.width) < held.counts[..., np.newaxis]
        found = self._pieces[key] = np.where(inside, whole[np.where(inside, at, -1)], NOTHING)
        return found

    def _of_layout(self, name: str) -> Integers:
        space = self.tensors.spaces.by_key["layout", name]
        found = np.full(space.count, NOTHING, np.int64)
        for parameter, offset, place, size in self.tensors.fragments(
            self.tensors.schedule.layout_by_name[name]
        ):
            low, high = space.inside(place, place + size)
            starts = (space.starts[low:high] - place + offset).tolist()
            found[low:high] = [self.numbers[parameter, start] for start in starts]
        return found

    def filled(self, ranks: RankArray, fill: Fill, scalars: Mapping[str, float]) -> Datum:
        """Return the data that a fill writes."""
        value = Fraction(fill.value)
        if fill.scalar is not None:
            value *= Fraction(scalars[fill.scalar])
        index = self.tensors.index(ranks, fill.target)
        shape = (2, *(1,) * len(ranks.shape), index.count)
        found = self._filled.get((value, shape))
        if found is None:
            one = number(value, len(shape))
            if not self.is_constant(one):
                self.constants.append(one.reshape(2))
            if fill.scalar is not None:
                self.scaled.append(one.reshape(2))
            found = self._filled[value, shape] = np.broadcast_to(one, shape)
        return Datum(found)

    def is_constant(self, value: Numbers) -> bool:
        """Return True if some fill has written this number."""
        return any((value.reshape(2) == each).all() for each in self.constants)

    def is_scaled(self, values: Numbers, shares: Iterable[int]) -> bool:
        """Return True if all are one number that a fill has scaled, or a share of it."""
        flat = values.reshape(2, -1)
        return any(
            (product(flat, number(each, 2)) == one.reshape(2, 1)).all()
            for one in self.scaled
            for each in shares
        )

    def copied(self, ranks: RankArray, copy: Copy, source: Datum, target: Datum | None) -> Datum:
        """Return the content of the target of a copy afterwards.

        `target` is its content before, or None if the copy overwrites it.

        Raises:
            UnfollowedError: source and target are cut differently.
        """
        if target is None:
            return self._shared(source, copy.divisor)
        if copy.by_parameter:
            moved = self._shared(source, copy.divisor)
            return self._by_parameter(ranks, copy, moved, target)
        if source.count != target.count:
            raise UnfollowedError(f"{copy.id}: source and target are cut differently")
        if not (source.is_marked or target.is_marked):
            return Datum(added(target.values, source.values, divisor=copy.divisor))
        moved = self._shared(source, copy.divisor)
        found = like((moved, target), total(moved.values, target.values))
        if moved.covered is not None and target.covered is not None:
            found.covered = moved.covered | target.covered  # verdicts are 0 or 1: sum is "or"
        return found

    def _shared(self, source: Datum, divisor: int) -> Datum:
        if divisor == 1:
            return source
        values = product(source.values, share(divisor, source.values.ndim))
        return Datum(values, source.undefined, source.words, source.pieces, source.covered)

    def _by_parameter(self, ranks: RankArray, copy: Copy, moved: Datum, target: Datum) -> Datum:
        """Return the target after shared parts of each parameter are copied; padding is zero."""
        take, held = self._map(ranks, copy.source.buffer, copy.target.buffer)
        there = take != NOTHING
        keeps = held & ~there  # pieces not in the source stay, places in no piece become zero
        found = changed((moved,), lambda arrays, _: chosen(arrays[0], take))
        if copy.accumulate:
            found = like((found, target), total(found.values, target.values))

        return changed((found, target), partial(_kept, there=there, keeps=keeps))

    def _map(
        self, ranks: RankArray, source: str, target: str
    ) -> tuple[Integers, NDArray[np.bool_]]:
        """Return the place of the source for each place of the target, and which are pieces."""
        key = (ranks.index, source, target)
        if key not in self._maps:
            here, there = self.pieces(ranks, source), self.pieces(ranks, target)
            shape = np.broadcast_shapes(here.shape[:-1], there.shape[:-1])
            here = np.broadcast_to(here, (*shape, here.shape[-1]))
            there = np.broadcast_to(there, (*shape, there.shape[-1]))
            take = np.full(there.shape, NOTHING, np.int64)
            for rank in np.ndindex(*shape):
                order = np.argsort(here[rank], kind="stable")
                ordered = here[rank][order]
                at = np.searchsorted(ordered, there[rank])
                at = np.minimum(at, len(ordered) - 1) if len(ordered) else at
                if len(ordered):
                    match = (ordered[at] == there[rank]) & (there[rank] != NOTHING)
                    take[rank] = np.where(match, order[at], NOTHING)
            self._maps[key] = take, there != NOTHING
        return self._maps[key]


def _kept(arrays: Sequence[NDArray[Any]], _: int, *, there: Marks, keeps: Marks) -> NDArray[Any]:
    """Return new values `there`, old values where `keeps` is True, and zero elsewhere."""
    new, old = arrays
    return np.where(there, new, np.where(keeps, old, old.dtype.type(0)))
