"""The end of a step: overflow test, clipping, and the update of what a rank trains.

Order of the arithmetic, as mixed-precision runtimes have it: gradients are tested and measured as
they were reduced (scaled, with fp16), cast to the optimizer's format, unscaled, clipped, applied.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from zsim.dtype import DType
from zsim.model.kernel import Kernel, KernelKind
from zsim.schedule.layout import Layout
from zsim.schedule.operation import (
    Action,
    AllReduce,
    Branch,
    Compute,
    Copy,
    Edge,
    Operand,
    Reduction,
    Role,
    SetScalar,
    View,
)
from zsim.schedule.schedule import Kind
from zsim.strategy.optimizer_rule import Adam, ClipNorm, Optimizer
from zsim.strategy.strategy import Precision, Strategy
from zsim.zero.assemble import replica_group
from zsim.zero.parameter_groups import Ruled, ruled
from zsim.zero.state import GOOD_STEPS, LOSS_SCALE, SKIPPED_STEPS, STEP
from zsim.zero.writer import COMMUNICATION, COMPUTE, WORLD, Draft

ADAM_FLOPS = 12
"""Operations of Adam per element: 2 moments of 3, the step of 6 (Kingma and Ba 2015, alg. 1)."""


def flops(rule: Optimizer) -> int:
    """Operations of an update per element."""
    if isinstance(rule, Adam):
        return ADAM_FLOPS
    return 2 * (1 + bool(rule.momentum) + bool(rule.weight_decay) + rule.nesterov)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """A tensor that one rank updates.

    Attributes:
        name: last part of the path of its operations.
        layout: of the whole tensor, of which the rank updates all or its shard.
        gradient: the reduced gradient; its buffer is freed after the update unless it is kept.
        measured: the part of it that counts in a norm: every rank measures another one.
        after: what completes the gradient.
        parameter: what the update writes: what is trained, or its copy in the compute format.
        master: what is trained, if that is not the parameter.
        moments: as many as the optimizer keeps.
        keeps_gradient: whether the gradient's buffer outlives the step.
    """

    name: str
    layout: Layout
    gradient: View
    measured: View
    after: tuple[Edge, ...]
    parameter: View
    master: View | None
    moments: tuple[View, ...]
    keeps_gradient: bool = False


def _of(part: Ruled, operand: Operand, layout: Layout, draft: Draft) -> Operand:
    """Return what of an operand a part of the whole tensor has."""
    if part.size == layout.elements:
        return operand
    view = part.part(draft.buffers[operand.view.buffer], operand.view, layout)
    return replace(operand, view=view)


Updated = Callable[[Draft, Trained, str], None]
"""What follows the update of a tensor: the draft, the tensor, the operation that wrote it."""


def _nothing(_draft: Draft, _item: Trained, _operation: str) -> None:
    """Nothing follows an update."""


class Ending:
    """Writes what follows the last backward of a step.

    Args:
        draft: what is written to.
        strategy: which optimizer, whether it clips, whether there is a loss scale.
        trained: every tensor that a rank updates, in order.
        measured_after: what completes all gradients.
        updated: called after each update.
        stream: on which the overflow flag and the norm are reduced.
    """

    def __init__(
        self,
        draft: Draft,
        strategy: Strategy,
        trained: Sequence[Trained],
        *,
        measured_after: tuple[Edge, ...],
        updated: Updated = _nothing,
        stream: str = COMMUNICATION,
    ) -> None:
        self.draft = draft
        self.strategy = strategy
        self.trained = trained
        self.measured_after = measured_after
        self.updated = updated
        self.stream = stream

    def write(self) -> None:
        """Append to the draft; with fp16 everything stands in a branch on the overflow flag."""
        draft = self.draft
        draft.prefix = "step/update"
        if self.strategy.precision is not Precision.FP16:
            self._update(draft)
            return
        flag = self._one_number("overflow")
        draft.allocate(flag)
        self._measure(draft, Action.FINITE, flag, Reduction.MAX, trained=self.trained, group=WORLD)
        skip, go_on = draft.side("step/skip"), draft.side("step/update")
        self._skip(skip)
        self._update(go_on)
        draft.add(
            Branch(
                id=draft.path("branch"),
                after=(draft.path("overflow/reduce"),),
                value=draft.all(flag),
                then=tuple(skip.operations),
                otherwise=tuple(go_on.operations),
            )
        )
        assert skip.alive == go_on.alive
        draft.join(skip)
        draft.join(go_on)
        draft.free(flag, (draft.path("overflow/reduce"),))

    def _one_number(self, name: str) -> str:
        return self.draft.buffer(name, 1, self.strategy.precision.optimizer, Kind.WORKSPACE)

    def _measure(
        self,
        draft: Draft,
        action: Action,
        target: str,
        reduction: Reduction,
        *,
        trained: Sequence[Trained],
        group: str,
    ) -> None:
        """One number over the gradients of `trained`, then over all ranks of `group`."""
        operands = [Operand(role=Role.GRADIENT, view=item.measured) for item in trained]
        elements = sum(item.measured.size for item in trained)
        operands.append(Operand(role=Role.OUTPUT, view=draft.all(target)))
        measured = draft.add(
            Compute(
                id=draft.path(f"{target}/measure"),
                stream=COMPUTE,
                after=self.measured_after,
                action=action,
                operands=tuple(operands),
                kernels=(self._kernel(elements, reads=1, writes=0),),
            )
        )
        wire = draft.buffers[target].dtype
        draft.add(
            AllReduce(
                id=draft.path(f"{target}/reduce"),
                stream=self.stream,
                after=(measured,),
                group=group,
                source=draft.all(target),
                target=draft.all(target),
                reduction=reduction,
                wire=wire,
                accumulate=wire,
            )
        )

    def _skip(self, draft: Draft) -> None:
        """Gradients overflowed: nothing is updated, the loss scale falls."""
        scale = self.strategy.loss_scale
        for item in self.trained:
            if not item.keeps_gradient:
                draft.free(item.gradient.buffer, ("step/update/overflow/measure",))
        draft.add(
            SetScalar(
                id=draft.path(LOSS_SCALE),
                scalar=LOSS_SCALE,
                multiply=scale.backoff,
                minimum=scale.minimum,
            )
        )
        draft.add(SetScalar(id=draft.path(GOOD_STEPS), scalar=GOOD_STEPS, multiply=0.0))
        draft.add(SetScalar(id=draft.path(SKIPPED_STEPS), scalar=SKIPPED_STEPS, add=1.0))

    def _update(self, draft: Draft) -> None:
        strategy = self.strategy
        draft.add(SetScalar(id=draft.path(STEP), scalar=STEP, add=1.0))
        norm = self._norm(draft)
        for item in self.trained:
            self._update_one(draft, item, norm)
        if norm is not None:
            draft.free(norm, (draft.path("norm/reduce"),))
        if strategy.precision is Precision.FP16:
            scale = strategy.loss_scale
            draft.add(SetScalar(id=draft.path(GOOD_STEPS), scalar=GOOD_STEPS, add=1.0))
            draft.add(
                SetScalar(
                    id=draft.path(LOSS_SCALE),
                    scalar=LOSS_SCALE,
                    multiply=scale.growth,
                    counter=GOOD_STEPS,
                    every=scale.interval,
                )
            )

    def _norm(self, draft: Draft) -> str | None:
        """The buffer of the squared norm, which `norm/reduce` makes; None if nothing is clipped."""
        if self.strategy.clip_norm is None:
            return None
        self._measure_norm(draft, "norm", self.trained)
        return "norm"

    def _measure_norm(self, draft: Draft, name: str, trained: Sequence[Trained]) -> None:
        """The square of the norm of the gradients of `trained`, in a buffer called `name`."""
        draft.allocate(self._one_number(name))
        group = replica_group(self.strategy)
        self._measure(draft, Action.NORM, name, Reduction.SUM, trained=trained, group=group)

    def _update_one(self, draft: Draft, item: Trained, norm: str | None) -> None:
        optimizer = self.strategy.precision.optimizer
        gradient, after = item.gradient, item.after
        outer, draft.prefix = draft.prefix, f"{draft.prefix}/{item.name}"
        cast = None
        if draft.buffers[gradient.buffer].dtype is not optimizer:
            held = draft.buffers[gradient.buffer]
            is_held = gradient.axis is not None or gradient == draft.all(held.name)
            cast = draft.buffer(
                f"{item.name}/cast",
                gradient.size,
                optimizer,
                Kind.WORKSPACE,
                layout=held.layout if is_held else None,
                shard=(gradient.axis or held.shard) if is_held else None,
            )
            draft.allocate(cast)
            widened = Copy(
                id=draft.path("widen"),
                stream=COMPUTE,
                after=after,
                source=gradient,
                target=draft.all(cast),
            )
            draft.add(widened)
            gradient, after = draft.all(cast), ()
        if self.strategy.precision is Precision.FP16:
            self._change(draft, Action.UNSCALE, gradient, after=after)
            after = ()
        if norm is not None:
            norm_reduced = f"{outer}/norm/reduce"
            self._change(draft, Action.CLIP, gradient, norm=norm, after=(*after, norm_reduced))
            after = ()
        updated = self._apply(draft, item, gradient, after)
        if cast is not None:
            draft.free(cast)
        self.updated(draft, item, updated)
        if not item.keeps_gradient:
            draft.free(item.gradient.buffer, (draft.path("update"),))
        draft.prefix = outer

    def _change(
        self,
        draft: Draft,
        action: Action,
        gradient: View,
        *,
        norm: str | None = None,
        after: tuple[Edge, ...] = (),
    ) -> None:
        """Unscale or clip a gradient in place."""
        strategy = self.strategy
        operands = [Operand(role=Role.GRADIENT, view=gradient)]
        rule = None
        if norm is not None:
            assert strategy.clip_norm is not None
            operands.insert(0, Operand(role=Role.INPUT, view=draft.all(norm)))
            rule = ClipNorm(maximum=strategy.clip_norm)
        draft.add(
            Compute(
                id=draft.path(str(action)),
                stream=COMPUTE,
                after=after,
                action=action,
                operands=tuple(operands),
                kernels=(self._kernel(gradient.size, reads=1, writes=1),),
                scalars=(LOSS_SCALE,) if strategy.precision is Precision.FP16 else (),
                rule=rule,
            )
        )

    def _apply(self, draft: Draft, item: Trained, gradient: View, after: tuple[Edge, ...]) -> str:
        """Update the rank's parameters; the id of what writes them in the compute format."""
        trained = Operand(role=Role.PARAMETER, view=item.parameter)
        if item.master is not None:
            trained = Operand(role=Role.MASTER, view=item.master)
        operands = (
            Operand(role=Role.GRADIENT, view=gradient),
            trained,
            *(Operand(role=Role.MOMENT, view=moment) for moment in item.moments),
        )
        parts, updated = ruled(item.layout, self.strategy), ""
        for part in parts:
            last = part is parts[-1]
            updated = draft.add(
                Compute(
                    id=draft.path("update" if last else f"update/{part.start}"),
                    stream=COMPUTE,
                    after=() if updated else after,
                    action=Action.UPDATE,
                    operands=tuple(_of(part, each, item.layout, draft) for each in operands),
                    kernels=(self._update_kernel(part, gradient, item),),
                    scalars=(STEP,) if isinstance(part.rule, Adam) else (),
                    rule=part.rule,
                )
            )
        if item.master is None:
            return updated
        return draft.add(
            Copy(
                id=draft.path("cast"),
                stream=COMPUTE,
                source=trained.view,
                target=item.parameter,
            )
        )

    def _update_kernel(self, part: Ruled, gradient: View, item: Trained) -> Kernel:
        """Return what the update of a part costs in the mean of ranks, which have more or less."""
        moments = len(item.moments)
        return self._kernel(
            -(-gradient.size * part.size // max(1, item.layout.elements)),
            reads=2 + moments,
            writes=1 + moments,
            each=flops(part.rule),
        )

    def _kernel(self, elements: int, *, reads: int, writes: int, each: int = 2) -> Kernel:
        dtype: DType = self.strategy.precision.optimizer
        return Kernel(
            kind=KernelKind.ELEMENTWISE,
            flops=elements * each,
            bytes=elements * (reads + writes) * dtype.size_bytes,
            dtype=dtype,
        )
