"""The segments of a block with experts: before, at and after the experts, whole or in parts.

A segment reads and returns values by their names in the block, as `zsim.model.transformer.mixture`
gives them.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from zsim.model.architecture import Transformer
from zsim.model.model import Segment
from zsim_torch.module.mixture_layers import (
    RoutedExperts,
    SharedExperts,
    SharedGate,
    add_mixture,
    mixed,
    permuted,
    sent_rows,
)
from zsim_torch.module.norm import norm
from zsim_torch.module.routed_rows import RowHandle, RowSegment, expert_of_rows, sums_of_rows
from zsim_torch.module.router_layer import RouterLayer
from zsim_torch.module.transformer import add_projections, attention

OF_EXPERTS = "experts/"
"""Prefix of the names of values of experts in a block."""

SHARED = "shared/down"
"""Outputs of shared experts, summed over tensor ranks."""


def local_names(names: Sequence[str]) -> tuple[str, ...]:
    """Return the names of values in their block, without the block's name."""
    return tuple(name.partition("/")[2] for name in names)


def _outputs(segment: Segment) -> tuple[str, ...]:
    return local_names([value.name for value in segment.outputs])


def _in_order(found: Mapping[str, Tensor], names: Sequence[str]) -> tuple[Tensor, ...]:
    """Return the values of these names."""
    return tuple(found[name] for name in names)


def _of_router(sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the sums of a router by the names of values."""
    return {f"{OF_EXPERTS}{name}": value for name, value in sums.items()}


class _FirstHalf(nn.Module):
    """The first half of a block, with the norm after it."""

    def __init__(self, shape: Transformer, dtype: torch.dtype) -> None:
        super().__init__()
        self.shape = shape
        self.ln1 = norm(shape, dtype)
        add_projections(self, shape, dtype)
        self.ln2 = norm(shape, dtype)

    def middle(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return the residual sum, and the input of the experts."""
        shape = self.shape
        hidden = hidden.view(-1, shape.sequence_length, shape.hidden_size)
        middle = hidden + attention(self, shape, self.ln1(hidden))
        return middle, self.ln2(hidden if shape.parallel_residual else middle)


class MiddleSegment(_FirstHalf):
    """The first half of a block; returns its sum and the normed tokens."""

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return the residual sum, and the input of the experts."""
        return self.middle(hidden)


class MixtureBlock(_FirstHalf):
    """A block that holds all experts; returns its hidden state, or parts of it, and its sums."""

    def __init__(
        self, shape: Transformer, segment: Segment, router: RouterLayer, dtype: torch.dtype
    ) -> None:
        super().__init__(shape, dtype)
        add_mixture(self, shape, dtype)
        self.router = router
        self._names = _outputs(segment)

    def forward(self, hidden: Tensor) -> tuple[Tensor, ...]:
        """Return the values of the segment."""
        middle, normed = self.middle(hidden)
        made, sums = mixed(self, self.shape, normed)
        found = _of_router(sums) | {"sum": middle, "down": made}
        if "output" in self._names:
            found["output"] = middle + made
        return _in_order(found, self._names)


class MixtureSegment(nn.Module):
    """All experts on this rank's tokens, apart from the first half of the block."""

    def __init__(
        self, shape: Transformer, segment: Segment, router: RouterLayer, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self._inputs, self._names = local_names(segment.inputs), _outputs(segment)
        self.shape = shape
        add_mixture(self, shape, dtype)
        self.router = router
        if SHARED in self._inputs:
            self.shared = SharedGate(shape, dtype)

    def forward(self, *values: Tensor) -> tuple[Tensor, ...]:
        """Return the output of the mixture, and its sums."""
        read = dict(zip(self._inputs, values, strict=True))
        tokens = read["ln2"].view(-1, self.shape.hidden_size)
        made, sums = mixed(self, self.shape, tokens, read.get(SHARED))
        return _in_order(_of_router(sums) | {"down": made}, self._names)


class RouteSegment(RowSegment):
    """The router, and copies of tokens in the order of experts, with weights and counts."""

    def __init__(
        self, shape: Transformer, segment: Segment, handle: RowHandle, router: RouterLayer
    ) -> None:
        super().__init__(handle)
        self.shape, self.router, self._names = shape, router, _outputs(segment)

    def forward(self, normed: Tensor) -> tuple[Tensor, ...]:
        """Return copies of tokens, their weights, copies for each expert, and the router's sums."""
        tokens = normed.view(-1, self.shape.hidden_size)
        routed = self.router(tokens)
        rows = sent_rows(self.shape, routed.choice)
        self.handle.note_order(rows)
        copies, weights = permuted(tokens, routed.choice, rows)
        found = _of_router(self.router.sums_of(routed, rows))
        found |= _of_router({"permuted": copies, "ordered": weights, "weights": weights})
        found |= _of_router({"counts": rows.counts})
        return _in_order(found, self._names)


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


class SharedSegment(nn.Module):
    """A tensor rank's part of shared experts; returns summands of their output."""

    def __init__(self, shape: Transformer, ranks: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.shape = shape
        self.shared = SharedExperts(shape, dtype, ranks=ranks)

    def forward(self, normed: Tensor) -> Tensor:
        """Return summands for all tokens."""
        made: Tensor = self.shared(normed.view(-1, self.shape.hidden_size))
        return made


class ReturnSegment(RowSegment):
    """The sums of the outputs of each token's experts, of shared experts and of the residual."""

    def __init__(
        self, shape: Transformer, segment: Segment, handle: RowHandle, dtype: torch.dtype
    ) -> None:
        super().__init__(handle)
        assert shape.experts is not None
        self.shape, self.choices = shape, shape.experts.top_k
        self._names = local_names(segment.inputs)
        self.shared: nn.Module | None = None
        if SHARED in self._names:
            self.shared = SharedGate(shape, dtype)
        elif shape.experts.shared_intermediate_size:
            self.shared = SharedExperts(shape, dtype)

    def forward(self, *values: Tensor) -> Tensor:
        """Return the next hidden state, or the value to be added to it."""
        found = {
            name: value.view(-1, self.shape.hidden_size)
            for name, value in zip(self._names, values, strict=True)
        }
        made = sums_of_rows(found[self._names[0]], self.handle.take_rows(), self.choices)
        if isinstance(self.shared, SharedGate):
            made = made + self.shared(found[SHARED], found.get("ln2"))
        elif self.shared is not None:
            made = made + self.shared(found["ln2"])
        return made + found["sum"] if "sum" in found else made
