"""Formats: numbers on the path from a gradient to an update are as wide as the strategy says.

Exact numbers do not show rounding. Compared with `zsim.specification.strategy_formats` are the
formats in which reductions over ranks with different data send and add, in which gradients are
summed over micro-batches, before and after their reduction, in which norms are summed, which
updates read and write, and in which parameters are kept. Parameters that the contract allows to be
gathered in 8-bit floats may be cast to them, gathered and read; they are kept as wide as the
others. A schedule whose contract names no strategy is not checked.
"""

from collections.abc import Iterator

from zsim.dtype import DType
from zsim.proof.context import Context
from zsim.proof.finding import Finding
from zsim.proof.format_paths import is_narrower, passages, updated_format
from zsim.schedule.access import touching
from zsim.schedule.operation import (
    Action,
    CollectiveOperation,
    Compute,
    Copy,
    Operation,
    ReducingOperation,
    Reduction,
    Role,
)
from zsim.schedule.schedule import Buffer, Kind, Program, Schedule
from zsim.specification.strategy_formats import formats
from zsim.strategy.execution import NarrowWeights
from zsim.strategy.optimizer_rule import Optimizer
from zsim.strategy.runtime_options import Formats

INVARIANT = "formats"

STATES = (Kind.PARAMETER, Kind.COMMUNICATION, Kind.MASTER)
"""Kinds of buffers through which parameters pass."""

UPDATED = (Role.GRADIENT, Role.MASTER, Role.PARAMETER, Role.MOMENT)


def examine(context: Context) -> list[Finding]:
    """Find each operation with a narrower format than the strategy says."""
    strategy = context.schedule.contract.strategy
    if strategy is None:
        return []
    wanted, found = formats(strategy), list[Finding]()
    narrow = {
        each.role: _Narrow(context.schedule, each, wanted) for each in context.schedule.programs
    }
    for each in narrow.values():
        found += each.examine()
    known = {(each.role, each.operation) for each in found}

    def is_narrow(program: Program, name: str, dtype: DType, *, gathered: bool) -> bool:
        return narrow[program.role].holds_narrower(name, dtype, gathered=gathered)

    for role, operation, why in passages(context.schedule, wanted, is_narrow):
        if (role, operation) not in known:
            found.append(Finding(invariant=INVARIANT, role=role, operation=operation, why=why))
    return found


def _width(dtype: DType) -> int:
    return dtype.size_bytes


class _Narrow:
    """Checks one program."""

    def __init__(self, schedule: Schedule, program: Program, wanted: Formats) -> None:
        self.schedule = schedule
        self.program = program
        self.wanted = wanted
        self.gradients: set[str] = set()
        self.reduced: dict[str, frozenset[str]] = {}
        self.micro_batches: dict[str, frozenset[int]] = {}
        self.norms: set[str] = set()
        self._reading: dict[int, str] = {}
        self.float8 = frozenset(each.name for each in schedule.contract.parameters if each.float8)
        contract, mesh = schedule.contract, schedule.mesh
        asked = contract.strategy
        self.keeps_float8 = asked is not None and asked.narrow_weights is NarrowWeights.KEPT
        self.quantized = frozenset(each.name for each in contract.parameters if each.quantized)
        self.data = frozenset(axis for axis in contract.data_axes if mesh.axis_size(axis) > 1)
        self.experts = frozenset(each.name for each in contract.parameters if each.expert)

    def examine(self) -> Iterator[Finding]:
        """Check persistent buffers, and then the step."""
        role, wanted = self.program.role, self.wanted.compute
        for name in self.program.persistent:
            buffer = self.program.by_name[name]
            if self._is_quantized(buffer):
                continue
            is_kept = self.keeps_float8 and self._may_be_float8(buffer)
            if buffer.kind is Kind.PARAMETER and is_narrower(buffer.dtype, wanted) and not is_kept:
                why = f"keeps parameters in {buffer.dtype}, and not in {wanted}"
                kept = f"persistent/{name}"
                yield Finding(invariant=INVARIANT, role=role, operation=kept, why=why)
        for operation in touching(self.program.step_work):
            why = self._wrong(operation)
            if why:
                yield Finding(invariant=INVARIANT, role=role, operation=operation.id, why=why)

    def _dtype(self, name: str) -> DType:
        return self.program.by_name[name].dtype

    def _computes(self, name: str) -> bool:
        """Return True if a buffer is as wide as the computations with its parameters."""
        return not self.holds_narrower(name, self.wanted.compute, gathered=True)

    def holds_narrower(self, name: str, wanted: DType, *, gathered: bool) -> bool:
        """Return True if a buffer is narrower than a format; some may be `gathered` in 8 bits."""
        buffer = self.program.by_name[name]
        if not is_narrower(buffer.dtype, wanted):
            return False
        return not (gathered and (self._may_be_float8(buffer) or self._is_quantized(buffer)))

    def _is_quantized(self, buffer: Buffer) -> bool:
        """Return True if a buffer has only parameters that are kept in 4 bits, or their scales."""
        if buffer.dtype is DType.INT8:
            return buffer.layout is None and bool(self.quantized)
        if buffer.dtype is not DType.NF4 or buffer.layout is None:
            return False
        layout = self.schedule.layout_by_name[buffer.layout]
        return self.quantized.issuperset(each.parameter for each in layout.pieces)

    def _may_be_float8(self, buffer: Buffer) -> bool:
        """Return True if a buffer has only parameters that may be gathered in 8 bits."""
        if buffer.dtype is not DType.FP8 or buffer.layout is None:
            return False
        layout = self.schedule.layout_by_name[buffer.layout]
        return self.float8.issuperset(each.parameter for each in layout.pieces)

    def _wrong(self, operation: Operation) -> str:
        if type(operation) is Copy:  # most of them
            return self._copy(operation)
        match operation:
            case Compute(action=Action.FORWARD | Action.RECOMPUTE | Action.BACKWARD_INPUT):
                return self._parameters(operation)
            case Compute(action=Action.BACKWARD | Action.BACKWARD_WEIGHT):
                for each in operation.operands:
                    if each.role is Role.GRADIENT:
                        name = each.view.buffer
                        self.gradients.add(name)
                        self.reduced.pop(name, None)
                        self.micro_batches[name] = frozenset({operation.micro_batch})
                        dtype = self._dtype(name)
                        if is_narrower(dtype, self.wanted.compute):
                            return f"makes gradients in {dtype}, and not in {self.wanted.compute}"
                return self._parameters(operation)
            case Compute(action=Action.NORM):
                self.norms |= {
                    each.view.buffer for each in operation.operands if each.role is Role.OUTPUT
                }
            case Compute(action=Action.UPDATE):
                return self._update(operation)
            case Compute(action=Action.UNSCALE | Action.CLIP):
                return self._scaled(operation)
            case ReducingOperation():
                return self._reduction(operation)
            case CollectiveOperation():
                return self._spread(operation)
            case Copy():
                return self._copy(operation)
            case _:
                pass
        return ""

    def _parameters(self, compute: Compute) -> str:
        """Return the fault in a segment's parameters, cached for all micro-batches."""
        key = id(compute.operands)
        found = self._reading.get(key)
        if found is None:
            found = self._reading[key] = self._narrow_parameters(compute)
        return found

    def _narrow_parameters(self, compute: Compute) -> str:
        for each in compute.operands:
            if each.role is not Role.PARAMETER:
                continue
            if not self._computes(each.view.buffer):
                dtype = self._dtype(each.view.buffer)
                return f"reads parameters in {dtype}, and not in {self.wanted.compute}"
        return ""

    def _update(self, update: Compute) -> str:
        rounds = isinstance(update.rule, Optimizer) and update.rule.quantized
        for each in update.operands:
            dtype, wanted = self._dtype(each.view.buffer), updated_format(self.wanted, each.role)
            if rounds and each.role is Role.MOMENT and dtype is DType.INT8:
                continue
            if each.role in UPDATED and is_narrower(dtype, wanted):
                return f"updates with {each.role} in {dtype}, and not in {wanted}"
        return ""

    def _scaled(self, compute: Compute) -> str:
        """Return the fault in gradients that are unscaled or clipped, or in their norm."""
        verb = f"{compute.action}s"
        for each in compute.operands:
            dtype, wanted = self._dtype(each.view.buffer), updated_format(self.wanted, each.role)
            if is_narrower(dtype, wanted):
                what = "gradients" if each.role is Role.GRADIENT else "by a norm"
                return f"{verb} {what} in {dtype}, and not in {wanted}"
        return ""

    def _spread(self, operation: CollectiveOperation) -> str:
        """Follow data that ranks pass on unchanged; return the fault in its format."""
        source, target = operation.source.buffer, operation.target.buffer
        self._follow_norm(source, target)
        if source in self.gradients:
            self.gradients.add(target)
            self.micro_batches[target] = self._batches(source)
            self.reduced.pop(target, None)
            if source in self.reduced:
                self.reduced[target] = self.reduced[source]
            return ""
        self.gradients.discard(target)
        if self._computes(target) or self.program.by_name[target].kind not in STATES:
            return ""
        return f"gathers in {operation.wire}, and not in {self.wanted.compute}"

    def _follow_norm(self, source: str, target: str) -> None:
        if source in self.norms:
            self.norms.add(target)
        else:
            self.norms.discard(target)

    def _reduction(self, operation: ReducingOperation) -> str:
        source, target = operation.source.buffer, operation.target.buffer
        self._follow_norm(source, target)
        if source in self.norms:
            for dtype in (operation.wire, operation.accumulate, self._dtype(target)):
                if is_narrower(dtype, self.wanted.optimizer):
                    return f"adds up a norm in {dtype}, and not in {self.wanted.optimizer}"
        if source not in self.gradients or operation.reduction is Reduction.MAX:
            return ""
        self.gradients.add(target)
        self.micro_batches[target] = self._batches(source)
        group = self.schedule.group_by_name[operation.group]
        over = frozenset(group.axes) & set(self.schedule.contract.data_axes)
        if not over:
            return ""
        self.reduced[target] = self.reduced.get(source, frozenset()) | over
        wanted = self.wanted.reduction
        for what, dtype in (
            ("sends", operation.wire),
            ("adds in", operation.accumulate),
            ("reads", self._dtype(source)),
            ("writes", self._dtype(target)),
        ):
            if is_narrower(dtype, wanted):
                return f"reduces gradients and {what} {dtype}, and not {wanted}"
        return ""

    def _copy(self, copy: Copy) -> str:
        source, target = copy.source.buffer, copy.target.buffer
        if self.norms:
            self._follow_norm(source, target)
        if source not in self.gradients:
            self.gradients.discard(target)
            if self.program.by_name[target].kind in STATES and not self._computes(target):
                return (
                    f"keeps parameters in {self._dtype(target)}, and not in {self.wanted.compute}"
                )
            return ""
        self.gradients.add(target)
        mine, theirs = self._batches(source), self._batches(target)
        is_one = len(mine) == 1 and mine == theirs
        self.micro_batches[target] = mine | theirs if copy.accumulate else mine
        if source in self.reduced:
            self.reduced[target] = self.reduced[source]
        elif not copy.accumulate:
            self.reduced.pop(target, None)
        least = self._sum(source, self._due(target))
        if is_one:  # autograd adds up the uses of a parameter
            least = min(least, self.wanted.compute, key=_width)
        if not copy.accumulate:  # a cast to a narrower format of the reduction is allowed
            least = min(self.wanted.compute, self.wanted.reduction, key=_width)
        dtype = self._dtype(target)
        if is_narrower(dtype, least):
            verb = "sums" if copy.accumulate else "keeps"
            return f"{verb} gradients in {dtype}, and not in {least}"
        return ""

    def _batches(self, name: str) -> frozenset[int]:
        """Return the micro-batches of the gradients that a buffer holds."""
        return self.micro_batches.get(name, frozenset())

    def _due(self, name: str) -> frozenset[str]:
        """Return the data axes over which the gradients in a buffer are to be reduced."""
        layout = self.program.by_name[name].layout if self.experts else None
        pieces = () if layout is None else self.schedule.layout_by_name[layout].pieces
        if self.experts.isdisjoint(piece.parameter for piece in pieces):
            return self.data
        return self.data.difference(self.schedule.contract.expert_axes)

    def _sum(self, name: str, due: frozenset[str]) -> DType:
        """Return the format in which the content of a buffer is added to other micro-batches.

        Its gradients are to be reduced over the axes in `due`.
        """
        if not due:  # nothing is reduced, so both sums are allowed
            return min(self.wanted.whole, self.wanted.reduced, key=_width)
        axes = self.reduced.get(name)
        if axes is None:
            return self.wanted.whole
        return self.wanted.reduced if due <= axes else self.wanted.reduction
