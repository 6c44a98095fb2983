"""Megatron-LM's data parallelism: whole parameters and gradients, whole or sharded optimizer state.

Parameters are in buckets in the reverse order of the model. Gradients of all micro-batches are
added to persistent buffers, and each bucket is reduced in place once a step. With the distributed
optimizer (stage 1), it is reduce-scattered (and all-reduced over the replicas, which are
`num_distributed_optimizer_instances`). Each of N ranks updates an N-th of each bucket, which is
then gathered in place: after the step, or bucket by bucket during the next forward. With
`allreduce_in_float32`, each bucket is all-reduced in fp32 instead, and a rank reads its N-th.
Without the distributed optimizer (stage 0), each bucket is all-reduced, and every rank updates all
of it. A rank still measures only its N-th for the norm; in Megatron-LM, every rank measures
everything. Megatron-LM has one allocation for all buckets of a dtype; here each bucket has a
separate one, of the same bytes.

Parameters of experts in a separate rank order (`allreduce = False`) have separate buckets. They are
reduced over the ranks that hold the same experts, and divided by all data ranks: the tokens of
other ranks have reached the experts already. With average_in_collective they are first multiplied
by the share of these ranks in the data ranks.

Functions named in comments are from `megatron/core` in August 2026 (d98e8a64);
`_ParamAndGradBucketGroup` is in `distributed/param_and_grad_buffer.py`, `DistributedDataParallel`
in `distributed/distributed_data_parallel.py`.
"""

from collections.abc import Sequence, Set
from math import lcm

from zsim.dtype import DType
from zsim.model.model import Model, Parameter
from zsim.schedule.layout import Layout, Piece
from zsim.schedule.operation import Edge, Previous, Reduction
from zsim.schedule.operation_list import COMMUNICATION, COMPUTE
from zsim.schedule.schedule import Kind, Schedule
from zsim.schedule.schedule_writer import ScheduleWriter
from zsim.strategy.execution import NarrowWeights
from zsim.strategy.strategy import Strategy
from zsim.zero.assemble import PeakOf
from zsim.zero.bucket import (
    Bucket,
    Buckets,
    ExpertPacking,
    Packed,
    Packing,
    numbered,
    one_after_the_other,
)
from zsim.zero.gather import gather_updated
from zsim.zero.names import DATA, EXPERT_DATA, REPLICATE, TENSOR
from zsim.zero.reduce import UnitsLeft, copy_run
from zsim.zero.state import Holding, Reduced, gather_path, own_view, persist_zeros, update_path
from zsim.zero.step_skeleton import Step
from zsim.zero.updated_tensor import UpdatedTensor
from zsim.zero.visit_order import UnitVisit
from zsim_runtimes.megatron.cast_weights import CastWeights, narrow_buckets
from zsim_runtimes.megatron.layers_on_host import OFFLOAD, OffloadedPasses
from zsim_runtimes.megatron.options import Megatron
from zsim_runtimes.megatron.volume import VOLUME

# pad_param_start and bucket_end_divisor in optimizer/param_layout.py
START = 64
"""Parameters start at multiples of this number of elements."""
END = 128
"""A bucket's size is a multiple of this and of the ranks."""


def schedule(
    model: Model,
    strategy: Strategy,
    *,
    kind: "type[MegatronStep] | None" = None,
    more_streams: tuple[str, ...] = (),
) -> Schedule:
    """Return the schedule of Megatron-LM training `model`, a step of a `kind`.

    Raises:
        ModelError: the model was built for other parallel degrees, or a checkpoint cannot be
            partitioned.
    """
    ranks, options = strategy.parallel.data, strategy.options(Megatron)
    members = groups(
        model,
        ranks,
        options,
        has_size=True,
        has_gaps=strategy.zero.stage == 1,
        apart=strategy.has_expert_order,
    )
    buckets = numbered(
        model, members, place=packing(strategy), ranks=ranks, experts=of_experts(strategy)
    )
    step = (kind or MegatronStep)(model, strategy, buckets, overlaps=options.overlap_grad_reduce)
    step.write()
    copies = (OFFLOAD,) if strategy.layers_on_host else ()
    streams = (COMPUTE, COMMUNICATION, *expert_streams(strategy), *copies, *more_streams)
    return step.schedule(
        title(strategy),
        VOLUME,
        streams=streams,
        layouts=step.layouts,
        peak_of=promised_peak(strategy),
    )


def promised_peak(strategy: Strategy) -> PeakOf | None:
    """Return the function of the peak if memory returns late; None for the writer's own."""
    # InputBuffer::accumulate of torch 2.13: gradients that a side stream reads are recorded
    execution = strategy.execution
    if not (execution.overlaps_shared or execution.merges_micro_batches):
        return None
    from zsim_runtimes.late_frees import worst_case  # noqa: PLC0415 (only late frees)

    return worst_case


def title(strategy: Strategy) -> str:
    """Return the name of the emulated optimizer or data parallelism."""
    return f"Megatron {'distributed optimizer' if strategy.zero.stage else 'data parallelism'}"


def groups(
    model: Model,
    ranks: int,
    options: Megatron,
    *,
    has_size: bool,
    has_gaps: bool,
    alone: Set[str] = frozenset(),
    apart: bool = False,
) -> list[list[Parameter]]:
    """Return the parameters of each bucket, from the last of the model to the first.

    With `has_size`, a bucket is closed at the size that the options set, counting the gaps before
    its parameters with `has_gaps`; otherwise there is one bucket. Parameters in `alone` have
    separate buckets. With `apart`, buckets of experts come after all others.
    """
    limit = options.bucket_elements(data=ranks) if has_size else None
    kinds: list[list[Parameter]] = [[*reversed(model.parameters)]]
    if apart:  # DistributedDataParallel.__init__: dense_params, expert_parallel_params
        kinds = [[each for each in kinds[0] if each.expert is expert] for expert in (False, True)]
    if options.fp8_param_gather:  # one buffer for each `param_dtype`
        kinds = [
            [each for each in kind if each.float8 is it] for kind in kinds for it in (True, False)
        ]
    return [
        group
        for kind in kinds
        for group in _groups(kind, limit, start=START if has_gaps else 1, alone=alone)
        if kind or not (apart or options.fp8_param_gather)
    ]


def _groups(
    parameters: Sequence[Parameter], limit: int | None, *, start: int, alone: Set[str]
) -> list[list[Parameter]]:
    """Return parameters in this order, in groups that are closed at the limit."""
    found: list[list[Parameter]] = [[]]
    end = 0
    # _compute_per_buffer_param_layout in optimizer/distrib_optimizer.py; without gaps
    # _compute_default_per_buffer_param_layout
    for parameter in parameters:
        # _does_param_require_new_bucket
        closed = any(each.name in alone for each in (parameter, *found[-1][-1:]))
        if found[-1] and (closed or (limit is not None and end >= limit)):
            found.append([])
            end = 0
        found[-1].append(parameter)
        end = -(-end // start) * start + parameter.elements
    return found


def packing(strategy: Strategy) -> Packing:
    """Return the packing of buckets, without gaps unless the optimizer is distributed."""
    ranks = strategy.parallel.data
    return aligned(ranks) if strategy.zero.stage else one_after_the_other(ranks)


def of_experts(strategy: Strategy) -> ExpertPacking | None:
    """Return the packing of buckets of experts; None if experts have no separate rank order."""
    return ExpertPacking.of(strategy, aligned if strategy.zero.stage else one_after_the_other)


def expert_streams(strategy: Strategy) -> tuple[str, ...]:
    """Return the stream of collectives of expert buckets: NCCL has one for each communicator."""
    return (EXPERT_DATA,) if strategy.has_expert_order else ()


def aligned(ranks: int) -> Packing:
    """Return a packing with starts at multiples of 64, its end at one of the ranks and of 128."""

    # pad_param_start and pad_bucket_end in optimizer/param_layout.py
    def place(parameters: Sequence[Parameter]) -> Packed:
        starts: list[int] = []
        end = 0
        for parameter in parameters:
            starts.append(-(-end // START) * START)
            end = starts[-1] + parameter.elements
        multiple = lcm(ranks, END)
        elements = -(-end // multiple) * multiple
        return Packed(starts=tuple(starts), elements=elements, alignment=multiple // ranks)

    return place


def stream_of(bucket: Bucket) -> str:
    """Return the stream of a bucket's collectives."""
    return COMMUNICATION if bucket.axis == DATA else EXPERT_DATA


def one_after_another(model: Model, name: str) -> Layout:
    """Return the layout of parameters whose gradients cover only a rank's own tokens, in order."""
    shared = model.summed_copies
    pieces: list[Piece] = []
    end = 0
    for each in model.parameters:
        if each.name in shared:
            pieces.append(Piece(parameter=each.name, start=end, size=each.elements))
            end += each.elements
    return Layout(name=name, pieces=tuple(pieces), elements=end)


class MegatronStep(Step):
    """Forward and backward of every micro-batch, then the update.

    Attributes:
        overlaps: True if buckets are reduced during the last backward.
        shards: True if a rank updates only its shard of each bucket.
        written: for each bucket, the last operation that wrote its gradients.
        gathered: for each bucket, the gather of its parameters, if it overlaps forward.
    """

    def __init__(
        self,
        model: Model,
        strategy: Strategy,
        buckets: Buckets,
        *,
        overlaps: bool,
        writer: ScheduleWriter | None = None,
    ) -> None:
        # DistributedOptimizer shards fp32 masters and moments; parameters stay whole
        # (_build_model_and_main_param_groups, optimizer/distrib_optimizer.py). The states of
        # Float16OptimizerWithFloat16Params (optimizer/optimizer.py) are whole.
        precision = strategy.train.precision
        weights, narrow = strategy.narrow_weights, narrow_buckets(model, buckets)
        holding = Holding(
            parameter=precision.compute,
            narrow_parameters=narrow if weights is NarrowWeights.KEPT else frozenset(),
            shards=narrow if weights is NarrowWeights.CAST_FROM_SHARDS else frozenset(),
            optimizer_sharded=strategy.zero.stage == 1,
            has_master=precision.has_master,
        )
        super().__init__(model, strategy, buckets, holding, writer=writer)
        if strategy.layers_on_host:
            self.passes = OffloadedPasses(
                self.writer, model, strategy, buckets=buckets, held=self.held
            )
        self.casts = CastWeights(
            self.writer, model, strategy, buckets=buckets.all, states=self.states
        )
        self.passes.elsewhere = self.casts.places
        self.overlaps = overlaps
        self.shards = strategy.zero.stage == 1
        self.options = strategy.options(Megatron)
        wire = DType.FP32 if self.options.grad_reduce_in_fp32 else precision.compute
        # _ParamAndGradBuffer: a gradient buffer as long as the parameters
        self.gradients = [
            bucket.buffer(self.writer, "gradient", wire, Kind.GRADIENT) for bucket in buckets.all
        ]
        mean = self.options.average_in_collective
        self._reduction = Reduction.AVERAGE if mean else Reduction.SUM
        place = f"{self.writer.role}/" if self.writer.box else ""
        self.copied = one_after_another(model, f"{place}sequence_parallel/gradient")
        self._left = UnitsLeft(buckets)
        self.written = [""] * len(buckets.all)
        self.gathered: dict[int, str] = {}
        self._waited: set[int] = set()

    @property
    def layouts(self) -> tuple[Layout, ...]:
        """Every layout of the buffers of this step."""
        copied = [self.copied] if self.copied.pieces else []
        return (*self.buckets.layouts, *self.casts.layouts, *copied)

    def write_setup(self) -> None:
        """Allocate persistent memory for gradients."""
        for bucket in self.buckets.all:
            self.writer.prefix = f"setup/{bucket.name}"
            persist_zeros(self.writer, self.gradients[bucket.index], "gradient")

    def begin(self) -> None:
        """Zero all gradients."""
        # DistributedDataParallel.zero_grad_buffer
        for bucket in self.buckets.all:
            self.writer.prefix = f"step/zero/{bucket.name}"
            self.writer.fill("zero/gradient", self.gradients[bucket.index], 0.0)

    def forward(self, visit: UnitVisit) -> None:
        """Run a unit forward once its parameters are gathered."""
        needed = {run.bucket: None for run in self.buckets.runs[visit.unit]}
        first = [bucket for bucket in needed if bucket not in self._waited]
        self._waited.update(first)
        self.passes.checkpoints.enter(visit)
        self.passes.forward(visit, self._arrivals(first))

    def _arrivals(self, first: Sequence[int]) -> tuple[Edge, ...]:
        """Return the edges that the first reads of buckets wait for; cast their weights."""
        found: list[Edge] = []
        for number in first:
            found += self.casts.write(self.buckets.all[number], (self.arrival(number),))
        return tuple(found)

    def arrival(self, number: int) -> Edge:
        """Return the edge that the first reads of a bucket wait for."""
        bucket = self.buckets.all[number]
        if not self.shards:
            return Previous(update_path(bucket, self.strategy))
        if not self.options.overlap_param_gather and number not in self.casts.gathered_again:
            return Previous(gather_path(bucket))
        # _make_forward_pre_hook, finish_param_sync: dispatches the bucket's own gather if needed;
        # after the wait for it, dispatches that of the next bucket
        self.gather_ahead(number)
        # next_param_gather_bucket_group: dense layers and experts have separate chains
        later = (each for each in self.buckets.all[number + 1 :] if each.axis == bucket.axis)
        following = next(later, None)
        if self.options.overlap_param_gather and following is not None:
            self.gather_ahead(following.index)
        return self.gathered[number]

    def gather_ahead(self, number: int) -> None:
        """Dispatch the gather of a bucket's parameters, unless that is done."""
        if number not in self.gathered:
            bucket = self.buckets.all[number]
            after = Previous(update_path(bucket, self.strategy))
            self.gathered[number] = self._gather(
                self.writer, bucket, f"gather/{bucket.name}", after
            )

    def _gather(self, writer: ScheduleWriter, bucket: Bucket, name: str, after: Edge) -> str:
        """Gather the updated parameters of a bucket group in place."""
        # start_param_sync: in a coalescing manager
        stream, parameter = stream_of(bucket), self.states[bucket.index].parameter
        if bucket.index in self.casts.gathered_again:
            whole = self.casts.whole(bucket)
            writer.allocate(whole)
            writer.all_gather(f"{name}/member", bucket.axis, parameter, whole, stream=stream)
        else:
            gather_updated(writer, bucket, parameter, f"{name}/member", stream=stream)
        return writer.together(name, 1, after=(after,))

    def backward(self, visit: UnitVisit) -> None:
        """Run a unit backward and add its gradients; reduce the buckets that are ready."""
        self.passes.checkpoints.enter(visit)
        self.passes.backward(visit, ())
        ready: list[Bucket] = []
        # DistributedDataParallel._make_backward_post_hook: main_grad.add_, then register_grad_ready
        for position, run in self.buckets.trained_runs(visit.unit):
            source = self.passes.transient(visit.unit, position)
            target = self.gradients[run.bucket]
            self.written[run.bucket] = copy_run(
                self.writer,
                f"add/{target}",
                run,
                source=source,
                target=target,
                divisor=self.strategy.train.gradient_accumulation_steps,
                # `general_gemm(..., accumulate=True, out=main_grad)` of Transformer Engine; the
                # hook still adds the small gradients of norms and biases
                launches=0 if self.options.gradient_accumulation_fusion else 1,
            )
            self.writer.free(source)
            # register_grad_ready counts only in the last micro-batch (is_last_microbatch)
            if self.is_last and self._left.complete(run.bucket):
                ready.append(self.buckets.all[run.bucket])
        if self.overlaps:
            for bucket in ready:
                self.reduce((bucket,))

    def _sum_copies(self) -> None:
        """Sum gradients that cover only a rank's own tokens over the tensor axis.

        They are copied into one tensor, summed, and copied back. Only the rank's reduced part of
        the sum is valid; the rest is never read.
        """
        # as in _allreduce_non_tensor_model_parallel_grads of distributed/finalize_model_grads.py
        # after finish_grad_sync, for the `main_grad` of every `sequence_parallel` parameter
        writer, layout = self.writer, self.copied
        if not layout.pieces:
            return
        held = {piece.parameter for piece in layout.pieces}
        buckets = [
            bucket
            for bucket in self.buckets.all
            if any(piece.parameter in held for piece in bucket.layout.pieces)
        ]
        wire = writer.buffers[self.gradients[0]].dtype
        flat = writer.buffer(
            layout.name, layout.elements, wire, Kind.COMMUNICATION, layout=layout.name
        )
        writer.allocate(flat)
        for bucket in buckets:
            gradient, after = self.gradients[bucket.index], (self.written[bucket.index],)
            name = f"flatten/{bucket.name}"
            writer.copy(name, gradient, flat, by_parameter=True, after=after)
        writer.all_reduce("sum", TENSOR, flat, stream=COMPUTE)
        for bucket in buckets:
            gradient = self.gradients[bucket.index]
            pieces = sum(piece.parameter in held for piece in bucket.layout.pieces)
            name = f"put/{bucket.name}"
            self.written[bucket.index] = writer.copy(
                name, flat, gradient, by_parameter=True, launches=pieces
            )
        writer.free(flat)

    def reduce_rest(self) -> None:
        """Reduce all gradients; none has been reduced so far."""
        # finalize_model_grads, finish_grad_sync
        self.reduce(self.buckets.all)

    def sum_tied(self) -> None:
        """Sum gradients of tied parameters over two pipeline stages; nothing here."""

    def reduce(self, ready: Sequence[Bucket]) -> None:
        """Reduce the buckets of dense layers as one group, then the buckets of experts."""
        # finish_grad_sync: bucket_groups, then expert_parallel_bucket_groups
        for axis in (DATA, EXPERT_DATA):
            if group := [bucket for bucket in ready if bucket.axis == axis]:
                self._reduce_group(group, axis)

    def _divisor(self, axis: str) -> int:
        """Return the divisor of gradients before their sum over `axis`, or before their mean."""
        # gradient_scaling_factor and expert_gradient_scaling_factor of DistributedDataParallel
        strategy = self.strategy
        if not self.options.average_in_collective:
            return strategy.replicas
        return 1 if axis == DATA else strategy.parallel.data // strategy.expert_data

    def _reduce_group(self, ready: Sequence[Bucket], axis: str) -> None:
        """Scale and reduce a bucket group in place, and sum its shards over the replicas."""
        # start_grad_sync
        writer, options = self.writer, self.options
        if options.allreduce_in_float32:
            for bucket in ready:
                self._sum_whole(bucket)
            return
        divisor, stream = self._divisor(axis), stream_of(ready[0])
        for bucket in ready if divisor > 1 or not options.average_in_collective else ():
            # `bucket.grad_data *= gradient_scaling_factor`, 1 / ranks without average_in_collective
            target = self.gradients[bucket.index]
            self.written[bucket.index] = writer.copy(
                f"scale/{target}", target, target, divisor=divisor
            )
        name, after = ready[0].name, tuple(self.written[bucket.index] for bucket in ready)
        for bucket in ready:  # _coalescing_manager: all buckets of the group in one call
            target, path = self.gradients[bucket.index], f"reduce/{bucket.name}/member"
            if self.shards:
                own = own_view(writer, bucket, target)
                writer.reduce_scatter(
                    path, axis, target, own, reduction=self._reduction, stream=stream
                )
            else:
                writer.all_reduce(path, axis, target, reduction=self._reduction, stream=stream)
        done = writer.together(f"reduce/{name}", len(ready), after=after)
        if self.strategy.parallel.replicate > 1:
            # `inter_distributed_optimizer_instance_group`: shards, on the same stream
            for bucket in ready:
                own = own_view(writer, bucket, self.gradients[bucket.index])
                path = f"all_reduce/{bucket.name}/member"
                writer.all_reduce(path, REPLICATE, own, reduction=self._reduction, stream=stream)
            done = writer.together(f"all_reduce/{name}", len(ready))
        for bucket in ready:
            self.written[bucket.index] = done

    def _sum_whole(self, bucket: Bucket) -> None:
        """Average the gradients of a bucket over the data ranks in fp32, and copy them back."""
        # allreduce_bucket, allreduce_tensor_in_float32, allreduce_and_copy of Aleph-Alpha/scaling
        # (src/scaling/core/optimizer/allreduce.py), in sequence on the current stream
        writer, gradient = self.writer, self.gradients[bucket.index]
        writer.prefix = f"step/backward/sum/{bucket.name}"
        flat = bucket.buffer(writer, "flat", writer.buffers[gradient].dtype)
        writer.allocate(flat)
        writer.copy("flatten", gradient, flat, after=(self.written[bucket.index],))
        writer.copy("divide", flat, flat, divisor=self.strategy.replicas)
        summed = flat
        if writer.buffers[flat].dtype is not DType.FP32:
            summed = bucket.buffer(writer, "wide", DType.FP32)
            writer.allocate(summed)
            writer.copy("widen", flat, summed)
        writer.all_reduce("all_reduce", DATA, summed, stream=COMPUTE)
        if summed != flat:
            writer.copy("narrow", summed, flat)
            writer.free(summed)
        launches = len(bucket.layout.pieces)  # unflatten_dense_tensors returns views
        self.written[bucket.index] = writer.copy("put", flat, gradient, launches=launches)
        writer.free(flat)

    def end(self) -> None:
        """Reduce remaining gradients, and update; gather the parameters unless that overlaps."""
        if not self.overlaps:
            self.reduce_rest()
        self._sum_copies()
        self.sum_tied()
        numbers = {bucket.name: bucket for bucket in self.buckets.all}

        def updated(writer: ScheduleWriter, item: UpdatedTensor, operation: str) -> None:
            # DistributedOptimizer.step_with_ready_grads (optimizer/distrib_optimizer.py): otherwise
            # the next forward gathers
            bucket = numbers[item.name]
            is_later = bucket.index in self.casts.gathered_again
            if self.shards and not (self.options.overlap_param_gather or is_later):
                self._gather(writer, bucket, "gather", operation)

        reduced = {
            bucket.index: Reduced(self.gradients[bucket.index], self.written[bucket.index])
            for bucket in self.buckets.all
        }
        after = tuple(dict.fromkeys(self.written))
        self.update(reduced, after=after, updated=updated, keeps_gradients=True)
