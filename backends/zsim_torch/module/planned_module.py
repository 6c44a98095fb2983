"""Run any module as units: its repeated blocks, and the code of its forward between them."""

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_map_only

from zsim.dtype import DType
from zsim_torch.ground.torch_dtype import TORCH_DTYPE, entering
from zsim_torch.module.block_result import BlockResult, cut
from zsim_torch.module.compiled import uncompiled
from zsim_torch.module.forward_plan import (
    ParameterSymbol,
    PlannedBatch,
    PlannedParts,
    PlannedUnit,
    Symbol,
    UnitPlan,
)
from zsim_torch.module.forward_planner import ForwardPlanner
from zsim_torch.module.forward_values import PLAIN_RUNS, ForwardValues
from zsim_torch.module.module_loss import (
    LossOf,
    WithLoss,
    extents,
    loss_of,
    need_extents,
    need_unwritten,
    tree_tensors,
    versions,
)
from zsim_torch.module.module_refusal import need_no_hooks
from zsim_torch.module.module_state import evaluating, unchanged
from zsim_torch.module.planned_function import MARK
from zsim_torch.module.probe import value_or_probe
from zsim_torch.module.repeated_blocks import blocks_of, names_outside, outside
from zsim_torch.module.state_crossing import LateReads, StateCrossing
from zsim_torch.module.unit import ModuleUnitError, TorchUnit, UnitRunError, choose

_UP: Final = 1 + 2**-2
_DOWN: Final = 1 - 2**-2
"""Factors of parameters in compared forwards, so that stale values from before show."""


def has_forward(module: nn.Module) -> bool:
    """Return True if a module can be called and is not just a sequence of its children."""
    return type(module).forward not in (nn.Module.forward, nn.Sequential.forward)


@dataclass(frozen=True, slots=True)
class _UnitShape:
    """Properties of a unit that are the same in every micro-batch."""

    name: str
    parameters: tuple[str, ...]
    inputs: tuple[tuple[int, int], ...]
    outputs: tuple[tuple[torch.Size, torch.dtype], ...]
    sloped: int


class PlannedModule:
    """An unmodified module that runs as units.

    Attributes:
        units: the units in the order of forward.
        first: the plan of the first micro-batch.
        dtype: the data type of parameters and of float tensors in micro-batches.
    """

    def __init__(
        self,
        module: nn.Module,
        batch: object,
        *,
        dtype: DType,
        loss: LossOf = loss_of,
        blocks: Mapping[str, nn.Module] | None = None,
    ) -> None:
        """Run the forward once with values, and once without.

        By default `blocks` are the repeated blocks of the module.

        Raises:
            ModuleUnitError: zsim cannot plan the forward.
        """
        self.module = module
        self._loss = loss
        self.dtype = dtype
        self._blocks = dict(blocks or blocks_of(module))
        self._parameters = dict(module.named_parameters())
        self._names = {id(each): name for name, each in self._parameters.items()}
        self._frozen = {name for name, each in self._parameters.items() if not each.requires_grad}
        self._local = {
            id(block): {local: self._names[id(each)] for local, each in block.named_parameters()}
            for block in self._blocks.values()
        }
        self._around = outside(module, self._blocks)
        self._between = names_outside(module, self._blocks)
        need_no_hooks(module, self._blocks.values(), forward_is_run=True)
        batch = self._entering(batch)
        self._extents = extents(batch)
        self._results: Sequence[BlockResult] | None = None
        self._late = LateReads({})
        with unchanged(module, loss), self._in_format(batch):
            before = versions(batch)
            plans, self._results = self._planned(batch)
            need_unwritten(batch, before)
            self._read_between = self._between.union(
                *(plan.parameters for plan in plans if not plan.block)
            )
            self.first = replace(self._batch(plans), at_end=_nothing)
            self._shapes = _shapes_of(plans)
            self.units = self._units(plans)
            self._need_equal_values(batch)

    def block(self, unit: str) -> nn.Module | None:
        """Return the block that a unit runs; None if it runs code between blocks."""
        return self._blocks.get(self.first.plans[unit].block)

    @contextmanager
    def _in_format(self, batch: object) -> Generator[None]:
        """Return a context for the first forward, in the data type of the strategy.

        Raises:
            ModuleUnitError: the forward fails, and the module or the batch has other data types.
        """
        try:
            yield
        except RuntimeError as error:
            formats = {each.dtype for each in self._parameters.values()}
            formats |= {each.dtype for each in tree_tensors(batch) if each.is_floating_point()}
            own = TORCH_DTYPE[self.dtype]
            if isinstance(error, UnitRunError) or formats == {own}:
                raise
            others = ", ".join(sorted(str(each) for each in formats - {own}))
            raise ModuleUnitError(
                f"module: its forward fails in {self.dtype}, the precision of the strategy, and it "
                f"or the batch has {others} (train.precision?): {str(error).splitlines()[0]}"
            ) from error

    def plan(self, batch: object) -> PlannedBatch:
        """Run the forward ahead for a micro-batch.

        Raises:
            ModuleUnitError: its forward differs from that of the first micro-batch.
        """
        batch = self._entering(batch)
        need_extents(extents(batch), self._extents)
        plans, _ = self._planned(batch)
        self._need_shapes(_shapes_of(plans))
        return self._batch(plans)

    def _need_equal_values(self, batch: object) -> None:
        """Raise ModuleUnitError unless units and module compute bitwise equal values.

        Parameters are scaled, so that a value that a block passes on outside its outputs is stale
        and shows. In training, random draws ahead may come in another order than in the module, so
        evaluation mode decides then.
        """
        both = self._by_units(batch, _UP), self._by_itself(batch, _UP)
        if both[0].equals(both[1]):
            return
        with evaluating([self.module]) if both[1].draws else nullcontext():
            found, plain, *again = (
                run(batch, _DOWN) for run in (self._by_units, *[self._by_itself] * (1 + PLAIN_RUNS))
            )
        plain.warn_of_spread(again)
        if not found.equals(plain, again):
            one, other = (f"{float(each.loss.detach()):.9g}" for each in (found, plain))
            differs = f"makes a loss of {one}, and by itself {other}"
            raise ModuleUnitError(
                f"module: run by units it {differs if one != other else 'computes other values'}; "
                "blocks pass on a value past their arguments and results (an attribute, a file?): "
                "return it"
            )

    def _by_units(self, batch: object, scale: float) -> ForwardValues:
        """Return the arguments that units pass to blocks, and the loss."""
        made = ForwardValues()
        values: dict[tuple[int, int], Tensor] = {}
        with (
            unchanged(self.module, self._loss),
            torch.enable_grad(),
        ):  # hooks of tensors need a graph
            planned = self.plan(batch)
            with made.noted(self._blocks.values()):
                for place, (unit, shape) in enumerate(zip(self.units, self._shapes, strict=True)):
                    given = [*(values[each] for each in shape.inputs), planned]
                    found = unit.run([self._scaled(name, scale) for name in unit.names], given)
                    values |= {(place, number): cut(each) for number, each in enumerate(found)}
        made.loss = values[len(self.units) - 1, 0]
        return made

    def _by_itself(self, batch: object, scale: float) -> ForwardValues:
        """Return the arguments that the module's forward passes to blocks, and its loss."""
        made = ForwardValues()
        called = partial(self._called, scale)
        with (
            unchanged(self.module, self._loss),
            torch.enable_grad(),
            made.noted(self._blocks.values(), called),
        ):
            whole = WithLoss(self.module, self._loss)
            named = {f"module.{name}": self._scaled(name, scale) for name in self._read_between}
            made.loss = functional_call(whole, named, (batch,)).reshape(())
        return made

    def _entering(self, batch: object) -> object:
        return entering(dict(batch) if isinstance(batch, Mapping) else batch, self.dtype)

    def _called(self, scale: float, block: nn.Module, *args: object, **kwargs: object) -> object:
        """Call a block with its scaled parameters, which are freed after the call."""
        named = {local: self._scaled(name, scale) for local, name in self._local[id(block)].items()}
        given = {id(each) for each in tree_tensors((args, kwargs))}
        made = functional_call(block, named, args, kwargs)
        return tree_map_only(Tensor, lambda each: each if id(each) in given else cut(each), made)

    def _scaled(self, name: str, scale: float) -> Tensor:
        scaled = (self._value(name) * scale).contiguous()  # a probe has other strides
        return scaled.requires_grad_(name not in self._frozen)

    def values_of(self, unit: TorchUnit) -> list[Tensor]:
        """Return the parameters of a unit, in its order and data type."""
        return [
            self._value(name).contiguous().requires_grad_(name not in self._frozen)
            for name in unit.names
        ]

    def _value(self, name: str) -> Tensor:
        return value_or_probe(self._parameters[name], name, TORCH_DTYPE[self.dtype])

    def _stand_in(self, known: dict[str, Tensor], name: str, *, has_values: bool) -> Tensor:
        """Return the stand-in for a parameter.

        `known` holds those used between blocks in this forward.
        """
        if name in known:
            return known[name]
        if has_values:
            made = self._value(name)
        else:
            shape = self._parameters[name].shape
            made = torch.empty(shape, dtype=TORCH_DTYPE[self.dtype], device="meta")
        made.requires_grad_(name not in self._frozen)
        if name in self._between:
            known[name] = made
        return made

    def _planned(self, batch: object) -> tuple[list[UnitPlan], list[BlockResult]]:
        """Run the forward ahead; the first time with values."""
        is_first = self._results is None
        crossing = None
        if is_first:
            crossing = StateCrossing.of(self.module, self._blocks, self._around, self._loss)
        device = next((each.device for each in tree_tensors(batch)), torch.device("cpu"))
        parts = PlannedParts(
            blocks=self._blocks,
            names=self._names,
            stand_in=partial(self._stand_in, {}, has_values=is_first),
            buffers=frozenset(id(each) for each in self.module.buffers()),
            device=device,
            watch=_unwatched if crossing is None else crossing.block,
        )
        planner = ForwardPlanner(parts, self._results)
        with torch.enable_grad():
            watched = nullcontext() if crossing is None else crossing.watched()
            with uncompiled(self._around), watched, planner.watched():
                loss = self._loss(self.module, batch)
            last = planner.close(loss)
        if crossing is not None:
            self._late = LateReads(crossing.late_reads)
        for name, buffer in self.module.named_buffers():
            if hasattr(buffer, MARK):
                raise ModuleUnitError(
                    f"module: its forward makes buffer {name} of what depends on parameters, which "
                    "zsim follows inside blocks alone"
                )
        self._settle(planner.plans, last)
        return planner.plans, planner.results

    def _batch(self, plans: Sequence[UnitPlan]) -> PlannedBatch:
        """Return plans as a micro-batch with the total bytes of its tensors."""
        storages = {
            each.untyped_storage().data_ptr(): each.untyped_storage().nbytes()
            for plan in plans
            for call in plan.calls
            for each in call.leaves
            if isinstance(each, Tensor) and each.numel()
        }
        self._late.note()
        return PlannedBatch(
            {plan.name: plan for plan in plans},
            sum(storages.values()),
            plans[-1].name,
            self._late.need_unchanged,
        )

    def _settle(self, plans: list[UnitPlan], loss: Symbol) -> None:
        """Compute the parameters of each unit, and the values that cross between units."""
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
        """Return the units; the last one gets the parameters that no unit reads, untrained."""
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
                shapes = tuple(self._parameters[name].shape for name in names)
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
        """Raise ModuleUnitError unless a forward has the units and values of the first one."""
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


def _nothing() -> None:
    """Do nothing: state between blocks is restored before the first one is measured."""


def _unwatched(_: str) -> nullcontext[None]:
    return nullcontext()
