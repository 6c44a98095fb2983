"""Segments read the parameters that they are about, and make gradients of the same.

Where a buffer has a layout, each view is one piece of it; with the model given, they are the
segment's parameters in their order. In a whole tensor that is gathered block by block the ranks'
parts of a parameter are not together: no segment can read it there.
"""

from collections.abc import Iterator

from zsim.check.finding import Finding
from zsim.check.subject import NumberedProgram, Subject
from zsim.operation import Action, Compute, Role, View

OTHERS_MAX = 6
"""Views that a witness shows one by one."""


class Reads:
    """Whether segments read the parameters that they are about."""

    def __init__(self, subject: Subject, each: NumberedProgram, invariant: str) -> None:
        self.program = each.program
        self.step = each.step
        self.invariant = invariant
        self.pieces = {
            layout.name: {(piece.start, piece.size): piece.parameter for piece in layout.pieces}
            for layout in subject.schedule.layouts
        }
        mesh = subject.schedule.mesh
        self.apart = {
            layout.name
            for layout in subject.schedule.layouts
            if len(set(layout.blocks or ()) - {layout.elements}) > 1
            if layout.axis is not None and mesh.axis_size(layout.axis) > 1
        }
        self.needed = {
            (unit.name, number): segment.parameters
            for unit in (subject.model.units if subject.model is not None else ())
            for number, segment in enumerate(unit.segments)
        }
        self.names: dict[int, str | None] = {}
        self.right: set[tuple[int, str, int]] = set()

    def inspect(self) -> Iterator[Finding]:
        """Every operation that reads something else.

        Operands that come again, as they do in each micro-batch, are looked at once if they are
        right: it is their roles that say what is read, not the action.
        """
        segments = (Action.FORWARD, Action.RECOMPUTE, Action.BACKWARD)
        for number in self.step.computes:
            operation = self.step.operations[number]
            if isinstance(operation, Compute) and operation.action in segments:
                key = (id(operation.operands), operation.unit, operation.segment)
                if key in self.right:
                    continue
                found = list(self._operation(operation))
                if not found:
                    self.right.add(key)
                yield from found

    def _operation(self, compute: Compute) -> Iterator[Finding]:
        parameters: list[View] = []
        gradients: list[View] = []
        for operand in compute.operands:
            if operand.role is Role.PARAMETER:
                parameters.append(operand.view)
            elif operand.role is Role.GRADIENT:
                gradients.append(operand.view)
        if parameters:
            yield from self._views(compute, parameters, "computes with")
        if gradients:
            yield from self._views(compute, gradients, "makes gradients of")

    def _views(self, compute: Compute, views: list[View], verb: str) -> Iterator[Finding]:
        names = [self._name(view) for view in views]
        for view, name in zip(views, names, strict=True):
            if name is None:
                what = f"a part of {view.buffer} that is no parameter"
                if self.program.by_name[view.buffer].layout in self.apart:
                    what = f"{view.buffer}, in which the parts of a parameter are not together"
                where = f"elements {view.start} to {view.start + view.size}"
                yield self._finding(compute, f"{verb} {what}", where)
        needed = self.needed.get((compute.unit, compute.segment))
        if needed is None or None in names:
            return
        others: list[str] = []
        if len(names) == len(needed):
            others = [
                f"{name}, in {view.buffer}, where {due} is needed"
                for name, view, due in zip(names, views, needed, strict=True)
                if name and name != due
            ]
        if others or len(names) != len(needed):
            yield self._finding(
                compute,
                f"{verb} other parameters than segment {compute.segment} of {compute.unit} has",
                f"its views: {', '.join(name or 'something' for name in names)}",
                f"needs {', '.join(needed)}",
                *others[:OTHERS_MAX],
            )

    def _finding(self, compute: Compute, why: str, *witness: str) -> Finding:
        return Finding(
            invariant=self.invariant,
            role=self.program.role,
            operation=compute.id,
            why=why,
            witness=witness,
        )

    def _name(self, view: View) -> str | None:
        """The parameter that `view` is; nothing if it is none, "" where no layout can say."""
        key = id(view)
        if key not in self.names:
            layout = self.program.by_name[view.buffer].layout
            whole = layout is not None and view.axis is None and view.layout is None
            if not whole or view.size == 0 or layout is None:
                self.names[key] = ""
            elif layout in self.apart and self.program.by_name[view.buffer].shard is None:
                self.names[key] = None
            else:
                self.names[key] = self.pieces[layout].get((view.start, view.size))
        return self.names[key]
