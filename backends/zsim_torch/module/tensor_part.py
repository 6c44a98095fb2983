"""Parts that a rank of the tensor axis has of a transformer's parameters.

Column-parallel layers are cut by rows of their weights, row-parallel ones by columns, tables of the
vocabulary by rows behind which zeros make the parts equal (Shoeybi et al. 2019, section 3).
"""

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


class TensorPlace(NamedTuple):
    """A rank's number along the tensor axis, and how many there are."""

    number: int = 0
    ranks: int = 1

    @classmethod
    def of(cls, schedule: Schedule, coordinates: Coordinates) -> "TensorPlace":
        """Return the place of the rank at `coordinates`."""
        if TENSOR not in coordinates:
            return cls()
        return cls(coordinates[TENSOR], schedule.mesh.axis_size(TENSOR))

    def part(self, shape: Transformer, name: str, whole: Tensor) -> Tensor:
        """Return this rank's part of the parameter `name`, or all of it where ranks have copies."""
        if self.ranks == 1:
            return whole
        if name in VOCABULARY:
            return self._rows(_padded(whole, self.ranks))
        if name.endswith(ROW_PARALLEL):
            return whole.chunk(self.ranks, 1)[self.number].contiguous()
        layer = name.split(".")[-2]
        if layer not in COLUMN_PARALLEL:
            return whole
        parts: tuple[Tensor, ...] = (whole,)
        if layer == "qkv":
            queries, keys = shape.attention_heads, shape.shared_heads
            heads = [shape.head_width * each for each in (queries, keys, keys)]
            parts = torch.split(whole, heads)
        return torch.cat([self._rows(part) for part in parts])

    def _rows(self, whole: Tensor) -> Tensor:
        return whole.chunk(self.ranks)[self.number]


def _padded(whole: Tensor, count: int) -> Tensor:
    """Return `whole` with rows of zeros behind it, so that `count` divides them."""
    missing = -len(whole) % count
    return torch.cat([whole, whole.new_zeros(missing, whole.shape[1])]) if missing else whole
