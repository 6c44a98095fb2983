"""Runs the programs of all classes in the order of issue of their hosts, on exact numbers.

The families of order prove that this order represents every other one, so only schedules that
passed them are run. A send ends when it is issued, other operations before the next one.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import assert_never

from zsim.proof.execution.class_memory import BufferWrite, ClassMemory
from zsim.proof.execution.collective_runner import Bring, CollectiveRunner, UnfollowedError
from zsim.proof.execution.computations import Kernels
from zsim.proof.execution.datum import Datum, read, unwritten
from zsim.proof.execution.grid import RankArray
from zsim.proof.execution.moves import Moves
from zsim.proof.execution.segment_replay import REPLAYED, SegmentReplay
from zsim.proof.execution.tensors import Index, Tensors
from zsim.schedule.access import COMPUTE_ACCESS
from zsim.schedule.issue_order import set_scalar
from zsim.schedule.operation import (
    Action,
    Allocate,
    Branch,
    CollectiveOperation,
    Communication,
    Compute,
    Copy,
    Fill,
    Free,
    HostWait,
    Operand,
    Operation,
    ReadCounts,
    Receive,
    ReducingOperation,
    Role,
    Send,
    SetScalar,
    Together,
    View,
)
from zsim.specification.residues import Numbers, number
from zsim.specification.step import Application

Host = Generator[CollectiveOperation | Receive, Datum, None]
Placed = tuple[Operand, Index]


class Interpreter:
    """Runs setup or a step from given memory.

    `overflows` selects the list of branches that test whether a gradient overflowed. `failures`
    holds faults by role and operation: operations that plain training never has.
    """

    def __init__(
        self, tensors: Tensors, collectives: CollectiveRunner, kernels: Kernels, moves: Moves
    ) -> None:
        self.tensors = tensors
        self.collectives = collectives
        self.kernels = kernels
        self.moves = moves
        self.replay = SegmentReplay(tensors, kernels.segments)
        self.classes = tensors.grid.classes
        self.memory: list[ClassMemory] = []
        self.overflows = False
        self.in_setup = True
        self.failures: dict[tuple[str, str], str] = {}
        self._mail: dict[tuple[object, ...], deque[Datum]] = defaultdict(deque)
        self._decided: list[list[tuple[Branch, Numbers]]] = []
        self._waiting: list[tuple[Host, CollectiveOperation | Receive] | None] = []
        self._placed: dict[tuple[int, int], tuple[Placed, ...]] = {}

    def run(self, memory: list[ClassMemory], *, setup: bool, overflows: bool) -> None:
        """Run setup or a step; changes the `memory` of each class.

        Raises:
            UnfollowedError: the schedule has operations that the proof cannot follow.
        """
        programs = [ranks.program for ranks in self.classes]
        lists = [program.setup if setup else program.step for program in programs]
        self.in_setup = setup
        self._run(memory, lists, overflows=overflows)

    def run_outcomes(
        self, begin: Callable[[], list[ClassMemory]], cases: Sequence[bool]
    ) -> Iterator[tuple[bool, list[ClassMemory]]]:
        """Run a step from `begin()` for each value of `overflows` in `cases`; yield both results.

        With one class, operations before the first branch run only once, since they do not depend
        on it. With several classes, they may be interleaved differently by then.

        Raises:
            UnfollowedError: the schedule has operations that the proof cannot follow.
        """
        if len(self.classes) > 1 or len(cases) == 1:
            for overflows in cases:
                memory = begin()
                self.run(memory, setup=False, overflows=overflows)
                yield overflows, memory
            return
        (ranks,) = self.classes
        step = ranks.program.step
        first = next((n for n, each in enumerate(step) if isinstance(each, Branch)), len(step))
        (common,) = begin()
        self.in_setup = False
        self._run([common], [step[:first]], overflows=False)
        if any(self._mail.values()):  # a rank that sends to itself
            step, first, common = ranks.program.step, 0, begin()[0]
        for overflows in cases:
            own = ClassMemory(dict(common.buffers), dict(common.scalars))
            self._run([own], [step[first:]], overflows=overflows)
            yield overflows, [own]

    def _run(
        self,
        memory: list[ClassMemory],
        lists: Sequence[Sequence[Operation]],
        *,
        overflows: bool,
    ) -> None:
        self.memory, self.overflows = memory, overflows
        self._mail.clear()
        self._decided = [[] for _ in self.classes]
        hosts = [
            self._host(ranks, operations)
            for ranks, operations in zip(self.classes, lists, strict=True)
        ]
        self._waiting = [None] * len(hosts)
        for index, host in enumerate(hosts):
            self._resume(index, host, None)
        while any(self._waiting):
            if not self._serve():
                blocked = next(each for each in self._waiting if each is not None)
                raise UnfollowedError(f"{blocked[1].id} waits for what is not issued")

    def _resume(self, index: int, host: Host, answer: Datum | None) -> None:
        try:
            request = next(host) if answer is None else host.send(answer)
        except StopIteration:
            self._waiting[index] = None
        else:
            self._waiting[index] = host, request

    def _serve(self) -> bool:
        """Answer requests of classes whose data is available; return True if any was answered."""
        served = False
        for index, waiting in enumerate(self._waiting):
            if waiting is None or self._waiting[index] is not waiting:
                continue
            host, request = waiting
            ranks = self.classes[index]
            if isinstance(request, Receive):
                mail = self._mail[self.tensors.grid.route(ranks, request)]
                if mail:
                    self._resume(index, host, mail.popleft())
                    served = True
                continue
            group = self.tensors.schedule.group_by_name[request.group]
            row = self.tensors.grid.row(ranks, group)
            waits = [self._waiting[other.index] for other in row]
            if any(
                each is None or isinstance(each[1], Receive) or each[1].group != request.group
                for each in waits
            ):
                continue
            answers = self._meet(
                [
                    (other, each[1], self._source(other, each[1]))
                    for other, each in zip(row, waits, strict=True)
                    if each is not None and not isinstance(each[1], Receive)
                ]
            )
            for other, each, answer in zip(row, waits, answers, strict=True):
                assert each is not None
                self._resume(other.index, each[0], answer)
            served = True
        return served

    def _meet(self, brings: Sequence[Bring]) -> list[Datum]:
        """Carry out a collective; return the result for each class."""
        answers = self.collectives.meet(brings)
        if self.collectives.unordered:
            ranks, operation, _ = brings[0]
            name = operation.source.buffer
            why = f"takes the maximum of {name}, which is no verdict and differs between ranks"
            self._failure(ranks, operation.id, why)
        return answers

    def _collective(self, ranks: RankArray, operation: CollectiveOperation) -> Host:
        """Carry out a collective, at once if no ranks of another class participate."""
        group = self.tensors.schedule.group_by_name[operation.group]
        if len(self.tensors.grid.row(ranks, group)) > 1:
            answer = yield operation
        else:
            (answer,) = self._meet([(ranks, operation, self._source(ranks, operation))])
        self.write(ranks, operation.target, answer)

    def _source(self, ranks: RankArray, operation: CollectiveOperation) -> Datum:
        """Return the data that a rank contributes; for a reduction it must have been written."""
        datum = self.read(ranks, operation.source)
        if isinstance(operation, ReducingOperation):
            self._need_written(ranks, operation.id, operation.source, datum)
        return datum

    def _need_written(self, ranks: RankArray, operation: str, view: View, datum: Datum) -> None:
        """Record a fault if an operation computes with data that was never written."""
        if datum.undefined is None or not datum.undefined.any():
            return
        if (datum.undefined & self.tensors.filled(ranks, view)).any():
            why = f"computes with {view.buffer}, of which nothing wrote a part"
            self._failure(ranks, operation, why)

    def read(self, ranks: RankArray, view: View) -> Datum:
        """Return the content of a view on all ranks of a class."""
        return self._read(ranks, view.buffer, self.tensors.index(ranks, view))

    def _read(self, ranks: RankArray, name: str, index: Index) -> Datum:
        datum = self.memory[ranks.index].buffers.get(name)
        if datum is None:
            return unwritten(len(ranks.shape), index.count)
        return datum if index.is_whole else read(datum, index)

    def write(self, ranks: RankArray, view: View, new: Datum) -> None:
        """Write a view on all ranks of a class.

        Raises:
            UnfollowedError: `new` has another number of pieces than the view.
        """
        self._write(ranks, ((view.buffer, self.tensors.index(ranks, view), new),))

    def _write(self, ranks: RankArray, writes: Iterable[BufferWrite]) -> None:
        """Write views on all ranks of a class, in order."""
        anew = partial(self._unwritten, ranks)
        self.memory[ranks.index].write(writes, anew)

    def _unwritten(self, ranks: RankArray, name: str) -> Datum:
        return unwritten(len(ranks.shape), self.tensors.held(ranks, name).width)

    def _host(self, ranks: RankArray, operations: Iterable[Operation]) -> Host:
        memory = self.memory[ranks.index]
        buffers = memory.buffers
        for operation in operations:
            if type(operation) is Allocate or type(operation) is Free:  # most of them
                buffers.pop(operation.buffer, None)
                continue
            match operation:
                case Allocate() | Free():
                    pass
                case Compute():
                    self._compute(ranks, operation, memory.scalars)
                case Copy():
                    self._copy(ranks, operation)
                case Fill():
                    self.write(
                        ranks, operation.target, self.moves.filled(ranks, operation, memory.scalars)
                    )
                case CollectiveOperation():
                    yield from self._collective(ranks, operation)
                case Send():
                    self._send(ranks, operation)
                case Receive():
                    self.write(ranks, operation.target, (yield operation))
                case Together(members=members):
                    yield from self._together(ranks, members)
                case SetScalar():
                    set_scalar(operation, memory.scalars)
                case Branch():
                    side = operation.then if self._takes(ranks, operation) else operation.otherwise
                    yield from self._host(ranks, side)
                case ReadCounts(source=source):
                    self._need_written(ranks, operation.id, source, self.read(ranks, source))
                case HostWait():
                    pass
                case Communication():
                    raise UnfollowedError(f"{operation.id}: the proof knows no {operation.name}")
                case _:
                    assert_never(operation)

    def _together(self, ranks: RankArray, members: Iterable[Operation]) -> Host:
        """Run operations that are issued as one, sends first."""
        for member in members:
            if isinstance(member, Send):
                self._send(ranks, member)
        for member in members:
            if isinstance(member, Receive):
                self.write(ranks, member.target, (yield member))
            elif isinstance(member, CollectiveOperation):
                yield from self._collective(ranks, member)

    def _compute(self, ranks: RankArray, compute: Compute, scalars: Mapping[str, float]) -> None:
        run: Application | None = None
        if self.kernels.begins_backward == (compute.unit, compute.segment):
            self._need_scaled(ranks, compute)
        if compute.action in REPLAYED and not self.kernels.rows.drops:
            run = self.kernels.plain.applications.get(
                (compute.unit, compute.segment, compute.micro_batch)
            )
            if run is not None and self._replayed(ranks, compute, run):
                return
        placed = self._places(ranks, compute)
        operands: list[Datum] = []
        for operand, index in placed:
            datum = self._read(ranks, operand.view.buffer, index)
            operands.append(datum)
            if datum.undefined is not None and COMPUTE_ACCESS[compute.action][operand.role][0]:
                self._need_written(ranks, compute.id, operand.view, datum)
        made = self.kernels.run(ranks, compute, operands, scalars, in_setup=self.in_setup)
        if run is not None and self.kernels.segments.is_plain:
            self.replay.learn(ranks, compute, run, self.memory[ranks.index].buffers)
        self._write(
            ranks,
            [
                (operand.view.buffer, index, new)
                for (operand, index), new in zip(placed, made, strict=True)
                if new is not None
            ],
        )

    def _need_scaled(self, ranks: RankArray, compute: Compute) -> None:
        """Record a fault if backward starts with a gradient without the loss scale."""
        views = [each.view for each in compute.operands if each.role is Role.OUTPUT_GRADIENT]
        if views and self.kernels.is_unscaled(self.read(ranks, views[-1])):
            why = "begins with a gradient of the loss that is not multiplied by the loss scale"
            self._failure(ranks, compute.id, why)

    def _replayed(self, ranks: RankArray, compute: Compute, run: Application) -> bool:
        """Replay a segment from another micro-batch; return True if its result matches `run`."""
        made = self.replay.run(ranks, compute, run, self.memory[ranks.index].buffers)
        if made is None:
            return False
        if compute.action is Action.BACKWARD and self.kernels.follows_overflow:
            self.kernels.measures.mark(ranks, compute, made.gradients)
        self._write(ranks, made.writes)
        return True

    def _places(self, ranks: RankArray, compute: Compute) -> tuple[Placed, ...]:
        """Return the operands with their places, cached for micro-batches that share operands."""
        key = (ranks.index, id(compute.operands))
        found = self._placed.get(key)
        if found is None:
            index = self.tensors.index
            found = tuple((each, index(ranks, each.view)) for each in compute.operands)
            self._placed[key] = found
        return found

    def _copy(self, ranks: RankArray, copy: Copy) -> None:
        name, index = copy.target.buffer, self.tensors.index(ranks, copy.target)
        source = self.read(ranks, copy.source)
        counts = copy.accumulate or copy.by_parameter
        made = self.moves.copied(
            ranks, copy, source, self._read(ranks, name, index) if counts else None
        )
        if copy.accumulate and made.undefined is not None:
            self._need_written(ranks, copy.id, copy.target, made)
        if index.is_whole and made.count == index.count:
            self.memory[ranks.index].buffers[name] = made
        else:
            self._write(ranks, ((name, index, made),))

    def _send(self, ranks: RankArray, operation: Send) -> None:
        self._mail[self.tensors.grid.route(ranks, operation)].append(
            self.read(ranks, operation.source)
        )

    def _takes(self, ranks: RankArray, branch: Branch) -> bool:
        """Return True if a class takes the list `then`."""
        if branch.value is None:
            counted = self.memory[ranks.index].scalars[branch.scalar or ""]
            self._decide(ranks, branch, number(counted, 2))
            return counted != 0
        value = self.read(ranks, branch.value)
        self._need_written(ranks, branch.id, branch.value, value)
        flat = value.values.reshape(2, -1)
        first = flat[:, :1]
        if (flat != first).any():
            self._failure(ranks, branch.id, "decides on what differs from rank to rank")
        self._decide(ranks, branch, first)
        if value.covered is not None:
            left = self.kernels.measures.uncovered(value.covered.whole)
            if left:
                self._failure(ranks, branch.id, f"an overflow of {left} does not reach it")
            return self.overflows
        if not first.any() or self.moves.is_constant(first):
            return bool(first.any())
        if self.kernels.judges:
            self._failure(ranks, branch.id, "decides on what is no verdict on all gradients")
        return self.overflows

    def _decide(self, ranks: RankArray, branch: Branch, first: Numbers) -> None:
        """Record the value on which a class decides; it must be the same for all classes."""
        place = len(self._decided[ranks.index])
        self._decided[ranks.index].append((branch, first))
        for other in self.classes[: ranks.index]:
            theirs = self._decided[other.index]
            if place < len(theirs) and (theirs[place][1] != first).any():
                name = other.program.role
                self._failure(ranks, branch.id, f"decides on another value than {name} does")

    def _failure(self, ranks: RankArray, operation: str, why: str) -> None:
        self.failures.setdefault((ranks.program.role, operation), why)
