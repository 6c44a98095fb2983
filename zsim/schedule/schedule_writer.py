"""Writer of one role's program: buffers by name, operations in order, memory so far."""

from collections.abc import Iterable
from typing import Final

from msgspec.structs import replace

from zsim.dtype import DType
from zsim.limits import go_on
from zsim.model.model import ModelError
from zsim.model.tensor_lifetime import AllocationTrace
from zsim.schedule.buffer_handle import BufferHandle
from zsim.schedule.counts import Rows
from zsim.schedule.mesh import Box, Group
from zsim.schedule.operation import Allocate, Free, FreeMode, Operation
from zsim.schedule.operation_list import COMPUTE, OperationList
from zsim.schedule.schedule import Buffer, Kind, Place, Pool, Program

TO_HOST = "device_to_host"
FROM_HOST = "host_to_device"
"""Streams of copies to host memory and back, separate from kernels and collectives."""
CPU = "cpu"
"""The stream of a host thread, which updates the state in host memory."""
NVME_READ = "nvme_read"
NVME_WRITE = "nvme_write"
"""Streams of the I/O handles that read and write files."""
POOL = "device"
HOST_POOL = "host"
PAGEABLE_POOL = "pageable"
"""Host memory that is not pinned: a copy to or from it blocks the host until it ends."""
NVME_POOL = "nvme"
ROLE = "all"
"""The role of all ranks if they run the same program."""

OPERATIONS_MAX: Final = 500_000
"""Maximum length of a program. At 0.6 kB each, they fit in a laptop's memory; 1,000 layers
with two micro-batches are 128,000."""

OPERATIONS_A_LOOK: Final = 64
"""How many operations are written between two looks at whether the work is to stop."""


class ScheduleWriter(OperationList):
    """Collects the buffers of a role, and the operations of its setup and then of its step.

    It counts the bytes in use of each pool, so that the schedule can promise its peak: a free
    returns memory at once, whatever its mode. `groups` holds groups needed in addition to those
    along axes. Operations whose prefix is in `captured` are in a CUDA graph. Counted rows are
    allocated for `micro_batch`.
    """

    def __init__(self, role: str = ROLE, box: Box = ()) -> None:
        super().__init__("", {})
        self.role = role
        self.box = box
        self.persistent: list[str] = []
        self.setup: list[Operation] = []
        self.alive_bytes = {POOL: 0}
        self.peak_bytes = {POOL: 0}
        self.alive: set[str] = set()
        self.slot_pools: list[Pool] = []
        self.groups: list[Group] = []
        self.captured: tuple[str, ...] = ()
        self.micro_batch = 0
        self._sizes: dict[str, tuple[str, int]] = {}

    def buffer(
        self,
        name: str,
        elements: int,
        dtype: DType,
        kind: Kind,
        *,
        pool: str = POOL,
        home: str = COMPUTE,
        produced: bool = False,
        layout: str | None = None,
        shard: str | None = None,
        course: AllocationTrace | None = None,
        rows: Rows | None = None,
    ) -> str:
        """Declare a buffer once; later declarations of the name are the same buffer."""
        if name not in self.buffers:
            self.buffers[name] = Buffer(
                name=name,
                pool=pool,
                elements=elements,
                dtype=dtype,
                kind=kind,
                home=home,
                produced=produced,
                layout=layout,
                shard=shard,
                course=course,
                rows=rows,
            )
        return name

    def count_as_saved(self, name: str) -> None:
        """Report a buffer as saved activations: its content lives from forward into backward."""
        buffer = self.buffers[name]
        if buffer.kind is Kind.WORKSPACE:
            self.buffers[name] = replace(buffer, kind=Kind.SAVED)

    def slots(self, name: str, slot_bytes: int, count: int) -> None:
        """Declare a pool of `count` slots of `slot_bytes` in pinned host memory."""
        capacity = count * slot_bytes
        pool = Pool(name=name, place=Place.HOST, slot_bytes=slot_bytes, capacity_bytes=capacity)
        self.slot_pools.append(pool)

    def add(self, operation: Operation) -> str:
        """Append an operation and return its id.

        Raises:
            ModelError: there are too many; the message names settings that reduce them.
        """
        count = len(self.operations)
        if not count % OPERATIONS_A_LOOK:
            go_on()
        if count >= OPERATIONS_MAX:
            raise ModelError(
                f"model.layers: a step of more than {OPERATIONS_MAX:,} operations; fewer layers or "
                "gradient_accumulation_steps, or larger buckets, need fewer"
            )
        self.operations.append(operation)
        return operation.id

    def allocate(self, *buffers: BufferHandle | str, micro_batch: int | None = None) -> None:
        """Allocate memory for each buffer; `micro_batch` selects the numbers of counted rows.

        By default it is the current one.
        """
        for each in buffers:
            name = each if isinstance(each, str) else each.name
            assert name not in self.alive, f"{self.prefix}: {name} is alive"
            self.alive.add(name)
            if self.captured and self.prefix.startswith(self.captured):
                self.buffers[name] = replace(self.buffers[name], captured=True)
            pool, size = self._sizes.get(name) or self._size_of(name)
            alive = self.alive_bytes.get(pool, 0) + size
            self.alive_bytes[pool] = alive
            if alive >= self.peak_bytes.get(pool, 0):
                self.peak_bytes[pool] = alive
            path = f"{self.prefix}/allocate/{name}"
            batch = micro_batch
            if batch is None and self.buffers[name].rows is not None:
                batch = self.micro_batch
            self.add(Allocate(id=path, buffer=name, micro_batch=batch))

    def _size_of(self, name: str) -> tuple[str, int]:
        """Return the pool of a buffer, and its bytes, and keep both."""
        buffer = self.buffers[name]
        found = self._sizes[name] = buffer.pool, buffer.size_bytes
        return found

    def count_late(self, pool: str, size_bytes: int) -> None:
        """Add bytes that the previous step freed and that may not have returned yet.

        A negative `size_bytes` removes them once they have returned.
        """
        self.alive_bytes[pool] = self.alive_bytes.get(pool, 0) + size_bytes

    def persist(self, name: str) -> str:
        """Allocate a buffer that lives from setup on, through all steps."""
        self.persistent.append(name)
        self.allocate(name)
        return name

    def free(
        self,
        *buffers: BufferHandle | str,
        mode: FreeMode = FreeMode.WAITED,
        uses: Iterable[str] = (),
        verb: str = "free",
    ) -> None:
        """Free the memory of each buffer after `uses`, by the given mode."""
        uses = tuple(uses)
        for each in buffers:
            name = each if isinstance(each, str) else each.name
            self.alive.remove(name)
            pool, size = self._sizes.get(name) or self._size_of(name)
            self.alive_bytes[pool] -= size
            path = f"{self.prefix}/{verb}/{name}"
            self.add(Free(id=path, buffer=name, mode=mode, uses=uses))

    def begin_step(self) -> None:
        """End setup: later operations belong to the step."""
        self.setup, self.operations = self.operations, []

    def fork(self, prefix: str) -> "ScheduleWriter":
        """Return a writer of one list of a branch: same buffers, a copy of the memory counts."""
        side = ScheduleWriter(self.role, self.box)
        side.buffers, side.persistent, side._views = self.buffers, self.persistent, self._views
        side.prefix = prefix
        side.alive, side.alive_bytes = set(self.alive), dict(self.alive_bytes)
        side.peak_bytes = dict(self.peak_bytes)
        return side

    def join(self, side: "ScheduleWriter") -> None:
        """Continue from the memory state at the end of `side`."""
        self.alive, self.alive_bytes = side.alive, side.alive_bytes
        self.peak_bytes = {
            pool: max(size, self.peak_bytes.get(pool, 0)) for pool, size in side.peak_bytes.items()
        }

    def program(self) -> Program:
        """Return the program of the role written so far."""
        return Program(
            role=self.role,
            buffers=tuple(self.buffers.values()),
            persistent=tuple(self.persistent),
            setup=tuple(self.setup),
            step=tuple(self.operations),
        )
