"""The end of a step: overflow test, clipping, update of shards, gather of updated parameters.

Order of the arithmetic, as mixed-precision runtimes have it: gradients are tested and measured as
they were reduced (scaled, with fp16), cast to the optimizer's format, unscaled, clipped, applied.
"""

from zsim.dtype import DType
from zsim.kernel import Kernel, KernelKind
from zsim.operation import (
    Action,
    AllGather,
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
from zsim.rule import Adam, ClipNorm
from zsim.schedule import Kind
from zsim.strategy import Precision, Strategy
from zsim.zero.bucket import Bucket, Buckets
from zsim.zero.draft import COMMUNICATION, COMPUTE, DATA, WORLD, Draft
from zsim.zero.reduce import Reduced
from zsim.zero.state import (
    GOOD_STEPS,
    LOSS_SCALE,
    SKIPPED_STEPS,
    STEP,
    BucketState,
    own_view,
    update_path,
    updated_view,
)

ADAM_FLOPS = 12
"""Operations of Adam per element: 2 moments of 3, the step of 6 (Kingma and Ba 2015, alg. 1)."""


class Ending:
    """Writes what follows the last backward of a step."""

    def __init__(
        self,
        draft: Draft,
        strategy: Strategy,
        *,
        buckets: Buckets,
        states: tuple[BucketState, ...],
        reduced: dict[int, Reduced],
    ) -> None:
        self.draft = draft
        self.strategy = strategy
        self.buckets = buckets
        self.states = states
        self.reduced = reduced

    def write(self) -> None:
        """Append to the draft; with fp16 everything stands in a branch on the overflow flag."""
        draft = self.draft
        draft.prefix = "step/update"
        if self.strategy.precision is not Precision.FP16:
            self._update(draft)
            return
        flag = self._one_number("overflow")
        draft.allocate(flag)
        self._measure(draft, Action.FINITE, flag, Reduction.MAX)
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

    def _measure(self, draft: Draft, action: Action, target: str, reduction: Reduction) -> None:
        """One number over all gradients, then over all ranks."""
        operands: list[Operand] = []
        elements = 0
        for bucket in self.buckets.all:
            view = own_view(draft, bucket, self.reduced[bucket.index].buffer)
            operands.append(Operand(role=Role.GRADIENT, view=view))
            elements += view.size
        operands.append(Operand(role=Role.OUTPUT, view=draft.all(target)))
        measured = draft.add(
            Compute(
                id=draft.path(f"{target}/measure"),
                stream=COMPUTE,
                after=self._all_reduced(),
                action=action,
                operands=tuple(operands),
                kernels=(self._kernel(elements, reads=1, writes=0),),
            )
        )
        wire = draft.buffers[target].dtype
        draft.add(
            AllReduce(
                id=draft.path(f"{target}/reduce"),
                stream=COMMUNICATION,
                after=(measured,),
                group=WORLD,
                source=draft.all(target),
                target=draft.all(target),
                reduction=reduction,
                wire=wire,
                accumulate=wire,
            )
        )

    def _all_reduced(self) -> tuple[Edge, ...]:
        """The last reduction: communication runs in order, so it ends after all others."""
        if not self.reduced:
            return ()
        last = list(self.reduced.values())[-1]
        return (last.operation,)

    def _skip(self, draft: Draft) -> None:
        """Gradients overflowed: nothing is updated, the loss scale falls."""
        scale = self.strategy.loss_scale
        for bucket in self.buckets.all:
            draft.free(self.reduced[bucket.index].buffer, ("step/update/overflow/measure",))
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
        norm = None
        if strategy.clip_norm is not None:
            norm = self._one_number("norm")
            draft.allocate(norm)
            self._measure(draft, Action.NORM, norm, Reduction.SUM)
        for bucket in self.buckets.all:
            self._update_bucket(draft, bucket, norm)
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

    def _update_bucket(self, draft: Draft, bucket: Bucket, norm: str | None) -> None:
        strategy = self.strategy
        reduced = self.reduced[bucket.index]
        gradient = updated_view(draft, bucket, reduced.buffer, strategy)
        parameter = self.states[bucket.index].parameter
        outer, draft.prefix = draft.prefix, f"{draft.prefix}/{bucket.name}"
        after: tuple[Edge, ...] = (reduced.operation,)
        cast = None
        if strategy.precision.has_master:
            cast = draft.buffer(
                f"{bucket.name}/cast", gradient.size, strategy.precision.optimizer, Kind.WORKSPACE
            )
            draft.allocate(cast)
            draft.add(
                Copy(
                    id=draft.path("widen"),
                    stream=COMPUTE,
                    after=after,
                    source=gradient,
                    target=draft.all(cast),
                )
            )
            gradient, after = draft.all(cast), ()
            if strategy.precision is Precision.FP16:
                self._change(draft, Action.UNSCALE, gradient)
        if norm is not None:
            norm_reduced = f"{outer}/norm/reduce"
            self._change(draft, Action.CLIP, gradient, norm=norm, after=(*after, norm_reduced))
            after = ()
        updated = self._apply(draft, bucket, gradient, after)
        if cast is not None:
            draft.free(cast)
        assert updated == update_path(bucket, strategy)
        if strategy.stage in (1, 2):
            draft.add(
                AllGather(
                    id=draft.path("gather"),
                    stream=COMMUNICATION,
                    after=(updated,),
                    group=DATA,
                    source=own_view(draft, bucket, parameter),
                    target=draft.all(parameter),
                    wire=strategy.precision.compute,
                )
            )
        draft.free(reduced.buffer, (draft.path("update"),))
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

    def _apply(self, draft: Draft, bucket: Bucket, gradient: View, after: tuple[Edge, ...]) -> str:
        """Update the rank's parameters; the id of what writes them in the compute format."""
        strategy = self.strategy
        state = self.states[bucket.index]
        parameter = updated_view(draft, bucket, state.parameter, strategy)
        trained = Operand(role=Role.PARAMETER, view=parameter)
        if state.master is not None:
            trained = Operand(role=Role.MASTER, view=draft.all(state.master))
        moments = state.moments
        adam = isinstance(strategy.optimizer, Adam)
        updated = draft.add(
            Compute(
                id=draft.path("update"),
                stream=COMPUTE,
                after=after,
                action=Action.UPDATE,
                operands=(
                    Operand(role=Role.GRADIENT, view=gradient),
                    trained,
                    *(Operand(role=Role.MOMENT, view=draft.all(moment)) for moment in moments),
                ),
                kernels=(
                    self._kernel(gradient.size, reads=2 + len(moments), writes=1 + len(moments)),
                ),
                scalars=(STEP,) if adam else (),
                rule=strategy.optimizer,
            )
        )
        if state.master is None:
            return updated
        return draft.add(
            Copy(id=draft.path("cast"), stream=COMPUTE, source=trained.view, target=parameter)
        )

    def _kernel(self, elements: int, *, reads: int, writes: int) -> Kernel:
        dtype: DType = self.strategy.precision.optimizer
        streams = reads + writes
        return Kernel(
            kind=KernelKind.ELEMENTWISE,
            flops=elements * (ADAM_FLOPS if streams > 3 else 2),
            bytes=elements * streams * dtype.size_bytes,
            dtype=dtype,
        )
