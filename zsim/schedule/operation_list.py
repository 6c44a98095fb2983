"""A list of operations that grows, one method per operation; and buffers to take views of.

This is the part of `zsim.schedule.builder` that a person calls most: `build.step` and `build.setup`
are each a `Part`.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from zsim.dtype import DType
from zsim.model.kernel import Kernel
from zsim.schedule.operation import (
    Action,
    AllGather,
    Allocate,
    AllReduce,
    Branch,
    Broadcast,
    Communication,
    Compute,
    Copy,
    Edge,
    Fill,
    Free,
    FreeMode,
    HostWait,
    Operand,
    Operation,
    Receive,
    ReduceScatter,
    Reduction,
    Role,
    Send,
    SetScalar,
    Together,
    View,
)
from zsim.schedule.schedule import Buffer
from zsim.strategy.optimizer_rule import Rule

COMPUTE = "compute"
COMMUNICATION = "communication"


@dataclass(frozen=True, slots=True)
class Named:
    """A buffer as the builder hands it out: something to take views of."""

    buffer: Buffer

    @property
    def name(self) -> str:
        """Name of the buffer."""
        return self.buffer.name

    @property
    def all(self) -> View:
        """Every element."""
        return View(buffer=self.name, size=self.buffer.elements)

    def __getitem__(self, part: slice) -> View:
        """Elements `start:end`, as of a list."""
        start, end, _ = part.indices(self.buffer.elements)
        return View(buffer=self.name, start=start, size=max(0, end - start))

    def own(self, axis: str, size: int, start: int = 0) -> View:
        """The rank's own `size` elements, from `start` + its coordinate along `axis` x size on."""
        return View(buffer=self.name, start=start, size=size, axis=axis)

    def window(self, layout: str, size: int, start: int = 0, *, origin: int | None = None) -> View:
        """What the rank's segment of `layout` has of `size` elements from `start` on.

        The buffer holds the segment or, with `origin`, the window, from its element `origin` on.
        """
        return View(buffer=self.name, start=start, size=size, layout=layout, origin=origin)


def _operand(given: tuple[Role, View] | Operand) -> Operand:
    return given if isinstance(given, Operand) else Operand(role=given[0], view=given[1])


class Part:
    """A list of operations that grows: setup, a step, or one side of a branch."""

    def __init__(self, prefix: str, dtypes: dict[str, DType]) -> None:
        self.prefix = prefix
        self.operations: list[Operation] = []
        self._dtypes = dtypes
        self._allocations: dict[str, int] = {}

    def add(self, operation: Operation) -> str:
        """Append an operation that was made elsewhere."""
        self.operations.append(operation)
        return operation.id

    def path(self, name: str) -> str:
        """The id of an operation called `name` in this part."""
        return f"{self.prefix}/{name}"

    def allocate(self, *buffers: Named) -> None:
        """Take memory for each buffer."""
        for buffer in buffers:
            self.add(Allocate(id=self._count("allocate", buffer), buffer=buffer.name))

    def free(
        self, *buffers: Named, mode: FreeMode = FreeMode.WAITED, uses: Iterable[str] = ()
    ) -> None:
        """Give the memory of each buffer back; `uses` ran on streams other than its home."""
        for buffer in buffers:
            name = self._count("free", buffer)
            self.add(Free(id=name, buffer=buffer.name, mode=mode, uses=tuple(uses)))

    def _count(self, verb: str, buffer: Named) -> str:
        key = f"{verb} {buffer.name}"
        count = self._allocations[key] = self._allocations.get(key, -1) + 1
        return self.path(f"{buffer.name}/{verb}{count or ''}")

    def compute(
        self,
        name: str,
        action: Action,
        operands: Iterable[tuple[Role, View] | Operand],
        *,
        unit: str = "",
        segment: int = 0,
        micro_batch: int = 0,
        stream: str = COMPUTE,
        after: Iterable[Edge] = (),
        kernels: Iterable[Kernel] = (),
        scalars: Iterable[str] = (),
        rule: Rule | None = None,
    ) -> str:
        """Run `action` on the operands: pairs of role and view, or `Operand` to say more."""
        return self.add(
            Compute(
                id=self.path(name),
                stream=stream,
                after=tuple(after),
                action=action,
                unit=unit,
                segment=segment,
                micro_batch=micro_batch,
                operands=tuple(map(_operand, operands)),
                kernels=tuple(kernels),
                scalars=tuple(scalars),
                rule=rule,
            )
        )

    def all_gather(
        self,
        name: str,
        group: str,
        source: View,
        target: View,
        *,
        stream: str = COMMUNICATION,
        after: Iterable[Edge] = (),
    ) -> str:
        """Gather `source` of all ranks into `target`."""
        return self.add(
            AllGather(
                id=self.path(name),
                stream=stream,
                after=tuple(after),
                group=group,
                source=source,
                target=target,
                wire=self._dtypes[source.buffer],
            )
        )

    def reduce_scatter(
        self,
        name: str,
        group: str,
        source: View,
        target: View,
        *,
        reduction: Reduction = Reduction.SUM,
        stream: str = COMMUNICATION,
        after: Iterable[Edge] = (),
    ) -> str:
        """Reduce `source` over ranks, keep the own part in `target`."""
        wire = self._dtypes[source.buffer]
        return self.add(
            ReduceScatter(
                id=self.path(name),
                stream=stream,
                after=tuple(after),
                group=group,
                source=source,
                target=target,
                reduction=reduction,
                wire=wire,
                accumulate=wire,
            )
        )

    def all_reduce(
        self,
        name: str,
        group: str,
        source: View,
        target: View | None = None,
        *,
        reduction: Reduction = Reduction.SUM,
        stream: str = COMMUNICATION,
        after: Iterable[Edge] = (),
    ) -> str:
        """Reduce `source` over ranks into `target`, in place where none is given."""
        wire = self._dtypes[source.buffer]
        return self.add(
            AllReduce(
                id=self.path(name),
                stream=stream,
                after=tuple(after),
                group=group,
                source=source,
                target=source if target is None else target,
                reduction=reduction,
                wire=wire,
                accumulate=wire,
            )
        )

    def broadcast(
        self,
        name: str,
        group: str,
        source: View,
        target: View | None = None,
        *,
        root: int = 0,
        stream: str = COMMUNICATION,
        after: Iterable[Edge] = (),
    ) -> str:
        """Copy `source` of the group's member `root` to `target` of all."""
        return self.add(
            Broadcast(
                id=self.path(name),
                stream=stream,
                after=tuple(after),
                group=group,
                source=source,
                target=source if target is None else target,
                root=root,
                wire=self._dtypes[source.buffer],
            )
        )

    def send(
        self,
        name: str,
        group: str,
        source: View,
        offset: int,
        *,
        stream: str = COMMUNICATION,
        after: Iterable[Edge] = (),
    ) -> str:
        """Send `source` to the member `offset` places on."""
        return self.add(
            Send(
                id=self.path(name),
                stream=stream,
                after=tuple(after),
                group=group,
                offset=offset,
                source=source,
                wire=self._dtypes[source.buffer],
            )
        )

    def receive(
        self,
        name: str,
        group: str,
        target: View,
        offset: int,
        *,
        stream: str = COMMUNICATION,
        after: Iterable[Edge] = (),
    ) -> str:
        """Receive `target` from the member `offset` places on."""
        return self.add(
            Receive(
                id=self.path(name),
                stream=stream,
                after=tuple(after),
                group=group,
                offset=offset,
                target=target,
                wire=self._dtypes[target.buffer],
            )
        )

    def together(self, name: str, count: int, *, after: Iterable[Edge] = ()) -> str:
        """Issue the last `count` operations, all communication, as one."""
        members: list[Communication] = []
        for operation in self.operations[-count:]:
            if not isinstance(operation, Communication):
                raise TypeError(f"{operation.id}: only communication can be issued together")
            members.append(operation)
        del self.operations[-count:]
        return self.add(
            Together(
                id=self.path(name),
                stream=members[0].stream,
                after=tuple(after),
                members=tuple(members),
            )
        )

    def fill(
        self,
        name: str,
        target: View,
        value: float,
        *,
        scalar: str | None = None,
        stream: str = COMPUTE,
        after: Iterable[Edge] = (),
    ) -> str:
        """Write `value` into `target`."""
        return self.add(
            Fill(
                id=self.path(name),
                stream=stream,
                after=tuple(after),
                target=target,
                value=value,
                scalar=scalar,
            )
        )

    def copy(
        self,
        name: str,
        source: View,
        target: View,
        *,
        accumulate: bool = False,
        divisor: int = 1,
        by_parameter: bool = False,
        stream: str = COMPUTE,
        after: Iterable[Edge] = (),
    ) -> str:
        """Copy, or add, `source` / `divisor` to `target`; by parameter if their layouts differ."""
        return self.add(
            Copy(
                id=self.path(name),
                stream=stream,
                after=tuple(after),
                source=source,
                target=target,
                accumulate=accumulate,
                divisor=divisor,
                by_parameter=by_parameter,
            )
        )

    def host_wait(self, name: str, operation: Edge) -> str:
        """Stop the host until `operation` has finished."""
        return self.add(HostWait(id=self.path(name), operation=operation))

    def set_scalar(self, name: str, scalar: str, *, multiply: float = 1.0, add: float = 0.0) -> str:
        """Change a host scalar."""
        return self.add(SetScalar(id=self.path(name), scalar=scalar, multiply=multiply, add=add))

    def branch(
        self, name: str, value: View, then: "Part", otherwise: "Part", *, after: Iterable[Edge]
    ) -> str:
        """Read one element; run `then` if it is not zero, else `otherwise`."""
        return self.add(
            Branch(
                id=self.path(name),
                after=tuple(after),
                value=value,
                then=tuple(then.operations),
                otherwise=tuple(otherwise.operations),
            )
        )

    def side(self, name: str) -> "Part":
        """An empty list for one side of a branch called `name`."""
        return Part(self.path(name), self._dtypes)
