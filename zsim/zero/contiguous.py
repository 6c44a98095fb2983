"""ZeRO-R MD: memory in a row for what lives long, which set-up allocates and nothing frees.

Rajbhandari et al. 2020, section 6.3. Checkpoints and gradients live long and are made between
values that live shortly; an allocator that has handed out both in turn has holes. Here they are
moved, as they are made, into buffers that lie one after the other from the start: all checkpoints
of a micro-batch in one, gradients by bucket.
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
    """A store of one buffer for each format, with a slot for every checkpoint."""

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
        """Return its slot, which is there."""
        return self.view(value)

    def view(self, value: str) -> View:
        """Return its slot."""
        return self._views[value]

    def clear(self, value: str, uses: Iterable[str] = ()) -> None:
        """Do nothing: the slot stays, and what writes it next is ordered after what read it."""


def allocate_gradients(writer: ScheduleWriter, strategy: Strategy, buckets: Buckets) -> None:
    """Allocate in setup what gradients collect in, and what they are reduced to."""
    writer.prefix = "setup/gradients"
    for bucket in buckets.trained:
        for name in long_lived(writer, strategy, bucket):
            writer.persist(name)
