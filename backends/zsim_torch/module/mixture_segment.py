"""The segments of a block with experts: before, at and after the experts, whole or in parts.

A segment reads and returns values by their names in the block, as `zsim.model.transformer.mixture`
gives them.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

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
    weights_and_tokens,
)
from zsim_torch.module.norm import norm
from zsim_torch.module.routed_rows import (
    RowHandle,
    RowSegment,
    SentRows,
    expert_of_rows,
    sums_of_rows,
)
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


def _add_first_half(part: nn.Module, shape: Transformer, dtype: torch.dtype) -> None:
    """Add the first half of a block to `part`, and the norm after it."""
    part.add_module("ln1", norm(shape, dtype))
    add_projections(part, shape, dtype)
    part.add_module("ln2", norm(shape, dtype))


def _first_half(part: nn.Module, shape: Transformer, hidden: Tensor) -> dict[str, Tensor]:
    """Return the residual sum of the first half of a block, and the input of the experts."""
    hidden = hidden.view(-1, shape.sequence_length, shape.hidden_size)
    normed = part.get_submodule("ln1")(hidden)
    middle = hidden + attention(part, shape, normed)
    read = hidden if shape.parallel_residual else middle
    return {"sum": middle, "ln2": part.get_submodule("ln2")(read)}


class MiddleSegment(nn.Module):
    """The first half of a block, with the norm after it; returns its sum and the normed tokens."""

    def __init__(self, shape: Transformer, dtype: torch.dtype) -> None:
        super().__init__()
        self.shape = shape
        _add_first_half(self, shape, dtype)

    def forward(self, hidden: Tensor) -> tuple[Tensor, ...]:
        """Return the residual sum, and the input of the experts."""
        return tuple(_first_half(self, self.shape, hidden).values())


class MixtureBlock(nn.Module):
    """A block that holds all experts; returns its hidden state, or parts of it, and its sums."""

    def __init__(
        self, shape: Transformer, segment: Segment, router: RouterLayer, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.shape, self._names = shape, _outputs(segment)
        _add_first_half(self, shape, dtype)
        add_mixture(self, shape, dtype)
        self.router = router

    def forward(self, hidden: Tensor) -> tuple[Tensor, ...]:
        """Return the values of the segment."""
        found = _first_half(self, self.shape, hidden)
        found["down"], sums = mixed(self, self.shape, found["ln2"])
        found |= _of_router(sums)
        if "output" in self._names:
            found["output"] = found["sum"] + found["down"]
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


class ChoosingSegment(RowSegment):
    """A router whose weights stay at the source, maybe after the first half of its block.

    It returns the weight and the token of each copy, in the order of experts. Copies that are
    dropped are at the end, with the weight 0. Loops over experts also keep the place of each copy
    among the experts of its token.
    """

    def __init__(
        self,
        shape: Transformer,
        segment: Segment,
        handle: RowHandle,
        router: RouterLayer,
        *,
        dtype: torch.dtype,
    ) -> None:
        super().__init__(handle)
        self.shape, self._names = shape, _outputs(segment)
        sizes = {value.name.rpartition("/")[2]: value.elements for value in segment.outputs}
        self.has_places = sizes["rows"] > sizes["ordered"]
        self.has_half = "sum" in self._names
        if self.has_half:
            _add_first_half(self, shape, dtype)
        self.router = router

    def forward(self, read: Tensor) -> tuple[Tensor, ...]:
        """Return the values of the segment."""
        found = _first_half(self, self.shape, read) if self.has_half else {"ln2": read}
        tokens = found["ln2"].view(-1, self.shape.hidden_size)
        routed = self.router(tokens)
        rows = sent_rows(self.shape, routed.choice)
        self.handle.note_order(rows)
        weights, numbers = weights_and_tokens(routed.choice, rows)
        if self.has_places:
            places = rows.order % routed.choice.experts.shape[1]
            places = functional.pad(places, (0, len(numbers) - len(places)))
            numbers = torch.cat([numbers, places])
        found |= _of_router({"ordered": weights, "rows": numbers})
        return _in_order(found | _of_router(self.router.sums_of(routed, rows)), self._names)


class PermuteSegment(RowSegment):
    """Copies of tokens in the order of experts, and their numbers; weights stay at the source."""

    def __init__(self, shape: Transformer, segment: Segment, handle: RowHandle) -> None:
        super().__init__(handle)
        self.shape, self._names = shape, _outputs(segment)

    def forward(self, normed: Tensor, numbers: Tensor) -> tuple[Tensor, ...]:
        """Return the copies, and how many are for each expert."""
        rows = self.handle.rows()
        sent = normed.view(-1, self.shape.hidden_size)[numbers[: len(rows.order)]]
        return _in_order(_of_router({"permuted": sent, "counts": rows.counts}), self._names)


class ExpertsSegment(RowSegment):
    """The experts of this rank, on the rows that arrived."""

    def __init__(self, shape: Transformer, handle: RowHandle, dtype: torch.dtype) -> None:
        super().__init__(handle)
        self.shape = shape
        held = handle.experts // handle.place.ranks
        self.experts = RoutedExperts(shape, held, dtype)

    def forward(self, copies: Tensor, weights: Tensor | None = None) -> Tensor:
        """Return the outputs in the order of the rows, times their weights if these arrived."""
        rows = copies.view(-1, self.shape.hidden_size)
        own = expert_of_rows(self.handle.received().to(rows.device))
        made: Tensor = self.experts(rows, None if weights is None else weights.view(-1), own)
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
        found = dict(zip(self._names, values, strict=True))
        width = self.shape.hidden_size
        made = self.summed(values[0].view(-1, width), found, self.handle.take_rows())
        wide = {
            name: found[name].view(-1, width) for name in ("ln2", SHARED, "sum") if name in found
        }
        if isinstance(self.shared, SharedGate):
            made = made + self.shared(wide[SHARED], wide.get("ln2"))
        elif self.shared is not None:
            made = made + self.shared(wide["ln2"])
        return made + wide["sum"] if "sum" in wide else made

    def summed(self, back: Tensor, found: Mapping[str, Tensor], rows: SentRows) -> Tensor:
        """Return the sums by token of the rows that came `back`, which have their weights."""
        del found
        return sums_of_rows(back, rows, self.choices)


class WeighingSegment(ReturnSegment):
    """As `ReturnSegment`, for rows whose weights stayed at the source.

    Products are in fp32 or fp64 (`AllToAllTokenDispatcher.combine` of torchtitan in August 2026,
    b5bcd76c, torchtitan/models/common/token_dispatcher.py).
    """

    def summed(self, back: Tensor, found: Mapping[str, Tensor], rows: SentRows) -> Tensor:
        """Return the weighted sums of the rows that came `back`."""
        weights, numbers = (
            found[f"{OF_EXPERTS}{name}"].view(-1)[: len(back)] for name in ("ordered", "rows")
        )
        weighted = (back.to(weights.dtype) * weights[:, None]).to(back.dtype)
        tokens = back.new_zeros(rows.pairs // self.choices, back.shape[1])
        return tokens.index_add(0, numbers, weighted)
