"""A growing list of operations, with one method per operation.

Every operation of every schedule is created here. `build.step` and `build.setup` of a schedule
that is written by hand are each an `OperationList`, and so is the writer of the scheduler and of
all runtimes.
"""

from collections.abc import Iterable
from typing import cast

from zsim.model.generator import Draw
from zsim.model.kernel import Kernel
from zsim.schedule.host_actions import HostActions, Memory
from zsim.schedule.operation import (
    Action,
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Communication,
    Compute,
    Copy,
    Edge,
    Fill,
    Operand,
    Read,
    Receive,
    ReduceScatter,
    Reduction,
    Role,
    Send,
    Together,
    View,
    Write,
)
from zsim.strategy.optimizer_rule import Rule

COMPUTE = "compute"
COMMUNICATION = "communication"


_OPERAND = {Operand}


def _operands(given: Iterable[tuple[Role, View] | Operand]) -> tuple[Operand, ...]:
    """Return operands; keep a tuple of operands, by whose identity proofs recognise repetition."""
    if isinstance(given, tuple) and {*map(type, given)} <= _OPERAND:
        return cast("tuple[Operand, ...]", given)
    return tuple(
        each if isinstance(each, Operand) else Operand(role=each[0], view=each[1]) for each in given
    )


class OperationList(HostActions):
    """A growing list of operations: setup, a step, or one list of a branch."""

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
        draw: Draw | None = None,
    ) -> str:
        """Run `action` on operands, given as (role, view) or `Operand`; return the id."""
        return self.add(
            Compute(
                id=self.path(name),
                stream=stream,
                after=tuple(after),
                action=action,
                unit=unit,
                segment=segment,
                micro_batch=micro_batch,
                operands=_operands(operands),
                kernels=tuple(kernels),
                scalars=tuple(scalars),
                rule=rule,
                draw=draw,
            )
        )

    def all_gather(
        self,
        name: str,
        group: str,
        source: Memory,
        target: Memory,
        *,
        in_parts: bool = False,
        beside: bool = False,
        stream: str = COMMUNICATION,
        after: Iterable[Edge] = (),
    ) -> str:
        """Gather `source` of all ranks into `target`."""
        source = self.view(source)
        return self.add(
            AllGather(
                id=self.path(name),
                stream=stream,
                after=tuple(after),
                group=group,
                source=source,
                target=self.view(target),
                in_parts=in_parts,
                beside=beside,
                wire=self.buffers[source.buffer].dtype,
            )
        )

    def reduce_scatter(
        self,
        name: str,
        group: str,
        source: Memory,
        target: Memory,
        *,
        reduction: Reduction = Reduction.SUM,
        in_parts: bool = False,
        beside: bool = False,
        stream: str = COMMUNICATION,
        after: Iterable[Edge] = (),
    ) -> str:
        """Reduce `source` over ranks; each rank keeps its own part in `target`."""
        source = self.view(source)
        wire = self.buffers[source.buffer].dtype
        return self.add(
            ReduceScatter(
                id=self.path(name),
                stream=stream,
                after=tuple(after),
                group=group,
                source=source,
                target=self.view(target),
                in_parts=in_parts,
                beside=beside,
                reduction=reduction,
                wire=wire,
                accumulate=wire,
            )
        )

    def all_reduce(
        self,
        name: str,
        group: str,
        source: Memory,
        target: Memory | None = None,
        *,
        reduction: Reduction = Reduction.SUM,
        beside: bool = False,
        stream: str = COMMUNICATION,
        after: Iterable[Edge] = (),
    ) -> str:
        """Reduce `source` over ranks into `target`, in place without a target."""
        source = self.view(source)
        wire = self.buffers[source.buffer].dtype
        return self.add(
            AllReduce(
                id=self.path(name),
                stream=stream,
                after=tuple(after),
                group=group,
                source=source,
                target=source if target is None else self.view(target),
                beside=beside,
                reduction=reduction,
                wire=wire,
                accumulate=wire,
            )
        )

    def broadcast(
        self,
        name: str,
        group: str,
        source: Memory,
        target: Memory | None = None,
        *,
        root: int = 0,
        stream: str = COMMUNICATION,
        after: Iterable[Edge] = (),
    ) -> str:
        """Copy `source` of the group's member `root` to `target` of all members."""
        source = self.view(source)
        return self.add(
            Broadcast(
                id=self.path(name),
                stream=stream,
                after=tuple(after),
                group=group,
                source=source,
                target=source if target is None else self.view(target),
                root=root,
                wire=self.buffers[source.buffer].dtype,
            )
        )

    def all_to_all(
        self,
        name: str,
        group: str,
        source: Memory,
        target: Memory,
        *,
        stream: str = COMMUNICATION,
        after: Iterable[Edge] = (),
    ) -> str:
        """Send block i of `source` to member i; `target` receives a block from each member."""
        source = self.view(source)
        return self.add(
            AllToAll(
                id=self.path(name),
                stream=stream,
                after=tuple(after),
                group=group,
                source=source,
                target=self.view(target),
                wire=self.buffers[source.buffer].dtype,
            )
        )

    def send(
        self,
        name: str,
        group: str,
        source: Memory,
        offset: int,
        *,
        stream: str = COMMUNICATION,
        after: Iterable[Edge] = (),
    ) -> str:
        """Send `source` to the member `offset` places further in the group."""
        source = self.view(source)
        return self.add(
            Send(
                id=self.path(name),
                stream=stream,
                after=tuple(after),
                group=group,
                offset=offset,
                source=source,
                wire=self.buffers[source.buffer].dtype,
            )
        )

    def receive(
        self,
        name: str,
        group: str,
        target: Memory,
        offset: int,
        *,
        stream: str = COMMUNICATION,
        after: Iterable[Edge] = (),
    ) -> str:
        """Receive `target` from the member `offset` places further in the group."""
        target = self.view(target)
        return self.add(
            Receive(
                id=self.path(name),
                stream=stream,
                after=tuple(after),
                group=group,
                offset=offset,
                target=target,
                wire=self.buffers[target.buffer].dtype,
            )
        )

    def together(self, name: str, count: int, *, after: Iterable[Edge] = ()) -> str:
        """Replace the last `count` operations, all communication, by one `Together`.

        Raises:
            TypeError: one of them is not communication.
        """
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
        target: Memory,
        value: float,
        *,
        scalar: str | None = None,
        stream: str = COMPUTE,
        after: Iterable[Edge] = (),
    ) -> str:
        """Write `value` into `target`, times the host scalar `scalar` if given."""
        return self.add(
            Fill(
                id=self.path(name),
                stream=stream,
                after=tuple(after),
                target=self.view(target),
                value=value,
                scalar=scalar,
            )
        )

    def copy(
        self,
        name: str,
        source: Memory,
        target: Memory,
        *,
        accumulate: bool = False,
        divisor: int = 1,
        by_parameter: bool = False,
        launches: int = 1,
        stream: str = COMPUTE,
        after: Iterable[Edge] = (),
    ) -> str:
        """Copy, or add, `source` / `divisor` to `target`; by parameter if their layouts differ."""
        return self.add(
            Copy(
                id=self.path(name),
                stream=stream,
                after=tuple(after),
                source=self.view(source),
                target=self.view(target),
                accumulate=accumulate,
                divisor=divisor,
                by_parameter=by_parameter,
                launches=launches,
            )
        )

    def read(
        self, name: str, source: Memory, target: Memory, *, stream: str, after: Iterable[Edge] = ()
    ) -> str:
        """Read `source`, in a file, into `target` in memory; `stream` is an I/O handle."""
        source, target = self.view(source), self.view(target)
        path = self.path(name)
        return self.add(
            Read(id=path, stream=stream, after=tuple(after), source=source, target=target)
        )

    def write_file(
        self, name: str, source: Memory, target: Memory, *, stream: str, after: Iterable[Edge] = ()
    ) -> str:
        """Write `source`, in memory, to `target` in a file; `stream` is an I/O handle."""
        source, target = self.view(source), self.view(target)
        path = self.path(name)
        return self.add(
            Write(id=path, stream=stream, after=tuple(after), source=source, target=target)
        )

    def side(self, name: str) -> "OperationList":
        """Return an empty list for the list `name` of a branch."""
        return OperationList(self.path(name), self.buffers)
