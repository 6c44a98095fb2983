"""Allowed operations of a micro-batch that is removed from a step.

It runs its own segments in memory that it allocates and frees, communicates with the same
micro-batch on other ranks, and adds gradients that its backward made, or loads of experts that its
forward made, to sums, and nothing else. So the step without it differs only in these sums, each by
a number times its gradient, or by its load.
"""

from collections.abc import Callable, Iterable, Sequence, Set

from zsim.proof.execution.repetition import IrregularError
from zsim.schedule.access import COMPUTE_ACCESS
from zsim.schedule.layout import Layout
from zsim.schedule.operation import (
    MAKES_GRADIENTS,
    OF_SEGMENTS,
    Action,
    Allocate,
    CollectiveOperation,
    Compute,
    Copy,
    Fill,
    Free,
    HostWait,
    Operation,
    Receive,
    ReducingOperation,
    Reduction,
    Role,
    Send,
    View,
)

ACTIONS = frozenset({*OF_SEGMENTS, Action.LOAD})
"""Actions that compute for one micro-batch alone, named in `micro_batch`."""


def need_lone(
    operations: Iterable[Operation],
    is_linear: Callable[[str], bool],
    loads: Set[str] = frozenset(),
) -> None:
    """Raise IrregularError unless all operations are allowed in a removed micro-batch.

    `is_linear` returns True for a group whose members all run the same program, each with its own
    part. Outputs may be added to sums in `loads`, which only updates of biases of experts read.

    Raises:
        IrregularError: an operation is not allowed, or memory is not freed.
    """
    lone = _LoneMicroBatch(is_linear, loads)
    for operation in operations:
        lone.follow(operation)
    if lone.taken:
        raise IrregularError


class _LoneMicroBatch:
    """State after some operations: allocated buffers, those with gradients and with outputs."""

    def __init__(self, is_linear: Callable[[str], bool], loads: Set[str]) -> None:
        self.taken: set[str] = set()
        self._is_linear = is_linear
        self._loads = loads
        self._holds_gradients: dict[str, bool] = {}
        self._holds_output: set[str] = set()

    def follow(self, operation: Operation) -> None:
        """Update the state by an operation.

        Raises:
            IrregularError: it is not allowed.
        """
        match operation:
            case Allocate(buffer=name) if name not in self.taken:
                self.taken.add(name)
            case Free(buffer=name) if name in self.taken:
                self.taken.remove(name)
                self._holds_gradients.pop(name, None)
                self._holds_output.discard(name)
            case HostWait() | Send():
                pass
            case Compute(action=action, scalars=(), rule=None) if action in ACTIONS:
                self._compute(operation)
            case Copy() if type(operation) is Copy:
                self._copy(operation)
            case Fill(target=target) | Receive(target=target):
                self._write(target, is_gradient=False)
            case CollectiveOperation(source=source, target=target, group=group):
                self._write(
                    target,
                    is_gradient=self._is_gradient(source)
                    and self._is_linear(group)
                    and not (
                        isinstance(operation, ReducingOperation)
                        and operation.reduction is Reduction.MAX
                    ),
                )
            case _:
                raise IrregularError

    def _compute(self, compute: Compute) -> None:
        makes_gradients = compute.action in MAKES_GRADIENTS
        for operand in compute.operands:
            if COMPUTE_ACCESS[compute.action][operand.role][1]:
                is_gradient = makes_gradients and operand.role is Role.GRADIENT
                self._write(operand.view, is_gradient=is_gradient)
                if compute.action is not Action.LOAD and operand.role is Role.OUTPUT:
                    self._holds_output.add(operand.view.buffer)

    def _copy(self, copy: Copy) -> None:
        is_gradient = self._is_gradient(copy.source)
        if copy.target.buffer in self.taken:
            self._write(copy.target, is_gradient=is_gradient)
        elif not (copy.accumulate and (is_gradient or self._is_load(copy))):
            raise IrregularError

    def _is_load(self, copy: Copy) -> bool:
        """Return True if a copy adds an output of a segment to a load of experts."""
        return copy.target.buffer in self._loads and copy.source.buffer in self._holds_output

    def _is_gradient(self, view: View) -> bool:
        return self._holds_gradients.get(view.buffer, False)

    def _write(self, view: View, *, is_gradient: bool) -> None:
        """Write to an allocated buffer.

        Raises:
            IrregularError: it is not allocated.
        """
        name = view.buffer
        if name not in self.taken:
            raise IrregularError
        self._holds_gradients[name] = is_gradient and self._holds_gradients.get(name, True)
        self._holds_output.discard(name)


def need_commuting(adds: Sequence[Copy], layout: Layout | None) -> None:
    """Raise IrregularError unless copies may add to a buffer of `layout` in any order.

    A copy by parameter sets padding to zero, so no other copy may add to padding.

    Raises:
        IrregularError: one may.
    """
    if not any(each.by_parameter for each in adds):
        return
    for view in [each.target for each in adds if not each.by_parameter]:
        if layout is None or layout.blocks or view.axis is not None or view.layout is not None:
            raise IrregularError
        end = view.start + view.size
        sizes = [
            min(each.end, end) - max(each.start, view.start)
            for each in layout.pieces
            if each.start < end and view.start < each.end
        ]
        if sum(sizes) != view.size:
            raise IrregularError
