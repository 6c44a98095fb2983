"""Values of a simulated run as torch tensors: a user's module on all ranks in one process.

A schedule that is simulated with these values trains the module itself, in floating point. Saved
tensors of a forward are not stored: its backward runs the unit again, on the inputs and parameters
that the schedule has at that time, or on the forward's inputs if it keeps none. So a module must
compute the same result when it is run again: no dropout, no batch norm.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import assert_never

import torch
from torch import nn

from zsim.backend.values import Seat
from zsim.dtype import DType
from zsim.schedule.access import accesses
from zsim.schedule.operation import Action, Communication, Compute, Copy, Fill, Role, View
from zsim.schedule.parameter_copy import Rearrangement, held, rearrangement
from zsim.schedule.schedule import Schedule
from zsim_torch.execute import sharded_optimizer as optimizer
from zsim_torch.execute.collectives import received
from zsim_torch.execute.memory_part import invalidate
from zsim_torch.feed import place_of_data
from zsim_torch.ground.torch_dtype import TORCH_DTYPE
from zsim_torch.module import autograd
from zsim_torch.module.absent import Absence
from zsim_torch.module.unit import TorchUnit, UnitChoice, resolve
from zsim_torch.module.visit import Visit, parameter_order, views_of, visit_of

Feed = Callable[[int, int, int], torch.Tensor]
"""Returns the micro-batch for a replica, a step, and an index in the step."""

SAVED = 1.0
"""Placeholder in memory for saved tensors; if it is spoiled, the backward result is, too."""


class TorchValues:
    """Implements `zsim.backend.values.Values` for a module and its units of one segment each."""

    def __init__(
        self, schedule: Schedule, module: nn.Module, units: Sequence[UnitChoice], feed: Feed
    ) -> None:
        self._schedule = schedule
        self._feed = feed
        self._absence = Absence(module)
        self._units = {unit.key: unit for unit in resolve(module, units)}
        self._initial = {
            name: value.detach().flatten().clone() for name, value in module.named_parameters()
        }
        self._shapes: dict[str, torch.Size] = {}
        self._entered: dict[tuple[str, int], torch.Size] = {}
        self._inputs: dict[tuple[int, Visit], list[torch.Tensor]] = {}
        self._slopes: dict[tuple[int, Visit], list[torch.Tensor]] = {}
        self._orders: dict[tuple[str, tuple[View, ...]], tuple[int, ...]] = {}
        self._moves: dict[tuple[str, int], Rearrangement] = {}

    def memory(self, elements: int, dtype: DType) -> torch.Tensor:
        """Return new memory, filled with NaN or the largest integer."""
        made = torch.empty(elements, dtype=TORCH_DTYPE[dtype])
        invalidate(made)
        return made

    def window(self, memory: torch.Tensor, start: int, size: int) -> torch.Tensor:
        """Return `size` elements of `memory` from `start`."""
        return memory[start : start + size]

    def invalidate(self, window: torch.Tensor) -> None:
        """Fill `window` with NaN or the largest integer, so that invalid reads show."""
        invalidate(window)

    def is_invalidated(self, window: torch.Tensor) -> bool:
        """Return True if all elements of `window` are spoiled."""
        spoiled = torch.empty_like(window)
        invalidate(spoiled)
        return self.same(window, spoiled)

    def taken(self, window: torch.Tensor) -> torch.Tensor:
        """Return a copy of `window`."""
        return window.clone()

    def same(self, one: torch.Tensor, other: torch.Tensor) -> bool:
        """Return True if both are bitwise equal."""
        return torch.equal(one.view(torch.uint8), other.view(torch.uint8))

    def store(self, window: torch.Tensor, value: torch.Tensor) -> None:
        """Copy `value` to `window`, cast to its data type."""
        window.copy_(value)

    def is_zero(self, window: torch.Tensor) -> bool:
        """Return True if the only element is zero."""
        return bool(window.item() == 0)

    def apply(
        self,
        operation: Compute | Fill | Copy,
        views: Sequence[torch.Tensor],
        *,
        seat: Seat,
        step: int,
        scalars: Mapping[str, float],
    ) -> Sequence[torch.Tensor | None]:
        """Return the tensors that `operation` writes: see `Values.apply`."""
        match operation:
            case Fill(value=value, scalar=scalar):
                scale = 1.0 if scalar is None else scalars[scalar]
                return [torch.full_like(views[0], value * scale)]
            case Copy():
                return [None, self._copied(operation, views, seat)]
            case Compute():
                return self._computed(operation, views, seat=seat, step=step, scalars=scalars)
            case _:
                assert_never(operation)

    def _copied(self, copy: Copy, views: Sequence[torch.Tensor], seat: Seat) -> torch.Tensor:
        source, before = views
        target = before.clone()
        if not copy.by_parameter:
            return _moved(source, target, copy)
        key = (copy.id, seat.rank)
        found = self._moves.get(key)
        if found is None:
            found = rearrangement(self._schedule, seat.program, copy, seat.coordinates)
            self._moves[key] = found
        for rows in found.moves:
            for row in range(rows.rows):
                here, there = rows.source + row * rows.source_step, rows.target
                there += row * rows.target_step
                window = target[there : there + rows.size]
                window.copy_(_moved(source[here : here + rows.size], window, copy))
        for start, size in found.padding:
            target[start : start + size] = 0
        return target

    def _computed(
        self,
        compute: Compute,
        views: Sequence[torch.Tensor],
        *,
        seat: Seat,
        step: int,
        scalars: Mapping[str, float],
    ) -> Sequence[torch.Tensor | None]:
        pairs = list(zip(compute.operands, views, strict=True))
        of = {role: [view for operand, view in pairs if operand.role is role] for role in Role}
        made: Mapping[Role, Sequence[torch.Tensor]]
        match compute.action:
            case Action.LOAD:
                replica, _ = place_of_data(self._schedule, seat.rank)
                batch = self._feed(replica, step, compute.micro_batch)
                for view in views_of(compute, Role.OUTPUT):
                    self._shapes[view.buffer] = batch.shape
                made = {Role.OUTPUT: [batch.flatten() for _ in of[Role.OUTPUT]]}
            case Action.INITIALIZE:
                return [self._initial_of(operand.view, seat) for operand in compute.operands]
            case Action.FORWARD | Action.RECOMPUTE:
                with self._absence:
                    made = self._forward(compute, of, seat)
            case Action.BACKWARD | Action.BACKWARD_INPUT | Action.BACKWARD_WEIGHT:
                with self._absence:
                    made = self._backward(compute, of, seat)
            case (
                Action.UPDATE
                | Action.NORM
                | Action.UNSCALE
                | Action.CLIP
                | Action.FINITE
                | Action.AMAX
            ):
                made = _optimized(compute, of, scalars)
            case Action.COMPRESS | Action.DECOMPRESS | Action.RESIDUAL:
                raise ValueError(f"{compute.id}: factors of gradients have no values here")
            case _:
                assert_never(compute.action)
        left = {role: iter(values) for role, values in made.items()}
        found: list[torch.Tensor | None] = []
        for operand, access in zip(compute.operands, accesses(compute), strict=True):
            value = next(left[operand.role]) if operand.role in left else None
            found.append(value if access.writes else None)
        return found

    def _initial_of(self, view: View, seat: Seat) -> torch.Tensor:
        """Return initial values of the parameters in a buffer's layout; zeros in the padding."""
        buffer = seat.program.by_name[view.buffer]
        whole = torch.zeros(buffer.elements, dtype=TORCH_DTYPE[buffer.dtype])
        for each in held(self._schedule, buffer, seat.coordinates):
            values = self._initial[each.parameter][each.offset : each.offset + each.size]
            whole[each.position : each.position + each.size] = values
        start, size = self._schedule.extent(view, seat.coordinates)
        return whole[start : start + size]

    def _forward(
        self, compute: Compute, of: Mapping[Role, list[torch.Tensor]], seat: Seat
    ) -> dict[Role, Sequence[torch.Tensor]]:
        unit = self._units[compute.unit, compute.segment]
        inputs = self._shaped(compute, of[Role.INPUT])
        self._inputs[seat.rank, visit_of(compute)] = inputs
        outputs = autograd.evaluate(unit, self._parameters(compute, of, seat), inputs)
        for view, output in zip(views_of(compute, Role.OUTPUT), outputs, strict=True):
            self._shapes[view.buffer] = output.shape
        return {
            Role.OUTPUT: [output.flatten() for output in outputs],
            Role.SAVED: [torch.full_like(saved, SAVED) for saved in of[Role.SAVED]],
        }

    def _backward(
        self, compute: Compute, of: Mapping[Role, list[torch.Tensor]], seat: Seat
    ) -> dict[Role, Sequence[torch.Tensor]]:
        unit, parameters = (
            self._units[compute.unit, compute.segment],
            self._parameters(compute, of, seat),
        )
        inputs = self._shaped(compute, of[Role.INPUT])
        inputs = inputs or self._inputs[seat.rank, visit_of(compute)]
        wanted = len(of[Role.INPUT_GRADIENT])
        floating = [place for place, each in enumerate(inputs) if each.is_floating_point()]
        _, record = autograd.forward(unit, parameters, inputs, floating[:wanted])
        saved, left = [*of[Role.SAVED]], of[Role.INTERMEDIATE_GRADIENT]
        first, second = (
            compute.action is each for each in (Action.BACKWARD_INPUT, Action.BACKWARD_WEIGHT)
        )
        slopes = of[Role.OUTPUT_GRADIENT]
        if second:
            slopes = self._slopes.get((seat.rank, visit_of(compute)), [])
            saved += left
        elif first:
            self._slopes[seat.rank, visit_of(compute)] = [each.clone() for each in slopes]
        found, towards = autograd.backward(record, parameters, slopes)
        spoiled = any(not bool((each == SAVED).all()) for each in saved)
        order = self._order(compute, seat)
        trained = () if first else unit.trained(order)
        return {
            Role.INTERMEDIATE_GRADIENT: [torch.full_like(each, SAVED) for each in left],
            Role.INPUT_GRADIENT: [
                _gradient(gradient, window, spoiled=spoiled)
                for gradient, window in zip(towards, of[Role.INPUT_GRADIENT], strict=True)
            ],
            Role.GRADIENT: [
                _gradient(found[place], window, spoiled=spoiled)
                for place, window in zip(trained, of[Role.GRADIENT], strict=True)
            ],
        }

    def _shaped(self, compute: Compute, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return inputs in their original shapes; stored ones in the shapes of the forward."""
        found: list[torch.Tensor] = []
        views = views_of(compute, Role.INPUT)
        for place, (view, each) in enumerate(zip(views, inputs, strict=True)):
            key = (compute.unit, place)
            shape = self._shapes.get(view.buffer, self._entered.get(key, each.shape))
            self._entered[key] = shape
            found.append(each.reshape(shape))
        return found

    def _parameters(
        self, compute: Compute, of: Mapping[Role, list[torch.Tensor]], seat: Seat
    ) -> list[torch.Tensor]:
        """Return parameters in the order of the module and in their shapes."""
        unit: TorchUnit = self._units[compute.unit, compute.segment]
        pairs = zip(self._order(compute, seat), of[Role.PARAMETER], strict=True)
        found = dict(pairs)
        return [found[place].view(shape) for place, shape in enumerate(unit.shapes)]

    def _order(self, compute: Compute, seat: Seat) -> tuple[int, ...]:
        key = (compute.unit, tuple(views_of(compute, Role.PARAMETER)))
        found = self._orders.get(key)
        if found is None:
            unit = self._units[compute.unit, compute.segment]
            found = parameter_order(self._schedule, seat.program, compute, unit)
            self._orders[key] = found
        return found

    def meet(
        self, members: Sequence[Communication], sources: Sequence[torch.Tensor]
    ) -> Sequence[torch.Tensor]:
        """Return the result for each member: see `Values.meet`. Sums are in the order of ranks."""
        return [received(members, place, sources) for place in range(len(members))]


def _moved(source: torch.Tensor, target: torch.Tensor, copy: Copy) -> torch.Tensor:
    """Return the target after the copy, with the arithmetic of a real run."""
    if copy.accumulate:
        return target.add(source, alpha=1 / copy.divisor)
    moved = source.to(target.dtype)
    return moved if copy.divisor == 1 else moved / copy.divisor


def _gradient(
    gradient: torch.Tensor | None, window: torch.Tensor, *, spoiled: bool
) -> torch.Tensor:
    made = torch.zeros_like(window) if gradient is None else gradient.flatten()
    return torch.full_like(made, float("nan")) if spoiled else made


def _optimized(
    compute: Compute, of: Mapping[Role, list[torch.Tensor]], scalars: Mapping[str, float]
) -> Mapping[Role, Sequence[torch.Tensor]]:
    """Return new values by role.

    Updated tensors are changed in place: they are the operation's own copies.
    """
    gradients = of[Role.GRADIENT]
    scale = scalars[compute.scalars[0]] if compute.scalars else 1.0
    match compute.action:
        case Action.UPDATE:
            (trained,) = of[Role.MASTER] + of[Role.PARAMETER]
            operands = optimizer.Updated(
                gradient=gradients[0], trained=trained, moments=tuple(of[Role.MOMENT])
            )
            optimizer.update(compute.rule, operands, scalars)
        case Action.NORM | Action.FINITE:
            target = of[Role.OUTPUT][0].clone()
            is_norm = compute.action is Action.NORM
            (optimizer.sum_of_squares if is_norm else optimizer.is_finite)(gradients, target)
            return {Role.OUTPUT: [target]}
        case Action.AMAX:
            target = of[Role.OUTPUT][0].clone()
            optimizer.largest_magnitudes([*of[Role.PARAMETER], *of[Role.INPUT]], target)
            return {Role.OUTPUT: [target]}
        case Action.UNSCALE:
            optimizer.unscale(gradients, scale)
        case Action.CLIP:
            optimizer.clip(compute.rule, of[Role.INPUT][0], gradients, scale)
        case _:
            raise AssertionError(compute.action)
    return of
