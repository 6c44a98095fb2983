"""DeepSpeed without ZeRO: whole states on every rank, gradients all-reduced after backward.

With fp16 and bf16, `FP16_Optimizer` keeps flat fp32 masters (`_do_optimizer_sanity_check` chooses
it for bf16 as well, DDP_BFLOAT16); with fp32 the optimizer is not wrapped. Gradients accumulate in
`.grad`, in the dtype of the model. At the boundary of accumulation they are flattened into buckets
of a fixed size, divided, all-reduced and copied back, one bucket after the other.
`reduce_bucket_size` and `overlap_comm` have no effect.

Functions named in comments are from `runtime/engine.py` in DeepSpeed 0.19, if not marked.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from zsim.model.model import Model, ModelError, Parameter
from zsim.schedule.operation import View
from zsim.schedule.operation_list import COMPUTE
from zsim.schedule.schedule import Kind, Schedule
from zsim.schedule.schedule_writer import ScheduleWriter
from zsim.strategy.optimizer_rule import name_of
from zsim.strategy.precision import Precision
from zsim.strategy.strategy import Strategy
from zsim.zero.bucket import Bucket, Buckets, frozen_groups, numbered, one_after_the_other
from zsim.zero.names import DATA
from zsim.zero.reduce import UnitsLeft, copy_run
from zsim.zero.state import Holding, Reduced
from zsim.zero.step_skeleton import Step
from zsim.zero.updated_tensor import UpdatedTensor
from zsim.zero.visit_order import UnitVisit
from zsim_runtimes.deepspeed.checkpoint_engine import checkpoint_streams, move_checkpoints
from zsim_runtimes.deepspeed.options import DeepSpeed
from zsim_runtimes.deepspeed.stage_0_volume import BUCKET_ELEMENTS, VOLUME
from zsim_runtimes.late_frees import worst_case
from zsim_runtimes.replicated import LocalOptimizerStep, whole


def need(strategy: Strategy) -> None:
    """Raise ModelError if DeepSpeed refuses the precision in stage 0.

    Raises:
        ModelError: masters would be in bf16, which only ZeRO has, or the optimizer has 8-bit states
            and another wrapper.
    """
    if strategy.zero.stage:
        return
    if strategy.train.optimizer.quantized and strategy.train.precision.has_master:
        kind = name_of(strategy.train.optimizer)
        raise ModelError(
            f"train.optimizer: {kind} with zero.stage 0 is wrapped by FP16_UnfusedOptimizer, "
            "which is not modelled; say zero.emulate = ddp"
        )
    if strategy.train.precision is Precision.PURE_BF16:
        raise ModelError(
            'train.precision: "pure_bf16" needs zero.stage 1, 2 or 3 with DeepSpeed; say bf16'
        )


def schedule(model: Model, strategy: Strategy) -> Schedule:
    """Return the schedule of DeepSpeed training `model` without ZeRO.

    Raises:
        ModelError: the precision is refused, the model was built for other parallel degrees, or a
            checkpoint cannot be partitioned.
    """
    need(strategy)
    step = Stage0Step(model, strategy, by_unit(model))
    step.write()
    copies = checkpoint_streams(strategy)
    return step.schedule(
        "DeepSpeed stage 0",
        VOLUME,
        streams=(COMPUTE, *copies),
        peak_of=worst_case if copies else None,
    )


def by_unit(model: Model) -> Buckets:
    """Return buckets: trained parameters by unit, each shared parameter alone, frozen ones."""
    users: dict[str, list[int]] = {}
    for index, unit in enumerate(model.units):
        for parameter in unit.parameters:
            users.setdefault(parameter.name, []).append(index)
    groups: dict[int | str, list[Parameter]] = {}
    for parameter in model.parameters:
        units = users[parameter.name]
        key = units[0] if len(units) == 1 else parameter.name
        if not parameter.frozen:
            groups.setdefault(key, []).append(parameter)
    every = [*groups.values(), *frozen_groups(model)]
    return whole(numbered(model, every, place=one_after_the_other(1), ranks=1))


@dataclass(frozen=True, slots=True)
class BucketPart:
    """A part of a unit's gradients in one reduced bucket, `pieces` parameters."""

    flat: Bucket
    start: int
    size: int
    pieces: int


class Stage0Step(Step):
    """Forward and backward of every micro-batch, the all-reduces, and the update."""

    def __init__(self, model: Model, strategy: Strategy, buckets: Buckets) -> None:
        precision = strategy.train.precision
        holding = Holding(
            parameter=precision.compute,
            optimizer_sharded=False,
            has_master=precision.has_master,
        )
        super().__init__(model, strategy, buckets, holding)
        self.optimizer_step = FlatOptimizerStep if precision.has_master else LocalOptimizerStep
        self.options = strategy.options(DeepSpeed)
        move_checkpoints(self)
        self._left = UnitsLeft(buckets)
        self._copied: dict[int, str] = {}

    def forward(self, visit: UnitVisit) -> None:
        """Run a unit forward."""
        self.passes.checkpoints.enter(visit)  # CheckpointFunction.forward
        self.passes.forward(visit, ())

    def backward(self, visit: UnitVisit) -> None:
        """Run a unit backward; autograd adds its gradients to `.grad`."""
        self.passes.checkpoints.enter(visit)  # CheckpointFunction.backward
        self.passes.backward(visit, ())
        if visit.only_recomputes:
            return
        for position, run in self.buckets.trained_runs(visit.unit):
            flat, source = self.buckets.all[run.bucket], self.passes.transient(visit.unit, position)
            target = self._gradient(flat)
            adds = target in self.writer.alive
            if not adds:
                self.writer.allocate(target)
            self._copied[flat.index] = copy_run(
                self.writer,
                f"{'add' if adds else 'set'}/{source}",
                run,
                source=source,
                target=target,
                accumulate=adds,
                divisor=self.strategy.train.gradient_accumulation_steps,
                launches=len(run.trained) if adds else 0,  # AccumulateGrad takes over the first
            )
            self.writer.free(source)

    def _gradient(self, flat: Bucket) -> str:
        """Return the buffer of a unit's `.grad`."""
        return flat.buffer(
            self.writer, "gradient", self.strategy.train.precision.compute, Kind.GRADIENT
        )

    def end(self) -> None:
        """All-reduce all gradients, and update."""
        for number, parts in enumerate(self._parts()):  # allreduce_no_retain
            self._all_reduce(number, parts)
        reduced = {
            flat.index: Reduced(self._gradient(flat), self._copied[flat.index])
            for flat in self.buckets.trained
        }
        self.update(reduced, after=(), stream=COMPUTE)

    def _parts(self) -> Iterator[list[BucketPart]]:
        """Yield the parts of each bucket, which closes when it exceeds `BUCKET_ELEMENTS`."""
        found: list[BucketPart] = []
        filled = 0
        for flat in self.buckets.trained:
            start = pieces = size = 0
            for piece in flat.layout.pieces:
                size, pieces, filled = size + piece.size, pieces + 1, filled + piece.size
                if filled > BUCKET_ELEMENTS:
                    yield [*found, BucketPart(flat, start, size, pieces)]
                    found, filled, start = [], 0, start + size
                    size = pieces = 0
            if size:
                found.append(BucketPart(flat, start, size, pieces))
        if found:
            yield found

    def _all_reduce(self, number: int, parts: Sequence[BucketPart]) -> None:
        """Flatten, divide, all-reduce and copy back the gradients of a bucket."""
        # allreduce_bucket, allreduce_and_copy: all on the current stream
        writer, compute = self.writer, self.strategy.train.precision.compute
        elements, ranks = sum(part.size for part in parts), self.strategy.replicas
        bucket = writer.buffer(f"bucket{number}", elements, compute, Kind.COMMUNICATION)
        writer.allocate(bucket)
        offset = 0
        for part in parts:
            target = View(buffer=bucket, start=offset, size=part.size)
            writer.copy(f"flatten{number}/{part.flat.name}", self._view(part), target)
            offset += part.size
        source, wire = bucket, self.options.communication_data_type or compute
        if wire is not compute:
            source = writer.buffer(f"wire{number}", elements, wire, Kind.COMMUNICATION)
            writer.allocate(source)
            writer.copy(f"cast{number}", bucket, source)
        if ranks > 1:
            writer.copy(f"divide{number}", source, source, divisor=ranks)
        writer.all_reduce(f"reduce{number}", DATA, source, stream=COMPUTE)
        if source != bucket:
            writer.copy(f"back{number}", source, bucket)
            writer.free(source)
        offset = 0
        for part in parts:
            self._copied[part.flat.index] = writer.copy(
                f"unflatten{number}/{part.flat.name}",
                View(buffer=bucket, start=offset, size=part.size),
                self._view(part),
                launches=part.pieces,
            )
            offset += part.size
        writer.free(bucket)

    def _view(self, part: BucketPart) -> View:
        return View(buffer=self._gradient(part.flat), start=part.start, size=part.size)


class FlatOptimizerStep(LocalOptimizerStep):
    """`FP16_Optimizer`: flat fp32 gradients, a norm with or without clipping, and the update."""

    def _update(self, writer: ScheduleWriter) -> None:
        self.tensors = self._flattened(writer)
        super()._update(writer)

    def _flattened(self, writer: ScheduleWriter) -> list[UpdatedTensor]:
        """Cast all gradients, concatenate the casts, and free both; return the new tensors."""
        # step (runtime/fp16/fused_optimizer.py): `_flatten_dense_tensors([p.grad.to(...), ...])`,
        # then `p.grad = None`
        optimizer, casts = self.strategy.train.precision.optimizer, list[str]()
        for item in self.tensors:
            name, size, layout = f"{item.name}/wide", item.gradient.size, item.layout.name
            writer.buffer(name, size, optimizer, Kind.WORKSPACE, layout=layout)
            writer.allocate(name)
            pieces = len(item.layout.pieces)
            writer.copy(f"widen/{item.name}", item.gradient, name, launches=pieces)
            casts.append(name)
        found: list[UpdatedTensor] = []
        for item, cast in zip(self.tensors, casts, strict=True):
            name, size, layout = f"{item.name}/flat", item.gradient.size, item.layout.name
            writer.buffer(name, size, optimizer, Kind.GRADIENT, layout=layout)
            writer.allocate(name)
            writer.copy(f"flatten/{item.name}", cast, name)
            view = writer.all(name)
            found.append(replace(item, gradient=view, measured=view, after=()))
        writer.free(*casts, *(item.gradient.buffer for item in self.tensors))
        return found

    def norm(self, writer: ScheduleWriter) -> str | None:
        """Return the buffer of the norm, which is taken in any case; None without clipping."""
        # get_flattened_grad_norm
        self._measure_norm(writer, "norm", self.tensors)
        if self.strategy.train.clip_norm is None:
            writer.free("norm", uses=(writer.path(self.norm_ready),))
            return None
        return "norm"

    def casts(self, item: UpdatedTensor, /) -> int:
        """Return one launch for each parameter, which is a view of the flat tensor."""
        return max(1, len(item.layout.pieces))
