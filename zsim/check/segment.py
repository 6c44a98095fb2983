"""Forward, recompute and backward of a segment: what they read, and what they write.

Operands are the same objects in every micro-batch, mostly: what is to be looked at is worked out
once for all of them, and neighbors in a buffer are one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from zsim.check.content import Content, What
from zsim.check.ledger import Ledger
from zsim.check.placed import (
    ANY,
    COMPLETE,
    EVERY,
    PARTIAL,
    SHARD,
    WHOLE,
    ZERO,
    Placement,
    Rule,
    both,
)
from zsim.check.signature import TENSOR_AXIS, Key, Signature, Signatures
from zsim.check.where import Where
from zsim.operation import Action, Compute, Operand, Role, View

T = TypeVar("T")
Named = tuple[View, str, int]
"""A view, the name of what it holds or will hold, and the number of the elements of that."""


@dataclass(slots=True)
class _Made:
    """A gradient that is written: where, placed how, which use of how many, of which elements.

    The elements are told by their number; by 0 where the buffer says which they are.
    """

    view: View
    placement: Placement
    name: str
    use: tuple[int, int]
    place: int


@dataclass(slots=True)
class _Plan:
    """What is to be looked at in a segment's operands, whatever the micro-batch."""

    operands: tuple[Operand, ...]
    parameters: Sequence[View] = ()
    inputs: Sequence[Named] = ()
    saved: Sequence[Named] = ()
    slopes: Sequence[Named] = ()
    outputs: Sequence[_Made] = ()
    input_gradients: Sequence[_Made] = ()
    gradients: Sequence[_Made] = ()
    spoils: Sequence[View] = ()


class Segments:
    """The segments of one program; `judges` says whether contents are held against what is due."""

    def __init__(
        self, ledger: Ledger, *, signatures: Signatures, data: list[bool], judges: bool
    ) -> None:
        self.ledger = ledger
        self.signatures = signatures
        self.judges = judges
        over = " and ".join(
            name for name, is_data in zip(ledger.axes, data, strict=True) if is_data
        )
        self.complete = Rule([COMPLETE] * len(data), "no summand, and whole where it is read")
        self.whole = Rule([WHOLE if each else COMPLETE for each in data], f"Replicate over {over}")
        self.flowing: Placement = tuple(SHARD if each else ANY for each in data)
        self.summand: Placement = tuple(PARTIAL if each else ANY for each in data)
        self.parameter = ledger.contents.code(Content(What.PARAMETER))
        self.spoiled = ledger.contents.code(Content(What.WORKSPACE))
        self._plans: dict[tuple[int, Action, str, int], _Plan] = {}

    def run(self, compute: Compute) -> None:
        """Read what the segment reads, and write what it makes."""
        key = (id(compute.operands), compute.action, compute.unit, compute.segment)
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = self._planned(compute)
        for view in plan.parameters:
            self._read_parameter(compute.id, view)
        batch = compute.micro_batch
        self._read(compute.id, plan.inputs, What.TENSOR, batch)
        if compute.action is Action.BACKWARD:
            self._backward(compute, plan)
            return
        contents, write = self.ledger.contents, self.ledger.write
        origin = self.ledger.origin(compute.id)
        for view, name, place in plan.saved:
            code = contents.named(What.SAVED, name, (batch, 0, 1), place)
            write(origin, view, (*self.flowing, code))
        for made in plan.outputs:
            code = contents.named(What.TENSOR, made.name, (batch, 0, 1), made.place)
            write(origin, made.view, (*made.placement, code))
        self._spoil(compute, plan)

    def _backward(self, compute: Compute, plan: _Plan) -> None:
        self._read(compute.id, plan.saved, What.SAVED, compute.micro_batch)
        slope = ANY
        for view, name, place in plan.slopes:
            slope = both(slope, self._slope(compute, view, name, place))
        contents, batch = self.ledger.contents, compute.micro_batch
        origin = self.ledger.origin(compute.id, *(view for view, _, _ in plan.slopes))
        for made in plan.input_gradients:
            code = contents.slope(made.name, slope, (batch, *made.use), made.place)
            self.ledger.write(origin, made.view, (*made.placement, code))
        for made in plan.gradients:
            code = contents.gradient(slope, (batch, *made.use), made.place)
            self.ledger.write(origin, made.view, (*made.placement, code))
        self._spoil(compute, plan)

    def _spoil(self, compute: Compute, plan: _Plan) -> None:
        for view in plan.spoils:
            self.ledger.write(self.ledger.origin(compute.id), view, (*self.flowing, self.spoiled))

    def _read_parameter(self, name: str, view: View) -> None:
        code = self.ledger.need(name, view, self.whole, "computes with")[-1]
        if code in (self.parameter, ANY):
            return
        constant = self.ledger.contents.what(code) is What.CONSTANT
        if not constant or self.judges:
            self.ledger.expect(name, view, "computes with", code=code, due=self.parameter)

    def _read(self, name: str, views: Sequence[Named], what: What, batch: int) -> None:
        contents, part = self.ledger.contents, (batch, 0, 1)
        for view, due, place in views:
            code = self.ledger.need(name, view, self.complete, "computes with")[-1]
            if self.judges and due and code != ANY:
                wanted = contents.named(what, due, part, place)
                unplaced = not contents.place(code) and contents.at(code, place) == wanted
                if code != wanted and not unplaced:
                    self.ledger.expect(name, view, "computes with", code=code, due=wanted)

    def _slope(self, compute: Compute, view: View, name: str, place: int) -> int:
        """What the gradient of an output is of; a constant is the gradient of the loss."""
        contents, ledger = self.ledger.contents, self.ledger
        code = ledger.need(compute.id, view, self.complete, "computes with")[-1]
        if not self.judges or code == ANY or not view.size:
            return code
        is_constant = contents.what(code) is What.CONSTANT and code != ZERO
        if is_constant and name in ("", self.signatures.loss):
            return code
        uses = 0 if name not in self.signatures.readers else 1
        due = contents.slope(name, code, (compute.micro_batch, 0, uses), place)
        if name and contents.what(code) is What.SLOPE and not contents.place(code):
            code = contents.at(code, place)
        if name and code != due:
            ledger.expect(compute.id, view, "computes with", code=code, due=due)
            return ANY
        return code

    def _planned(self, compute: Compute) -> _Plan:
        plan = _Plan(compute.operands)
        key = (compute.unit, compute.segment)
        roles: dict[Role, list[Operand]] = {}
        for operand in compute.operands:
            roles.setdefault(operand.role, []).append(operand)
        parameters = [each.view for each in roles.get(Role.PARAMETER, [])]
        plan.parameters = [view for view, _ in self._merged([(view, None) for view in parameters])]
        inputs = [each.view for each in roles.get(Role.INPUT, [])]
        outputs = roles.get(Role.OUTPUT, [])
        signature = self.signatures.known.get(key)
        if signature is None and compute.action is not Action.BACKWARD:
            names = tuple(map(self._name_of, inputs))
            signature = self.signatures.learn(compute, names, len(outputs))
        signature = signature or Signature((), (), ())
        plan.inputs = self._named(inputs, signature.inputs)
        saved = [each.view for each in roles.get(Role.SAVED, [])]
        names = tuple(f"{compute.unit}/{compute.segment}/{each}" for each in range(len(saved)))
        plan.saved = self._named(saved, names)
        plan.outputs = [
            _Made(view, self._placed(operand), name, (0, 1), place)
            for operand, (view, name, place) in zip(
                outputs,
                self._named([each.view for each in outputs], signature.outputs),
                strict=True,
            )
        ]
        plan.spoils = [each.view for each in roles.get(Role.WORKSPACE, []) if each.view.size]
        if compute.action is Action.BACKWARD:
            self._plan_backward(compute, plan, roles, signature)
        return plan

    def _plan_backward(
        self, compute: Compute, plan: _Plan, roles: dict[Role, list[Operand]], signature: Signature
    ) -> None:
        key = (compute.unit, compute.segment)
        slopes = [each.view for each in roles.get(Role.OUTPUT_GRADIENT, [])]
        plan.slopes = self._named(slopes, self._sloped(signature))
        wanted = roles.get(Role.INPUT_GRADIENT, [])
        plan.input_gradients = [
            _Made(
                view,
                self._summed(operand, self.flowing),
                name,
                self.signatures.reading(name, key),
                place if name else 0,
            )
            for operand, (view, name, place) in zip(
                wanted, self._named([each.view for each in wanted], signature.wanted), strict=True
            )
        ]
        plan.gradients = self._gradients(compute, roles, key)

    def _named(self, views: list[View], names: tuple[str, ...]) -> list[Named]:
        """Views with their names, where there is a name for each; else without."""
        given = names if len(names) == len(views) else ("",) * len(views)
        return [
            (view, name, self._place(view, name)) for view, name in zip(views, given, strict=True)
        ]

    def _place(self, view: View, name: str) -> int:
        """Which elements of a value a view has: all, or of one that is cut by tokens the own."""
        where = Where(name, -view.start)
        if view.size == self.signatures.cut.get(name):
            where = Where(name, -view.start, (TENSOR_AXIS,), view.size)
        return self.ledger.contents.numbered(where)

    def _sloped(self, signature: Signature) -> tuple[str, ...]:
        """Outputs whose gradients backward reads: those that some segment makes one of."""
        readers, loss = self.signatures.readers, self.signatures.loss
        return tuple(name for name in signature.outputs if name in readers or name == loss)

    def _gradients(
        self, compute: Compute, roles: dict[Role, list[Operand]], key: Key
    ) -> list[_Made]:
        gradients = roles.get(Role.GRADIENT, [])
        parameters = [each.view for each in roles.get(Role.PARAMETER, [])]
        names = list(self.signatures.parameters(compute))
        uses = [self.signatures.use(name, key) for name in names]
        places = [0] * len(gradients)
        if len(parameters) == len(gradients):
            places = [
                self.ledger.contents.numbered(self._where(each.view, parameter))
                for each, parameter in zip(gradients, parameters, strict=True)
            ]
        tags = [
            (use, place, self._summed(each, self.summand))
            for use, place, each in zip(uses, places, gradients, strict=True)
        ]
        merged = self._merged([(each.view, tag) for each, tag in zip(gradients, tags, strict=True)])
        return [_Made(view, tag[2], "", tag[0], tag[1]) for view, tag in merged]

    def _where(self, view: View, parameter: View) -> Where | None:
        """Which elements of a layout a gradient is of, if the buffer that takes it has none."""
        by_name = self.ledger.program.by_name
        layout = by_name[parameter.buffer].layout
        plain = parameter.axis is None and parameter.layout is None and view.axis is None
        if by_name[view.buffer].layout is not None or layout is None or not plain:
            return None
        if by_name[parameter.buffer].shard is not None:
            return None
        if self.ledger.layouts[layout].blocks is not None:
            return None
        return Where(layout, parameter.start - view.start)

    def _merged(self, views: list[tuple[View, T]]) -> list[tuple[View, T]]:
        """Views that continue one another in a buffer are one, where they are of the same."""
        found: list[tuple[View, T]] = []
        for view, tag in views:
            if not view.size:
                continue
            if found and view.axis is None and view.layout is None:
                last, same = found[-1]
                if (last.buffer, last.start + last.size, same) == (
                    view.buffer,
                    view.start,
                    tag,
                ) and (last.axis is None and last.layout is None):
                    found[-1] = (
                        self.ledger.view(last.buffer, last.start, last.size + view.size),
                        tag,
                    )
                    continue
            found.append((view, tag))
        return found

    def _placed(self, operand: Operand) -> Placement:
        return self._summed(operand, self.flowing)

    def _summed(self, operand: Operand, placement: Placement) -> Placement:
        """`placement`, but a summand over the axes that the operand names."""
        along = [each for axis in operand.partial for each in self.ledger.numbers[axis]]
        return self.ledger.with_codes(placement, along, EVERY, PARTIAL) if along else placement

    def _name_of(self, view: View) -> str:
        """The name of the activation that a view holds; none if that is not known."""
        code = self.ledger.read(view)[-1] if view.size else ANY
        if code >= 0 or self.ledger.contents.what(code) is not What.TENSOR:
            return ""
        return self.ledger.contents[code].name
