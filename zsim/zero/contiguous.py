"""ZeRO-R MD: contiguous memory for long-lived tensors, allocated in setup and never freed.

Rajbhandari et al. 2020, section 6.3. Checkpoints and gradients are long-lived and are produced
between short-lived values, which fragments the allocator. Here they are moved, as they are
produced, into preallocated contiguous buffers: all checkpoints of a micro-batch in one buffer for
each dtype, gradients by bucket.
"""

from collections.abc import Iterable, Sequence

from zsim.dtype import DType
from zsim.model.model import Model
from zsim.schedule.operation import View
from zsim.schedule.schedule_writer import ScheduleWriter
from zsim.strategy.strategy import Strategy
from zsim.zero.bucket import Buckets
from zsim.zero.checkpoints import CheckpointStore
from zsim.zero.partitioned_checkpoints import own_elements
from zsim.zero.reduce import long_lived
from zsim.zero.visit_order import UnitVisit


class ContiguousStore(CheckpointStore):
    """A store of one buffer for each dtype, with a slot for every checkpoint."""

    def __init__(
        self,
        writer: ScheduleWriter,
        model: Model,
        strategy: Strategy,
        *,
        visits: Sequence[UnitVisit],
    ) -> None:
        super().__init__(writer, model, strategy)
        sizes: dict[DType, int] = {}
        self._views: dict[str, View] = {}
        for value in (value for visit in visits if not visit.backward for value in visit.parts):
            dtype, size = model.values[value].dtype, own_elements(model, strategy, value)
            start = sizes.get(dtype, 0)
            self._views[value] = View(buffer=f"checkpoints/{dtype}", start=start, size=size)
            sizes[dtype] = start + size
        writer.prefix = "setup/checkpoints"
        for dtype, elements in sizes.items():
            writer.persist(self._declare(f"checkpoints/{dtype}", elements, dtype))

    def make_room(self, value: str) -> View:
        """Return the slot of `value`, which is allocated already."""
        return self.view(value)

    def view(self, value: str) -> View:
        """Return the slot of `value`."""
        return self._views[value]

    def clear(self, value: str, uses: Iterable[str] = ()) -> None:
        """Do nothing: the slot stays allocated; the next write to it is ordered after the reads."""


def allocate_gradients(writer: ScheduleWriter, strategy: Strategy, buckets: Buckets) -> None:
    """Allocate in setup the buffers that accumulate gradients and receive reduced ones."""
    writer.prefix = "setup/gradients"
    for bucket in buckets.trained:
        for name in long_lived(writer, strategy, bucket):
            writer.persist(name)
