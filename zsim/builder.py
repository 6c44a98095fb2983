"""Write a schedule by hand: names in, a checked `Schedule` out.

    build = ScheduleBuilder("sum", Mesh(axes=(Axis(name="data", size=4),)))
    data = build.group("data", "data")
    x = build.buffer("x", 8, persistent=True)
    build.setup.allocate(x)
    build.setup.fill("x", x.all, 1.0)
    total = build.step.all_reduce("sum", data, x.all)
    schedule = build.schedule()

A view is `x.all`, `x[2:6]`, or `x.own("data", 2)`: the rank's own part of two elements. Each
method returns the id of the operation, to be named in `after`. Ranks that do something else get a
role: `build.role("first", Span(axis="data", start=0, end=1))`.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from zsim.dtype import DType
from zsim.kernel import Kernel
from zsim.layout import Layout
from zsim.mesh import Axis, Box, Group, Mesh, Span
from zsim.operation import (
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
from zsim.rule import Rule
from zsim.schedule import (
    Buffer,
    Contract,
    Kind,
    Pool,
    Program,
    RankRole,
    Scalar,
    Schedule,
)

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
        """The rank's own `size` elements: they start at `start` + coordinate along `axis` x size."""
        return View(buffer=self.name, start=start, size=size, axis=axis)


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
        operands: Iterable[tuple[Role, View]],
        *,
        unit: str = "",
        micro_batch: int = 0,
        stream: str = COMPUTE,
        after: Iterable[Edge] = (),
        kernels: Iterable[Kernel] = (),
        scalars: Iterable[str] = (),
        rule: Rule | None = None,
    ) -> str:
        """Run `action` on the operands, given as pairs of role and view."""
        return self.add(
            Compute(
                id=self.path(name),
                stream=stream,
                after=tuple(after),
                action=action,
                unit=unit,
                micro_batch=micro_batch,
                operands=tuple(Operand(role=role, view=view) for role, view in operands),
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
        stream: str = COMPUTE,
        after: Iterable[Edge] = (),
    ) -> str:
        """Copy, or add, `source` / `divisor` to `target`."""
        return self.add(
            Copy(
                id=self.path(name),
                stream=stream,
                after=tuple(after),
                source=source,
                target=target,
                accumulate=accumulate,
                divisor=divisor,
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


@dataclass
class RoleBuilder:
    """One role: its ranks, buffers and operations."""

    name: str
    boxes: tuple[Box, ...]
    buffers: dict[str, Buffer] = field(default_factory=dict[str, Buffer])
    persistent: list[str] = field(default_factory=list[str])

    def __post_init__(self) -> None:
        self.dtypes: dict[str, DType] = {}
        self.setup = Part("setup", self.dtypes)
        self.step = Part("step", self.dtypes)

    def buffer(
        self,
        name: str,
        elements: int,
        *,
        dtype: DType = DType.FP32,
        kind: Kind = Kind.WORKSPACE,
        home: str = COMPUTE,
        pool: str = "device",
        persistent: bool = False,
        produced: bool = False,
        layout: str | None = None,
        shard: str | None = None,
    ) -> Named:
        """Declare a buffer; `Allocate` takes its memory."""
        made = Buffer(
            name=name,
            pool=pool,
            elements=elements,
            dtype=dtype,
            kind=kind,
            home=home,
            produced=produced,
            layout=layout,
            shard=shard,
        )
        self.buffers[name] = made
        self.dtypes[name] = dtype
        if persistent:
            self.persistent.append(name)
        return Named(made)

    def program(self) -> Program:
        """The program as it stands."""
        return Program(
            role=self.name,
            buffers=tuple(self.buffers.values()),
            persistent=tuple(self.persistent),
            setup=tuple(self.setup.operations),
            step=tuple(self.step.operations),
        )


class ScheduleBuilder(RoleBuilder):
    """A schedule in the making; itself the role of all ranks until another role is asked for."""

    def __init__(self, name: str, mesh: Mesh, *, role: str = "all") -> None:
        super().__init__(role, ((),))
        self.title = name
        self.mesh = mesh
        self.groups: list[Group] = []
        self.streams = [COMPUTE, COMMUNICATION]
        self.pools = [Pool(name="device")]
        self.layouts: list[Layout] = []
        self.scalars: list[Scalar] = []
        self._roles: list[RoleBuilder] = []

    @classmethod
    def of(cls, name: str, **axes: int) -> "ScheduleBuilder":
        """A builder over a mesh given as axis=size."""
        return cls(
            name, Mesh(axes=tuple(Axis(name=axis, size=size) for axis, size in axes.items()))
        )

    def group(self, name: str, *axes: str, where: Box = ()) -> str:
        """Declare a communicator of the ranks that differ along `axes` alone."""
        self.groups.append(Group(name=name, axes=axes, where=where))
        return name

    def layout(self, layout: Layout) -> str:
        """Declare a layout."""
        self.layouts.append(layout)
        return layout.name

    def stream(self, name: str) -> str:
        """Declare a stream beside compute and communication."""
        self.streams.append(name)
        return name

    def scalar(self, name: str, initial: float) -> str:
        """Declare a host scalar."""
        self.scalars.append(Scalar(name=name, initial=initial))
        return name

    def role(self, name: str, *spans: Span) -> RoleBuilder:
        """Ranks within `spans` play a role of their own, with their own program."""
        made = RoleBuilder(name, (tuple(spans),))
        self._roles.append(made)
        return made

    def schedule(self, contract: Contract | None = None) -> Schedule:
        """The schedule as it stands.

        Raises:
            ScheduleError: it is not well formed.
        """
        parts = self._roles or [self]
        return Schedule(
            name=self.title,
            mesh=self.mesh,
            roles=tuple(RankRole(name=part.name, boxes=part.boxes) for part in parts),
            groups=tuple(self.groups),
            streams=tuple(self.streams),
            pools=tuple(self.pools),
            layouts=tuple(self.layouts),
            scalars=tuple(self.scalars),
            programs=tuple(part.program() for part in parts),
            contract=contract or Contract(),
        )
