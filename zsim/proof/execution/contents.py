"""States of training in the buffers of a class: numbers of parameters, arranged by layout."""

from collections.abc import Mapping

import numpy as np

from zsim.proof.execution.datum import chosen
from zsim.proof.execution.grid import RankArray
from zsim.proof.execution.moves import Moves
from zsim.proof.execution.pieces import Integers
from zsim.proof.execution.tensors import NOTHING, Tensors
from zsim.specification.residues import Numbers
from zsim.specification.step import TensorCuts

Key = tuple[int, str, str, int]
"""A class, a layout, the axis of a part, and its number of places."""


class Contents:
    """Arranges numbers of parameters by the layouts of buffers."""

    def __init__(self, tensors: Tensors, moves: Moves, cut: TensorCuts) -> None:
        self.tensors = tensors
        self.moves = moves
        self.cut = cut
        self._contents: dict[Key, tuple[Mapping[str, Numbers], Numbers]] = {}
        self._takes: dict[Key, tuple[list[str], Integers]] = {}
        self._as_they_are: set[Key] = set()  # buffers that hold all pieces in their order
        self._places: dict[tuple[int, tuple[int, ...]], tuple[slice, ...] | None] = {}

    def within(self, ranks: RankArray, numbers: Numbers) -> Numbers:
        """Return the part of the ranks of a class in numbers of all ranks."""
        key = (ranks.index, numbers.shape[1:-1])
        if key not in self._places:
            self._places[key] = self._place(ranks, numbers.shape[1:-1])
        place = self._places[key]
        return numbers if place is None else numbers[place]

    def _place(self, ranks: RankArray, shape: tuple[int, ...]) -> tuple[slice, ...] | None:
        """Return the slices of a class's ranks in numbers of that shape; None for all ranks."""
        place: list[slice] = [slice(None)]
        for axis, along, size in zip(self.tensors.grid.axes, ranks.along, shape, strict=True):
            whole = self.tensors.grid.tracked[axis].coordinates
            if size == 1 or len(whole) == len(along.coordinates):
                place.append(slice(None))
            else:
                start = whole.index(along.coordinates[0])
                place.append(slice(start, start + len(along.coordinates)))
        return None if all(each == slice(None) for each in place) else tuple(place)

    def content(self, ranks: RankArray, name: str, state: Mapping[str, Numbers]) -> Numbers:
        """Return the content of a buffer in a state of all its parameters; zero in the padding."""
        buffer = ranks.program.by_name[name]
        if buffer.layout is None:
            width = self.tensors.held(ranks, name).width
            return np.zeros((2, *(1,) * len(ranks.shape), width), np.uint64)
        held = self.tensors.held(ranks, name)
        key = (ranks.index, buffer.layout, buffer.shard or "", held.width)
        known = self._contents.get(key)
        if known is not None and known[0] is state:
            return known[1]
        names, take = self._take(key, self.moves.pieces(ranks, name), buffer.layout)
        parts = [self.within(ranks, state[each]) for each in names]
        if len(parts) == 1 and key in self._as_they_are:
            self._contents[key] = state, parts[0]
            return parts[0]
        lead = np.broadcast_shapes(
            *(part.shape[:-1] for part in parts), (2, *(1,) * len(ranks.shape))
        )
        flat = np.zeros((*lead, sum(part.shape[-1] for part in parts)), np.uint64)
        width = 0
        for part in parts:
            flat[..., width : width + part.shape[-1]] = part
            width += part.shape[-1]
        found: Numbers = chosen(flat, take)
        self._contents[key] = state, found
        return found

    def _take(self, key: Key, pieces: Integers, layout: str) -> tuple[list[str], Integers]:
        """Return the parameters of a layout, and the place of each element among their pieces."""
        if key not in self._takes:
            where = np.full(len(self.moves.names) + 1, NOTHING, np.int64)
            named = self.tensors.schedule.layout_by_name[layout].pieces
            names = list(dict.fromkeys(piece.parameter for piece in named if piece.size))
            width = 0
            for each in names:
                first = self.moves.first(each)
                count = len(self.cut.parameters[each])
                where[first : first + count] = np.arange(width, width + count)
                width += count
            take = np.where(pieces == NOTHING, NOTHING, where[pieces])
            self._takes[key] = names, take
            if take.shape[-1] == width and bool((take == np.arange(width)).all()):
                self._as_they_are.add(key)
        return self._takes[key]
