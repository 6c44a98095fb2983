"""A schedule of one role in the making: buffers by name, operations in order, the book so far."""

from collections.abc import Iterable
from typing import Final

from zsim.dtype import DType
from zsim.model.generator import Draws
from zsim.model.model import ModelError
from zsim.schedule.operation import Allocate, Edge, Free, FreeMode, HostWait, Operation, View
from zsim.schedule.schedule import Buffer, Kind

COMPUTE = "compute"
COMMUNICATION = "communication"
TO_HOST = "device_to_host"
FROM_HOST = "host_to_device"
"""Streams: of kernels, of collectives, and of copies to host memory and back."""
POOL = "device"
HOST_POOL = "host"
DATA = "data"
TENSOR = "tensor"
REPLICATE = "replicate"
PIPELINE = "pipeline"
INNER = "inner"
OUTER = "outer"
"""Axes, and the groups along each. Where the data axis is split, its parts are outer and inner."""
WORLD = "world"
REPLICA = "replica"
"""Groups of all ranks, and of those that hold the model's states once."""
GENERATOR: Final = {Draws.ALIKE: "default", Draws.APART: "model-parallel"}
"""Generators of random numbers, as Megatron-LM calls them (`core/tensor_parallel/random.py`)."""

OPERATIONS_MAX: Final = 500_000
"""No program of one role is longer: at 0.6 kB each, what a laptop holds; 1,000 layers
with two micro-batches are 128,000."""


class Draft:
    """Collects buffers and operations; `prefix` is the path of what is being written.

    The book of each pool is kept as it goes, so that the schedule can promise its peak.
    """

    def __init__(self) -> None:
        self.buffers: dict[str, Buffer] = {}
        self.persistent: list[str] = []
        self.operations: list[Operation] = []
        self.prefix = ""
        self.alive_bytes = {POOL: 0}
        self.peak_bytes = {POOL: 0}
        self.alive: set[str] = set()
        self._views: dict[str, View] = {}

    def buffer(
        self,
        name: str,
        elements: int,
        dtype: DType,
        kind: Kind,
        *,
        home: str = COMPUTE,
        produced: bool = False,
        layout: str | None = None,
        shard: str | None = None,
    ) -> str:
        """Declare a buffer once; later declarations of the name are the same buffer."""
        if name not in self.buffers:
            self.buffers[name] = Buffer(
                name=name,
                pool=POOL,
                elements=elements,
                dtype=dtype,
                kind=kind,
                home=home,
                produced=produced,
                layout=layout,
                shard=shard,
            )
        return name

    def host_buffer(self, name: str, elements: int, dtype: DType, kind: Kind) -> str:
        """The same in the host's memory, first written by a copy out of the device."""
        if name not in self.buffers:
            self.buffers[name] = Buffer(
                name=name, pool=HOST_POOL, elements=elements, dtype=dtype, kind=kind, home=TO_HOST
            )
        return name

    def all(self, name: str) -> View:
        """Every element of the buffer called `name`."""
        view = self._views.get(name)
        if view is None:
            view = self._views[name] = View(buffer=name, size=self.buffers[name].elements)
        return view

    def add(self, operation: Operation) -> str:
        """Append an operation; its id.

        Raises:
            ModelError: there are too many; it names what makes fewer.
        """
        if len(self.operations) >= OPERATIONS_MAX:
            raise ModelError(
                f"layers: a step of more than {OPERATIONS_MAX:,} operations; fewer layers or "
                "gradient_accumulation_steps, or larger buckets, need fewer"
            )
        self.operations.append(operation)
        return operation.id

    def path(self, name: str) -> str:
        """The id of an operation called `name` here."""
        return f"{self.prefix}/{name}"

    def allocate(self, name: str) -> None:
        """Take memory for the buffer called `name`."""
        assert name not in self.alive, f"{self.prefix}: {name} is alive"
        self.alive.add(name)
        buffer = self.buffers[name]
        alive = self.alive_bytes.get(buffer.pool, 0) + buffer.size_bytes
        self.alive_bytes[buffer.pool] = alive
        self.peak_bytes[buffer.pool] = max(self.peak_bytes.get(buffer.pool, 0), alive)
        self.add(Allocate(id=f"{self.prefix}/allocate/{name}", buffer=name))

    def persist(self, name: str) -> None:
        """Take memory that lives from set-up on, through all steps."""
        self.persistent.append(name)
        self.allocate(name)

    def free(
        self,
        name: str,
        uses: Iterable[str] = (),
        *,
        verb: str = "free",
        mode: FreeMode = FreeMode.WAITED,
    ) -> None:
        """Give the memory back after `uses`, as `mode` says. `verb` tells two frees apart.

        The book of the draft returns the memory at once, whatever the mode.
        """
        self.alive.remove(name)
        buffer = self.buffers[name]
        self.alive_bytes[buffer.pool] -= buffer.size_bytes
        path = f"{self.prefix}/{verb}/{name}"
        self.add(Free(id=path, buffer=name, mode=mode, uses=tuple(uses)))

    def host_wait(self, operation: Edge, name: str = "host_wait") -> None:
        """The host stops until `operation` has finished."""
        self.add(HostWait(id=self.path(name), operation=operation))

    def side(self, prefix: str) -> "Draft":
        """A list for one side of a branch: same buffers, own operations, own copy of the book."""
        side = Draft()
        side.buffers, side.persistent, side._views = self.buffers, self.persistent, self._views
        side.prefix = prefix
        side.alive, side.alive_bytes = set(self.alive), dict(self.alive_bytes)
        side.peak_bytes = dict(self.peak_bytes)
        return side

    def join(self, side: "Draft") -> None:
        """Go on from where `side` ended."""
        self.alive, self.alive_bytes = side.alive, side.alive_bytes
        self.peak_bytes = {
            pool: max(size, self.peak_bytes.get(pool, 0)) for pool, size in side.peak_bytes.items()
        }
