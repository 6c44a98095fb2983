"""The plan of one forward: the calls that each unit makes for one micro-batch.

The plan is recorded by running the module's own forward ahead without values. The code between two
repeated blocks becomes a list of torch calls; a block is called as it is. Tensors that depend on no
parameter, such as masks and rotary tables, are stored in the plan with their values.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import nn
from torch.utils._pytree import TreeSpec, tree_leaves, tree_unflatten

from zsim_torch.module.block_result import BlockResult
from zsim_torch.module.unit import TorchUnit

_OF_GRADIENTS: Final = (torch.Tensor.register_hook, torch.Tensor.retain_grad)
"""Functions that do nothing in a forward, and fail without a graph."""


@dataclass(eq=False, frozen=True, slots=True)
class Symbol:
    """A tensor that depends on parameters; `maker` is the index of the unit that makes it."""

    maker: int
    shape: torch.Size
    dtype: torch.dtype
    requires_grad: bool


@dataclass(frozen=True, slots=True)
class ParameterSymbol:
    """A parameter of the module, by its name."""

    name: str


@dataclass(frozen=True, slots=True)
class PlannedCall:
    """A call whose arguments contain symbols, and the symbols of the tensors that it returns.

    `function` is None for the block of the unit, whose result must match `result`, that of the
    first call. Returned leaves that are not new tensors have None in `makes`.
    """

    function: Callable[..., object] | None
    leaves: tuple[object, ...]
    spec: TreeSpec
    makes: tuple[Symbol | None, ...]
    with_grad: bool = True
    result: BlockResult | None = None

    def reads(self) -> Iterable[Symbol | ParameterSymbol]:
        """Return the symbols among the arguments."""
        return (each for each in self.leaves if isinstance(each, Symbol | ParameterSymbol))


@dataclass(slots=True)
class UnitPlan:
    """Calls of one unit in order, with its inputs and outputs.

    Values that receive a gradient come first: `sloped` is their number among the outputs. `block`
    is the path of the unit's block, or empty for code between two blocks.
    """

    name: str
    block: str = ""
    calls: list[PlannedCall] = field(default_factory=list[PlannedCall])
    parameters: tuple[str, ...] = ()
    inputs: tuple[Symbol, ...] = ()
    outputs: tuple[Symbol, ...] = ()
    sloped: int = 0
    last_uses: dict[int, list[Symbol]] = field(default_factory=dict[int, list[Symbol]])

    def run(
        self,
        unit: TorchUnit,
        parameters: Sequence[torch.Tensor],
        values: Sequence[torch.Tensor],
    ) -> tuple[torch.Tensor, ...]:
        """Return the outputs for the inputs `values`; `parameters` are in the order of `unit`."""
        named = dict(zip(unit.local_names, parameters, strict=True))
        known: dict[object, Any] = dict(zip(self.inputs, values, strict=True))
        wanted = set(self.outputs)
        for number, call in enumerate(self.calls):
            leaves = [
                known[each]
                if isinstance(each, Symbol)
                else named[each.name]
                if isinstance(each, ParameterSymbol)
                else each
                for each in call.leaves
            ]
            args, kwargs = tree_unflatten(leaves, call.spec)
            if call.function in _OF_GRADIENTS and not torch.is_grad_enabled():
                continue
            if call.function is None:
                result = unit.call(parameters, args, kwargs)
            else:
                with torch.set_grad_enabled(call.with_grad and torch.is_grad_enabled()):
                    result = call.function(*args, **kwargs)
            made = [result] if isinstance(result, torch.Tensor) else tree_leaves(result)
            if call.result is not None:
                call.result.need(made, leaves)
            del args, kwargs, leaves
            known.update(zip(call.makes, made, strict=True))
            del result, made
            known.pop(None, None)
            for symbol in self.last_uses.get(number, ()):
                if symbol not in wanted:
                    del known[symbol]
        shared = {_storage(each) for each in (*parameters, *values)}
        found = (known[symbol] for symbol in self.outputs)
        return tuple(each.clone() if _storage(each) in shared else each for each in found)

    def note_last_uses(self) -> None:
        """Compute after which call each symbol can be dropped."""
        last: dict[Symbol, int] = {}
        for number, call in enumerate(self.calls):
            read = [each for each in call.reads() if isinstance(each, Symbol)]
            for symbol in (*read, *(each for each in call.makes if each is not None)):
                last[symbol] = number
        self.last_uses = {}
        for symbol, number in last.items():
            self.last_uses.setdefault(number, []).append(symbol)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedParts:
    """Parts of a module, as a planner uses them.

    `names` are those of parameters by their ids. `stand_in` returns the stand-in for a parameter
    name: a new tensor each time for a block's parameter, else always the same. `blocks` are by
    path; a block runs inside `watch(path)`.
    """

    blocks: Mapping[str, nn.Module]
    names: Mapping[int, str]
    stand_in: Callable[[str], torch.Tensor]
    buffers: frozenset[int]
    device: torch.device
    watch: Callable[[str], AbstractContextManager[None]]


@dataclass(slots=True)
class Glue:
    """Calls since the last block, and the versions of other units' values that they use."""

    calls: list[PlannedCall] = field(default_factory=list[PlannedCall])
    entered: list[tuple[torch.Tensor, int]] = field(default_factory=list[tuple[torch.Tensor, int]])


def _storage(tensor: torch.Tensor) -> int:
    """Return the address of the memory of `tensor`, to find outputs that are views of inputs."""
    return tensor.untyped_storage().data_ptr() if tensor.numel() else id(tensor)


@dataclass(eq=False, frozen=True, slots=True)
class PlannedBatch:
    """A micro-batch with the plan of its forward by unit; its tensors have `size_bytes`.

    `at_end` is called after the unit `last` has run.
    """

    plans: Mapping[str, UnitPlan]
    size_bytes: int
    last: str
    at_end: Callable[[], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedUnit(TorchUnit):
    """A unit that runs the plan of a micro-batch, which is its last input."""

    def run(
        self, parameters: Sequence[torch.Tensor], inputs: Sequence[object]
    ) -> tuple[torch.Tensor, ...]:
        """Return the outputs for values and a planned micro-batch."""
        *values, batch = inputs
        assert isinstance(batch, PlannedBatch)
        tensors = [each for each in values if isinstance(each, torch.Tensor)]
        made = batch.plans[self.name].run(self, parameters, tensors)
        if self.name == batch.last:
            batch.at_end()
        return made
