"""The tokens that a rank of a context group holds of each sequence.

A sequence is cut into two parts per rank. A rank has one part of the first half, and the part with
the same distance from the end. So every rank computes the same number of causal attention pairs
(head-tail balancing, as in `_HeadTailLoadBalancer` of torch 2.13 and Transformer Engine).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from zsim.schedule.mesh import Coordinates
from zsim.schedule.schedule import Schedule
from zsim.zero.names import CONTEXT


class ContextPlace(NamedTuple):
    """A rank's index in its context group, and the size of the group."""

    number: int = 0
    ranks: int = 1

    @classmethod
    def of(cls, schedule: Schedule, coordinates: Coordinates) -> "ContextPlace":
        """Return the place of the rank at `coordinates`."""
        if CONTEXT not in coordinates:
            return cls()
        return cls(coordinates[CONTEXT], schedule.mesh.axis_size(CONTEXT))

    def own(self, of_tokens: Tensor, dimension: int) -> Tensor:
        """Return a copy of this rank's tokens from `of_tokens`, a tensor of whole sequences."""
        parts = of_tokens.chunk(2 * self.ranks, dimension)
        return torch.cat((parts[self.number], parts[-1 - self.number]), dimension)

    def tokens(self, length: int, device: torch.device) -> Tensor:
        """Return the positions of this rank's tokens in a sequence of `length`, in their order."""
        part = length // (2 * self.ranks)
        head, tail = self.number, 2 * self.ranks - 1 - self.number
        inside = torch.arange(part, device=device)
        return torch.cat((head * part + inside, tail * part + inside))

    def all_tokens(self, length: int, device: torch.device) -> Tensor:
        """Return the positions of the tokens of every rank, concatenated."""
        ranks = (self._replace(number=number) for number in range(self.ranks))
        return torch.cat([each.tokens(length, device) for each in ranks])


ALONE = ContextPlace()
"""The place of a rank that holds whole sequences."""
