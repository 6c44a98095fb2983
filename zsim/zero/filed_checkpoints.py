"""Checkpoints on NVMe: written after forward through host memory, and read ahead of backward.

Rajbhandari et al. 2021, section 5.1. A checkpoint passes through host memory in both directions.
The host waits for the write of one unit while the checkpoint of the next is copied out, so that two
are in flight. `read_units` sets how many units reads are ahead of copies back.
"""

from collections.abc import Sequence

from zsim.model.model import Model
from zsim.schedule.operation import Edge, FreeMode, View
from zsim.schedule.schedule_writer import (
    FROM_HOST,
    HOST_POOL,
    NVME_READ,
    NVME_WRITE,
    TO_HOST,
    ScheduleWriter,
)
from zsim.strategy.strategy import Strategy
from zsim.zero.checkpoints import CheckpointStore
from zsim.zero.offloaded_checkpoints import OffloadedCheckpoints
from zsim.zero.visit_order import UnitVisit


class FiledCheckpoints(OffloadedCheckpoints):
    """Checkpoints whose store is in files."""

    def __init__(
        self,
        writer: ScheduleWriter,
        model: Model,
        strategy: Strategy,
        store: CheckpointStore,
        *,
        visits: Sequence[UnitVisit],
    ) -> None:
        super().__init__(writer, model, strategy, store, visits=visits)
        self._place = {visit.unit: number for number, visit in enumerate(self._backward)}
        self._written: list[list[tuple[str, str]]] = []
        self._files: dict[str, str] = {}
        self._reads: dict[str, str] = {}

    def put_away(self, visit: UnitVisit, last: str) -> None:
        """Copy the unit's inputs to the host and write them; free those of the previous unit."""
        if visit.parts:
            self._written.append([])
        super().put_away(visit, last)
        self._free_written(keep=1)

    def bring_back(self, visit: UnitVisit) -> tuple[Edge, ...]:
        """Read this unit's checkpoints and the next ones; copy this unit's back to the device."""
        first = self._place[visit.unit]
        self._free_written(keep=int(first == 0))  # backward starts during the last write
        ahead = first + 2 + self.strategy.offload.read_units
        for following in self._backward[first:ahead]:
            for value in following.parts:
                if value in self._files:
                    self._reads[value] = self._read(value)
        return super().bring_back(visit)

    def _copy_out(self, value: str, source: View, made: str) -> str:
        staging = self._slice("leaving", value, TO_HOST, HOST_POOL)
        self.writer.allocate(staging)
        copied = self.writer.copy(
            f"offload/{value}", source, staging, stream=TO_HOST, after=(made,)
        )
        target = self.store.make_room(value)
        written = self.writer.write_file(
            f"write/{value}", staging, target, stream=NVME_WRITE, after=(copied,)
        )
        self._written[-1].append((staging, written))
        self._files[value] = written
        return copied

    def _read(self, value: str) -> str:
        """Read `value` into host memory and clear its file; return the read."""
        slot = self._slice("coming", value, NVME_READ, HOST_POOL)
        self.writer.allocate(slot)
        after, source = (self._files.pop(value),), self.store.view(value)
        read = self.writer.read(f"read/{value}", source, slot, stream=NVME_READ, after=after)
        self.store.clear(value, (read,))
        return read

    def _fetch(self, value: str, target: str) -> str:
        slot, read = self._slice("coming", value, NVME_READ, HOST_POOL), self._reads.pop(value)
        del self._out[value]
        self.writer.host_wait(f"fetch/{value}/wait", read)
        copied = self.writer.copy(f"fetch/{value}", slot, target, stream=FROM_HOST, after=(read,))
        self.writer.free(slot, uses=(copied,))
        return copied

    def _free_written(self, *, keep: int) -> None:
        """Free host staging memory once its writes are done, except for the last `keep` units."""
        while len(self._written) > keep:
            for staging, written in self._written.pop(0):
                self.writer.free(staging, uses=(written,), mode=FreeMode.HOST)
