"""Experts of a user's module that are on several ranks, as units and as part of its model.

A block of experts becomes three segments: copies of tokens in the order of experts, the experts of
this rank on the rows that arrive, and the sums of what comes back.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_unflatten

from zsim.backend.backend import RefusedError
from zsim.dtype import DType
from zsim.model.kernel import Kernel, KernelKind, OperandLayout, grouped_matmul, streaming
from zsim.model.model import Model, Segment, Unit, Value
from zsim.model.segment_exchange import SWAP_EXPERTS, flags_of
from zsim.model.token_loads import Routing, balanced
from zsim_torch.ground.torch_dtype import DTYPE_OF_TORCH
from zsim_torch.module.expert_parts import ExpertParts
from zsim_torch.module.experts_module import (
    STACKED,
    are_experts,
    arguments_of,
    count_of,
    own_part,
)
from zsim_torch.module.forward_plan import PlannedBatch, Symbol, UnitPlan
from zsim_torch.module.planned_module import PlannedModule
from zsim_torch.module.routed_rows import (
    ExpertPlace,
    RowHandle,
    RowSegment,
    expert_of_rows,
    in_order,
    sums_of_rows,
)
from zsim_torch.module.unit import TorchUnit

INDEX_BYTES = 8
"""Bytes of the place of a row."""


class _Permute(RowSegment):
    """Copies of tokens in the order of experts, their weights, and their counts."""

    def forward(self, tokens: Tensor, chosen: Tensor, weights: Tensor) -> tuple[Tensor, ...]:
        """Return copies, weights and counts."""
        rows = in_order(chosen, self.handle.experts)
        self.handle.note_order(rows)
        copies = tokens.reshape(len(chosen), -1)[rows.order // chosen.shape[1]]
        return copies, weights.reshape(-1)[rows.order], rows.counts


class _OwnExperts(RowSegment):
    """The experts of this rank, on the rows that arrived: each row has one choice."""

    def __init__(self, handle: RowHandle, experts: nn.Module, width: int) -> None:
        super().__init__(handle)
        self.experts, self.width = own_part(experts, handle.experts // handle.place.ranks), width

    def forward(self, copies: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted outputs, in the order of the rows."""
        rows, shares = copies.view(-1, self.width), weights.view(-1, 1)
        if not len(rows):  # implementations need a row
            return (rows * shares).to(rows.dtype)
        own = expert_of_rows(self.handle.received().to(rows.device))
        made: Tensor = self.experts(rows, own[:, None], shares)
        return made


class _Return(RowSegment):
    """The sum of the outputs of each token's experts."""

    def __init__(self, handle: RowHandle, shape: Sequence[int], choices: int) -> None:
        super().__init__(handle)
        self.shape, self.choices = tuple(shape), choices

    def forward(self, weighted: Tensor) -> Tensor:
        """Return the sums in the shape of the tokens."""
        rows = weighted.view(-1, self.shape[-1])
        return sums_of_rows(rows, self.handle.take_rows(), self.choices).view(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class _PermuteUnit(TorchUnit):
    """The first segment: it reads the arguments of a call of `experts` from the plan."""

    experts: nn.Module

    def run(self, parameters: Sequence[Tensor], inputs: Sequence[object]) -> object:
        """Return copies of tokens, weights and counts for values and a planned micro-batch."""
        *values, batch = inputs
        assert isinstance(batch, PlannedBatch)
        plan = batch.plans[self.name]
        found = _arguments(self.experts, plan, dict(zip(plan.inputs, values, strict=True)))
        return self.call(parameters, found, {})


def _arguments(
    experts: nn.Module, plan: UnitPlan, known: Mapping[Symbol, object]
) -> tuple[Any, Any, Any]:
    """Return tokens, chosen experts and weights of the call of `experts` in `plan`."""
    (call,) = plan.calls
    leaves = [known[each] if isinstance(each, Symbol) else each for each in call.leaves]
    args, kwargs = tree_unflatten(leaves, call.spec)
    return arguments_of(experts, args, kwargs)


class _BlockSizes(NamedTuple):
    """Shape of the tokens of a block, and the choices of each."""

    tokens: torch.Size
    choices: int

    @property
    def copies(self) -> int:
        """Copies of tokens that a rank sends."""
        return prod(self.tokens[:-1]) * self.choices


@dataclass(frozen=True, slots=True)
class ExpertRanks:
    """A module whose forward is planned, with `experts` on `ranks` ranks, by unit."""

    planned: PlannedModule
    ranks: int
    experts: Mapping[str, nn.Module]

    @classmethod
    def of(cls, planned: PlannedModule, ranks: int) -> "ExpertRanks":
        """Return the experts of a planned module on `ranks` ranks.

        Raises:
            RefusedError: the module contains no experts, or the ranks do not divide them.
        """
        found: dict[str, nn.Module] = {}
        for unit in planned.units:
            block = planned.block(unit.name)
            if block is not None and are_experts(block):
                found[unit.name] = block
        if not found:
            raise RefusedError(
                f"parallel.expert: {ranks} needs a module with stacked experts, called with "
                "hidden_states, top_k_index and top_k_weights as in transformers 5"
            )
        counts = {count_of(each) for each in found.values()}
        if len(counts) > 1:
            raise RefusedError(
                f"parallel.expert: {ranks} needs equal numbers of experts in all blocks, the "
                f"module has {min(counts)} and {max(counts)}"
            )
        if any(each % ranks for each in counts):
            raise RefusedError(f"parallel.expert: {ranks} must divide the {min(counts)} experts")
        return cls(planned, ranks, found)

    @property
    def count(self) -> int:
        """Number of experts of a block."""
        return count_of(next(iter(self.experts.values())))

    def _sizes(self, name: str) -> _BlockSizes:
        plan = self.planned.first.plans[name]
        symbols: dict[Symbol, object] = {each: each for each in plan.inputs}
        tokens, chosen, _ = _arguments(self.experts[name], plan, symbols)
        return _BlockSizes(tokens.shape, chosen.shape[-1])

    def parts(self, place: ExpertPlace) -> ExpertParts:
        """Return the parts of the parameters of experts on the rank at `place`."""
        own = {id(each) for one in self.experts.values() for each in one.parameters()}
        named = self.planned.module.named_parameters()
        return ExpertParts(place, {name: each.shape for name, each in named if id(each) in own})

    def units(self, place: ExpertPlace) -> tuple[TorchUnit, ...]:
        """Return the units of the module on the rank at `place`."""
        found: list[TorchUnit] = []
        layers = {name: number for number, name in enumerate(self.experts)}
        for unit in self.planned.units:
            if unit.name not in layers:
                found.append(unit)
                continue
            handle = RowHandle(layers[unit.name], self.count, place)
            found += self._segments(unit, handle)
        return tuple(found)

    def _segments(self, unit: TorchUnit, handle: RowHandle) -> list[TorchUnit]:
        sizes, experts = self._sizes(unit.name), self.experts[unit.name]
        own = _OwnExperts(handle, experts, sizes.tokens[-1])
        held = handle.experts // handle.place.ranks
        none: dict[str, Any] = {"names": (), "local_names": (), "shapes": ()}
        return [
            _PermuteUnit(name=unit.name, module=_Permute(handle), experts=experts, **none),
            TorchUnit(
                name=unit.name,
                segment=1,
                module=own,
                names=unit.names,
                local_names=tuple(f"experts.{name}" for name in unit.local_names),
                shapes=tuple(torch.Size((held, *shape[1:])) for shape in unit.shapes),
                frozen=unit.frozen,
            ),
            TorchUnit(
                name=unit.name,
                segment=2,
                module=_Return(handle, sizes.tokens, sizes.choices),
                **none,
            ),
        ]

    def model(self, whole: Model) -> Model:
        """Return `whole`, the model of the module on one rank, with experts on several ranks.

        A rank has memory for the rows of all ranks, so no routing exceeds it.
        """
        units = tuple(
            self._unit(each) if each.name in self.experts else each for each in whole.units
        )
        sent = {self._sizes(name).copies for name in self.experts}
        if len(sent) > 1:
            rows = " and ".join(f"{each:,}" for each in sorted(sent))
            raise RefusedError(
                f"parallel.expert: {self.ranks} needs blocks that choose equally many experts for "
                f"all tokens, the blocks of the module choose {rows}; say 1"
            )
        routing = Routing(
            experts=self.count,
            sent=min(sent),
            maximum=min(sent) * self.ranks,
            layers=tuple(self.experts),
        )
        return replace(whole, units=units, expert=self.ranks, routing=routing)

    def _unit(self, unit: Unit) -> Unit:
        """Return a unit of experts in three segments, with the experts of one rank."""
        (whole,) = unit.segments
        sizes, held, name = self._sizes(unit.name), self.count // self.ranks, unit.name
        copies, (output,) = sizes.copies, whole.outputs
        width = sizes.tokens[-1]
        rows = replace(output, name=f"{name}/permuted", elements=copies * width, copies=copies)
        scores = replace(rows, name=f"{name}/ordered", elements=copies, dtype=self._wide(name))
        counts = Value(
            name=f"{name}/counts",
            elements=self.count,
            dtype=DType.INT64,
            requires_gradient=False,
        )
        back = replace(rows, name=f"{name}/weighted")
        parameters = tuple(
            replace(each, shape=(held, *each.shape[1:]), experts=held) for each in unit.parameters
        )
        return replace(
            unit,
            parameters=parameters,
            segments=(
                Segment(
                    inputs=whole.inputs,
                    outputs=(rows, scores, counts),
                    routes=counts.name,
                    saved_bytes=2 * INDEX_BYTES * copies,
                    saves_input=False,
                    **flags_of(None, SWAP_EXPERTS),
                    forward=(_moved(copies, width, output.dtype),),
                    backward=(_moved(copies, width, output.dtype, backward=True),),
                ),
                Segment(
                    inputs=(rows.name, scores.name),
                    outputs=(back,),
                    parameters=whole.parameters,
                    saved_bytes=whole.saved_bytes,
                    **flags_of(None, SWAP_EXPERTS),
                    forward=self._products(unit, output.dtype, backward=False),
                    backward=self._products(unit, output.dtype, backward=True),
                ),
                Segment(
                    inputs=(back.name,),
                    outputs=whole.outputs,
                    saved_bytes=INDEX_BYTES * copies,
                    saves_input=False,
                    forward=(_moved(copies, width, output.dtype),),
                    backward=(_moved(copies, width, output.dtype, backward=True),),
                ),
            ),
        )

    def _wide(self, name: str) -> DType:
        """Return the format of the weights of choices."""
        plan = self.planned.first.plans[name]
        symbols: dict[Symbol, object] = {each: each for each in plan.inputs}
        *_, weights = _arguments(self.experts[name], plan, symbols)
        return DTYPE_OF_TORCH[weights.dtype]

    def _products(self, unit: Unit, dtype: DType, *, backward: bool) -> tuple[Kernel, ...]:
        """Return the products of a rank's experts with balanced rows."""
        loads = balanced(self._sizes(unit.name).copies, self.count // self.ranks)
        layouts = (OperandLayout.NN, OperandLayout.TN) if backward else (OperandLayout.NT,)
        return tuple(
            grouped_matmul(loads, *each.shape[1:], dtype, backward=backward, layout=layout)
            for each in unit.parameters
            if len(each.shape) == STACKED
            for layout in layouts
        )


def _moved(rows: int, width: int, dtype: DType, *, backward: bool = False) -> Kernel:
    return streaming(KernelKind.ELEMENTWISE, (rows, width), dtype, streams=2, backward=backward)
