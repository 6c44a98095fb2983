"""Any module as units: its repeated blocks, and what its forward does between them."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import keystr, tree_flatten_with_path

from zsim.dtype import DType
from zsim_torch.module.block_result import BlockResult, called_instead
from zsim_torch.module.forward_plan import (
    ParameterSymbol,
    PlannedBatch,
    PlannedParts,
    PlannedUnit,
    Symbol,
    UnitPlan,
)
from zsim_torch.module.forward_planner import ForwardPlanner
from zsim_torch.module.module_state import evaluating, unchanged
from zsim_torch.module.probe import value_or_probe
from zsim_torch.module.repeated_blocks import blocks_of, names_outside
from zsim_torch.module.unit import ModuleUnitError, TorchUnit, choose
from zsim_torch.torch_dtype import TORCH_DTYPE, entering

LossOf = Callable[[nn.Module, object], Tensor]
"""The loss of a module on a micro-batch."""


def loss_of(module: nn.Module, batch: object) -> Tensor:
    """Return what the module makes of a batch, as keyword arguments if it is a mapping.

    Raises:
        ModuleUnitError: it is neither one number nor has one called loss.
    """
    if isinstance(batch, Mapping):
        made = module(**batch)
    elif isinstance(batch, tuple | list):
        made = module(*batch)
    else:
        made = module(batch)
    found = made.get("loss") if isinstance(made, Mapping) else getattr(made, "loss", made)
    if not isinstance(found, Tensor) or found.numel() != 1:
        raise ModuleUnitError(
            f"module: returns {_described(found)} for a batch; say loss=lambda module, batch: ..."
        )
    return found


def _described(made: object) -> str:
    if isinstance(made, Tensor):
        return f"a tensor of {made.numel()} elements"
    return "no loss" if made is None else f"a {type(made).__name__}"


def has_forward(module: nn.Module) -> bool:
    """Return whether a module can be called, and is more than a sequence of its children."""
    return type(module).forward not in (nn.Module.forward, nn.Sequential.forward)


@dataclass(frozen=True, slots=True)
class _UnitShape:
    """Traits of a unit that are the same in every micro-batch."""

    name: str
    parameters: tuple[str, ...]
    inputs: tuple[tuple[int, int], ...]
    outputs: tuple[tuple[torch.Size, torch.dtype], ...]
    sloped: int


_Extent = tuple[str, torch.Size, torch.dtype]


class PlannedModule:
    """A module that is run by units, unmodified.

    Attributes:
        units: in the order of forward.
        first: the first micro-batch, planned.
        dtype: the format of the parameters, and of floats in micro-batches.
    """

    def __init__(
        self,
        module: nn.Module,
        batch: object,
        *,
        dtype: DType,
        loss: LossOf = loss_of,
    ) -> None:
        """Run the forward once with values, and once without.

        Raises:
            ModuleUnitError: zsim cannot follow it.
        """
        self.module = module
        self._loss = loss
        self.dtype = dtype
        self._blocks = blocks_of(module)
        self._names = {id(each): name for name, each in module.named_parameters()}
        self._frozen = {name for name, each in module.named_parameters() if not each.requires_grad}
        self._between = names_outside(module, self._blocks)
        batch = self._entering(batch)
        self._extents = _extents(batch)
        self._results: Sequence[BlockResult] | None = None
        with unchanged(module):
            plans, self._results = self._planned(batch)
            self.first = _batch(plans)
            self._shapes = _shapes_of(plans)
            self.units = self._units(plans)
            self._need_equal_losses(batch)

    def plan(self, batch: object) -> PlannedBatch:
        """Run the forward ahead for a micro-batch.

        Raises:
            ModuleUnitError: it does something else than for the first one.
        """
        batch = self._entering(batch)
        self._need_extents(batch)
        plans, _ = self._planned(batch)
        self._need_shapes(_shapes_of(plans))
        return _batch(plans)

    def _need_equal_losses(self, batch: object) -> None:
        """Return if units make the loss that the module makes, of other parameters than before.

        What a block leaves in the module past its outputs is from before, and shows. In training
        what draws ahead may draw other numbers than in its turn, so evaluation decides then.

        Raises:
            ModuleUnitError: they do not.
        """
        both = self._losses(batch, 1 + 2**-4)
        if not _close(*both):
            with evaluating([self.module]):
                both = self._losses(batch, 1 - 2**-4)
        if not _close(*both):
            raise ModuleUnitError(
                f"module: run by units it makes a loss of {both[0]:.6g}, and by itself "
                f"{both[1]:.6g} (a block that reads what the forward leaves in the module?)"
            )

    def _losses(self, batch: object, scale: float) -> tuple[Tensor, Tensor]:
        """Return the loss by units, and by the module itself, both from one state of generators."""
        values: dict[tuple[int, int], Tensor] = {}
        with unchanged(self.module), torch.no_grad():
            planned = self.plan(batch)
            for place, (unit, shape) in enumerate(zip(self.units, self._shapes, strict=True)):
                given = [*(values[each] for each in shape.inputs), planned]
                made = unit.run([self._value(name) * scale for name in unit.names], given)
                values |= {(place, number): each for number, each in enumerate(made)}
        with unchanged(self.module), torch.no_grad(), ExitStack() as stack:
            for block in self._blocks.values():
                stack.enter_context(called_instead(block, partial(self._called, block, scale)))
            whole = _WithLoss(self.module, self._loss)
            named = {f"module.{name}": self._value(name) * scale for name in self._between}
            itself = functional_call(whole, named, (batch,))
        return values[len(self.units) - 1, 0], itself.reshape(())

    def _entering(self, batch: object) -> object:
        return entering(dict(batch) if isinstance(batch, Mapping) else batch, self.dtype)

    def _called(self, block: nn.Module, scale: float, *args: object, **kwargs: object) -> object:
        """Call a block with its parameters, which have memory for the time of the call."""
        named = {
            local: self._value(self._names[id(each)]) * scale
            for local, each in block.named_parameters()
        }
        with called_instead(block, None):
            return functional_call(block, named, args, kwargs)

    def values_of(self, unit: TorchUnit) -> list[Tensor]:
        """Return the parameters of a unit, in its order and in the format in which it has them."""
        return [
            self._value(name).contiguous().requires_grad_(name not in self._frozen)
            for name in unit.names
        ]

    def _value(self, name: str) -> Tensor:
        return value_or_probe(self.module.get_parameter(name), name, TORCH_DTYPE[self.dtype])

    def _stand_in(self, known: dict[str, Tensor], name: str, *, has_values: bool) -> Tensor:
        """Return what stands for a parameter; `known` are those of one forward between blocks."""
        if name in known:
            return known[name]
        if has_values:
            made = self._value(name)
        else:
            shape = self.module.get_parameter(name).shape
            made = torch.empty(shape, dtype=TORCH_DTYPE[self.dtype], device="meta")
        made.requires_grad_(name not in self._frozen)
        if name in self._between:
            known[name] = made
        return made

    def _planned(self, batch: object) -> tuple[list[UnitPlan], list[BlockResult]]:
        """Run the forward ahead; the first time with values."""
        is_first = self._results is None
        device = next((each.device for each in tree_tensors(batch)), torch.device("cpu"))
        parts = PlannedParts(
            blocks=self._blocks,
            names=self._names,
            stand_in=partial(self._stand_in, {}, has_values=is_first),
            buffers=frozenset(id(each) for each in self.module.buffers()),
            device=device,
        )
        planner = ForwardPlanner(parts, self._results)
        with torch.enable_grad():
            with planner.watched():
                loss = self._loss(self.module, batch)
            last = planner.close(loss)
        self._settle(planner.plans, last)
        return planner.plans, planner.results

    def _settle(self, plans: list[UnitPlan], loss: Symbol) -> None:
        """Find the parameters of each unit, and the values that cross between them."""
        order = {name: number for number, name in enumerate(self._names.values())}
        readers: dict[Symbol, list[int]] = {loss: []}
        for place, plan in enumerate(plans):
            read = dict.fromkeys(each for call in plan.calls for each in call.reads())
            if plan.block:
                own = self._blocks[plan.block].parameters()
                names = {self._names[id(each)] for each in own}
            else:
                names = {each.name for each in read if isinstance(each, ParameterSymbol)}
            plan.parameters = tuple(sorted(names, key=order.__getitem__))
            foreign = [each for each in read if isinstance(each, Symbol) and each.maker != place]
            plan.inputs = tuple(foreign)
            for symbol in foreign:
                readers.setdefault(symbol, []).append(place)
        slopes = dict[Symbol, bool]()
        runs_back = [False] * len(plans)
        for place in reversed(range(len(plans))):
            plan = plans[place]
            made = [symbol for symbol in readers if symbol.maker == place]
            for symbol in made:
                wanted = symbol is loss or any(runs_back[each] for each in readers[symbol])
                slopes[symbol] = symbol.requires_grad and wanted
            plan.outputs = tuple(sorted(made, key=lambda each: not slopes[each]))
            plan.sloped = sum(slopes[each] for each in made)
            trained = any(name not in self._frozen for name in plan.parameters)
            runs_back[place] = trained or any(slopes[each] for each in made)
            plan.note_last_uses()
        for plan in plans:
            plan.inputs = tuple(sorted(plan.inputs, key=lambda each: not slopes[each]))

    def _units(self, plans: Sequence[UnitPlan]) -> tuple[PlannedUnit, ...]:
        """Return the units; a parameter that none reads is the last one's, and not trained."""
        read = {name for plan in plans for name in plan.parameters}
        unread = [name for name in self._names.values() if name not in read]
        found: list[PlannedUnit] = []
        for plan in plans:
            if plan.block:
                known = choose(self.module, (plan.name, self._blocks[plan.block]), self._names)
                names, local, shapes = known.names, known.local_names, known.shapes
                module = known.module
            else:
                names = (*plan.parameters, *(unread if plan is plans[-1] else ()))
                local, module = names, self.module
                shapes = tuple(self.module.get_parameter(name).shape for name in names)
            frozen = frozenset(each for each in names if each in self._frozen or each in unread)
            found.append(
                PlannedUnit(
                    name=plan.name,
                    module=module,
                    names=names,
                    local_names=local,
                    shapes=shapes,
                    frozen=frozen,
                )
            )
        return tuple(found)

    def _need_shapes(self, found: Sequence[_UnitShape]) -> None:
        """Return if the forward of a micro-batch has the units and values of the first one.

        Raises:
            ModuleUnitError: it has not.
        """
        known = self._shapes
        for one, other in zip(known, found, strict=False):
            if one != other:
                fields = ("name", "parameters", "inputs", "outputs", "sloped")
                what = next(each for each in fields if getattr(one, each) != getattr(other, each))
                raise ModuleUnitError(
                    f"unit {one.name}: its {what} are not those of the first micro-batch: "
                    f"{getattr(other, what)} instead of {getattr(one, what)}"
                )
        if len(known) != len(found):
            raise ModuleUnitError(
                f"module: its forward has {len(found)} units, in the first {len(known)}"
            )

    def _need_extents(self, batch: object) -> None:
        """Return if the batch has tensors as the first one had.

        Raises:
            ModuleUnitError: it has not.
        """
        found = _extents(batch)
        if [each[0] for each in found] != [each[0] for each in self._extents]:
            raise ModuleUnitError(
                f"batch: has {', '.join(each[0] for each in found)}; the schedule is made for "
                f"{', '.join(each[0] for each in self._extents)}"
            )
        for (path, shape, dtype), (_, first, known) in zip(found, self._extents, strict=True):
            if (shape, dtype) != (first, known):
                raise ModuleUnitError(
                    f"batch: {path} is {_extent(shape, dtype)}, the schedule is made for "
                    f"{_extent(first, known)}"
                )


def _shapes_of(plans: Sequence[UnitPlan]) -> list[_UnitShape]:
    places = {
        symbol: (place, number)
        for place, plan in enumerate(plans)
        for number, symbol in enumerate(plan.outputs)
    }
    return [
        _UnitShape(
            plan.name,
            plan.parameters,
            tuple(places[each] for each in plan.inputs),
            tuple((each.shape, each.dtype) for each in plan.outputs),
            plan.sloped,
        )
        for plan in plans
    ]


class _WithLoss(nn.Module):
    """A module that returns its loss."""

    def __init__(self, module: nn.Module, loss: LossOf) -> None:
        super().__init__()
        self.module = module
        self._loss = loss
        self.training = module.training

    def forward(self, batch: object) -> Tensor:
        """Return the loss of a micro-batch."""
        return self._loss(self.module, batch)


def _close(one: Tensor, other: Tensor) -> bool:
    rounding = torch.finfo(one.dtype).eps ** 0.5
    return torch.allclose(one, other, rtol=rounding, atol=rounding, equal_nan=True)


def _extent(shape: torch.Size, dtype: torch.dtype) -> str:
    return f"{' x '.join(map(str, shape)) or 'one'} {str(dtype).removeprefix('torch.')}"


def tree_tensors(value: object) -> list[Tensor]:
    """Return the tensors in containers."""
    return [each for _, each in tree_flatten_with_path(value)[0] if isinstance(each, Tensor)]


def _extents(batch: object) -> list[_Extent]:
    found, _ = tree_flatten_with_path(batch)
    return [
        (f"batch{keystr(path)}", each.shape, each.dtype)
        for path, each in found
        if isinstance(each, Tensor)
    ]


def _batch(plans: Sequence[UnitPlan]) -> PlannedBatch:
    """Return plans as a micro-batch that knows how many bytes its tensors have."""
    storages = {
        each.untyped_storage().data_ptr(): each.untyped_storage().nbytes()
        for plan in plans
        for call in plan.calls
        for each in call.leaves
        if isinstance(each, Tensor) and each.numel()
    }
    return PlannedBatch({plan.name: plan for plan in plans}, sum(storages.values()))
