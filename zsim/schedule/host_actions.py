"""A growing list of operations with the host's actions: memory, scalars, waits and branches."""

from collections.abc import Iterable

from zsim.schedule.buffer_handle import BufferHandle
from zsim.schedule.operation import (
    Allocate,
    Branch,
    Edge,
    Free,
    FreeMode,
    HostWait,
    Operation,
    ReadCounts,
    SetScalar,
    View,
)
from zsim.schedule.schedule import Buffer

Memory = View | str
"""Memory that an operation reads or writes: a view, or a whole buffer by its name."""


class HostActions:
    """A growing list of operations: setup, a step, or one list of a branch.

    `prefix` is the path of this list; `buffers` holds every buffer that its operations may name.
    """

    def __init__(self, prefix: str, buffers: dict[str, Buffer]) -> None:
        self.prefix = prefix
        self.buffers = buffers
        self.operations: list[Operation] = []
        self._allocations: dict[str, int] = {}
        self._views: dict[str, View] = {}
        self._parts: dict[tuple[str, int, int], View] = {}

    def add(self, operation: Operation) -> str:
        """Append an operation and return its id."""
        self.operations.append(operation)
        return operation.id

    def path(self, name: str) -> str:
        """Return the id of an operation named `name` in this part."""
        return f"{self.prefix}/{name}"

    def all(self, name: str) -> View:
        """Return a view of every element of the buffer named `name`."""
        view = self._views.get(name)
        if view is None:
            view = self._views[name] = View(buffer=name, size=self.buffers[name].elements)
        return view

    def part(self, name: str, size: int, start: int = 0) -> View:
        """Return a view of `size` elements of the buffer named `name`; equal calls share it."""
        key = (name, size, start)
        view = self._parts.get(key)
        if view is None:
            view = self._parts[key] = View(buffer=name, start=start, size=size)
        return view

    def view(self, memory: Memory) -> View:
        """Return `memory` if it is a view, else a view of the whole buffer with that name."""
        return self.all(memory) if isinstance(memory, str) else memory

    def allocate(self, *buffers: BufferHandle | str, micro_batch: int | None = None) -> None:
        """Allocate memory for each buffer; `micro_batch` selects the numbers of counted rows."""
        for name in map(name_of, buffers):
            path = self._memory_id("allocate", name)
            self.add(Allocate(id=path, buffer=name, micro_batch=micro_batch))

    def free(
        self,
        *buffers: BufferHandle | str,
        mode: FreeMode = FreeMode.WAITED,
        uses: Iterable[str] = (),
        verb: str = "free",
    ) -> None:
        """Free the memory of each buffer; `uses` are operations on streams other than its home.

        `verb` makes the ids differ if one place frees a buffer twice.
        """
        uses = tuple(uses)
        for name in map(name_of, buffers):
            self.add(Free(id=self._memory_id(verb, name), buffer=name, mode=mode, uses=uses))

    def _memory_id(self, verb: str, name: str) -> str:
        key = f"{verb} {name}"
        count = self._allocations[key] = self._allocations.get(key, -1) + 1
        return self.path(f"{name}/{verb}{count or ''}")

    def host_wait(self, name: str, operation: Edge) -> str:
        """Block the host until `operation` has finished."""
        return self.add(HostWait(id=self.path(name), operation=operation))

    def read_counts(
        self,
        name: str,
        operation: Edge,
        source: Memory,
        count: str,
        *,
        layer: int = 0,
        micro_batch: int = 0,
    ) -> str:
        """Block the host until `operation` has finished, and read counts of received rows."""
        return self.add(
            ReadCounts(
                id=self.path(name),
                operation=operation,
                source=self.view(source),
                count=count,
                layer=layer,
                micro_batch=micro_batch,
            )
        )

    def set_scalar(
        self,
        name: str,
        scalar: str,
        *,
        multiply: float = 1.0,
        add: float = 0.0,
        minimum: float = 0.0,
        counter: str | None = None,
        every: int = 1,
    ) -> str:
        """Change a host scalar."""
        return self.add(
            SetScalar(
                id=self.path(name),
                scalar=scalar,
                multiply=multiply,
                add=add,
                minimum=minimum,
                counter=counter,
                every=every,
            )
        )

    def branch(
        self,
        name: str,
        value: Memory,
        then: "HostActions",
        otherwise: "HostActions",
        *,
        after: Iterable[Edge],
    ) -> str:
        """Read one element; run `then` if it is not zero, else `otherwise`."""
        return self.add(
            Branch(
                id=self.path(name),
                after=tuple(after),
                value=self.view(value),
                then=tuple(then.operations),
                otherwise=tuple(otherwise.operations),
            )
        )

    def branch_on_scalar(
        self, name: str, scalar: str, then: "HostActions", otherwise: "HostActions"
    ) -> str:
        """Run `then` if a host scalar is not zero, else `otherwise`."""
        return self.add(
            Branch(
                id=self.path(name),
                scalar=scalar,
                then=tuple(then.operations),
                otherwise=tuple(otherwise.operations),
            )
        )


def name_of(buffer: BufferHandle | str) -> str:
    """Return the name of a buffer given by name or handle."""
    return buffer if isinstance(buffer, str) else buffer.name
