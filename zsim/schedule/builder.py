"""Write a schedule by hand: pass names, get a checked `Schedule`.

    build = ScheduleBuilder("sum", Mesh(axes=(Axis(name="data", size=4),)))
    data = build.group("data", "data")
    x = build.buffer("x", 8, persistent=True)
    build.setup.allocate(x)
    ones = build.step.fill("x", x.all, 1.0)
    total = build.step.all_reduce("sum", data, x.all, after=[ones])
    schedule = build.schedule()

A view is `x.all`, `x[2:6]`, or `x.own("data", 2)`: the rank's own part of two elements. Each
method returns the id of the operation, to be named in `after`. Ranks with a different program get
a role: `build.role("first", Span(axis="data", start=0, end=1))`.
"""

from dataclasses import dataclass, field

from zsim.dtype import DType
from zsim.model.experts import Drops
from zsim.schedule.buffer_handle import BufferHandle
from zsim.schedule.counts import NamedCount, RowIndex, Rows, rows_at_most
from zsim.schedule.layout import Layout
from zsim.schedule.mesh import Axis, Box, Group, Mesh, Span
from zsim.schedule.operation_list import COMMUNICATION, COMPUTE, OperationList
from zsim.schedule.schedule import (
    Buffer,
    Contract,
    Kind,
    Pool,
    Program,
    RankRole,
    Scalar,
    Schedule,
    ScheduleError,
)

__all__ = [
    "COMMUNICATION",
    "COMPUTE",
    "BufferHandle",
    "OperationList",
    "RoleBuilder",
    "ScheduleBuilder",
]


@dataclass
class RoleBuilder:
    """One role: its ranks, buffers and operations."""

    name: str
    boxes: tuple[Box, ...]
    buffers: dict[str, Buffer] = field(default_factory=dict[str, Buffer])
    persistent: list[str] = field(default_factory=list[str])

    def __post_init__(self) -> None:
        self.setup = OperationList("setup", self.buffers)
        self.step = OperationList("step", self.buffers)

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
        rows: Rows | None = None,
    ) -> BufferHandle:
        """Declare a buffer; an `Allocate` operation allocates its memory."""
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
            rows=rows,
        )
        self.buffers[name] = made
        if persistent:
            self.persistent.append(name)
        return BufferHandle(made)

    def counted(
        self,
        name: str,
        count: NamedCount,
        own: RowIndex,
        *,
        layer: int = 0,
        order: tuple[RowIndex, RowIndex] = (RowIndex.SOURCE, RowIndex.EXPERT),
        width: int = 1,
        dtype: DType = DType.FP32,
        kind: Kind = Kind.WORKSPACE,
        home: str = COMPUTE,
        pool: str = "device",
        produced: bool = False,
    ) -> BufferHandle:
        """Declare a buffer with the rows of `count` that the rank sends or receives in `layer`."""
        rows = Rows(count=count.name, layer=layer, order=order, own=own, width=width)
        return self.buffer(
            name,
            rows_at_most(count, rows),
            dtype=dtype,
            kind=kind,
            home=home,
            pool=pool,
            produced=produced,
            rows=rows,
        )

    def program(self) -> Program:
        """Return the program built so far."""
        return Program(
            role=self.name,
            buffers=tuple(self.buffers.values()),
            persistent=tuple(self.persistent),
            setup=tuple(self.setup.operations),
            step=tuple(self.step.operations),
        )


class ScheduleBuilder(RoleBuilder):
    """Builder of a schedule. It is also the role of all ranks until another role is requested."""

    def __init__(self, name: str, mesh: Mesh, *, role: str = "all") -> None:
        super().__init__(role, ((),))
        self.title = name
        self.mesh = mesh
        self.groups: list[Group] = []
        self.streams = [COMPUTE, COMMUNICATION]
        self.host_threads: list[str] = []
        self.pools = [Pool(name="device")]
        self.layouts: list[Layout] = []
        self.scalars: list[Scalar] = []
        self.counts: list[NamedCount] = []
        self._roles: list[RoleBuilder] = []

    @classmethod
    def of(cls, name: str, **axes: int) -> "ScheduleBuilder":
        """Return a builder over a mesh given as axis=size."""
        return cls(
            name, Mesh(axes=tuple(Axis(name=axis, size=size) for axis, size in axes.items()))
        )

    def group(self, name: str, *axes: str, where: Box = ()) -> str:
        """Declare a communicator of the ranks that differ only along `axes`."""
        self.groups.append(Group(name=name, axes=axes, where=where))
        return name

    def layout(self, layout: Layout) -> str:
        """Declare a layout."""
        self.layouts.append(layout)
        return layout.name

    def stream(self, name: str) -> str:
        """Declare a stream in addition to compute and communication."""
        self.streams.append(name)
        return name

    def host_thread(self, name: str) -> str:
        """Declare a stream whose operations run on the host's processors."""
        self.host_threads.append(name)
        return self.stream(name)

    def scalar(self, name: str, initial: float, *, given: bool = False) -> str:
        """Declare a host scalar."""
        self.scalars.append(Scalar(name=name, initial=initial, given=given))
        return name

    def count(
        self,
        name: str,
        group: str,
        *,
        experts: int,
        sent: int,
        maximum: int | None = None,
        drops: Drops | None = None,
    ) -> NamedCount:
        """Declare a count of the rows that members of `group` send to experts.

        Without a maximum, rows are padded to a capacity of `sent` / `experts`. `drops` are rows
        that are not sent.
        """
        made = NamedCount(
            name=name,
            group=group,
            experts=experts,
            sent=sent,
            maximum=sent if maximum is None else maximum,
            padded=maximum is None,
            drops=drops,
        )
        self.counts.append(made)
        return made

    def role(self, name: str, *spans: Span) -> RoleBuilder:
        """Return the builder of a role with its own program for the ranks within `spans`."""
        made = RoleBuilder(name, (tuple(spans),))
        self._roles.append(made)
        return made

    def schedule(
        self, contract: Contract | None = None, *, with_host_time: bool = False
    ) -> Schedule:
        """Return the schedule built so far.

        Raises:
            ScheduleError: it is not well formed, or this builder has operations although roles were
                requested.
        """
        if self._roles and (self.buffers or self.setup.operations or self.step.operations):
            raise ScheduleError(f"role {self.name}: give its buffers and operations to the others")
        parts = self._roles or [self]
        return Schedule(
            name=self.title,
            mesh=self.mesh,
            roles=tuple(RankRole(name=part.name, boxes=part.boxes) for part in parts),
            groups=tuple(self.groups),
            streams=tuple(self.streams),
            host_threads=tuple(self.host_threads),
            pools=tuple(self.pools),
            layouts=tuple(self.layouts),
            scalars=tuple(self.scalars),
            counts=tuple(self.counts),
            programs=tuple(part.program() for part in parts),
            contract=contract or Contract(),
            with_host_time=with_host_time,
        )
