"""The segments of a block whose experts are on several ranks: before, at and after the experts."""

import torch
from torch import Tensor, nn

from zsim.model.architecture import Transformer
from zsim.model.model import Segment
from zsim_torch.module.mixture_layers import RoutedExperts, RouterLayer, SharedExperts, permuted
from zsim_torch.module.norm import norm
from zsim_torch.module.routed_rows import (
    RowHandle,
    RowSegment,
    expert_of_rows,
    in_order,
    sums_of_rows,
)
from zsim_torch.module.transformer import add_projections, attention


class MiddleSegment(nn.Module):
    """The first half of a block, with the norm after it; returns its sum and the normed tokens."""

    def __init__(self, shape: Transformer, dtype: torch.dtype) -> None:
        super().__init__()
        self.shape = shape
        self.ln1 = norm(shape, dtype)
        add_projections(self, shape, dtype)
        self.ln2 = norm(shape, dtype)

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return the residual sum, and the input of the experts."""
        shape = self.shape
        hidden = hidden.view(-1, shape.sequence_length, shape.hidden_size)
        middle = hidden + attention(self, shape, self.ln1(hidden))
        return middle, self.ln2(hidden if shape.parallel_residual else middle)


class RouteSegment(RowSegment):
    """The router, and copies of tokens in the order of experts, with weights and counts."""

    def __init__(self, shape: Transformer, handle: RowHandle, dtype: torch.dtype) -> None:
        super().__init__(handle)
        self.shape = shape
        self.router = RouterLayer(shape, dtype)

    def forward(self, normed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return copies of tokens, their weights, and the copies for each expert."""
        tokens = normed.view(-1, self.shape.hidden_size)
        choice = self.router(tokens)
        rows = in_order(choice.experts, self.handle.experts)
        self.handle.note_order(rows)
        return *permuted(tokens, choice, rows.order), rows.counts


class ExpertsSegment(RowSegment):
    """The experts of this rank, on the rows that arrived."""

    def __init__(self, shape: Transformer, handle: RowHandle, dtype: torch.dtype) -> None:
        super().__init__(handle)
        self.shape = shape
        held = handle.experts // handle.place.ranks
        self.experts = RoutedExperts(shape, held, dtype)

    def forward(self, copies: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted outputs, in the order of the rows."""
        rows = copies.view(-1, self.shape.hidden_size)
        own = expert_of_rows(self.handle.received().to(rows.device))
        made: Tensor = self.experts(rows, weights.view(-1), own)
        return made


class ReturnSegment(RowSegment):
    """The sums of the outputs of each token's experts, of shared experts and of the residual."""

    def __init__(
        self, shape: Transformer, segment: Segment, handle: RowHandle, dtype: torch.dtype
    ) -> None:
        super().__init__(handle)
        assert shape.experts is not None
        self.shape, self.choices = shape, shape.experts.top_k
        self._names = [name.rpartition("/")[2] for name in segment.inputs]
        if shape.experts.shared_intermediate_size:
            self.shared = SharedExperts(shape, dtype)

    def forward(self, *values: Tensor) -> Tensor:
        """Return the next hidden state."""
        found = {
            name: value.view(-1, self.shape.hidden_size)
            for name, value in zip(self._names, values, strict=True)
        }
        rows = found[self._names[0]]
        made = sums_of_rows(rows, self.handle.take_order(), self.choices)
        if "ln2" in found:
            made = made + self.shared(found["ln2"])
        return made + found["sum"]
