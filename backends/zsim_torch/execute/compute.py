"""Run the `Compute` operations of one rank: units through autograd."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Final, assert_never

import torch

from zsim.schedule.mesh import Coordinates
from zsim.schedule.operation import OF_SEGMENTS, Action, Compute, Role, View
from zsim.schedule.schedule import Schedule
from zsim_torch.execute.live_memory import LiveMemory
from zsim_torch.execute.memory_part import ProducedPart
from zsim_torch.execute.operands import Operands
from zsim_torch.execute.shard_compute import Initial, ShardComputer
from zsim_torch.ground.torch_dtype import entering
from zsim_torch.module import autograd
from zsim_torch.module.autograd import BackwardPart, Record, UnitLink
from zsim_torch.module.auxiliary_loss import LossSegment
from zsim_torch.module.entered import Leaves
from zsim_torch.module.generator_state import RandomState, need_repeatable
from zsim_torch.module.input_shape import InputShapes
from zsim_torch.module.routed_rows import RowHandle, RowSegment
from zsim_torch.module.saving import InputEntry, version
from zsim_torch.module.unit import SegmentKey, TorchUnit, UnitRunError
from zsim_torch.module.visit import LaterUses, Visit, parameter_order

PARTS: Final = {
    Action.BACKWARD: BackwardPart.WHOLE,
    Action.BACKWARD_INPUT: BackwardPart.INPUTS,
    Action.BACKWARD_WEIGHT: BackwardPart.WEIGHTS,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCompute:
    """Dependencies of the computation on this rank.

    `next_batch` returns the next micro-batch. `on_loss` is called with each loss; the segment
    `last` computes it if this rank runs that segment. `on_norm` is called with the squared norm of
    the gradients before clipping, and with the scale that they had then. `observed` enables
    counting the memory that gradients share.
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
    observed: bool


@dataclass(slots=True)
class Computer:
    """Interpreter of `Compute`; keeps the records of forwards until their backward."""

    work: RankCompute
    shared_bytes: int = 0
    shared_bytes_peak: int = 0
    _records: dict[Visit, Record] = field(default_factory=dict[Visit, Record])
    _looked_at: set[SegmentKey] = field(default_factory=set[SegmentKey])
    """Units that have run a backward: their saved tensors have been checked once."""
    _states: dict[Visit, RandomState] = field(default_factory=dict[Visit, RandomState])
    _saved: dict[str, Visit] = field(default_factory=dict[str, Visit])
    _links: dict[str, UnitLink] = field(default_factory=dict[str, UnitLink])
    _shapes: dict[str, torch.Size] = field(default_factory=dict[str, torch.Size])
    _entered: dict[tuple[str, int, int], torch.Size] = field(
        default_factory=dict[tuple[str, int, int], torch.Size]
    )
    _order: dict[tuple[str, int, tuple[View, ...]], tuple[int, ...]] = field(
        default_factory=dict[tuple[str, int, tuple[View, ...]], tuple[int, ...]]
    )
    _operands: dict[str, Operands] = field(default_factory=dict[str, Operands])
    _shared: dict[str, int] = field(default_factory=dict[str, int])
    _shards: ShardComputer = field(init=False)

    def __post_init__(self) -> None:
        work = self.work
        self._shards = ShardComputer(work.memory, work.initial, work.on_norm)

    def expect(self, shapes: InputShapes) -> None:
        """Set the shapes of inputs that other ranks compute."""
        self._entered.update(shapes)

    def entered_shape(self, compute: Compute, place: int) -> torch.Size | None:
        """Return the shape that a unit expects for its input at `place`, if it is known."""
        return self._entered.get((compute.unit, compute.segment, place))

    def run(self, compute: Compute, scalars: Mapping[str, float]) -> None:
        """Run `compute` now, on the current stream."""
        self.bound(compute, scalars)()

    def again(self, compute: Compute, scalars: Mapping[str, float]) -> Callable[[], None]:
        """Return a function that runs `compute` in any step, with its scalars and memory."""
        if compute.action in OF_SEGMENTS:
            return self.bound(compute, scalars)
        if compute.action is Action.UPDATE:
            return self._shards.updating(self._of(compute), scalars)
        return partial(self.run, compute, scalars)

    def bound(self, compute: Compute, scalars: Mapping[str, float]) -> Callable[[], None]:
        """Return a function that runs `compute`, with the current scalars and memory.

        A function that runs a unit looks up its memory when it is called.
        """
        match compute.action:
            case Action.FORWARD:
                return partial(self._forward, self._of(compute))
            case Action.RECOMPUTE:
                return partial(self._recompute, self._of(compute))
            case Action.BACKWARD | Action.BACKWARD_INPUT | Action.BACKWARD_WEIGHT:
                return partial(self._backward, self._of(compute), PARTS[compute.action])
            case Action.INITIALIZE:
                return self._shards.initializing(compute)
            case Action.LOAD:
                return partial(self._load, self._of(compute))
            case (
                Action.UPDATE
                | Action.NORM
                | Action.UNSCALE
                | Action.CLIP
                | Action.FINITE
                | Action.AMAX
            ):
                return self._shards.bound(self._of(compute), scalars)
            case Action.COMPRESS | Action.DECOMPRESS | Action.RESIDUAL:
                raise ValueError(f"{compute.id}: gradients in factors are simulated only")
            case _:
                assert_never(compute.action)

    def _load(self, known: Operands) -> None:
        for view in known.views[Role.OUTPUT]:
            batch = entering(self.work.next_batch(), self.work.forecast.parameters)
            self.work.memory.bind_batch(view.buffer, batch)

    def forget(self, buffer: str) -> None:
        """Forget the record that a forward saved in `buffer`, which was freed."""
        self._links.pop(buffer, None)
        visit = self._saved.pop(buffer, None)
        if visit is not None:
            self._records.pop(visit, None)
        if buffer in self._shared:
            self.shared_bytes -= self._shared.pop(buffer)

    def _forward(self, known: Operands) -> None:
        compute, visit = known.compute, known.visit
        self._enter(known)
        if visit in self.work.forecast.recomputed:
            self._states[visit] = RandomState.now()
            known_draws = self._unit(known).key in self._looked_at
            with nullcontext() if known_draws else need_repeatable(self._unit(known)):
                self._evaluate(known)
        elif visit not in self.work.forecast.input_gradients:
            self._evaluate(known)
        else:
            self._differentiate(known)
        if (compute.unit, compute.segment) == self.work.last:
            (loss,) = known.views[Role.OUTPUT][-1:]
            self.work.on_loss(self.work.memory.part(loss.buffer))

    def _enter(self, known: Operands) -> None:
        """Tell a segment that uses counted rows its micro-batch."""
        module = self._unit(known).module
        if isinstance(module, RowSegment):
            module.handle.micro_batch = known.visit.micro_batch

    def row_handle(self, layer: int) -> RowHandle | None:
        """Return the rows of a block with experts, by its number; None if no segment has any."""
        modules = (unit.module for unit in self.work.units.values())
        handles = (each.handle for each in modules if isinstance(each, RowSegment))
        return next((each for each in handles if each.layer == layer), None)

    def _recompute(self, known: Operands) -> None:
        state = self._states.pop(known.visit, None)
        if state is None and isinstance(self._unit(known).module, LossSegment):
            self._differentiate(known)  # the schedule computes it where gradients are recorded
            return
        if state is None:
            raise UnitRunError(f"{known.compute.id}: recomputes what had no forward")
        self._enter(known)
        with state.restored():
            self._differentiate(known)

    def _evaluate(self, known: Operands) -> None:
        unit = self._unit(known)
        versions = _buffer_versions(unit)
        outputs = autograd.evaluate(unit, self._parameters(known), self._inputs(known))
        if versions != _buffer_versions(unit):
            raise UnitRunError(
                f"unit {unit.name}: its forward changes a buffer of the module (batch norm?), "
                "so running it again changes what it computes; turn checkpointing off for it"
            )
        self._bind_outputs(known, outputs)

    def _differentiate(self, known: Operands) -> None:
        visit, leaves = known.visit, None if known.steady is None else known.steady.leaves
        if leaves is not None:  # the rest was computed with the leaves
            outputs, record = self._go_on(known, leaves)
        else:
            count = self.work.forecast.input_gradients.get(visit, 0)
            wanted = known.wanted = self._differentiated(known, count)
            unit, entries, views = self._unit(known), self._entries(known), self._parameters(known)
            if known.steady is not None and unit.key in self._looked_at and not known.stored:
                outputs, record = self._go_on(known, self._leaves(known, views))
            else:
                outputs, record = autograd.forward(
                    unit, views, self._inputs(known), wanted, entries=entries
                )
        self._records[visit] = record
        for view in known.views[Role.SAVED]:
            self.work.memory.bind(view.buffer, [])
            self._saved[view.buffer] = visit
        self._bind_outputs(known, [output.detach() for output in outputs])

    def _go_on(self, known: Operands, leaves: Leaves) -> tuple[tuple[torch.Tensor, ...], Record]:
        """Run a unit on persistent parameters; reuse the previous unit's output as its input."""
        unit, wanted, link = self._unit(known), known.wanted, None
        if len(wanted) == 1 and not unit.is_compiled:
            link = self._links.get(known.inputs[wanted[0]][0].buffer)
            if link is not None and not link.holds:
                link = None
        given = self._inputs(known)
        outputs, record = autograd.forward(unit, (), given, wanted, leaves=leaves, link=link)
        made = UnitLink.of(record, outputs, link.length if link else 0)
        if made is not None:
            self._links[known.views[Role.OUTPUT][0].buffer] = made
        return outputs, record

    def _leaves(self, known: Operands, views: Sequence[torch.Tensor]) -> Leaves:
        """Return the parameters of an operation as autograd leaves; created once."""
        steady = known.steady
        assert steady is not None
        if steady.leaves is None:
            with torch.enable_grad():
                steady.leaves = Leaves.of(views, known.trained)
        return steady.leaves

    def _backward(self, known: Operands, part: BackwardPart) -> None:
        record = self._records.get(known.visit)
        if record is None:
            raise UnitRunError(
                f"{known.compute.id}: nothing was saved for this backward, or it was freed"
            )
        unit, incoming = self._unit(known), self._incoming(known, record, part)
        views = self._parameters(known) if record.reads_parameters else ()
        if record.binds_inputs:
            given = self._inputs(known)
            tensors = [each if isinstance(each, torch.Tensor) else torch.empty(0) for each in given]
            views = [*views, *tensors]
        parameters, inputs = autograd.backward(record, views, incoming, part)
        self._looked_at.add(unit.key)
        others = {_start(each) for each in incoming}
        trained = () if part is BackwardPart.INPUTS else known.trained
        for view, position in zip(known.views[Role.GRADIENT], trained, strict=True):
            self._bind_gradient(view, parameters[position])
        for view, gradient in zip(known.views[Role.INPUT_GRADIENT], inputs, strict=True):
            # A residual sum passes one gradient on to several buffers, which must not share memory.
            own = gradient
            if gradient is not None and _start(gradient) in others:
                zeros = self.work.memory.zeros(view.buffer, gradient.numel())
                own = zeros.view(gradient.shape)
                own.copy_(gradient)
            if own is not None:
                others.add(_start(own))
            self._bind_gradient(view, own)

    def _incoming(self, known: Operands, record: Record, part: BackwardPart) -> list[torch.Tensor]:
        """Return gradients of outputs; keep them after the first part of a two-part backward."""
        memory = self.work.memory
        if part is not BackwardPart.INPUTS:
            del self._records[known.visit]
        if part is BackwardPart.WEIGHTS:
            if record.incoming is None:
                raise UnitRunError(f"{known.compute.id}: the first part has not run before it")
            return record.incoming
        incoming = [memory.part(view.buffer) for view in known.views[Role.OUTPUT_GRADIENT]]
        if part is BackwardPart.INPUTS:
            record.incoming = [each.clone() for each in incoming]
            for view in known.views[Role.INTERMEDIATE_GRADIENT]:
                memory.bind(view.buffer, [])
        return incoming

    def _bind_gradient(self, view: View, gradient: torch.Tensor | None) -> None:
        memory = self.work.memory
        routed = view.buffer in memory.routed
        if gradient is None:
            size = memory.extent(view)[1] if routed else view.size
            gradient = memory.zeros(view.buffer, size)
        size, wanted = gradient.numel(), memory.extent(view)[1] if routed else view.size
        if size != wanted:
            raise UnitRunError(
                f"buffer {view.buffer}: a gradient of {size} elements, the schedule says {wanted}"
            )
        if self.work.observed:
            self._count_shared(view.buffer, gradient)
        part = ProducedPart(view.start, gradient)
        memory.bind(view.buffer, [part])

    def _count_shared(self, buffer: str, gradient: torch.Tensor) -> None:
        """Count the bytes by which a gradient's storage, maybe shared, differs from its size."""
        size = gradient.numel()
        missing = size * gradient.element_size()
        if size and not self.work.memory.holds(_start(gradient)):
            missing -= gradient.untyped_storage().nbytes()
        if missing:
            self._shared[buffer] = self._shared.get(buffer, 0) + missing
            self.shared_bytes += missing
            self.shared_bytes_peak = max(self.shared_bytes_peak, self.shared_bytes)

    def _bind_outputs(self, known: Operands, outputs: list[torch.Tensor]) -> None:
        unit, views = known.compute.unit, known.views[Role.OUTPUT]
        if views and len(views) != len(outputs):
            raise UnitRunError(
                f"unit {unit}: it returned {len(outputs)} tensors, "
                f"the schedule has room for {len(views)}"
            )
        for view, output in zip(views, outputs, strict=False):
            if view.buffer in self.work.memory.routed:
                fits = self.work.memory.holds_rows(view, output.numel())
            else:  # packed formats: compare bytes
                fits = view.size in (output.numel(), output.nbytes)
            if not fits:
                raise UnitRunError(
                    f"unit {unit}: it returned {output.numel()} elements, "
                    f"the schedule has room for {view.size}"
                )
            self._shapes[view.buffer] = output.shape
            self.work.memory.bind(view.buffer, [ProducedPart(view.start, output)])

    def _inputs(self, known: Operands) -> list[object]:
        """Return the inputs in their original shapes; stored ones in the shapes of the forward."""
        memory = self.work.memory
        found: list[object] = []
        for view, key in known.inputs:
            if key is None:
                found.append(memory.batch(view.buffer))
                continue
            shape = self._shapes.get(view.buffer, self._entered.get(key))
            tensor = memory.operand(view)
            if shape is not None:
                self._entered[key] = shape
                if tensor.shape != shape:
                    tensor = tensor.view(shape)
            found.append(tensor)
        return found

    def _entries(self, known: Operands) -> dict[int, InputEntry]:
        """Return how to keep inputs whose memory the schedule may free before the backward.

        Only memory of the executor is freed then; outputs of units live as long as autograd.
        """
        if not known.stored:
            return {}
        again = known.visit in self.work.forecast.given_again
        entry = InputEntry.BOUND if again else InputEntry.COPIED
        return {
            position: entry
            for position, view in known.stored
            if self.work.memory.is_allocated(view.buffer)
        }

    def _differentiated(self, known: Operands, count: int) -> list[int]:
        """Return the positions of the first `count` inputs that have gradients.

        Batches, integer tensors and values that depend on frozen parameters only have none.
        """
        memory = self.work.memory
        return [
            position
            for position, view in known.differentiable
            if memory.operand(view).is_floating_point()
        ][:count]

    def _parameters(self, known: Operands) -> list[torch.Tensor]:
        """Return parameters in the order of the module, as views of the buffers that hold them."""
        steady = known.steady
        if steady is not None and steady.views:
            return steady.views
        unit, memory = self._unit(known), self.work.memory
        views = known.views[Role.PARAMETER]
        found: list[torch.Tensor | None] = [None] * len(unit.names)
        for view, position in zip(views, known.order, strict=True):
            found[position] = memory.shaped(view, unit.shapes[position])
        tensors = [tensor for tensor in found if tensor is not None]
        if steady is not None:
            steady.views = tensors
            memory.keep({view.buffer for view in views}, steady)
        return tensors

    def _unit(self, known: Operands) -> TorchUnit:
        """Return the unit of an operation; compute the order of its operands the first time."""
        if known.unit is None:
            compute, work = known.compute, self.work
            unit = known.unit = work.units[compute.unit, compute.segment]
            key = (compute.unit, compute.segment, known.views[Role.PARAMETER])
            if key not in self._order:
                program = work.memory.program
                self._order[key] = parameter_order(work.schedule, program, compute, unit)
            known.order = self._order[key]
            known.trained = tuple(unit.trained(known.order))
        return known.unit

    def _of(self, compute: Compute) -> Operands:
        """Return the cached operands of an operation."""
        found = self._operands.get(compute.id)
        if found is None or found.compute is not compute:
            work = self.work
            found = Operands.of(compute, work.forecast, work.memory.program)
            self._operands[compute.id] = found
        return found


def _start(tensor: torch.Tensor) -> int:
    """Return the address at which the storage of `tensor` starts."""
    return tensor.untyped_storage().data_ptr()


def _buffer_versions(unit: TorchUnit) -> list[int]:
    return [version(buffer) for buffer in unit.module.buffers()]
