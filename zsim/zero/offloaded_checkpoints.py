"""ZeRO-R Pa+cpu: checkpoints move to host memory after forward, and back before backward.

Rajbhandari et al. 2020, sections 6.1 and 8. A copy to the host overlaps the next unit's forward,
whose end waits for it, so the device holds one unit's checkpoint during its copy. A copy back is
issued one unit ahead, and overlaps that unit's backward. With Pa, each rank moves its own slice;
without it, every rank of the tensor axis moves the whole checkpoint.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from zsim.model.model import Model
from zsim.schedule.operation import Edge, View
from zsim.schedule.operation_list import COMPUTE
from zsim.schedule.schedule import Kind
from zsim.schedule.schedule_writer import FROM_HOST, POOL, TO_HOST, ScheduleWriter
from zsim.strategy.strategy import Strategy
from zsim.zero.checkpoints import Checkpoints, CheckpointStore, brought_back
from zsim.zero.partitioned_checkpoints import gather, own_elements
from zsim.zero.visit_order import UnitVisit


@dataclass(frozen=True, slots=True)
class _Leaving:
    """A device buffer that a copy to the host still reads."""

    buffer: str
    copied: str


class OffloadedCheckpoints(Checkpoints):
    """Checkpoints whose store is in host memory."""

    def __init__(
        self,
        writer: ScheduleWriter,
        model: Model,
        strategy: Strategy,
        store: CheckpointStore,
        *,
        visits: Sequence[UnitVisit],
    ) -> None:
        super().__init__(writer, model, strategy, store)
        self._backward = [visit for visit in visits if visit.backward and visit.opens]
        pairs = pairwise(self._backward)
        self._next = {visit.unit: following.parts for visit, following in pairs}
        self._out: dict[str, str] = {}
        self._leaving: list[_Leaving] = []
        self._back: dict[str, str] = {}

    def put_away(self, visit: UnitVisit, last: str) -> None:
        """Copy the unit's inputs to the host after `last`; free those of the previous unit."""
        for value in visit.parts:
            source, made = value, last
            if self.strategy.cuts_checkpoints:
                source = self._slice("part", value, COMPUTE)
                self.writer.allocate(source)
                made = self._shelve(value, self.writer.all(source))
            self._out[value] = self._copy_out(value, self.writer.all(source), made)
            self._leaving.append(_Leaving(source, self._out[value]))
        while len(self._leaving) > len(visit.parts):
            self._forget()

    def bring_back(self, visit: UnitVisit) -> tuple[Edge, ...]:
        """Copy back this unit's checkpoints and the next's; return the edges to wait for."""
        while self._leaving:
            self._forget()
        for value in (*visit.parts, *self._next.get(visit.unit, ())):
            if value not in self._back:
                self._back[value] = self._copy_back(value)
        arrived = tuple(self._back.pop(value) for value in visit.parts)
        if not self.strategy.cuts_checkpoints:
            return arrived
        for value, copied in zip(visit.parts, arrived, strict=True):
            part = self._slice("returned", value, FROM_HOST)
            source = self.writer.all(part)
            gathered = gather(self.writer, self.model, value, source=source, after=(copied,))
            self.writer.free(part, uses=(gathered,))
        return ()

    def view(self, value: str) -> View:
        """Return the view of the checkpoint that was copied back, whole."""
        return self.writer.all(brought_back(value))

    def end(self, value: str, last: str) -> None:
        """Free the checkpoint: at once if it was gathered, otherwise after `last`."""
        uses = () if self.strategy.cuts_checkpoints else (last,)
        self.writer.free(brought_back(value), uses=uses)

    def _copy_out(self, value: str, source: View, made: str) -> str:
        target = self.store.make_room(value)
        path = f"offload/{value}"
        return self.writer.copy(path, source, target, stream=TO_HOST, after=(made,))

    def _copy_back(self, value: str) -> str:
        if self.strategy.cuts_checkpoints:
            target = self._slice("returned", value, FROM_HOST)
        else:
            whole = self.model.values[value]
            target = self.writer.buffer(
                brought_back(value), whole.elements, whole.dtype, Kind.SAVED, home=FROM_HOST
            )
        self.writer.allocate(target)
        return self._fetch(value, target)

    def _fetch(self, value: str, target: str) -> str:
        """Copy `value` from its store to `target` on the device, and clear the store."""
        after = (self._out.pop(value),)
        source = self.store.view(value)
        copied = self.writer.copy(f"fetch/{value}", source, target, stream=FROM_HOST, after=after)
        self.store.clear(value, (copied,))
        return copied

    def _slice(self, name: str, value: str, home: str, pool: str = POOL) -> str:
        """Declare a buffer of the rank's share, for a copy to the store or back."""
        return self.writer.buffer(
            f"{value}/{name}",
            own_elements(self.model, self.strategy, value),
            self.model.values[value].dtype,
            Kind.SAVED,
            pool=pool,
            home=home,
        )

    def _forget(self) -> None:
        """Free the device memory of the oldest checkpoint that was copied to the host."""
        oldest = self._leaving.pop(0)
        self.writer.free(oldest.buffer, uses=(oldest.copied,))
