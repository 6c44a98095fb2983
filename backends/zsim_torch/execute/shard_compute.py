"""Run the `Compute` operations on shards of one rank: initial values and the optimizer."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch

from zsim.schedule.operation import Action, Compute, Role, View
from zsim.schedule.parameter_copy import held
from zsim.strategy.optimizer_rule import Optimizer
from zsim_torch.execute import sharded_optimizer as optimizer
from zsim_torch.execute.live_memory import LiveMemory
from zsim_torch.execute.norm_share import counted
from zsim_torch.execute.operands import Operands
from zsim_torch.module.unit import UnitRunError
from zsim_torch.module.visit import views_of
from zsim_torch.observe.watchers import is_watched, unwatched

Initial = Callable[[str], torch.Tensor]
"""A function from a parameter's name to its initial value."""


def _state(known: Operands) -> tuple[View, ...]:
    """Return the views that an update changes: master or parameter, and moments."""
    trained = known.views[Role.MASTER] or known.views[Role.PARAMETER]
    return (*trained[:1], *known.views[Role.MOMENT])


@dataclass(slots=True, eq=False)
class SteadyUpdate:
    """An update of persistent buffers; `prepared` holds their memory until it is freed."""

    memory: LiveMemory
    known: Operands
    rule: Optimizer
    scalars: Mapping[str, float]
    prepared: optimizer.SteadyAdam | None = None

    def __call__(self) -> None:
        """Apply a step, with the current scalars and memory."""
        known, scalars, prepared = self.known, self.scalars, self.prepared
        gradient = self.memory.flat(known.views[Role.GRADIENT][0])
        if prepared is None:
            state = _state(known)
            trained, *others = [self.memory.flat(each) for each in state]
            operands = optimizer.Updated(gradient=gradient, trained=trained, moments=tuple(others))
            steady = optimizer.STEADY[self.rule.fused]
            if is_watched() or not steady.serves(operands):
                optimizer.update(self.rule, operands, scalars)
                return
            with unwatched():
                prepared = self.prepared = steady(self.rule, operands)
            self.memory.keep({each.buffer for each in state}, self)
        prepared.update(gradient, scalars)

    def clear(self) -> None:
        """Release the memory."""
        self.prepared = None


@dataclass(frozen=True, slots=True)
class ShardComputer:
    """Runs operations without a unit; `initial` and `on_norm` are those of `RankCompute`."""

    memory: LiveMemory
    initial: Initial
    on_norm: Callable[[torch.Tensor, float], None]

    def initializing(self, compute: Compute) -> Callable[[], None]:
        """Return a function that writes initial values to parameters or masters."""
        views = [*views_of(compute, Role.PARAMETER, Role.MASTER)]
        targets = [self.memory.flat(each) for each in views]

        def initialize() -> None:
            for view, target in zip(views, targets, strict=True):
                self._initialize(view, target)

        return initialize

    def _initialize(self, view: View, target: torch.Tensor) -> None:
        memory = self.memory
        target.zero_()
        buffer = memory.program.by_name[view.buffer]
        if buffer.layout is None:
            raise UnitRunError(f"buffer {buffer.name}: initialized without a layout")
        start = memory.extent(view)[0]
        for part in held(memory.schedule, buffer, memory.coordinates):
            low = max(start, part.position)
            high = min(start + target.numel(), part.position + part.size)
            if low < high:
                value = self.initial(part.parameter).reshape(-1)
                first = part.offset + low - part.position
                target[low - start : high - start] = value[first : first + high - low]

    def updating(self, known: Operands, scalars: Mapping[str, float]) -> Callable[[], None]:
        """Return a function that runs an update in any step, with its scalars and memory."""
        rule, staying = known.compute.rule, frozenset(self.memory.program.persistent)
        state = _state(known)
        assert isinstance(rule, Optimizer)
        if rule.fused not in optimizer.STEADY or not {each.buffer for each in state} <= staying:
            return partial(self._update_anew, known, scalars)
        return SteadyUpdate(self.memory, known, rule, scalars)

    def _update_anew(self, known: Operands, scalars: Mapping[str, float]) -> None:
        self.bound(known, scalars)()

    def bound(self, known: Operands, scalars: Mapping[str, float]) -> Callable[[], None]:
        """Return a function that runs an optimizer operation with current scalars and memory."""
        compute, flat = known.compute, self.memory.flat

        def tensors(role: Role) -> tuple[torch.Tensor, ...]:
            return tuple([flat(view) for view in known.views[role]])

        gradients = tensors(Role.GRADIENT)
        scale = scalars[compute.scalars[0]] if compute.scalars else 1.0
        match compute.action:
            case Action.UPDATE:
                trained, *moments = [flat(view) for view in _state(known)]
                operands = optimizer.Updated(
                    gradient=gradients[0], trained=trained, moments=tuple(moments)
                )
                return partial(optimizer.update, compute.rule, operands, dict(scalars))
            case Action.NORM:
                summed = [
                    tensor
                    for view in known.views[Role.GRADIENT]
                    for tensor in counted(self.memory, view)
                ]
                return partial(optimizer.sum_of_squares, summed, tensors(Role.OUTPUT)[0])
            case Action.FINITE:
                return partial(optimizer.is_finite, gradients, tensors(Role.OUTPUT)[0])
            case Action.AMAX:
                measured = (*tensors(Role.PARAMETER), *tensors(Role.INPUT))
                return partial(optimizer.largest_magnitudes, measured, tensors(Role.OUTPUT)[0])
            case Action.UNSCALE:
                return partial(optimizer.unscale, gradients, scale)
            case Action.CLIP:
                squares = tensors(Role.INPUT)[0]

                def clip() -> None:
                    self.on_norm(squares, scale)
                    optimizer.clip(compute.rule, squares, gradients, scale)

                return clip
            case _:
                raise AssertionError(compute.action)
