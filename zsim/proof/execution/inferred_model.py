"""Training as defined by the contract and, without a model, the model that a schedule runs.

Without a model the first forward of each segment defines its inputs and outputs, and each backward
defines the tensors it keeps and the gradients it makes. All micro-batches, ranks and
recomputations are then compared with the first. The contract states which parameters are frozen.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from zsim.dtype import DType
from zsim.model.model import BATCH, Model, ModelError, Parameter, Segment, Unit, Value
from zsim.model.segment_exchange import flags_of, gather_tokens, sum_outputs
from zsim.schedule.mesh import Mesh
from zsim.schedule.operation import (
    Action,
    Allocate,
    CollectiveOperation,
    Compute,
    Copy,
    Operand,
    Role,
    View,
    walk,
)
from zsim.schedule.schedule import Program, Schedule
from zsim.strategy.optimizer_rule import ClipNorm, Optimizer
from zsim.strategy.precision import Precision

TENSOR = "tensor"
"""The axis over which the segments of a model are split: `Model.tensor` is its size."""
CONTEXT = "context"
"""The axis along which ranks share each sequence."""
EXPERT = "expert"
"""The axis along which ranks hold different experts, and exchange tokens."""
EXPERT_TENSOR = "expert_tensor"
"""The axis along which ranks hold parts of the same experts."""

Place = tuple[str, int, int]


def expert_axes(mesh: Mesh, *names: str) -> tuple[str, ...]:
    """Return the single axes of the axes of experts in `names`, or of both, the slowest first."""
    known = {*(axis.name for axis in mesh.axes), *(each.name for each in mesh.joined)}
    asked = known.intersection(names or (EXPERT, EXPERT_TENSOR))
    parts = {part for name in asked for part in mesh.parts(name)}
    return tuple(axis.name for axis in mesh.axes if axis.name in parts)


def _place(view: View) -> Place:
    return view.buffer, view.start, view.size


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """Training as defined by the contract; `assumed` lists what the contract does not define.

    `rules` has the rule of each parameter by name. `warm_up` is the number of steps that update at
    once before updates are delayed by a step; None if they never are. With `overflows` gradients
    are scaled, and a step whose gradients are not finite changes nothing.
    """

    micro_batches: int
    divisor: int
    rules: Mapping[str, Optimizer]
    clip: ClipNorm | None
    warm_up: int | None = None
    overflows: bool = False
    assumed: tuple[str, ...] = ()


def training_of(schedule: Schedule) -> Training | None:
    """Return the training of a schedule; None if neither contract nor updates define one."""
    contract = schedule.contract
    strategy = contract.strategy
    if strategy is not None:
        clip = (
            None if strategy.train.clip_norm is None else ClipNorm(maximum=strategy.train.clip_norm)
        )
        return Training(
            micro_batches=strategy.train.gradient_accumulation_steps,
            divisor=contract.loss_divisor,
            rules=contract.rules,
            clip=clip,
            warm_up=strategy.offload.warm_up_steps if strategy.delays_updates else None,
            overflows=strategy.train.precision is Precision.FP16,
        )
    computes = [
        operation
        for program in schedule.programs
        for operation in walk(program.step)
        if isinstance(operation, Compute)
    ]
    rules = [each.rule for each in computes if isinstance(each.rule, Optimizer)]
    clips = [each.rule for each in computes if isinstance(each.rule, ClipNorm)]
    names = [each.name for each in contract.parameters]
    said = contract.rules.keys() >= set(names)
    if not computes or not (rules or said):
        return None
    return Training(
        micro_batches=1 + max(each.micro_batch for each in computes),
        divisor=contract.loss_divisor,
        rules={name: contract.rules.get(name) or rules[0] for name in names},
        clip=clips[0] if clips else None,
        assumed=(
            *(() if said else ("the optimizer, which is that of the first update",)),
            f"clipping, which is {'as the first one' if clips else 'none'}",
            "the micro-batches, which are those that the schedule runs",
        ),
    )


def model_of(schedule: Schedule) -> Model | None:
    """Return the model that the first role runs in its first micro-batch; None if it runs none.

    Values that are passed in parts, or between roles, are not followed.
    """
    try:
        return _Reader(schedule, schedule.programs[0]).model()
    except (ModelError, KeyError):
        return None


@dataclass
class _Draft:
    """A segment under construction."""

    inputs: tuple[str, ...]
    outputs: tuple[Value, ...]
    parameters: tuple[Parameter, ...]
    is_partial: bool
    backward: Compute | None = None


class _Reader:
    """Follows values through the buffers of one program."""

    def __init__(self, schedule: Schedule, program: Program) -> None:
        self.schedule = schedule
        self.program = program
        self.names: dict[Place, str] = {}
        self.places: dict[str, list[Place]] = {}
        self.drafts: dict[tuple[str, int], _Draft] = {}
        self.batch = Value(name=BATCH, elements=1, dtype=DType.INT64, requires_gradient=False)
        self.frozen = {each.name for each in schedule.contract.parameters if each.frozen}
        self.experts = {each.name for each in schedule.contract.parameters if each.expert}
        self.pieces = {
            layout.name: {(piece.start, piece.size): piece for piece in layout.pieces}
            for layout in schedule.layouts
        }

    def model(self) -> Model | None:
        for operation in walk(self.program.step):
            match operation:
                case Allocate(buffer=name):
                    for place in self.places.pop(name, ()):
                        self.names.pop(place, None)
                case Copy(source=source, target=target):
                    self._moves(source, target)
                case CollectiveOperation(splits=False, joins=False, source=source, target=target):
                    self._moves(source, target)
                case Compute():
                    self._compute(operation)
                case _:
                    pass
        self._settle_gradients()
        units: dict[str, list[Segment]] = {}
        parameters: dict[str, dict[str, Parameter]] = {}
        for (unit, number), draft in self.drafts.items():
            segments = units.setdefault(unit, [])
            if number != len(segments):
                return None
            segments.append(self._segment(draft))
            own = self._with_partial_gradients(draft)
            parameters.setdefault(unit, {}).update({each.name: each for each in own})
        if not units:
            return None
        axes = {axis.name: axis.size for axis in self.schedule.mesh.axes}
        return Model(
            name=self.schedule.name,
            units=tuple(
                Unit(
                    name=unit,
                    parameters=tuple(parameters[unit].values()),
                    segments=tuple(segments),
                )
                for unit, segments in units.items()
            ),
            batch=self.batch,
            tensor=axes.get(TENSOR, 1),
        )

    def _settle_gradients(self) -> None:
        """Mark the values that have a gradient: made by backward, or after a trained parameter."""
        sloped: set[str] = set()
        for draft in self.drafts.values():
            if any(not each.frozen for each in draft.parameters) or not sloped.isdisjoint(
                draft.inputs
            ):
                sloped |= {value.name for value in draft.outputs}
        made = sloped.union(*(self._made(draft) for draft in self.drafts.values()))
        last = list(self.drafts.values())[-1:]
        made |= {value.name for draft in last for value in draft.outputs}
        for draft in self.drafts.values():
            draft.outputs = tuple(
                replace(value, requires_gradient=value.name in made) for value in draft.outputs
            )

    def _made(self, draft: _Draft) -> set[str]:
        """Return the inputs of which a backward makes gradients, matched in order by size."""
        operands = () if draft.backward is None else draft.backward.operands
        sizes = [each.view.size for each in operands if each.role is Role.INPUT_GRADIENT]
        inputs = [name for name in draft.inputs if name != BATCH]
        if len(sizes) == len(inputs):
            return set(inputs)
        elements = {
            value.name: value.elements for each in self.drafts.values() for value in each.outputs
        }
        found: set[str] = set()
        for name in inputs:
            if sizes and elements[name] == sizes[0]:
                found.add(name)
                sizes.pop(0)
        return found

    def _call(self, view: View, name: str) -> None:
        """Record the value that a view holds until its buffer is allocated again."""
        place = _place(view)
        self.names[place] = name
        self.places.setdefault(view.buffer, []).append(place)

    def _moves(self, source: View, target: View) -> None:
        name = self.names.get(_place(source))
        if name is not None and source.size == target.size:
            self._call(target, name)

    def _compute(self, compute: Compute) -> None:
        key = (compute.unit, compute.segment)
        match compute.action:
            case Action.LOAD:
                for operand in compute.operands:
                    self._call(operand.view, BATCH)
                    self.batch = Value(
                        name=BATCH,
                        elements=operand.view.size,
                        dtype=DType.INT64,
                        requires_gradient=False,
                    )
            case Action.FORWARD if key not in self.drafts:
                self._forward(compute)
            case Action.BACKWARD | Action.BACKWARD_INPUT if (
                key in self.drafts and self.drafts[key].backward is None
            ):
                self.drafts[key].backward = compute
            case _:
                pass

    def _forward(self, compute: Compute) -> None:
        def of(role: Role) -> list[Operand]:
            return [each for each in compute.operands if each.role is role]

        outputs: list[Value] = []
        for place, operand in enumerate(of(Role.OUTPUT)):
            name = f"{compute.unit}/{compute.segment}.{place}"
            outputs.append(Value(name=name, elements=operand.view.size, dtype=DType.FP32))
            self._call(operand.view, name)
        inputs = tuple(self.names[_place(each.view)] for each in of(Role.INPUT))
        parameters = tuple(
            self._parameter(compute, place, each.view)
            for place, each in enumerate(of(Role.PARAMETER))
        )
        partial = any(TENSOR in each.partial for each in of(Role.OUTPUT))
        self.drafts[compute.unit, compute.segment] = _Draft(
            inputs, tuple(outputs), parameters, partial
        )

    def _parameter(self, compute: Compute, place: int, view: View) -> Parameter:
        layout = self.program.by_name[view.buffer].layout
        piece = None
        if layout is not None and view.axis is None and view.layout is None:
            piece = self.pieces[layout].get((view.start, view.size))
        if piece is None:
            name = f"{compute.unit}/{compute.segment} parameter {place}"
            return Parameter(name=name, shape=(view.size,))
        sharded = TENSOR not in piece.copies
        return Parameter(
            name=piece.parameter,
            shape=(1, view.size) if piece.parameter in self.experts else (view.size,),
            tensor_sharded=sharded,
            frozen=piece.parameter in self.frozen,
            experts=int(piece.parameter in self.experts),
        )

    def _with_partial_gradients(self, draft: _Draft) -> list[Parameter]:
        """Return the parameters of a draft, marked if their gradients are partial sums."""
        operands = () if draft.backward is None else draft.backward.operands
        partial = [TENSOR in each.partial for each in operands if each.role is Role.GRADIENT]
        trained = [each.name for each in draft.parameters if each.name not in self.frozen]
        summed = {name for name, own in zip(trained, partial, strict=False) if own}
        return [
            replace(each, serves_own_heads=each.name in summed and not each.tensor_sharded)
            for each in draft.parameters
        ]

    def _segment(self, draft: _Draft) -> Segment:
        backward = draft.backward
        roles = [] if backward is None else [each.role for each in backward.operands]
        partial = backward is not None and any(
            TENSOR in each.partial for each in backward.operands if each.role is Role.INPUT_GRADIENT
        )
        return Segment(
            inputs=draft.inputs,
            outputs=draft.outputs,
            parameters=tuple(each.name for each in draft.parameters),
            saved_bytes=int(Role.SAVED in roles),
            saves_input=Role.INPUT in roles,
            **flags_of(
                gather_tokens() if partial else None, sum_outputs() if draft.is_partial else None
            ),
        )
