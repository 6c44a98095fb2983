"""Backward of a micro-batch in two parts: gradients of inputs, then those of parameters.

The first part leaves the output gradients of operators with parameters; all saved tensors stay for
the second part. A segment without trainable parameters runs its whole backward in the first.

Functions named in comments are from `torch/distributed/pipelining` in torch 2.13.
"""

from collections.abc import Iterable, Set
from dataclasses import replace

from zsim.model.model import Segment, SplitBackward
from zsim.model.tensor_lifetime import AllocationTrace
from zsim.schedule.operation import Action, Operand, Role
from zsim.schedule.schedule import Kind
from zsim.zero.micro_batch_slots import SlotForwardBackward
from zsim.zero.visit_order import SegmentVisit, UnitVisit, ValueInstance
from zsim.zero.workspace_buffer import course_buffer, workspace_of

PARTS = (Action.BACKWARD_INPUT, Action.BACKWARD_WEIGHT)


class SplitForwardBackward(SlotForwardBackward):
    """The visits of micro-batches whose backward is in two parts.

    Gradients of parameters have a buffer for each slot, because several micro-batches may hold some
    before they are added up.
    """

    shares_gradients = False

    def kept(self, visits: Iterable[UnitVisit]) -> frozenset[ValueInstance]:
        """Return the values that the second parts of the backward `visits` of a chunk read."""
        return frozenset(
            each
            for visit in visits
            for part in visit.segments
            if self._segment(visit, part).split is not None
            for each in part.reads
        )

    def backward_inputs(self, visit: UnitVisit, stay: Set[ValueInstance]) -> None:
        """Run the first part of a backward visit; keep the values in `stay` for the second part."""
        for part in visit.segments:
            split = self._segment(visit, part).split
            ends = tuple(each for each in part.ends if each not in stay)
            if split is None:
                self._run_backward(visit, replace(part, ends=ends), ())
            else:
                own = replace(part, action=Action.BACKWARD_INPUT, ends=ends)
                self._run_inputs(visit, own, split)

    def backward_weights(self, visit: UnitVisit) -> None:
        """Compute the weight gradients of a unit whose backward is split, segment by segment."""
        parts = [part for part in reversed(visit.segments) if self._segment(visit, part).split]
        if parts:
            self._allocate_transients(visit)
        for part in parts:
            split = self._segment(visit, part).split
            assert split is not None
            self._run_weights(visit, replace(part, action=Action.BACKWARD_WEIGHT, ends=()), split)

    def end_weights(self, visits: Iterable[UnitVisit], stay: Set[ValueInstance]) -> None:
        """Free the values in `stay` and saved tensors after a chunk's second parts."""
        # Each node of autograd's graph holds those before it, and `param_groups` the last ones
        # (get_param_groups in _backward.py): a chunk's saved tensors are freed with the last of
        # them.
        for visit in visits:
            for part in visit.segments:
                segment = self._segment(visit, part)
                if segment.split is not None and segment.saved_bytes:
                    self.writer.free(self._saved(visit, part))
                ends = tuple(each for each in part.ends if each in stay)
                self._end(replace(part, ends=ends), "")

    def _run_inputs(self, visit: UnitVisit, part: SegmentVisit, split: SplitBackward) -> None:
        writer, segment = self.writer, self._segment(visit, part)
        whole = self.exchanges.before_backward(segment, part, self._gradients)
        operands = self._operands_of(visit, part, saves=True)
        made = [each.view.buffer for each in operands if each.role is Role.INPUT_GRADIENT]
        workspace = [own] if (own := workspace_of(operands)) else []
        writer.allocate(self._left(visit, part, split), *made, *workspace)
        self._compute(visit, part, operands, split)
        writer.free(*whole, *workspace)
        for value in segment.outputs:
            if value.name in self._gradients:
                del self._gradients[value.name]
                self._free_gradient(value)
        self._end(part, "")
        for name in self._differentiable(segment):
            self._settle_gradient(name, part, segment)

    def _run_weights(self, visit: UnitVisit, part: SegmentVisit, split: SplitBackward) -> None:
        operands = self._operands_of(visit, part, saves=True)
        workspace = [own] if (own := workspace_of(operands)) else []
        self.writer.allocate(*workspace)
        self._compute(visit, part, operands, split)
        self.writer.free(*workspace, self._left(visit, part, split))

    def _compute(
        self,
        visit: UnitVisit,
        part: SegmentVisit,
        operands: tuple[Operand, ...],
        split: SplitBackward,
    ) -> None:
        first = part.action is Action.BACKWARD_INPUT
        self.writer.compute(
            f"{part.action}{part.segment}",
            part.action,
            operands,
            unit=self.model.units[visit.unit].name,
            segment=part.segment,
            micro_batch=self.micro_batch,
            kernels=split.inputs if first else split.weights,
        )

    def _left(self, visit: UnitVisit, part: SegmentVisit, split: SplitBackward) -> str:
        """Return the buffer of intermediate gradients from the first part of a segment."""
        dtype = self.strategy.train.precision.compute
        return self.writer.buffer(
            f"{self.model.units[visit.unit].name}/intermediate{part.segment}{self._slot}",
            -(-split.intermediate_bytes // dtype.size_bytes),
            dtype,
            Kind.SAVED,
            produced=True,
        )

    def _operands_of(
        self, visit: UnitVisit, part: SegmentVisit, *, saves: bool
    ) -> tuple[Operand, ...]:
        """Return the operands of a segment, cached because every micro-batch has the same."""
        segment = self._segment(visit, part)
        if part.action not in PARTS or segment.split is None:
            return super()._operands_of(visit, part, saves=saves)
        key = (visit.unit, visit.backward, part.segment, part.action)
        if key not in self._operands:
            self._operands[key] = self._operands_of_part(visit, part, segment, segment.split)
        return self._operands[key]

    def _operands_of_part(
        self, visit: UnitVisit, part: SegmentVisit, segment: Segment, split: SplitBackward
    ) -> tuple[Operand, ...]:
        writer = self.writer
        first = part.action is Action.BACKWARD_INPUT
        operands = [
            Operand(role=Role.INPUT, view=self._read(part, each, segment)) for each in part.reads
        ]
        operands += self._parameters(visit, segment, Role.PARAMETER)
        saved = self._saved(visit, part) if segment.saved_bytes else ""
        if saved:
            operands.append(Operand(role=Role.SAVED, view=writer.all(saved)))
        left = self._left(visit, part, split)
        operands.append(Operand(role=Role.INTERMEDIATE_GRADIENT, view=writer.all(left)))
        if first:
            operands += self._gradient_operands(segment)
        else:
            operands += self._parameters(visit, segment, Role.GRADIENT)
        own = self._workspace_of_part(visit, part, split, [*operands])
        if own:
            operands.append(Operand(role=Role.WORKSPACE, view=writer.all(own)))
        return tuple(operands)

    def _workspace_of_part(
        self, visit: UnitVisit, part: SegmentVisit, split: SplitBackward, operands: list[Operand]
    ) -> str:
        """Return the buffer a part needs only while it runs; an empty string if none."""
        unit = self.model.units[visit.unit]
        first = part.action is Action.BACKWARD_INPUT
        role = Role.INPUT_GRADIENT if first else Role.GRADIENT
        made = iter([each.view.buffer for each in operands if each.role is role])
        if first:  # an input without a gradient has no buffer
            values = [self.model.values[name] for name in unit.segments[part.segment].inputs]
            of = [next(made) if value.requires_gradient else "" for value in values]
        else:
            of = [*made]
        saved = self._saved(visit, part) if unit.segments[part.segment].saved_bytes else ""
        course = AllocationTrace(
            buffers=(saved, self._left(visit, part, split), *of),
            turns=split.input_course if first else split.weight_course,
        )
        size = split.input_workspace_bytes if first else split.weight_workspace_bytes
        # gradients of parameters of several segments of a unit share one buffer
        alone = sum(each.split is not None for each in unit.segments) == 1
        last = of[-1] if first or alone else ""
        name = f"{unit.name}/workspace{part.segment}/{part.action}"
        return course_buffer(self.writer, name, (size, None), course, last=last)
