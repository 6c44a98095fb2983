"""Runs the `Compute` operations of one rank: units through autograd, the optimizer on shards."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import assert_never

import torch

from zsim.schedule.mesh import Coordinates
from zsim.schedule.operation import Action, Compute, Role, View
from zsim.schedule.parameter_copy import held
from zsim.schedule.schedule import Schedule
from zsim_torch.execute import sharded_optimizer as optimizer
from zsim_torch.execute.generator_state import RandomState
from zsim_torch.execute.live_memory import LiveMemory, ProducedPart
from zsim_torch.execute.norm_share import counted
from zsim_torch.module import autograd
from zsim_torch.module.autograd import InputEntry, Record, UnitRunError
from zsim_torch.module.input_shape import InputShapes
from zsim_torch.module.unit import SegmentKey, TorchUnit
from zsim_torch.module.visit import LaterUses, Visit, parameter_order, views_of, visit_of
from zsim_torch.torch_dtype import entering

Initial = Callable[[str], torch.Tensor]
"""The initial value of a parameter, by its name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCompute:
    """Everything that this rank computes with.

    `next_batch` gives the next micro-batch. `on_loss` is told each loss, which the segment `last`
    makes if this rank runs it; `on_norm` the square of the norm of gradients before they are
    clipped, and what they were scaled by then.
    """

    schedule: Schedule
    coordinates: Coordinates
    memory: LiveMemory
    units: Mapping[SegmentKey, TorchUnit]
    last: SegmentKey
    forecast: LaterUses
    initial: Initial
    next_batch: Callable[[], object]
    on_loss: Callable[[torch.Tensor], None]
    on_norm: Callable[[torch.Tensor, float], None]


@dataclass(slots=True)
class Computer:
    """Interprets `Compute`. Records of forwards wait here for their backward."""

    work: RankCompute
    shared_bytes: int = 0
    shared_bytes_peak: int = 0
    _records: dict[Visit, Record] = field(default_factory=dict[Visit, Record])
    _looked_at: set[SegmentKey] = field(default_factory=set[SegmentKey])
    """Units that have had a backward: what they save was looked at once."""
    _states: dict[Visit, RandomState] = field(default_factory=dict[Visit, RandomState])
    _saved: dict[str, Visit] = field(default_factory=dict[str, Visit])
    _shapes: dict[str, torch.Size] = field(default_factory=dict[str, torch.Size])
    _entered: dict[tuple[str, int, int], torch.Size] = field(
        default_factory=dict[tuple[str, int, int], torch.Size]
    )
    _order: dict[tuple[str, int, tuple[View, ...]], tuple[int, ...]] = field(
        default_factory=dict[tuple[str, int, tuple[View, ...]], tuple[int, ...]]
    )
    _operands: dict[str, "_Operands"] = field(default_factory=dict[str, "_Operands"])
    _shared: dict[str, int] = field(default_factory=dict[str, int])

    def expect(self, shapes: InputShapes) -> None:
        """Give inputs these shapes where what they read was made elsewhere."""
        self._entered.update(shapes)

    def entered_shape(self, compute: Compute, place: int) -> torch.Size | None:
        """Return the shape in which a unit is given its input at `place`, if that is known."""
        return self._entered.get((compute.unit, compute.segment, place))

    def run(self, compute: Compute, scalars: Mapping[str, float]) -> None:
        """Do what `compute` says, now, on the current stream."""
        self.bound(compute, scalars)()

    def bound(self, compute: Compute, scalars: Mapping[str, float]) -> Callable[[], None]:
        """Return what does `compute`, with the scalars as they are and memory as it is now.

        What runs units takes its memory when it runs.
        """
        match compute.action:
            case Action.FORWARD:
                return partial(self._forward, compute)
            case Action.RECOMPUTE:
                return partial(self._recompute, compute)
            case Action.BACKWARD:
                return partial(self._backward, compute)
            case Action.INITIALIZE:
                views = views_of(compute, Role.PARAMETER, Role.MASTER)
                return partial(self._initialize, [(each, self._flat(each)) for each in views])
            case Action.LOAD:
                return partial(self._load, compute)
            case Action.UPDATE | Action.NORM | Action.UNSCALE | Action.CLIP | Action.FINITE:
                return self._optimizer(compute, scalars)
            case _:
                assert_never(compute.action)

    def _flat(self, view: View) -> torch.Tensor:
        return self.work.memory.flat(view)

    def _load(self, compute: Compute) -> None:
        for view in self._views(compute, Role.OUTPUT):
            batch = entering(self.work.next_batch(), self.work.forecast.parameters)
            self.work.memory.bind_batch(view.buffer, batch)

    def forget(self, buffer: str) -> None:
        """`buffer` was freed: what a forward saved in it is gone."""
        visit = self._saved.pop(buffer, None)
        if visit is not None:
            self._records.pop(visit, None)
        self.shared_bytes -= self._shared.pop(buffer, 0)

    def _forward(self, compute: Compute) -> None:
        visit = visit_of(compute)
        if visit in self.work.forecast.recomputed:
            self._states[visit] = RandomState.now()
            self._evaluate(compute)
        elif visit not in self.work.forecast.input_gradients:
            self._evaluate(compute)
        else:
            self._differentiate(compute)
        if (compute.unit, compute.segment) == self.work.last:
            (loss,) = self._views(compute, Role.OUTPUT)[-1:]
            self.work.on_loss(self.work.memory.part(loss.buffer))

    def _recompute(self, compute: Compute) -> None:
        state = self._states.pop(visit_of(compute), None)
        if state is None:
            raise UnitRunError(f"{compute.id}: recomputes what had no forward")
        with state.restored():
            self._differentiate(compute)

    def _evaluate(self, compute: Compute) -> None:
        unit = self._unit(compute)
        versions = _buffer_versions(unit)
        outputs = autograd.evaluate(unit, self._parameters(compute), self._inputs(compute))
        if versions != _buffer_versions(unit):
            raise UnitRunError(
                f"unit {unit.name}: its forward changes a buffer of the module (batch norm?), "
                "so running it again changes what it computes; turn checkpointing off for it"
            )
        self._bind_outputs(compute, outputs)

    def _differentiate(self, compute: Compute) -> None:
        visit = visit_of(compute)
        wanted = self._differentiated(compute, self.work.forecast.input_gradients.get(visit, 0))
        outputs, record = autograd.forward(
            self._unit(compute),
            self._parameters(compute),
            self._inputs(compute),
            wanted,
            entries=self._entries(compute),
            steady=self._of(compute).steady and self._unit(compute).key in self._looked_at,
        )
        self._records[visit] = record
        for view in self._views(compute, Role.SAVED):
            self.work.memory.bind(view.buffer, [])
            self._saved[view.buffer] = visit
        self._bind_outputs(compute, outputs)

    def _backward(self, compute: Compute) -> None:
        record = self._records.pop(visit_of(compute), None)
        if record is None:
            raise UnitRunError(
                f"{compute.id}: nothing was saved for this backward, or it was freed"
            )
        incoming = [
            self.work.memory.part(view.buffer)
            for view in self._views(compute, Role.OUTPUT_GRADIENT)
        ]
        views = self._parameters(compute)
        if record.binds_inputs:
            given = self._inputs(compute)
            views += [each if isinstance(each, torch.Tensor) else torch.empty(0) for each in given]
        parameters, inputs = autograd.backward(record, views, incoming)
        self._looked_at.add(self._unit(compute).key)
        trained = self._unit(compute).trained(self._operand_order(compute))
        others = {_start(each) for each in incoming}
        for view, position in zip(self._views(compute, Role.GRADIENT), trained, strict=True):
            self._bind_gradient(view, parameters[position])
        entered = self._views(compute, Role.INPUT_GRADIENT)
        for view, gradient in zip(entered, inputs, strict=True):
            # A residual sum passes one gradient on to several: each buffer has memory of its own.
            shared = gradient is not None and _start(gradient) in others
            own = gradient
            if shared and gradient is not None:
                own = self.work.memory.zeros(view.buffer, gradient.numel()).view(gradient.shape)
                own.copy_(gradient)
            if own is not None:
                others.add(_start(own))
            self._bind_gradient(view, own)

    def _bind_gradient(self, view: View, gradient: torch.Tensor | None) -> None:
        memory = self.work.memory
        if gradient is None:
            gradient = memory.zeros(view.buffer, view.size)
        if gradient.numel() != view.size:
            raise UnitRunError(
                f"buffer {view.buffer}: a gradient of {gradient.numel()} elements, "
                f"the schedule says {view.size}"
            )
        # What a storage holds beyond or short of this gradient belongs to others too.
        missing = 0
        if gradient.numel():
            declared = gradient.numel() * gradient.element_size()
            pointer = gradient.untyped_storage().data_ptr()
            held = 0 if memory.holds(pointer) else gradient.untyped_storage().nbytes()
            missing = declared - held
        self._shared[view.buffer] = self._shared.get(view.buffer, 0) + missing
        self.shared_bytes += missing
        self.shared_bytes_peak = max(self.shared_bytes_peak, self.shared_bytes)
        memory.bind(view.buffer, [ProducedPart(view.start, gradient)])

    def _bind_outputs(self, compute: Compute, outputs: list[torch.Tensor]) -> None:
        views = self._views(compute, Role.OUTPUT)
        if views and len(views) != len(outputs):
            raise UnitRunError(
                f"unit {compute.unit}: it returned {len(outputs)} tensors, "
                f"the schedule has room for {len(views)}"
            )
        for view, output in zip(views, outputs, strict=False):
            if output.numel() != view.size:
                raise UnitRunError(
                    f"unit {compute.unit}: it returned {output.numel()} elements, "
                    f"the schedule has room for {view.size}"
                )
            self._shapes[view.buffer] = output.shape
            self.work.memory.bind(view.buffer, [ProducedPart(view.start, output)])

    def _unit(self, compute: Compute) -> TorchUnit:
        return self.work.units[compute.unit, compute.segment]

    def _inputs(self, compute: Compute) -> list[object]:
        """Return inputs in the shapes in which they were made; stored ones have that of forward."""
        memory, batches = self.work.memory, self.work.forecast.batches
        found: list[object] = []
        for place, view in enumerate(self._views(compute, Role.INPUT)):
            if view.buffer in batches:
                found.append(memory.batch(view.buffer))
                continue
            key = (compute.unit, compute.segment, place)
            shape = self._shapes.get(view.buffer, self._entered.get(key))
            tensor = memory.operand(view)
            if shape is not None:
                self._entered[key] = shape
                tensor = tensor.view(shape)
            found.append(tensor)
        return found

    def _entries(self, compute: Compute) -> dict[int, InputEntry]:
        """Return how inputs are kept whose memory the schedule may give away before backward.

        That is memory of the executor: what units have made lives as long as autograd holds it.
        """
        again = visit_of(compute) in self.work.forecast.given_again
        entry = InputEntry.BOUND if again else InputEntry.COPIED
        return {
            position: entry
            for position, view in enumerate(self._views(compute, Role.INPUT))
            if self.work.memory.is_allocated(view.buffer)
        }

    def _differentiated(self, compute: Compute, count: int) -> list[int]:
        """Positions of the first `count` inputs that have gradients.

        No batch has one, no whole numbers, nor what comes from frozen parameters alone.
        """
        without = self.work.forecast.batches | self.work.forecast.without_gradient
        return [
            position
            for position, view in enumerate(self._views(compute, Role.INPUT))
            if view.buffer not in without and self.work.memory.part(view.buffer).is_floating_point()
        ][:count]

    def _parameters(self, compute: Compute) -> list[torch.Tensor]:
        """Parameters in the order of the module, as views of the buffers that hold them now."""
        unit, memory = self._unit(compute), self.work.memory
        views = self._views(compute, Role.PARAMETER)
        order = self._operand_order(compute)
        found: list[torch.Tensor | None] = [None] * len(unit.names)
        for view, position in zip(views, order, strict=True):
            found[position] = memory.shaped(view, unit.shapes[position])
        return [tensor for tensor in found if tensor is not None]

    def _operand_order(self, compute: Compute) -> tuple[int, ...]:
        """Return the place in the module of the parameter of each operand."""
        operands = self._of(compute)
        if operands.order is None:
            key = (compute.unit, compute.segment, self._views(compute, Role.PARAMETER))
            if key not in self._order:
                self._order[key] = parameter_order(
                    self.work.schedule, self.work.memory.program, compute, self._unit(compute)
                )
            operands.order = self._order[key]
        return operands.order

    def _views(self, compute: Compute, role: Role) -> tuple[View, ...]:
        """Return the views of the operands in a role, in order."""
        return self._of(compute).views.get(role, ())

    def _of(self, compute: Compute) -> "_Operands":
        """Return what is known of an operation from one step to the next."""
        found = self._operands.get(compute.id)
        if found is None or found.compute is not compute:
            views = {role: tuple(views_of(compute, role)) for role in Role}
            steady = all(view.buffer in self.work.forecast.steady for view in views[Role.PARAMETER])
            found = self._operands[compute.id] = _Operands(compute, views, steady=steady)
        return found

    def _initialize(self, views: Sequence[tuple[View, torch.Tensor]]) -> None:
        for view, target in views:
            self._initialize_one(view, target)

    def _initialize_one(self, view: View, target: torch.Tensor) -> None:
        memory = self.work.memory
        target.zero_()
        buffer = memory.program.by_name[view.buffer]
        if buffer.layout is None:
            raise UnitRunError(f"buffer {buffer.name}: initialized without a layout")
        start = memory.extent(view)[0]
        for part in held(self.work.schedule, buffer, self.work.coordinates):
            low = max(start, part.position)
            high = min(start + target.numel(), part.position + part.size)
            if low < high:
                value = self.work.initial(part.parameter).reshape(-1)
                first = part.offset + low - part.position
                target[low - start : high - start] = value[first : first + high - low]

    def _optimizer(self, compute: Compute, scalars: Mapping[str, float]) -> Callable[[], None]:
        def tensors(role: Role) -> tuple[torch.Tensor, ...]:
            return tuple(self._flat(view) for view in self._views(compute, role))

        gradients = tensors(Role.GRADIENT)
        scale = scalars[compute.scalars[0]] if compute.scalars else 1.0
        match compute.action:
            case Action.UPDATE:
                trained = tensors(Role.MASTER) or tensors(Role.PARAMETER)
                operands = optimizer.Updated(
                    gradient=gradients[0], trained=trained[0], moments=tensors(Role.MOMENT)
                )
                return partial(optimizer.update, compute.rule, operands, dict(scalars))
            case Action.NORM:
                summed = [
                    tensor
                    for view in self._views(compute, Role.GRADIENT)
                    for tensor in counted(self.work.memory, view)
                ]
                return partial(optimizer.sum_of_squares, summed, tensors(Role.OUTPUT)[0])
            case Action.FINITE:
                return partial(optimizer.is_finite, gradients, tensors(Role.OUTPUT)[0])
            case Action.UNSCALE:
                return partial(optimizer.unscale, gradients, scale)
            case Action.CLIP:
                squares = tensors(Role.INPUT)[0]

                def clip() -> None:
                    self.work.on_norm(squares, scale)
                    optimizer.clip(compute.rule, squares, gradients, scale)

                return clip
            case _:
                raise AssertionError(compute.action)


def _start(tensor: torch.Tensor) -> int:
    """Return where the storage of `tensor` starts."""
    return tensor.untyped_storage().data_ptr()


@dataclass(slots=True)
class _Operands:
    """Operands of a `Compute` by role, and where in the module its parameters are.

    `steady` says that memory of its parameters is the same in its backward.
    """

    compute: Compute
    views: Mapping[Role, tuple[View, ...]]
    order: tuple[int, ...] | None = None
    steady: bool = False


def _buffer_versions(unit: TorchUnit) -> list[int]:
    return [autograd.version(buffer) for buffer in unit.module.buffers()]
