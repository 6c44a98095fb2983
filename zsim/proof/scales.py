"""Scales: 8-bit floats are scaled by the largest magnitudes of the weights that are cast to them.

Exact numbers are not scaled, so the proof of values does not check how scales are made.

Proved for every role, and for every weight that a step casts to 8 bits: its largest magnitude is
measured in setup and in the step, after all writes to the weight there; it is reduced to the
maximum over all ranks that have other elements of the weight; and the cast comes after that. For
tokens that are cast before they are gathered over the tensor axis, the same is proved on the
stream of the cast.

Assumed: a cast reads the latest measurement, which no operand states. Nothing is proved of scales
that each rank computes from local elements: scales of blocks, rows and earlier steps, and of whole
weights in Transformer Engine.

Cost: linear in the number of operations if any casts to 8 bits, else none.
"""

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass

from zsim.dtype import DType
from zsim.proof.context import Context, NumberedProgram
from zsim.proof.finding import Finding
from zsim.schedule.happens_before import BranchPath, Timeline
from zsim.schedule.layout import Layout, Piece
from zsim.schedule.operation import (
    Action,
    AllReduce,
    Compute,
    Copy,
    Operation,
    Reduction,
    Role,
    View,
)
from zsim.schedule.program_index import FREE, HOST, READ, Numbered
from zsim.schedule.schedule import Kind, Schedule

INVARIANT = "scales"
TENSOR = "tensor"


@dataclass(frozen=True, slots=True)
class Weight:
    """A weight that is cast: the buffer of a rank's shard, its layout, and its piece there."""

    buffer: str
    layout: Layout
    piece: Piece


def examine(context: Context) -> list[Finding]:
    """Find the first fault in the scale of each weight that is cast."""
    strategy = context.schedule.contract.strategy
    if strategy is not None and not strategy.execution.shares_scales:
        return []
    return [
        finding
        for each in context.programs
        if not each.crowded
        for finding in _Scales(context.schedule, each).examine()
    ]


class _Scales:
    """Checks the scales of one program."""

    def __init__(self, schedule: Schedule, each: NumberedProgram) -> None:
        self.schedule = schedule
        self.each = each
        sizes = {axis.name: axis.size for axis in schedule.mesh.axes}
        self.several = {name for name, size in sizes.items() if size > 1}

    def examine(self) -> Iterator[Finding]:
        """Check all weights that are cast, and their casts."""
        yield from self._tokens()
        ready: dict[str, int] = {}
        refuted: set[str] = set()
        for copy, weights in list(self._casts()):
            for weight in weights:
                name = weight.piece.parameter
                if name not in ready and name not in refuted:
                    where, why = self._measured(weight, ready)
                    if why:
                        refuted.add(name)
                        yield self._finding(f"{where}/{name}", why)
            last = max((ready.get(each.piece.parameter, -1) for each in weights), default=-1)
            if last >= 0 and not _waits(self.each.settled_order, copy.id, last):
                made = self.each.step.operations[last].id
                yield self._finding(copy.id, f"casts before the scale is known, by {made}")

    def _finding(self, operation: str, why: str) -> Finding:
        role = self.each.program.role
        return Finding(invariant=INVARIANT, role=role, operation=operation, why=why)

    def _tokens(self) -> Iterator[Finding]:
        """Check casts of tokens, and of anything else whose weights no layout names."""
        buffers, numbered = self.each.program.by_name, self.each.step
        for number, copy in enumerate(numbered.operations):
            if type(copy) is not Copy or buffers[copy.target.buffer].dtype is not DType.FP8:
                continue
            if buffers[copy.source.buffer].dtype is DType.FP8 or self._weights(copy):
                continue
            if self._moves_nothing(copy):
                continue
            if why := self._token_cast(numbered, number, copy):
                yield self._finding(copy.id, why)

    def _token_cast(self, numbered: Numbered, number: int, copy: Copy) -> str:
        """Return the fault in the scale of tokens that are cast, or ""."""
        stream, measure = numbered.stream[number], None
        for before, code in _back(numbered, copy.source.buffer, number):
            operation = numbered.operations[before]
            if isinstance(operation, Compute) and operation.action is Action.AMAX:
                read = [each.view for each in operation.operands if each.role is Role.INPUT]
                if read == [copy.source] and numbered.stream[before] == stream:
                    measure = before
            if measure is not None or code != READ:
                break
        if measure is None:
            return "nothing measures the largest magnitude of what is cast"
        (made,) = _made(numbered, measure)
        left = self.several & {TENSOR}
        for before, code in _back(numbered, made.buffer, number):
            if before == measure:
                break
            operation = numbered.operations[before]
            if code == READ or numbered.stream[before] == HOST:
                continue
            if not _is_maximum(operation, made) or numbered.stream[before] != stream:
                return f"{operation.id} makes something else of its largest magnitude"
            assert isinstance(operation, AllReduce)
            left = left.difference(self.schedule.group_by_name[operation.group].axes)
        return f"its largest magnitude is not reduced over ranks of {TENSOR}" if left else ""

    def _casts(self) -> Iterator[tuple[Copy, list[Weight]]]:
        """Yield the casts of parameters, with the weights in each."""
        buffers = self.each.program.by_name
        for operation in self.each.program.step_work:
            if type(operation) is not Copy:
                continue
            if buffers[operation.target.buffer].dtype is not DType.FP8:
                continue
            if weights := self._weights(operation):
                yield operation, weights

    def _moves_nothing(self, copy: Copy) -> bool:
        """Return True if a copy by parameter has no parameter in both of its layouts."""
        buffers, layouts = self.each.program.by_name, self.schedule.layout_by_name
        named = [buffers[each.buffer].layout for each in (copy.source, copy.target)]
        if not copy.by_parameter or None in named:
            return False
        source, target = (
            {piece.parameter for piece in layouts[each].pieces} for each in named if each
        )
        return not source & target

    def _weights(self, copy: Copy) -> list[Weight]:
        """Return the weights that a cast reads; empty if layouts do not name them."""
        buffers, layouts = self.each.program.by_name, self.schedule.layout_by_name
        source, target = buffers[copy.source.buffer], buffers[copy.target.buffer]
        if source.kind is not Kind.PARAMETER or source.layout is None or target.layout is None:
            return []
        layout = layouts[source.layout]
        wanted = {piece.parameter for piece in layouts[target.layout].pieces}
        return [
            Weight(source.name, layout, piece)
            for piece in layout.pieces
            if piece.parameter in wanted
        ]

    def _measured(self, weight: Weight, ready: dict[str, int]) -> tuple[str, str]:
        """Return part and fault of a weight's scale; without a fault, add its source to `ready`."""
        each = self.each
        orders = (each.setup_order, each.settled_order)
        for (part, numbered), order in zip(each.parts, orders, strict=True):
            measure = self._measure(numbered, weight)
            if measure is None:
                return part, "nothing measures its largest magnitude"
            if not all(_after_writers(path, measure, weight.buffer) for path in order.paths):
                return part, "it is measured before all of it is written"
            last, why = self._reduced(numbered, measure, weight)
            if why:
                return part, why
            ready[weight.piece.parameter] = last
        return "", ""

    def _measure(self, numbered: Numbered, weight: Weight) -> int | None:
        """Return the last operation that measures all of a rank's shard of a weight."""
        history = numbered.history.get(weight.buffer)
        found = None
        for number in history.numbers if history is not None else ():
            operation = numbered.operations[number]
            if isinstance(operation, Compute) and operation.action is Action.AMAX:
                views = [each.view for each in operation.operands if each.role is Role.PARAMETER]
                if self._covers(views, weight):
                    found = number
        return found

    def _covers(self, views: list[View], weight: Weight) -> bool:
        """Return True if views cover the weight's elements on the first and on the last rank."""
        layout, piece = weight.layout, weight.piece
        count = 1 if layout.axis is None else self.schedule.mesh.axis_size(layout.axis)
        for rank in {0: None, count - 1: None}:
            low, size = layout.window(piece.start, piece.size, rank, count)
            if size and not any(
                view.buffer == weight.buffer
                and view.axis is view.layout is None
                and view.start <= low
                and low + size <= view.start + view.size
                for view in views
            ):
                return False
        return True

    def _reduced(self, numbered: Numbered, measure: int, weight: Weight) -> tuple[int, str]:
        """Return the last reduction of a measurement, and the fault in them, or ""."""
        (made,) = _made(numbered, measure)
        own = {weight.layout.axis, TENSOR}.difference(weight.piece.copies)
        left = sorted(self.several.intersection(own))
        last, history = measure, numbered.history[made.buffer]
        for number, code in zip(history.numbers, history.codes, strict=True):
            operation = numbered.operations[number]
            if number <= measure or code == READ or numbered.stream[number] == HOST:
                continue
            if not _is_maximum(operation, made):
                return last, f"{operation.id} makes something else of its largest magnitude"
            assert isinstance(operation, AllReduce)
            over = self.schedule.group_by_name[operation.group].axes
            left = [axis for axis in left if axis not in over]
            last = number
        why = f"its largest magnitude is not reduced over ranks of {left[0]}" if left else ""
        return last, why


def _made(numbered: Numbered, measure: int) -> list[View]:
    """Return the views to which a measuring operation writes."""
    compute = numbered.operations[measure]
    assert isinstance(compute, Compute)
    return [each.view for each in compute.operands if each.role is Role.OUTPUT]


def _is_maximum(operation: Operation, made: View) -> bool:
    """Return True if an operation reduces the measurement to the maximum over ranks, in place."""
    match operation:
        case AllReduce(reduction=Reduction.MAX, source=source, target=target):
            return source == target == made
        case _:
            return False


def _back(numbered: Numbered, buffer: str, number: int) -> Iterator[tuple[int, int]]:
    """Yield (number, effect) of accesses to a buffer before an operation, the last first."""
    history = numbered.history[buffer]
    for place in range(bisect_left(history.numbers, number) - 1, -1, -1):
        yield history.numbers[place], history.codes[place]


def _after_writers(path: BranchPath, measure: int, buffer: str) -> bool:
    """Return True if all writes to the shard, on a path, happen before the measurement."""
    numbered, known = path.numbered, path.known[measure]
    history = numbered.history[buffer]
    for number, code in zip(history.numbers, history.codes, strict=True):
        stream = numbered.stream[number]
        if code in (READ, FREE) or stream == HOST or path.known[number] is None:
            continue
        in_order = numbered.stream[measure] == stream and number < measure
        if not in_order and (known is None or known[stream] < numbered.position[number]):
            return False
    return True


def _waits(order: Timeline, cast: str, reduced: int) -> bool:
    """Return True if a cast comes after a reduction of the step before, on every path."""
    numbered = order.numbered
    stream, number = numbered.stream[reduced], numbered.index[cast]
    before = numbered.position[reduced] - len(numbered.entries[stream])
    return all(
        known is None or numbered.stream[number] == stream or known[stream] >= before
        for known in (path.known[number] for path in order.paths)
    )
