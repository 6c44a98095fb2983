"""nanotron's data parallelism and ZeRO-1: whole gradients in fp32, reduced once a step.

Every rank holds all parameters in the forward's data type, and an fp32 gradient buffer of the same
shape for the whole training. Autograd's own gradients live until the end of each backward, and are
then added to that buffer.

With several replicas and without ZeRO, PyTorch's DistributedDataParallel wraps the model. Its
buckets are persistent, too. In the last micro-batch each gradient is copied into its bucket as soon
as it is ready; a hook adds a full bucket to the fp32 buffer and all-reduces that part.

With ZeRO-1 the model is not wrapped. The whole buffer is all-reduced at once after the last
backward, without overlap. Then each rank updates its part of each parameter, and gathers the other
parts once all are updated.

Functions named in comments are those of `src/nanotron` in February 2025 (0e0a27ea).
"""

from collections import Counter

from zsim.dtype import DType
from zsim.model.model import Model, Parameter
from zsim.schedule.operation import Reduction, StreamOperation
from zsim.schedule.operation_list import COMPUTE
from zsim.schedule.schedule import Kind, Schedule
from zsim.schedule.schedule_writer import ScheduleWriter
from zsim.strategy.strategy import Strategy
from zsim.zero.assemble import need_single_calls
from zsim.zero.bucket import Bucket, Buckets, numbered, one_after_the_other
from zsim.zero.names import DATA, TENSOR
from zsim.zero.reduce import UnitsLeft, copy_run
from zsim.zero.state import Holding, Reduced, persist_zeros
from zsim.zero.step_skeleton import Step
from zsim.zero.updated_tensor import UpdatedTensor
from zsim.zero.visit_order import UnitVisit
from zsim_runtimes.nanotron.lists import Lists
from zsim_runtimes.nanotron.options import MIB, Nanotron
from zsim_runtimes.nanotron.update import EachParameter
from zsim_runtimes.nanotron.volume import VOLUME


def schedule(model: Model, strategy: Strategy) -> Schedule:
    """Return nanotron's schedule to train `model` on `strategy.parallel.data` ranks.

    Raises:
        ModelError: the model was resolved for another tensor degree, or a checkpoint cannot be
            partitioned.
    """
    need_single_calls(model, "nanotron")
    step = NanotronStep(model, strategy, filled(model, strategy))
    step.write()
    return step.schedule(f"nanotron, ZeRO-{strategy.zero.stage}", VOLUME)


def filled(model: Model, strategy: Strategy, *, name: str = "bucket") -> Buckets:
    """Return the gradient buckets of `model`, with `name` as prefix of their names."""
    # ZeroDistributedOptimizer._partition_parameters (optim/zero.py): equal parts of each parameter
    place = one_after_the_other(strategy.parallel.data)
    return numbered(
        model, groups(model, strategy), place=place, ranks=strategy.parallel.data, name=name
    )


def groups(model: Model, strategy: Strategy) -> list[list[Parameter]]:
    """Return the parameters of each bucket, from the model's last parameter to the first.

    A parameter that several units use gets a separate bucket, complete after its last use. Without
    DistributedDataParallel all other parameters share one bucket. Parameters whose copies are
    summed over the tensor axis share the last bucket.
    """
    # DistributedTrainer._init_model (trainer.py) gives `ddp_bucket_cap_mb` to DDP, which closes a
    # bucket before it would exceed it. FP32GradientAccumulator.build_grad_buffers
    # (optim/gradient_accumulator.py): all gradients lie in one buffer.
    cap = strategy.options(Nanotron).ddp_bucket_cap_mb
    limit = cap * MIB // strategy.train.precision.compute.size_bytes
    cut = is_wrapped(strategy)
    apart = model.summed_copies
    uses = Counter(parameter.name for unit in model.units for parameter in unit.parameters)
    tied = [[each] for each in model.parameters if uses[each.name] > 1]
    found: list[list[Parameter]] = [[]]
    size = 0
    for parameter in reversed(model.parameters):
        if parameter.name in apart or uses[parameter.name] > 1:
            continue
        if cut and size and size + parameter.elements > limit:
            found.append([])
            size = 0
        found[-1].append(parameter)
        size += parameter.elements
    together = [each for each in model.parameters if each.name in apart]
    return [group for group in (*tied, *found, together) if group]


def is_wrapped(strategy: Strategy) -> bool:
    """Return True if DistributedDataParallel wraps the model."""
    # DistributedTrainer._init_model (trainer.py): `make_ddp`, without which
    # sync_gradients_across_dp reduces the whole buffer; gradients are always collected in fp32 here
    return strategy.parallel.data > 1 and strategy.zero.stage == 0


class NanotronStep(Step):
    """Forward and backward of every micro-batch, then the update."""

    optimizer_step = EachParameter

    def __init__(
        self,
        model: Model,
        strategy: Strategy,
        buckets: Buckets,
        *,
        writer: ScheduleWriter | None = None,
    ) -> None:
        # helpers.init_optimizer_and_grad_accumulator: fp32 masters of FP32GradientAccumulator, of
        # a rank's own parts in ZeroDistributedOptimizer
        precision = strategy.train.precision
        holding = Holding(
            parameter=precision.compute,
            optimizer_sharded=strategy.zero.stage == 1,
            has_master=precision.has_master,
        )
        super().__init__(model, strategy, buckets, holding, writer=writer)
        self.lists = Lists(self)
        self.wrapped = is_wrapped(strategy)
        self.shared = model.summed_copies
        self._left = UnitsLeft(buckets)
        self._written = [""] * len(buckets.all)
        self._gradients: dict[int, str] = {}

    def write_setup(self) -> None:
        """Allocate the persistent gradient buffers and buckets."""
        for bucket in self.buckets.all:
            self.writer.prefix = f"setup/{bucket.name}"
            for name in (
                self._gradient(bucket),
                *([self._staging(bucket)] if self.wrapped else []),
            ):
                persist_zeros(self.writer, name, name)

    def _gradient(self, bucket: Bucket) -> str:
        # FP32GradientAccumulator.build_grad_buffers (optim/gradient_accumulator.py): whole, in fp32
        known = self._gradients.get(bucket.index)
        if known is None:
            known = bucket.buffer(self.writer, "gradient", DType.FP32, Kind.GRADIENT)
            self._gradients[bucket.index] = known
        return known

    def _staging(self, bucket: Bucket) -> str:
        """Return the buffer of DistributedDataParallel's bucket."""
        return bucket.buffer(
            self.writer, "staging", self.strategy.train.precision.compute, Kind.GRADIENT
        )

    def begin(self) -> None:
        """Zero the buffers of gradients."""
        # as FP32GradientAccumulator.zero_grad in optim/gradient_accumulator.py does
        self.writer.prefix = "step"
        for bucket in self.buckets.all:
            self.writer.fill(f"zero/{self._gradient(bucket)}", self._gradient(bucket), 0.0)

    def backward(self, visit: UnitVisit) -> None:
        """Run the backward of a unit; in the last micro-batch also reduce its gradients."""
        self.passes.backward(visit, ())
        # PipelineEngine._get_bwd_context (parallel/pipeline_parallel/engine.py): DDP's buckets are
        # used in the last backward alone (ddp_trigger_sync_in_bwd)
        if self.is_last and self.wrapped:
            self._stage(visit.unit)

    def _stage(self, unit: int) -> None:
        """Copy the gradients of a unit into DDP's buckets; reduce complete buckets."""
        # get_fp32_accum_hook (optim/gradient_accumulator.py), called for each bucket that is ready
        writer = self.writer
        for position, run in self.buckets.trained_runs(unit):
            bucket = self.buckets.all[run.bucket]
            source, staging = self.passes.transient(unit, position), self._staging(bucket)
            tied = len(bucket.layout.pieces) == 1
            copy_run(
                writer,
                f"stage/{source}",
                run,
                source=source,
                target=staging,
                accumulate=tied and not self._left.is_first(run.bucket),
                launches=len(run.parameters),
            )
            if self._left.complete(run.bucket):
                self._written[bucket.index] = writer.copy(
                    f"add/{staging}",
                    staging,
                    self._gradient(bucket),
                    accumulate=True,
                    divisor=self.strategy.train.gradient_accumulation_steps,
                    launches=len(bucket.layout.pieces),
                )
                if not self._is_shared(bucket):
                    self._reduce(bucket)

    def _is_shared(self, bucket: Bucket) -> bool:
        return any(piece.parameter in self.shared for piece in bucket.layout.pieces)

    def end_backward(self) -> None:
        """Add autograd's gradients to those in fp32, unless they are staged, and free them."""
        # FP32GradientAccumulator.backward calls _accumulate_grad in optim/gradient_accumulator.py
        writer, staged = self.writer, self.is_last and self.wrapped
        for unit in reversed(range(len(self.model.units))):
            writer.prefix = f"step/backward/mb{self.micro_batch}/{self.model.units[unit].name}"
            for position, run in self.buckets.trained_runs(unit):
                source = self.passes.transient(unit, position)
                if not staged:
                    self._written[run.bucket] = copy_run(
                        writer,
                        f"add/{source}",
                        run,
                        source=source,
                        target=self._gradient(self.buckets.all[run.bucket]),
                        divisor=self.strategy.train.gradient_accumulation_steps,
                        launches=len(run.parameters),
                    )
                writer.free(source)

    def _reduce(self, bucket: Bucket) -> None:
        """Average a bucket's fp32 gradients over the data axis, in place."""
        # distributed.all_reduce_coalesced in the hook, ReduceOp.AVG
        writer, written = self.writer, (self._written[bucket.index],)
        path = f"reduce/{bucket.name}"
        writer.all_reduce(
            f"{path}/member", DATA, self._gradient(bucket), reduction=Reduction.AVERAGE
        )
        self._written[bucket.index] = writer.together(path, 1, after=written)

    def end(self) -> None:
        """Reduce what is not reduced yet, sum copies over the tensor axis, then update."""
        if self.strategy.zero.stage == 1:
            self._reduce_all()
        for bucket in self.buckets.all:
            if not self._is_shared(bucket):
                continue
            # sync_tied_weights_gradients (parallel/tied_parameters.py), for parameters that
            # mark_unsharded_params_as_tied_across_tp (trainer.py) ties. Without ZeRO nanotron
            # reduces over the data axis first; both orders give the same result.
            path, after = f"sum/{bucket.name}", (self._written[bucket.index],)
            self._written[bucket.index] = self.writer.all_reduce(
                path, TENSOR, self._gradient(bucket), after=after
            )
            if self.wrapped:
                self._reduce(bucket)
        self._update()

    def _reduce_all(self) -> None:
        """Average all fp32 gradients over the data axis in one all-reduce, in place."""
        # as FP32GradientAccumulator.sync_gradients_across_dp in optim/gradient_accumulator.py does
        writer, after = self.writer, tuple(dict.fromkeys(self._written))
        for bucket in self.buckets.all:
            path = f"reduce/{bucket.name}"
            writer.all_reduce(path, DATA, self._gradient(bucket), reduction=Reduction.AVERAGE)
        if self.buckets.all:
            reduced = writer.together("reduce", len(self.buckets.all), after=after)
            self._written = [reduced] * len(self.buckets.all)

    def _update(self) -> None:
        strategy, trained = self.strategy, self.buckets.trained
        last = ""

        def updated(writer: ScheduleWriter, item: UpdatedTensor, operation: str) -> None:
            nonlocal last
            last = operation
            # ZeroDistributedOptimizer.step (optim/zero.py): _all_gather_params after all updates
            if strategy.zero.stage == 1 and item.name == trained[-1].name:
                last = self.lists.all_gather(writer, operation)

        reduced = {
            bucket.index: Reduced(self._gradient(bucket), self._written[bucket.index])
            for bucket in trained
        }
        after = tuple(dict.fromkeys(self._written))
        self.update(reduced, after=after, updated=updated, keeps_gradients=True)
        # DistributedTrainer.train_step_logs (trainer.py) reads the loss of every step
        # (`iteration_step_info_interval` is 1).
        if not last and strategy.train.clip_norm is not None:  # a stage without parameters
            last = f"{self.writer.prefix}/norm/reduce"
        self.writer.host_wait("host_wait", last or self.made())

    def made(self) -> str:
        """Return the id of the last operation issued on the compute stream."""
        return next(
            each.id
            for each in reversed(self.writer.operations)
            if isinstance(each, StreamOperation) and each.stream == COMPUTE
        )
