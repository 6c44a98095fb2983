"""The experts that a rank has of a user's module, as parts of the module's parameters."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from zsim_torch.module.routed_rows import ExpertPlace
from zsim_torch.module.tensor_part import PartBox

Initial = Callable[[str], Tensor]


@dataclass(frozen=True, slots=True)
class ExpertParts:
    """Shapes of the parameters of experts, which ranks hold parts of, and this rank's place."""

    place: ExpertPlace
    shapes: Mapping[str, torch.Size]

    def cut(self, initial: Initial) -> Initial:
        """Return a function for this rank's part of each parameter."""

        def part(name: str) -> Tensor:
            value = initial(name)
            return value[self.place.own(len(value))] if name in self.shapes else value

        return part

    def own_shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of this rank's part of a parameter of experts."""
        count, *others = self.shapes[name]
        return (count // self.place.ranks, *others)

    def part_of(self, name: str) -> tuple[tuple[int, ...], tuple[PartBox, ...]]:
        """Return the shape of a parameter of experts, and the box of this rank's part."""
        return self.place.part_of(self.own_shape(name))
