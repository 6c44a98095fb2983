"""The tokens that a rank has of sequences that it shares with others.

A sequence is cut into two parts for each rank; a rank has one of the first half, and the one that
lies as far from the end. So each has as many pairs of causal attention to compute (head-tail, as
`_HeadTailLoadBalancer` of torch 2.13 and Transformer Engine cut them).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from zsim.schedule.mesh import Coordinates
from zsim.schedule.schedule import Schedule
from zsim.zero.names import CONTEXT


class ContextPlace(NamedTuple):
    """A rank's number among those that share its sequences, and how many these are."""

    number: int = 0
    ranks: int = 1

    @classmethod
    def of(cls, schedule: Schedule, coordinates: Coordinates) -> "ContextPlace":
        """Return the place of the rank at `coordinates`."""
        if CONTEXT not in coordinates:
            return cls()
        return cls(coordinates[CONTEXT], schedule.mesh.axis_size(CONTEXT))

    def own(self, of_tokens: Tensor, dimension: int) -> Tensor:
        """Return a copy of what `of_tokens` of whole sequences has for this rank's tokens."""
        parts = of_tokens.chunk(2 * self.ranks, dimension)
        return torch.cat((parts[self.number], parts[-1 - self.number]), dimension)

    def tokens(self, length: int, device: torch.device) -> Tensor:
        """Return the places of its tokens in a sequence of `length`, in the order that it has."""
        part = length // (2 * self.ranks)
        head, tail = self.number, 2 * self.ranks - 1 - self.number
        inside = torch.arange(part, device=device)
        return torch.cat((head * part + inside, tail * part + inside))

    def all_tokens(self, length: int, device: torch.device) -> Tensor:
        """Return those of every rank, one after the other."""
        ranks = (self._replace(number=number) for number in range(self.ranks))
        return torch.cat([each.tokens(length, device) for each in ranks])


ALONE = ContextPlace()
"""The place of a rank that has whole sequences."""
