"""Megatron-LM's `cpu_offloading_num_layers`: activations of the first layers in host memory.

Transformer Engine does so (`pytorch/cpu_offload.py` of 2.20, `DefaultOffloadSynchronizer`), on one
stream for both directions. With L layers, N of which are stored, copies of layer i are issued with
layer i + 1 and start when their tensors exist. Compute waits for them when layer L - N + i starts,
and the memory is freed. Copies back start when compute reaches the backward of layer L - 1 - N + i.
So the device holds the activations of L - N layers.

A segment's tensors are one buffer here: it is copied as a whole, and stays until its backward is
over.
"""

from collections.abc import Callable, Sequence

from zsim.model.model import Model, ModelError
from zsim.schedule.operation import Action, Compute, Copy, Edge, Operand, View
from zsim.schedule.operation_list import COMPUTE
from zsim.schedule.schedule import Kind
from zsim.schedule.schedule_writer import HOST_POOL, ScheduleWriter
from zsim.strategy.strategy import Strategy
from zsim.zero.bucket import Buckets
from zsim.zero.checkpoints import Checkpoints, CheckpointStore, brought_back
from zsim.zero.forward_backward import ForwardBackward, Held
from zsim.zero.visit_order import SegmentVisit, UnitVisit
from zsim.zero.workspace_buffer import workspace_buffer

OFFLOAD = "offload"
"""The stream of copies in both directions: `offload_stream`."""


class LayersOnHost(Checkpoints):
    """Activations of layers in flight to the host or back, by the number of the layer."""

    def __init__(
        self,
        writer: ScheduleWriter,
        model: Model,
        strategy: Strategy,
        *,
        saved: Callable[[int, int], str],
    ) -> None:
        super().__init__(writer, model, strategy, CheckpointStore(writer, model, strategy))
        layers = [index for index, unit in enumerate(model.units) if unit.checkpoint]
        self._number = {unit: number for number, unit in enumerate(layers)}
        self._saved = saved
        self._stored, self._layers = strategy.layers_on_host, len(layers)
        if self._stored >= self._layers:
            raise ModelError(
                f"zero.megatron.cpu_offloading_num_layers: {self._stored} must be less than the "
                f"{self._layers} layers"
            )
        self._made: dict[int, dict[str, str]] = {}
        self._copied: dict[int, str] = {}
        self._back: dict[int, str] = {}

    def enter(self, visit: UnitVisit, after: tuple[Edge, ...] = ()) -> None:
        """Start copies, and wait for copies that must be done, when a layer starts."""
        del after
        layer = self._number.get(visit.unit)
        if layer is None:
            return
        if visit.backward:  # bwd_step
            self._copy_back(layer - (self._layers - 1 - self._stored))
            return
        self._copy_out(layer - 1)  # fwd_step
        self._release(layer - (self._layers - self._stored))

    def put_away(self, visit: UnitVisit, last: str) -> None:
        """Record the activations of a stored layer, and the operations that made them."""
        del last
        layer = self._number.get(visit.unit, self._stored)
        if layer >= self._stored:
            return
        made: dict[str, str] = {}
        segments = self.model.units[visit.unit].segments
        for number, segment in enumerate(segments):
            path = self.writer.path(f"forward{number}")
            for value in segment.kept_inputs:
                if value in visit.parts:
                    made.setdefault(value, path)
            if is_stored(self.writer, name := self._saved(visit.unit, number), self.strategy):
                made[name] = path
        self._made[layer] = made

    def _copy_out(self, layer: int) -> None:
        for name, made in self._made.get(layer, {}).items():
            kept = self.writer.buffers[name]
            host = self.writer.buffer(
                _on_host(name), kept.elements, kept.dtype, Kind.SAVED, pool=HOST_POOL, home=OFFLOAD
            )
            self.writer.allocate(host)
            path = f"offload/{name}"
            self._copied[layer] = self.writer.copy(path, name, host, stream=OFFLOAD, after=(made,))

    def _release(self, layer: int) -> None:
        # release_activation_forward_gpu_memory: one event for the layer
        for name in self._made.get(layer, {}):
            self.writer.free(name, uses=(self._copied[layer],))

    def _copy_back(self, layer: int) -> None:
        # start_reload: memory of the current stream, for which the copies wait
        made, after = self._made.pop(layer, {}), (self._latest(),)
        for name in made:
            kept = self.writer.buffers[name]
            back = back_of(self.model, name)
            self.writer.buffer(back, kept.elements, kept.dtype, Kind.SAVED)
            self.writer.allocate(back)
            path = f"fetch/{name}"
            copied = self.writer.copy(path, _on_host(name), back, stream=OFFLOAD, after=after)
            self.writer.free(_on_host(name))
            self._back[layer] = copied

    def _latest(self) -> str:
        """Return the latest operation issued on the compute stream."""
        return next(
            each.id
            for each in reversed(self.writer.operations)
            if isinstance(each, Compute | Copy) and each.stream == COMPUTE
        )

    def bring_back(self, visit: UnitVisit) -> tuple[Edge, ...]:
        """Return the copy back that a layer's backward waits for: the last one."""
        layer = self._number.get(visit.unit)
        copied = None if layer is None else self._back.pop(layer, None)
        return () if copied is None else (copied,)

    def view(self, value: str) -> View:
        """Return the view of the activation that was copied back."""
        return self.writer.all(brought_back(value))

    def end(self, value: str, last: str) -> None:
        """Free the copy on the device."""
        del last
        self.writer.free(brought_back(value))


class OffloadedPasses(ForwardBackward):
    """Forward and backward in which the first layers read activations that were copied back."""

    def __init__(
        self,
        writer: ScheduleWriter,
        model: Model,
        strategy: Strategy,
        *,
        buckets: Buckets,
        held: Held,
    ) -> None:
        layers = LayersOnHost(writer, model, strategy, saved=self._name)
        super().__init__(writer, model, strategy, buckets=buckets, held=held, checkpoints=layers)
        blocks = [index for index, unit in enumerate(model.units) if unit.checkpoint]
        self._stored = frozenset(blocks[: strategy.layers_on_host])

    def _name(self, unit: int, segment: int) -> str:
        return f"{self.model.units[unit].name}/saved{segment}"

    def _saved(self, visit: UnitVisit, part: SegmentVisit) -> str:
        saved = super()._saved(visit, part)
        return back_of(self.model, saved) if self._came_back(visit, part, saved) else saved

    def _came_back(self, visit: UnitVisit, part: SegmentVisit, saved: str) -> bool:
        is_backward = part.action is Action.BACKWARD and visit.unit in self._stored
        return is_backward and is_stored(self.writer, saved, self.strategy)

    def _workspace(self, visit: UnitVisit, part: SegmentVisit, operands: Sequence[Operand]) -> str:
        """Return the same; a copy back is one block, so it has no allocation trace."""
        saved = self._name(visit.unit, part.segment)
        if saved not in self.writer.buffers or not self._came_back(visit, part, saved):
            return super()._workspace(visit, part, operands)
        return workspace_buffer(
            self.writer, self.model, visit, part, saved="", operands=operands, rows=self.rows
        )


def is_stored(writer: ScheduleWriter, name: str, strategy: Strategy) -> bool:
    """Return True if saved tensors of a stored layer's segment exist and are large enough."""
    return name in writer.buffers and writer.buffers[name].elements >= strategy.stored_least


def _on_host(name: str) -> str:
    return f"{name}/host"


def back_of(model: Model, name: str) -> str:
    """Return the device buffer that an activation is copied back to."""
    return brought_back(name) if name in model.values else f"{name}/back"
