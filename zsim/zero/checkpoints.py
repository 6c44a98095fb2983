"""Checkpoint stores: where activation checkpoints are between forward and backward.

A checkpoint is an input of a unit that is recomputed before its backward. It stays in the memory
where forward wrote it unless a technique moves it: sharded over the tensor axis (`partition`),
offloaded to host memory or a file (`offload.checkpoints`), or copied to contiguous memory
(`contiguous`). The stores of this file keep one buffer for each checkpoint.
"""

from collections.abc import Iterable

from zsim.dtype import DType
from zsim.model.model import Model
from zsim.schedule.operation import Edge, View
from zsim.schedule.operation_list import COMPUTE
from zsim.schedule.schedule import Kind
from zsim.schedule.schedule_writer import (
    HOST_POOL,
    NVME_POOL,
    NVME_WRITE,
    POOL,
    TO_HOST,
    ScheduleWriter,
)
from zsim.strategy.offload import MemoryTier
from zsim.strategy.strategy import Strategy
from zsim.zero.partitioned_checkpoints import gather, own_elements, own_slice
from zsim.zero.visit_order import Made, UnitVisit, ValueInstance

_PLACES = {
    MemoryTier.DEVICE: (POOL, COMPUTE),
    MemoryTier.HOST: (HOST_POOL, TO_HOST),
    MemoryTier.NVME: (NVME_POOL, NVME_WRITE),
}
"""Pool of each tier, and the stream that first writes a checkpoint there."""


class CheckpointStore:
    """Memory that holds checkpoints: one buffer for each, freed after use.

    Attributes:
        place: the pool, and the stream that first writes a checkpoint there.
    """

    def __init__(self, writer: ScheduleWriter, model: Model, strategy: Strategy) -> None:
        self._writer = writer
        self._model = model
        self._strategy = strategy
        self._tier = strategy.checkpoint_tier
        self.place = _PLACES[self._tier]

    def make_room(self, value: str) -> View:
        """Allocate memory for the checkpoint `value`, and return its view."""
        self._writer.allocate(self._buffer(value))
        return self.view(value)

    def view(self, value: str) -> View:
        """Return the view of the checkpoint `value` in the store."""
        return self._writer.all(self._buffer(value))

    def clear(self, value: str, uses: Iterable[str] = ()) -> None:
        """Free the memory of `value` after the operations `uses`, which are on other streams."""
        self._writer.free(self._buffer(value), uses=uses)

    def _buffer(self, value: str) -> str:
        name = f"{value}/{'part' if self._tier is MemoryTier.DEVICE else self._tier}"
        elements = own_elements(self._model, self._strategy, value)
        return self._declare(name, elements, self._model.values[value].dtype)

    def _declare(self, name: str, elements: int, dtype: DType) -> str:
        pool, home = self.place
        return self._writer.buffer(name, elements, dtype, Kind.SAVED, pool=pool, home=home)


class Checkpoints:
    """Checkpoints that stay on the device; `store` is used only if they are moved."""

    def __init__(
        self, writer: ScheduleWriter, model: Model, strategy: Strategy, store: CheckpointStore
    ) -> None:
        self.writer = writer
        self.model = model
        self.strategy = strategy
        self.store = store

    def enter(self, visit: UnitVisit, after: tuple[Edge, ...] = ()) -> None:
        """Write operations that precede a visit, after `after`; nothing here."""

    def put_away(self, visit: UnitVisit, last: str) -> None:
        """Move the unit's inputs to the store after its forward, whose last operation is `last`."""
        for value in visit.parts:
            self._shelve(value, self.store.make_room(value))

    def bring_back(self, visit: UnitVisit) -> tuple[Edge, ...]:
        """Restore the unit's checkpoints; return the edges that its backward waits for."""
        if self.strategy.cuts_checkpoints:
            for value in visit.parts:
                gather(self.writer, self.model, value, source=self.store.view(value))
                self.store.clear(value)
        return ()

    def view(self, value: str) -> View:
        """Return the view of the checkpoint `value` that its unit's backward reads."""
        if self.strategy.cuts_checkpoints:
            return self.writer.all(brought_back(value))
        return self.store.view(value)

    def end(self, value: str, last: str) -> None:
        """Free the checkpoint `value`, last read by the operation `last`."""
        if self.strategy.cuts_checkpoints:
            self.writer.free(brought_back(value))
        else:
            self.store.clear(value)

    def _shelve(self, value: str, target: View) -> str:
        """Copy the rank's share of a forward output to `target` on the device; free the whole."""
        verb = "partition" if self.strategy.cuts_checkpoints else "keep"
        source = own_slice(self.model, self.strategy, value)
        copied = self.writer.copy(f"{verb}/{value}", source, target)
        self.writer.free(value)
        return copied


def brought_back(value: str) -> str:
    """Return the name of the buffer of a checkpoint that was restored whole."""
    return ValueInstance(value, Made.GATHERED).buffer
