"""The end of a step: overflow test, clipping, and the update of a rank's parameters.

The order of arithmetic is that of mixed-precision runtimes: gradients are tested and measured as
reduced (scaled, with fp16), cast to the optimizer's dtype, unscaled, clipped, then applied.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace as replaced

from msgspec.structs import replace

from zsim.dtype import DType
from zsim.model.kernel import Kernel, KernelKind
from zsim.schedule.layout import Layout
from zsim.schedule.operation import Action, Edge, Operand, Reduction, Role, View
from zsim.schedule.operation_list import COMMUNICATION, COMPUTE
from zsim.schedule.schedule import Kind
from zsim.schedule.schedule_writer import POOL, ScheduleWriter
from zsim.strategy.optimizer_rule import SCALE_BYTES, ClipNorm, scale_elements
from zsim.strategy.precision import Precision
from zsim.strategy.strategy import Strategy
from zsim.zero.assemble import replica_group
from zsim.zero.names import WORLD
from zsim.zero.parameter_groups import RuledPart, ruled
from zsim.zero.state import GOOD_STEPS, LOSS_SCALE, SKIPPED_STEPS, STEP
from zsim.zero.updated_tensor import UpdatedTensor

SCALED_PASSES = 9
"""fp32 reads and writes for each element of a scaled state, not counting the state itself: cast
1, unscaled 2, updated 2, measured 1, scaled 2, cast back 1."""


def _of(part: RuledPart, operand: Operand, layout: Layout, writer: ScheduleWriter) -> Operand:
    """Return the part of `operand` that belongs to `part` of the whole tensor."""
    if part.size == layout.elements:
        return operand
    view = part.part(writer.buffers[operand.view.buffer], operand.view, layout)
    return replace(operand, view=view)


Updated = Callable[[ScheduleWriter, UpdatedTensor, str], None]
"""Called after the update of a tensor: the writer, the tensor, the operation that wrote it."""


def nothing(_writer: ScheduleWriter, _item: UpdatedTensor, _operation: str) -> None:
    """Write nothing after an update."""


class OptimizerStep:
    """Writes the operations after the last backward of a step.

    Args:
        writer: the schedule writer.
        strategy: sets the optimizer, clipping and loss scaling.
        tensors: every tensor that a rank updates, in order.
        after: edges to the operations that complete all gradients.
        updated: called after each update.
        stream: reduces the overflow flag and the norm.

    Attributes:
        processor: the stream on which gradients are measured and updates computed.
        pool: memory pool of workspaces.
        number_home: the stream that first writes a number which is reduced over ranks.
        norm_ready: the operation that makes the norm available for clipping.
        overflow_ready: the operation that makes the overflow flag available.
    """

    processor = COMPUTE
    pool = POOL
    number_home = COMPUTE
    norm_ready = "norm/reduce"
    overflow_ready = "overflow/reduce"

    def __init__(
        self,
        writer: ScheduleWriter,
        strategy: Strategy,
        tensors: Sequence[UpdatedTensor],
        *,
        after: tuple[Edge, ...],
        updated: Updated = nothing,
        stream: str = COMMUNICATION,
    ) -> None:
        self.writer = writer
        self.strategy = strategy
        self.tensors = tensors
        self.after = after
        self.updated = updated
        self.stream = stream
        self.kept = strategy.kept_formats
        self.begin()

    def begin(self) -> None:
        """Prepare the state of a subclass; does nothing here."""

    def write(self) -> None:
        """Write the step; with fp16, all of it is in a branch on the overflow flag."""
        writer = self.writer
        writer.prefix = "step/update"
        if self.strategy.train.precision is not Precision.FP16:
            self._update(writer)
            return
        flag = self._one_number("overflow")
        writer.allocate(flag)
        self.measure(writer, Action.FINITE, flag, Reduction.MAX, trained=self.tensors, group=WORLD)
        skip, go_on = writer.fork("step/skip"), writer.fork("step/update")
        self.skip_update(skip)
        self._update(go_on)
        reduced = (writer.path(self.overflow_ready),)
        writer.branch("branch", flag, skip, go_on, after=reduced)
        assert skip.alive == go_on.alive
        writer.join(skip)
        writer.join(go_on)
        writer.free(flag, uses=reduced)

    def _one_number(self, name: str) -> str:
        dtype = self.strategy.train.precision.optimizer
        return self.writer.buffer(name, 1, dtype, Kind.WORKSPACE, home=self.number_home)

    def measure(
        self,
        writer: ScheduleWriter,
        action: Action,
        target: str,
        reduction: Reduction,
        *,
        trained: Sequence[UpdatedTensor],
        group: str,
    ) -> None:
        """Reduce one number over the gradients of `trained`, then over all ranks of `group`."""
        measured = self.measured(writer, action, target, target, trained=trained)
        path, after = f"{target}/reduce", (measured,)
        writer.all_reduce(path, group, target, reduction=reduction, stream=self.stream, after=after)

    def measured(
        self,
        writer: ScheduleWriter,
        action: Action,
        name: str,
        target: str,
        *,
        trained: Sequence[UpdatedTensor],
    ) -> str:
        """Measure the gradients of `trained` on this rank, and write the number to `target`."""
        operands = [(Role.GRADIENT, item.measured) for item in trained]
        elements = sum(item.measured.size for item in trained)
        layouts = [item.layout for item in trained]
        return writer.compute(
            f"{name}/measure",
            action,
            [*operands, (Role.OUTPUT, writer.all(target))],
            stream=self.processor,
            after=self.after,
            kernels=self.kernels(elements, layouts, reads=1, writes=0),
        )

    def measured_by(self, _item: UpdatedTensor, /) -> str:
        """Return the operation that tests the gradient of a tensor for overflow."""
        return "step/update/overflow/measure"

    def completed(self, writer: ScheduleWriter) -> None:
        """Write operations after the update of the last tensor; nothing here."""

    def skipped(self, writer: ScheduleWriter) -> None:
        """Write further operations of a step without an update; nothing here."""

    def skip_update(self, writer: ScheduleWriter) -> None:
        """Skip the update because gradients overflowed: free them and lower the loss scale."""
        for item in self.tensors:
            if not item.keeps_gradient:
                writer.free(item.gradient.buffer, uses=(self.measured_by(item),))
        self.skipped(writer)
        scale = self.strategy.train.loss_scale
        writer.set_scalar(LOSS_SCALE, LOSS_SCALE, multiply=scale.backoff, minimum=scale.minimum)
        writer.set_scalar(GOOD_STEPS, GOOD_STEPS, multiply=0.0)
        writer.set_scalar(SKIPPED_STEPS, SKIPPED_STEPS, add=1.0)

    def _update(self, writer: ScheduleWriter) -> None:
        writer.set_scalar(STEP, STEP, add=1.0)
        norm = self.norm(writer)
        for item in self.tensors:
            self.update_one(writer, item, norm)
        self.completed(writer)
        if norm is not None:
            writer.free(norm, uses=(writer.path(self.norm_ready),))
        self.grow(writer)

    def grow(self, writer: ScheduleWriter) -> None:
        """Count a step without overflow, which may raise the loss scale."""
        if self.strategy.train.precision is Precision.FP16:
            scale = self.strategy.train.loss_scale
            writer.set_scalar(GOOD_STEPS, GOOD_STEPS, add=1.0)
            writer.set_scalar(
                LOSS_SCALE,
                LOSS_SCALE,
                multiply=scale.growth,
                counter=GOOD_STEPS,
                every=scale.interval,
            )

    def norm(self, writer: ScheduleWriter) -> str | None:
        """Return the buffer of the squared norm, made by `norm/reduce`; None without clipping."""
        if self.strategy.train.clip_norm is None:
            return None
        self._measure_norm(writer, "norm", self.tensors)
        return "norm"

    def _measure_norm(
        self, writer: ScheduleWriter, name: str, trained: Sequence[UpdatedTensor]
    ) -> None:
        """Write the squared norm of the gradients of `trained` to a buffer called `name`."""
        writer.allocate(self._one_number(name))
        group = replica_group(self.strategy)
        self.measure(writer, Action.NORM, name, Reduction.SUM, trained=trained, group=group)

    def update_one(self, writer: ScheduleWriter, item: UpdatedTensor, norm: str | None) -> None:
        """Update a tensor, then write the operations that follow its update."""
        updated = self.apply_one(writer, item, norm)
        outer, writer.prefix = writer.prefix, f"{writer.prefix}/{item.name}"
        self.finish_one(writer, item, updated)
        writer.prefix = outer

    def apply_one(self, writer: ScheduleWriter, item: UpdatedTensor, norm: str | None) -> str:
        """Cast, unscale, clip and apply the gradient of a tensor; return the last operation."""
        optimizer = self.kept.gradient
        gradient, after = item.gradient, item.after
        outer, writer.prefix = writer.prefix, f"{writer.prefix}/{item.name}"
        cast = None
        if writer.buffers[gradient.buffer].dtype is not optimizer:
            held = writer.buffers[gradient.buffer]
            is_held = gradient.axis is not None or gradient == writer.all(held.name)
            cast = writer.buffer(
                f"{item.name}/cast",
                gradient.size,
                optimizer,
                Kind.WORKSPACE,
                pool=self.pool,
                home=self.processor,
                layout=held.layout if is_held else None,
                shard=(gradient.axis or held.shard) if is_held else None,
            )
            writer.allocate(cast)
            writer.copy("widen", gradient, cast, stream=self.processor, after=after)
            gradient, after = writer.all(cast), ()
        if self.strategy.train.precision is Precision.FP16:
            self._change(writer, Action.UNSCALE, gradient, item.layout, after=after)
            after = ()
        if norm is not None:
            ready = (*after, f"step/update/{self.norm_ready}")
            self._change(writer, Action.CLIP, gradient, item.layout, norm=norm, after=ready)
            after = ()
        updated = self._apply(writer, item, gradient, after)
        if cast is not None:
            writer.free(cast)
        writer.prefix = outer
        return updated

    def finish_one(self, writer: ScheduleWriter, item: UpdatedTensor, updated: str) -> None:
        """Write the operations after the update of a tensor; `updated` is its last operation."""
        self.updated(writer, item, updated)
        if not item.keeps_gradient:
            writer.free(item.gradient.buffer, uses=(writer.path("update"),))

    def _change(
        self,
        writer: ScheduleWriter,
        action: Action,
        gradient: View,
        layout: Layout,
        *,
        norm: str | None = None,
        after: tuple[Edge, ...] = (),
    ) -> None:
        """Unscale or clip a gradient in place."""
        strategy = self.strategy
        operands = [(Role.GRADIENT, gradient)]
        rule = None
        if norm is not None:
            assert strategy.train.clip_norm is not None
            operands.insert(0, (Role.INPUT, writer.all(norm)))
            rule = ClipNorm(maximum=strategy.train.clip_norm)
        writer.compute(
            str(action),
            action,
            operands,
            stream=self.processor,
            after=after,
            kernels=self.kernels(gradient.size, [layout], reads=1, writes=1),
            scalars=(LOSS_SCALE,) if strategy.train.precision is Precision.FP16 else (),
            rule=rule,
        )

    def _apply(
        self, writer: ScheduleWriter, item: UpdatedTensor, gradient: View, after: tuple[Edge, ...]
    ) -> str:
        """Update the rank's parameters; return the operation that writes the compute dtype."""
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
            updated = writer.compute(
                "update" if last else f"update/{part.start}",
                Action.UPDATE,
                [_of(part, each, item.layout, writer) for each in operands],
                stream=self.processor,
                after=() if updated else after,
                kernels=self.update_kernels(part, gradient, item),
                scalars=(STEP,) if part.rule.counts_steps else (),
                rule=part.rule,
            )
        if item.master is None:
            return updated
        return writer.copy(
            "cast",
            trained.view,
            item.parameter,
            launches=self.casts(item),
            stream=self.processor,
        )

    def casts(self, _item: UpdatedTensor, /) -> int:
        """Return the number of kernel launches that cast a tensor's masters to its parameters."""
        return 1

    def update_kernels(
        self, part: RuledPart, gradient: View, item: UpdatedTensor
    ) -> tuple[Kernel, ...]:
        """Return the kernels that update a part, for the mean number of elements over ranks."""
        moments = len(item.moments)
        if part.rule.quantized:
            return self._quantized_kernels(part, gradient, item)
        made = self.kernels(
            -(-gradient.size * part.size // max(1, item.layout.elements)),
            [item.layout],
            reads=2 + moments,
            writes=1 + moments,
            each=part.rule.flops,
        )
        if self.strategy.keeps_plain_states:
            return made
        return tuple(map(self._in_kept_formats, made))

    def _in_kept_formats(self, kernel: Kernel) -> Kernel:
        """Return an update kernel that reads and writes states in their own formats.

        Scaled states (fp16 and fp8) are in fp32 while they are updated: they are cast, multiplied
        by their scale, and after the update measured, multiplied and cast back, each in a pass
        (`get_unscaled_state` and `_apply_scale` of Transformer Engine, optimizers/fused_adam.py).
        """
        kept, wide = self.kept, self.strategy.train.precision.optimizer
        states = (kept.master, *kept.moments)
        moments = len(states)
        elements = kernel.bytes // ((1 + 2 * moments) * wide.size_bytes)
        moved = kept.gradient.size_bytes + sum(2 * each.size_bytes for each in states)
        for each in states:
            if each in (DType.FP16, DType.FP8) and each is not wide:
                moved += SCALED_PASSES * wide.size_bytes
        return replaced(kernel, bytes=elements * moved)

    def _quantized_kernels(
        self, part: RuledPart, gradient: View, item: UpdatedTensor
    ) -> tuple[Kernel, ...]:
        """Return one kernel for each parameter of a part, whose moments are bytes with scales."""
        dtype, moments = self.strategy.train.precision.optimizer, len(item.moments)
        end, whole = part.start + part.size, max(1, item.layout.elements)
        found: list[Kernel] = []
        for piece in item.layout.pieces:
            if part.start <= piece.start < end and piece.size:
                elements = -(-gradient.size * piece.size // whole)
                moved = elements + SCALE_BYTES * scale_elements([elements])
                found.append(
                    Kernel(
                        kind=KernelKind.ELEMENTWISE,
                        flops=elements * part.rule.flops,
                        bytes=3 * elements * dtype.size_bytes + 2 * moments * moved,
                        dtype=dtype,
                    )
                )
        return tuple(found)

    def kernels(
        self,
        elements: int,
        layouts: Sequence[Layout],
        *,
        reads: int,
        writes: int,
        each: int = 2,
    ) -> tuple[Kernel, ...]:
        """Return the elementwise kernels over `elements` of tensors with these layouts: one."""
        del layouts
        return (self.kernel(elements, reads=reads, writes=writes, each=each),)

    def kernel(self, elements: int, *, reads: int, writes: int, each: int = 2) -> Kernel:
        """Return one kernel over `elements`."""
        dtype = self.strategy.train.precision.optimizer
        return Kernel(
            kind=KernelKind.ELEMENTWISE,
            flops=elements * each,
            bytes=elements * (reads + writes) * dtype.size_bytes,
            dtype=dtype,
        )
