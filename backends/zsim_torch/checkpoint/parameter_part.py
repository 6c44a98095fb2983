"""This rank's part of a parameter, as boxes of the full parameter."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Protocol, runtime_checkable

from torch import nn

from zsim.backend.backend import RefusedError
from zsim.schedule.schedule import Schedule
from zsim.zero.names import TENSOR
from zsim_torch.checkpoint.flat_range import TensorBox, boxes
from zsim_torch.module.expert_parts import ExpertParts
from zsim_torch.module.tensor_part import PartBox


@runtime_checkable
class CutModule(Protocol):
    """A module whose matrices are cut along the tensor axis."""

    def part_of(self, name: str) -> tuple[tuple[int, ...], tuple[PartBox, ...]]:
        """Return the shape of the full parameter `name`, and the boxes of this rank's part."""
        ...


@dataclass(frozen=True, slots=True)
class ParameterPart:
    """A tensor of the shape `own`, whose rows are the boxes `cuts` of a tensor of shape `whole`.

    Without `cuts` it is the full tensor.
    """

    own: tuple[int, ...]
    whole: tuple[int, ...]
    cuts: tuple[PartBox, ...] = ()

    @classmethod
    def of(
        cls, module: nn.Module, name: str, own: Sequence[int], experts: ExpertParts | None = None
    ) -> "ParameterPart":
        """Return the part of a parameter that this rank has, of experts or of `module`."""
        if experts is not None and name in experts.shapes:
            return cls(experts.own_shape(name), *experts.part_of(name))
        if not isinstance(module, CutModule):
            return cls(tuple(own), tuple(own))
        return cls(tuple(own), *module.part_of(name))

    def boxes(self, first: int, size: int) -> Iterator[TensorBox]:
        """Yield boxes of the full tensor that cover `size` elements of the part from `first`.

        Elements of a box are contiguous in the part. Padding is in no box.
        """
        for box in boxes(self.own, first, size):
            if not self.cuts:
                yield box
            for cut in self.cuts:
                low = max(box.offsets[0], cut.row)
                count = min(box.offsets[0] + box.sizes[0], cut.row + cut.sizes[0]) - low
                if count > 0:
                    before = (low - box.offsets[0]) * prod(box.sizes[1:])
                    others = zip(cut.offsets[1:], box.offsets[1:], strict=True)
                    yield TensorBox(
                        (cut.offsets[0] + low - cut.row, *map(sum, others)),
                        (count, *box.sizes[1:]),
                        box.start + before,
                    )


def need_parts(schedule: Schedule, module: nn.Module) -> None:
    """Raise RefusedError unless the module can locate its parts of cut matrices."""
    cut = any(axis.name == TENSOR and axis.size > 1 for axis in schedule.mesh.axes)
    if not cut or isinstance(module, CutModule):
        return
    for layout in schedule.layouts:
        for piece in layout.pieces:
            if TENSOR not in piece.copies:
                raise RefusedError(
                    f"checkpoint: ranks of the tensor axis have parts of {piece.parameter}, and "
                    "the module does not say which (part_of)"
                )
