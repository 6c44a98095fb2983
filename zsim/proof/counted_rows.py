"""Counts: buffers with counted rows have the rows of the micro-batch for which they are used.

Proved for every role, in the order of issue: the host has read the counts of a layer and
micro-batch before it allocates rows that other ranks send; an exchange, a copy and a segment use
rows of one micro-batch, their own; a copy has equal rows on both sides. The numbers that the host
reads were made by the forward of one segment for that micro-batch, another segment for each layer,
and exchanged once over the group, or over one that has its ranks, or the segment has read the maps
of all of these ranks, which is a matter of values. Routing is saved: no
recomputation chooses again, since other experts of a token than in forward could not be seen in
values, unless the contract says `repeats_routing`. No operation on counted rows is
conditional, so ranks without rows run all of them. Members
send each other blocks of one name (validated), so their sizes agree under every binding. Blocks
with numbers agree between members: block j of member i is as large as member j receives from i.

Assumed: without a model, that segment counts the rows that it sends, and numbers that a segment
does not make (a fill) are not traced. Numbers that nothing wrote are a finding of `values`.

Cost: linear in the operations; for numbers, the square of the roles of a group times its members.
"""

from collections.abc import Container, Iterator, Mapping
from itertools import count
from typing import NamedTuple

from zsim.model.model import Model
from zsim.network.volume import communications as communications_in
from zsim.proof.context import Context, NumberedProgram
from zsim.proof.execution.rank_class import EqualCommunicators, communicators, rank_classes
from zsim.proof.finding import Finding
from zsim.schedule.access import COMPUTE_ACCESS, accesses, viewed
from zsim.schedule.counts import RowIndex, Rows
from zsim.schedule.operation import (
    Action,
    AllGather,
    Allocate,
    AllToAll,
    Branch,
    Compute,
    Copy,
    Free,
    Operation,
    ReadCounts,
    Role,
    Together,
    walk,
)
from zsim.schedule.program import Program
from zsim.schedule.schedule import Schedule

INVARIANT = "counts"

Routes = Mapping[tuple[str, int], int]
"""Segments that choose the experts of rows, with the number of the output that counts the rows."""


def examine(context: Context) -> list[Finding]:
    """Find operations that use rows of another micro-batch, or blocks of different sizes."""
    found: list[Finding] = []
    schedule = context.schedule
    routes = {} if context.model is None else _routes(context.model)
    gathering = None if context.model is None else _gathering(context.model)
    if schedule.counts or routes:
        for each in context.programs:
            rows = _Rows(each.program, schedule, routes, gathering)
            found += rows.findings()
            found += () if schedule.contract.repeats_routing else rows.recomputed()
    uneven = {
        (each.program.role, group): exchanges
        for each in context.programs
        for group, exchanges in _uneven(each).items()
    }
    if uneven:
        among = rank_classes(schedule)
        for group in schedule.groups:
            if any(name == group.name for _, name in uneven):
                for communicator in communicators(schedule.mesh, group, among):
                    found += _unequal_blocks(communicator, uneven)
    return found


def _routes(model: Model) -> Routes:
    """Return the segments that choose the experts of rows, and the output that counts these."""
    found: dict[tuple[str, int], int] = {}
    for unit in model.units:
        for place, segment in enumerate(unit.segments):
            if segment.routes:
                names = [value.name for value in segment.outputs]
                found[unit.name, place] = names.index(segment.routes)
    return found


def _gathering(model: Model) -> frozenset[tuple[str, int]]:
    """Return the segments that read the tokens, and so the map, of all ranks."""
    return frozenset(
        (unit.name, place)
        for unit in model.units
        for place, segment in enumerate(unit.segments)
        if segment.reads_all
    )


class _SegmentNumbers(NamedTuple):
    """Numbers that a segment made, its output, and the groups that exchanged them since.

    It may have made them of what was gathered over groups.
    """

    by: Compute
    output: int
    exchanged: tuple[str, ...]
    gathered: tuple[str, ...]


class _Rows:
    """Rows and counts alive in one program."""

    def __init__(
        self,
        program: Program,
        schedule: Schedule,
        routes: Routes,
        gathering: Container[tuple[str, int]] | None,
    ) -> None:
        self._program = program
        self._gathering = gathering
        self._routes = routes
        counts = schedule.counts
        self._groups = {count.name: count.group for count in counts}
        # ranks with parts of the same experts read the counts of all of them
        self._counting = {
            name: {
                each.name
                for each in schedule.groups
                if set(each.axes) >= set(schedule.group_by_name[name].axes)
            }
            for name in self._groups.values()
        }
        self._padded = {count.name for count in counts if count.padded}
        self._rows = {
            buffer.name: buffer.rows for buffer in program.buffers if buffer.rows is not None
        }
        self._alive: dict[str, int | None] = {}
        self._read: set[tuple[str, int, int]] = set()
        self._made: dict[str, _SegmentNumbers] = {}
        self._whole: dict[str, str] = {}
        self._routers: dict[tuple[str, int], tuple[str, int]] = {}

    def findings(self) -> Iterator[Finding]:
        """Yield the findings of setup and of a step."""
        for part in (self._program.setup, self._program.step):
            self._alive.clear()
            self._read.clear()
            self._made.clear()
            self._whole.clear()
            for operation in walk(part):
                for why in self._faults(operation):
                    yield self._finding(operation, why)

    def recomputed(self) -> Iterator[Finding]:
        """Yield recomputations that choose experts again; `findings` comes first."""
        routers = {*self._routes, *self._routers.values()}
        for operation in walk(self._program.step) if routers else ():
            if not isinstance(operation, Compute) or operation.action is not Action.RECOMPUTE:
                continue
            if (operation.unit, operation.segment) in routers:
                why = f"recomputes the routing of {operation.unit}: routing is saved"
                yield self._finding(operation, f"{why}, never recomputed")

    def _finding(self, operation: Operation, why: str) -> Finding:
        return Finding(
            invariant=INVARIANT, role=self._program.role, operation=operation.id, why=why
        )

    def _faults(self, operation: Operation) -> Iterator[str]:
        if isinstance(operation, ReadCounts):
            self._read.add((operation.count, operation.layer, operation.micro_batch))
            made = self._made.get(operation.source.buffer)
            if made is not None:
                yield from self._stale(operation, made)
            elif self._routes:
                yield "reads numbers that no router has made"
        elif isinstance(operation, Allocate):
            rows = self._rows.get(operation.buffer)
            if rows is not None:
                yield from self._allocated(operation, rows)
                self._alive[operation.buffer] = operation.micro_batch
        elif isinstance(operation, Free):
            self._alive.pop(operation.buffer, None)
            self._made.pop(operation.buffer, None)
            self._whole.pop(operation.buffer, None)
        elif isinstance(operation, Branch):
            yield from self._conditional(operation)
        elif isinstance(operation, Together):
            for member in operation.members:
                yield from self._faults(member)
        else:
            yield from self._used(operation)
            self._follow(operation)

    def _conditional(self, branch: Branch) -> Iterator[str]:
        """Yield the operations on counted rows that only run under a condition.

        A rank without rows takes part in all exchanges; its members would wait for it.
        """
        for side in (branch.then, branch.otherwise):
            for each in walk(side):
                rows = isinstance(each, ReadCounts) or any(
                    view.buffer in self._rows for view in viewed(each)
                )
                if rows or (isinstance(each, Allocate | Free) and each.buffer in self._rows):
                    yield f"runs {each.id} under a condition: ranks without rows must run it, too"
                    return

    def _stale(self, read: ReadCounts, made: "_SegmentNumbers") -> Iterator[str]:
        """Yield faults of counts that the host reads, which a segment has made."""
        compute = made.by
        of = f"{compute.unit or 'no unit'} in {compute.id}"
        if compute.micro_batch != read.micro_batch:
            yield f"reads counts of micro-batch {compute.micro_batch}, which {of} made"
        if compute.action is not Action.FORWARD:
            yield f"reads counts of a {compute.action}: routing is saved, {of} chooses again"
        if self._routes and made.output != self._routes.get((compute.unit, compute.segment)):
            yield f"reads numbers that {of} made, which are not the rows that it sends"
        group = self._groups[read.count]
        among = self._counting[group]
        once = len(made.exchanged) == 1 and made.exchanged[0] in among
        if not (once or (not made.exchanged and among.intersection(made.gathered))):
            times = " and ".join(made.exchanged) or "no group"
            yield f"reads counts exchanged over {times}, needed is {group}, once"
        router = (compute.unit, compute.segment)
        layer = (read.count, read.layer)
        for other, known in self._routers.items():
            if (known == router) is not (other == layer) and other[0] == read.count:
                yield f"reads counts that {of} made, layer {other[1]} has those of {known[0]}"
                return
        self._routers[layer] = router

    def _follow(self, operation: Operation) -> None:
        """Follow numbers that segments make through whole copies and exchanges."""
        if isinstance(operation, Compute):
            outputs, over = count(), self._read_from(operation)
            for operand in operation.operands:
                if operand.role is Role.OUTPUT:
                    numbers = _SegmentNumbers(operation, next(outputs), (), over)
                    self._made[operand.view.buffer] = numbers
                elif COMPUTE_ACCESS[operation.action][operand.role][1]:
                    self._made.pop(operand.view.buffer, None)
            return
        for access in accesses(operation):
            if access.writes:
                self._made.pop(access.view.buffer, None)
                self._whole.pop(access.view.buffer, None)
        if isinstance(operation, AllGather):
            self._whole[operation.target.buffer] = operation.group
        if isinstance(operation, Copy | AllToAll | AllGather):
            made = self._made.get(operation.source.buffer)
            views = (operation.source, operation.target)
            is_whole = all(
                view.size == self._program.by_name[view.buffer].elements for view in views
            )
            if (
                made is None
                or not is_whole
                or (isinstance(operation, Copy) and _changes(operation))
            ):
                return
            if isinstance(operation, AllToAll | AllGather):
                made = made._replace(exchanged=(*made.exchanged, operation.group))
            self._made[operation.target.buffer] = made

    def _read_from(self, compute: Compute) -> tuple[str, ...]:
        """Return groups over which inputs of a segment were gathered."""
        if self._gathering is not None:  # that they were is a matter of values
            reads_all = (compute.unit, compute.segment) in self._gathering
            return tuple(self._groups.values()) if reads_all else ()
        read = (each.view.buffer for each in compute.operands if each.role is Role.INPUT)
        return tuple(self._whole[name] for name in read if name in self._whole)

    def _allocated(self, allocate: Allocate, rows: Rows) -> Iterator[str]:
        if allocate.micro_batch is None:
            yield f"allocates rows of {rows.count} for no micro-batch"
        elif (
            rows.own is RowIndex.EXPERT
            and rows.count not in self._padded
            and (rows.count, rows.layer, allocate.micro_batch) not in self._read
        ):
            of = f"layer {rows.layer}, micro-batch {allocate.micro_batch}"
            yield f"allocates received rows before the host has read {rows.count} of {of}"

    def _used(self, operation: Operation) -> Iterator[str]:
        names = dict.fromkeys(view.buffer for view in viewed(operation))
        counted = [name for name in names if name in self._rows]
        batches = {name: self._alive[name] for name in counted if name in self._alive}
        if isinstance(operation, Compute) and operation.unit:
            for name, batch in batches.items():
                if batch != operation.micro_batch:
                    of = f"micro-batch {operation.micro_batch}"
                    yield f"of {of}, uses {name}, which has rows of micro-batch {batch}"
        elif len(set(batches.values())) > 1:
            said = " and ".join(f"{name} of micro-batch {batches[name]}" for name in batches)
            yield f"uses rows of several micro-batches: {said}"
        if isinstance(operation, Copy):
            one, other = (self._rows.get(view.buffer) for view in viewed(operation))
            if _said(one) != _said(other):
                yield f"copies {_text(one)} to {_text(other)}"


def _changes(copy: Copy) -> bool:
    """Return True if the target of a copy has other numbers than the source."""
    return copy.accumulate or copy.divisor != 1


def _said(rows: Rows | None) -> tuple[object, ...]:
    """Return a key that is equal for buffers whose numbers of rows are equal on every rank."""
    if rows is None:
        return ()
    order = () if rows.own is RowIndex.SOURCE else rows.order
    return rows.count, rows.layer, rows.own, rows.width, rows.parts, order


def _text(rows: Rows | None) -> str:
    if rows is None:
        return "elements without counts"
    return f"rows of {rows.count} by own {rows.own} of layer {rows.layer}"


def _uneven(each: NumberedProgram) -> dict[str, list[AllToAll]]:
    """Return the exchanges with unequal blocks of numbers, by group, in order of issue."""
    found: dict[str, list[AllToAll]] = {}
    for _, part in each.parts:
        for number in part.communications:
            for member in communications_in(part.operations[number]):
                if isinstance(member, AllToAll) and member.sent:
                    found.setdefault(member.group, []).append(member)
    return found


def _unequal_blocks(
    communicator: EqualCommunicators, uneven: dict[tuple[str, str], list[AllToAll]]
) -> Iterator[Finding]:
    """Find blocks that members of two roles send and receive with different sizes."""
    name = communicator.group.name
    for source in communicator.roles:
        for target in communicator.roles:
            sends, receives = uneven.get((source, name), []), uneven.get((target, name), [])
            senders, receivers = (
                [place for low, high in communicator.intervals(role) for place in range(low, high)]
                for role in (source, target)
            )
            for one, other in zip(sends, receives, strict=False):
                sent = {one.sent[place] for place in receivers}
                received = {other.received[place] for place in senders}
                if len(sent | received) > 1:
                    yield Finding(
                        invariant=INVARIANT,
                        role=source if source == target else f"{source} and {target}",
                        operation=one.id,
                        why="members send blocks of other sizes than members receive",
                        witness=(
                            f"{source} sends blocks of {sorted(sent)[:4]} elements to {target}",
                            f"{target} receives blocks of {sorted(received)[:4]} elements",
                        ),
                    )
