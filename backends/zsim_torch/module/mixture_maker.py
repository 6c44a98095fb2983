"""The modules of the segments of blocks with experts."""

import torch
from torch import nn

from zsim.model.architecture import Transformer
from zsim.model.model import Model, Segment, Unit
from zsim_torch.module.auxiliary_loss import BalanceSegment, LogitSegment, SequenceSums
from zsim_torch.module.mixture_segment import (
    OF_EXPERTS,
    SHARED,
    ChoosingSegment,
    ExpertsSegment,
    MiddleSegment,
    MixtureBlock,
    MixtureSegment,
    PermuteSegment,
    ReturnSegment,
    RouteSegment,
    SharedSegment,
    WeighingSegment,
    local_names,
)
from zsim_torch.module.routed_rows import ExpertPlace, RowHandle
from zsim_torch.module.router_layer import RouterLayer
from zsim_torch.module.tensor_part import TensorPlace

BACK = ("weighted", "reduced", "fc2")
"""Names of rows that come back to their tokens."""


class MixtureMaker:
    """Makes modules of `model` for the rank at these places; `shape` has the sizes of its parts."""

    def __init__(
        self, model: Model, shape: Transformer, place: TensorPlace, experts: ExpertPlace
    ) -> None:
        self.shape, self.place, self.experts = shape, place, experts
        self.layers = () if model.routing is None else model.routing.layers
        self.tokens = model.tokens
        self._own = self.tokens // place.ranks
        self._sequences = model.micro_batch_size
        self._handles: dict[str, RowHandle] = {}

    def make(self, unit: Unit, segment: Segment, dtype: torch.dtype) -> nn.Module | None:
        """Return the module of a segment of a block with experts; None for any other segment."""
        shape = self.shape
        if shape.experts is None:
            return None
        if segment.loads is not None:
            if local_names(segment.inputs) == (f"{OF_EXPERTS}z/sum",):
                return LogitSegment(shape.experts, self.place.ranks)
            return BalanceSegment(shape.experts, self.tokens)
        outputs = local_names([value.name for value in segment.outputs])
        if outputs == (SHARED,):
            return SharedSegment(shape, self.place.ranks, dtype)
        if any(".router." in name for name in segment.parameters):
            return self._routing(unit, segment, dtype)
        if unit.name not in self.layers:
            return None
        if outputs == ("sum", "ln2"):
            return MiddleSegment(shape, dtype)
        inputs = local_names(segment.inputs)
        if segment.swaps and f"{OF_EXPERTS}rows" in inputs:
            return PermuteSegment(shape, segment, self._handle(unit))
        if segment.swaps:
            return ExpertsSegment(shape, self._handle(unit), dtype)
        if inputs[0] in {f"{OF_EXPERTS}{name}" for name in BACK}:
            weighs = f"{OF_EXPERTS}ordered" in inputs
            made = WeighingSegment if weighs else ReturnSegment
            return made(shape, segment, self._handle(unit), dtype)
        return None

    def _routing(self, unit: Unit, segment: Segment, dtype: torch.dtype) -> nn.Module:
        """Return the module of a segment with a router."""
        losses_apart = any(each.loads is not None for each in unit.segments)
        sums = SequenceSums.of(
            self.shape, first=self.place.number * self._own, sequences=self._sequences
        )
        ranks = self.place.ranks
        router = RouterLayer(self.shape, dtype, sums, apart=losses_apart, ranks=ranks)
        if self.shape.execution.weighs_at_source and unit.name in self.layers:
            return ChoosingSegment(self.shape, segment, self._handle(unit), router, dtype=dtype)
        if segment.swaps:
            return RouteSegment(self.shape, segment, self._handle(unit), router)
        apart = local_names(segment.inputs)[0] == "ln2"
        return (MixtureSegment if apart else MixtureBlock)(self.shape, segment, router, dtype)

    def _handle(self, unit: Unit) -> RowHandle:
        """Return the rows of a block, which its segments share."""
        experts, known = self.shape.experts, self._handles.get(unit.name)
        assert experts is not None
        if known is None:
            layer = self.layers.index(unit.name)
            filled = experts.capacity(self._own) if experts.pads_to_capacity else 0
            known = RowHandle(layer, experts.count, self.experts, filled)
            self._handles[unit.name] = known
        return known
