"""The parts of a transformer's parameters on a tensor parallel rank.

Column-parallel layers are cut by rows of their weights, row-parallel ones by columns. Vocabulary
tables are cut by rows, padded with zeros to equal parts (Shoeybi et al. 2019, section 3).
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Final, NamedTuple

import torch
from torch import Tensor

from zsim.model.architecture import Transformer
from zsim.model.transformer.ends import TOKENS
from zsim.schedule.mesh import Coordinates
from zsim.schedule.schedule import Schedule
from zsim.zero.names import TENSOR

ROW_PARALLEL: Final = ("proj.weight", "down.weight")
COLUMN_PARALLEL: Final = ("qkv", "q", "k", "v", "gate", "up")
VOCABULARY: Final = (TOKENS, "head.weight")


class PartBox(NamedTuple):
    """Rows of a rank's part of a parameter, and their place in the parameter."""

    row: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def of_rows(cls, row: int, first: int, count: int, others: Sequence[int]) -> "PartBox":
        """Return a box of `count` whole rows from `first` on, each of the shape `others`."""
        return cls(row, (first, *[0] * len(others)), (count, *others))


class TensorPlace(NamedTuple):
    """A rank's index along the tensor axis, and the size of the axis."""

    number: int = 0
    ranks: int = 1

    @classmethod
    def of(cls, schedule: Schedule, coordinates: Coordinates) -> "TensorPlace":
        """Return the place of the rank at `coordinates`."""
        if TENSOR not in coordinates:
            return cls()
        return cls(coordinates[TENSOR], schedule.mesh.axis_size(TENSOR))

    def part(self, shape: Transformer, name: str, whole: Tensor) -> Tensor:
        """Return this rank's part of the parameter `name`; the whole if ranks have copies."""
        if self.ranks == 1:
            return whole
        parts = [
            whole[tuple(map(_extent, box.offsets, box.sizes))]
            for box in self.boxes(shape, name, whole.shape)
        ]
        if name in VOCABULARY:
            missing = -(-len(whole) // self.ranks) - sum(map(len, parts))
            parts.append(whole.new_zeros(missing, whole.shape[1]))
        return torch.cat(parts) if whole.dim() else whole

    def boxes(self, shape: Transformer, name: str, whole: Sequence[int]) -> tuple[PartBox, ...]:
        """Return the boxes of this rank's rows in the full parameter, whose shape is `whole`.

        Padding rows of a vocabulary table are in no box.
        """
        rows, *others = whole or (1,)
        if name in VOCABULARY:
            most = -(-rows // self.ranks)
            first = min(self.number * most, rows)
            return (PartBox.of_rows(0, first, min(most, rows - first), others),)
        if name.endswith(ROW_PARALLEL):
            columns = others[0] // self.ranks
            return (PartBox(0, (0, self.number * columns), (rows, columns)),)
        layer = name.split(".")[-2]
        if layer not in COLUMN_PARALLEL:
            return (PartBox.of_rows(0, 0, rows, others),)
        parts = [rows]
        if layer == "qkv":
            queries, keys = shape.attention_heads, shape.shared_heads
            parts = [shape.head_width * each for each in (queries, keys, keys)]
        found: list[PartBox] = []
        for part, start in zip(parts, accumulate(parts, initial=0), strict=False):
            own = part // self.ranks
            found.append(
                PartBox.of_rows(start // self.ranks, start + self.number * own, own, others)
            )
        return tuple(found)

    def whole_shape(self, shape: Transformer, name: str, own: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the full parameter, given the shape `own` of this rank's part."""
        if self.ranks == 1 or not own:
            return tuple(own)
        rows, *others = own
        if name in VOCABULARY:
            rows = shape.vocab_size
        elif name.endswith(ROW_PARALLEL):
            others = [self.ranks * others[0]]
        elif name.split(".")[-2] in COLUMN_PARALLEL:
            rows *= self.ranks
        return (rows, *others)


def _extent(offset: int, size: int) -> slice:
    return slice(offset, offset + size)
