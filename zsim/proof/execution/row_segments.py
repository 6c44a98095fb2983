"""Segments of experts: kernels that treat each row by itself, on rows that a rank has received.

What a segment writes to counted rows has zeros for the rows that the count drops.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from zsim.model.model import Model, Segment
from zsim.proof.execution.collective_runner import UnfollowedError
from zsim.proof.execution.datum import Datum, Marks, anywhere, either
from zsim.proof.execution.segments import ByRole, Makes, by_role, in_order
from zsim.schedule.counts import NamedCount, RowIndex
from zsim.schedule.operation import BACKWARDS, Action, Compute, Role
from zsim.schedule.program import Program
from zsim.schedule.schedule import Schedule
from zsim.specification.residues import Numbers, Random, product
from zsim.specification.row_kernels import RowKernel
from zsim.specification.row_kinds import RowKinds


class RowSegments:
    """Runs the segments of a model that treat each row by itself."""

    def __init__(self, schedule: Schedule, model: Model, random: Random, kinds: RowKinds) -> None:
        self._kinds = kinds
        self._counts = {count.name: count for count in schedule.counts}
        self._members = {
            count.name: schedule.group_by_name[count.group].size(schedule.mesh)
            for count in schedule.counts
        }
        self._model = model
        self._random = random
        self._segments = {
            (unit.name, place): segment
            for unit in model.units
            for place, segment in enumerate(unit.segments)
            if segment.experts
        }

    def segment(self, compute: Compute) -> Segment | None:
        """Return the segment of experts that an operation runs; None for any other one."""
        return self._segments.get((compute.unit, compute.segment)) if self._segments else None

    @property
    def drops(self) -> bool:
        """Return True if rows are dropped."""
        return self._kinds.count > 1

    def kept(self, program: Program, compute: Compute, made: Makes) -> Makes:
        """Return new operands of a segment, with zeros for rows that counts drop.

        What a segment of any rows saves is one number, whatever its rows.
        """
        found = list(made)
        is_of_experts = self.segment(compute) is not None
        for place, (operand, datum) in enumerate(zip(compute.operands, made, strict=True)):
            rows = program.by_name[operand.view.buffer].rows
            rule = None if rows is None else self._counts[rows.count].drops
            is_whole = operand.role is Role.SAVED and not is_of_experts
            if datum is not None and rule is not None and not is_whole:
                keeps = self._kinds.kept(rule, datum.count)
                found[place] = replace(datum, values=product(datum.values, keeps))
        return found

    def run(
        self, program: Program, compute: Compute, segment: Segment, operands: Sequence[Datum]
    ) -> tuple[Makes, list[Datum]]:
        """Return new operands, and the gradients of parameters among them.

        Raises:
            UnfollowedError: rows are not all of one order, or backward has two parts.
        """
        of = by_role(compute, operands)
        kernel = self._kernel(program, compute)
        weights = [each.values for each in of[Role.PARAMETER]]
        if any(each.shape[-1] % kernel.experts for each in weights):
            raise UnfollowedError(f"{compute.id}: reads weights of a part of an expert")
        if compute.action in (Action.BACKWARD_INPUT, Action.BACKWARD_WEIGHT):
            raise UnfollowedError(f"{compute.id}: backward of experts has two parts")
        if compute.action in BACKWARDS:
            outcome, gradients = self._backward(segment, of, kernel)
            return in_order(compute, operands, outcome), gradients
        outputs, saves = len(of[Role.OUTPUT]), len(of[Role.SAVED])
        if saves > 1:
            raise UnfollowedError(f"{compute.id}: experts save several tensors, one is followed")
        inputs = [each.values for each in of[Role.INPUT]]
        made = kernel.forward(inputs, weights, outputs + saves)
        undefined = _undefined(of[Role.INPUT], of[Role.PARAMETER])
        data = [Datum(each, undefined) for each in made]
        by = {Role.OUTPUT: iter(data[:outputs]), Role.SAVED: iter(data[outputs:])}
        return in_order(compute, operands, by), []

    def _backward(
        self, segment: Segment, of: ByRole, kernel: RowKernel
    ) -> tuple[dict[Role, Iterator[Datum]], list[Datum]]:
        """Return the outputs of backward by role, and the gradients of parameters."""
        read = [each.values for each in (*of[Role.INPUT], *of[Role.SAVED])]
        trained = self._model.trained_of(segment)
        gradients, inputs = kernel.backward(
            read,
            [each.values for each in of[Role.PARAMETER]],
            [each.values for each in of[Role.OUTPUT_GRADIENT]],
            trained=[segment.parameters.index(name) for name in trained],
            wanted=len(of[Role.INPUT_GRADIENT]),
        )
        rows = (*of[Role.INPUT], *of[Role.SAVED], *of[Role.OUTPUT_GRADIENT])
        undefined = _undefined(rows, of[Role.PARAMETER])
        every = anywhere(*rows, *of[Role.PARAMETER])
        found = [Datum(each, _wide(every, each)) for each in gradients]
        by = {
            Role.GRADIENT: iter(found),
            Role.INPUT_GRADIENT: iter([Datum(each, undefined) for each in inputs]),
        }
        return by, found

    def _kernel(self, program: Program, compute: Compute) -> RowKernel:
        """Return the kernels of an operation, over the places of its rows.

        Raises:
            UnfollowedError: some rows are local tokens, others are tokens of local experts.
        """
        found: set[tuple[str, RowIndex]] = set()
        for operand in compute.operands:
            rows = program.by_name[operand.view.buffer].rows
            if rows is not None:
                found.add((rows.count, rows.own))
        if len(found) != 1:
            raise UnfollowedError(f"{compute.id}: runs experts on rows of several orders")
        ((name, own),) = found
        count: NamedCount = self._counts[name]
        sources = 1 if own is RowIndex.SOURCE else self._members[name]
        return RowKernel(
            random=self._random,
            name=f"{compute.unit}/{compute.segment}",
            sources=sources,
            experts=count.experts // sources,
            kinds=self._kinds.count,
        )


def _undefined(rows: Sequence[Datum], weights: Sequence[Datum]) -> Marks | None:
    """Return the places at which a row or any weight was never written."""
    found: Marks | None = None
    for datum in rows:
        if datum.undefined is not None:
            found = either(found, datum.undefined)
    every = anywhere(*weights)
    if every is not None:
        shape = np.broadcast_shapes(*(each.values.shape[1:] for each in rows))
        found = either(found, np.broadcast_to(every, (*every.shape[:-1], shape[-1])))
    return found


def _wide(marks: Marks | None, numbers: Numbers) -> Marks | None:
    """Return marks of ranks for all their numbers."""
    if marks is None:
        return None
    return np.broadcast_to(marks, (*marks.shape[:-1], numbers.shape[-1]))
