"""Checkpoints that other runtimes keep in host memory, copied on the compute stream.

A block's input is copied out before the block runs, and back before recompute. PyTorch's
`offload_wrapper` around `checkpoint_wrapper` does so (`_NoopSaveInputs` of torch.utils.checkpoint
saves the inputs of a block, `save_on_cpu(pin_memory=True)` copies saved tensors, torch 2.13): to
pinned memory, without blocking the host. DeepSpeed's `cpu_checkpointing` until 0.19.5 copied to
pageable memory, for which the host waits (`CheckpointFunction` in
`runtime/activation_checkpointing/checkpointing.py`).
"""

from collections.abc import Sequence, Set

from zsim.model.model import Model
from zsim.schedule.operation import Edge, View
from zsim.schedule.operation_list import COMPUTE
from zsim.schedule.schedule import Kind
from zsim.schedule.schedule_writer import HOST_POOL, PAGEABLE_POOL, ScheduleWriter
from zsim.strategy.strategy import Strategy
from zsim.zero.checkpoints import Checkpoints, CheckpointStore, brought_back
from zsim.zero.partitioned_checkpoints import gather, own_elements, own_slice
from zsim.zero.visit_order import UnitVisit


class HostStore(CheckpointStore):
    """A host buffer for each checkpoint, pinned or not, first written on the stream `home`."""

    def __init__(
        self,
        writer: ScheduleWriter,
        model: Model,
        strategy: Strategy,
        *,
        home: str = COMPUTE,
        pinned: bool = True,
    ) -> None:
        super().__init__(writer, model, strategy)
        self.place = (HOST_POOL if pinned else PAGEABLE_POOL, home)


class CopiedCheckpoints(Checkpoints):
    """Checkpoints that are copied out when a block starts, and back before recompute.

    If the host `waits` for copies, the memory is not pinned. Values in `stays` are copied but not
    freed on the device, such as the received input of a pipeline stage.
    """

    def __init__(
        self,
        writer: ScheduleWriter,
        model: Model,
        strategy: Strategy,
        *,
        visits: Sequence[UnitVisit],
        waits: bool = False,
        stays: Set[str] = frozenset(),
    ) -> None:
        store = HostStore(writer, model, strategy, pinned=not waits)
        super().__init__(writer, model, strategy, store)
        self._waits = waits
        self._stays = stays
        self._given: dict[int, tuple[str, ...]] = {}
        first = 0
        for visit in visits:
            if not visit.backward:
                first = visit.unit if visit.opens else first
                self._given[first] = visit.parts

    def enter(self, visit: UnitVisit, after: tuple[Edge, ...] = ()) -> None:
        """Copy the inputs of a block out before its forward, and back before recompute."""
        if visit.backward:
            for value in visit.parts:
                self._copy_back(value, after)
        elif visit.opens:
            for value in self._given[visit.unit]:
                self._copy_out(value, after)

    def put_away(self, visit: UnitVisit, last: str) -> None:
        """Free the inputs that the host now holds."""
        del last
        self.writer.free(*(value for value in visit.parts if value not in self._stays))

    def bring_back(self, visit: UnitVisit) -> tuple[Edge, ...]:
        """Return nothing: the compute stream also runs the copy, so it is ordered."""
        del visit
        return ()

    def view(self, value: str) -> View:
        """Return the view of the checkpoint that was copied back, whole."""
        return self.writer.all(brought_back(value))

    def end(self, value: str, last: str) -> None:
        """Free the checkpoint; `last` is on the same stream as the copy."""
        del last
        self.writer.free(brought_back(value))

    def _copy_out(self, value: str, after: tuple[Edge, ...]) -> None:
        writer, target = self.writer, self.store.make_room(value)
        if not self.strategy.cuts_checkpoints:
            self._crossed(f"offload/{value}", writer.all(value), target, after)
            return
        part = self._own_part(value, "part")  # partition_activations: a clone of it, whose `cpu()`
        source = own_slice(self.model, self.strategy, value)
        writer.copy(f"partition/{value}", source, part, after=after)
        self._crossed(f"offload/{value}", writer.all(part), target, ())
        writer.free(part)

    def _copy_back(self, value: str, after: tuple[Edge, ...]) -> None:
        writer, cuts = self.writer, self.strategy.cuts_checkpoints
        if cuts:
            target = self._own_part(value, "returned")
        else:
            whole = self.model.values[value]
            target = writer.buffer(brought_back(value), whole.elements, whole.dtype, Kind.SAVED)
            writer.allocate(target)
        self._crossed(f"fetch/{value}", self.store.view(value), writer.all(target), after)
        self.store.clear(value)
        if cuts:  # gather_partitioned_activations
            gather(writer, self.model, value, source=writer.all(target))
            writer.free(target)

    def _own_part(self, value: str, name: str) -> str:
        """Allocate device memory for the rank's share of a checkpoint, for a copy out or back."""
        size = own_elements(self.model, self.strategy, value)
        dtype = self.model.values[value].dtype
        part = self.writer.buffer(f"{value}/{name}", size, dtype, Kind.SAVED)
        self.writer.allocate(part)
        return part

    def _crossed(self, path: str, source: View, target: View, after: tuple[Edge, ...]) -> None:
        copied = self.writer.copy(path, source, target, after=after)
        if self._waits:
            self.writer.host_wait(f"{path}/wait", copied)
