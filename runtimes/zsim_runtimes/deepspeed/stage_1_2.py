"""DeepSpeed's ZeRO stages 1 and 2: flat parameters split anywhere, gradients all-reduced.

The parameters of each group, which share an update rule, are in one flat tensor, padded to a
multiple of twice the ranks. Each of N ranks updates an N-th of it, regardless of the borders of
parameters. Gradients are copied into a bucket as backward makes them. A full bucket is divided by
the ranks and all-reduced, and the rank keeps its part. Stage 1 does so once a step, stage 2 in
every micro-batch. An in-place all-gather of each flat tensor ends the step.

Functions named in comments are from `DeepSpeedZeroOptimizer` in
`runtime/zero/stage_1_and_2.py`, DeepSpeed 0.19.
"""

from collections import Counter

from zsim.model.model import Model, Parameter
from zsim.schedule.operation import Edge, Previous, View
from zsim.schedule.operation_list import COMPUTE
from zsim.schedule.schedule import Kind, Schedule
from zsim.schedule.schedule_writer import CPU, ScheduleWriter
from zsim.strategy.offload import MemoryTier
from zsim.strategy.strategy import Strategy
from zsim.zero.bucket import (
    Buckets,
    ExpertPacking,
    Packing,
    frozen_groups,
    numbered,
    one_after_the_other,
)
from zsim.zero.gather import gather_updated
from zsim.zero.optimizer_step import OptimizerStep
from zsim.zero.state import Holding, gather_path
from zsim.zero.step_skeleton import Step
from zsim.zero.updated_tensor import UpdatedTensor
from zsim.zero.visit_order import UnitVisit
from zsim_runtimes.deepspeed.checkpoint_engine import checkpoint_streams, move_checkpoints
from zsim_runtimes.deepspeed.expert_layers import trained_groups
from zsim_runtimes.deepspeed.host_update import HostPartitionStep
from zsim_runtimes.deepspeed.options import DeepSpeed
from zsim_runtimes.deepspeed.stage_1_2_reduce import MIGRATION, REDUCTION, AllReducedBuckets
from zsim_runtimes.deepspeed.stage_1_2_volume import VOLUME
from zsim_runtimes.deepspeed.update import NormPerGroup
from zsim_runtimes.late_frees import worst_case

ALIGNMENT = 2  # __init__: nccl_start_alignment_factor, in elements


def schedule(model: Model, strategy: Strategy) -> Schedule:
    """Return the schedule of DeepSpeed training `model` in the stage of `strategy`, 1 or 2.

    Raises:
        ModelError: the model was built for other parallel degrees, or a checkpoint cannot be
            partitioned.
    """
    # __init__: `bit16_groups` has parameters with requires_grad; flatten_dense_tensors_aligned pads
    # the flat tensor of each group. Frozen parameters stay as they are, here in one tensor.
    ranks = strategy.parallel.data
    groups = [*trained_groups(model, strategy), *frozen_groups(model)]
    experts = ExpertPacking.of(strategy, _aligned)
    buckets = numbered(model, groups, place=_aligned(ranks), ranks=ranks, experts=experts)
    step = Stage12Step(model, strategy, buckets)
    step.write()
    overlaps, copies = step.options.overlap_comm, checkpoint_streams(strategy)
    return step.schedule(
        f"DeepSpeed ZeRO stage {strategy.zero.stage}",
        VOLUME,
        streams=(
            COMPUTE,
            *([REDUCTION] if overlaps else []),
            *([MIGRATION] if step.options.migration_stream else []),
            *copies,
            *([CPU] if step.options.offload_optimizer.is_on else []),
        ),
        layouts=(*step.buckets.layouts, *step.reductions.layouts.values()),
        peak_of=worst_case if copies or step.options.migration_stream else None,
    )


def _aligned(ranks: int) -> Packing:
    """Return the packing of flat tensors on `ranks`."""
    return one_after_the_other(ranks, alignment=ALIGNMENT)


class Stage12Step(Step):
    """Forward and backward of every micro-batch, then the update."""

    optimizer_step: type[OptimizerStep] = NormPerGroup

    def __init__(self, model: Model, strategy: Strategy, buckets: Buckets) -> None:
        # __init__: `single_partition_of_fp32_groups` copies the rank's part, in any precision
        self.options = strategy.options(DeepSpeed)
        offloads = self.options.offload_optimizer.is_on
        holding = Holding(
            parameter=strategy.train.precision.compute,
            has_master=True,
            optimizer_tier=MemoryTier.HOST if offloads else MemoryTier.DEVICE,
        )
        super().__init__(model, strategy, buckets, holding)
        if offloads:
            self.optimizer_step = HostPartitionStep
        move_checkpoints(self)
        self.reductions = AllReducedBuckets(self, self.options)
        self._uses = Counter(each.name for unit in model.units for each in unit.parameters)
        self._places = {
            parameter.name: (buckets.all[run.bucket], start)
            for runs in buckets.runs
            for run in runs
            for parameter, start in zip(run.parameters, run.starts, strict=True)
        }
        self._contributed: Counter[str] = Counter()
        self._after: tuple[Edge, ...] = (Previous(gather_path(buckets.trained[-1])),)

    def write_setup(self) -> None:
        """Allocate the host memory through which gradients and parameters pass."""
        if self.reductions.host is not None:
            self.reductions.host.write_setup()

    def forward(self, visit: UnitVisit) -> None:
        """Run a unit forward; the first one of a step waits for the last gather."""
        self.passes.checkpoints.enter(visit, self._after)  # CheckpointFunction.forward
        self.passes.forward(visit, self._after)
        self._after = ()

    def begin_backward(self) -> None:
        """Allocate the buckets, if gradients are reduced during this backward."""
        self._contributed.clear()
        # create_gradient_handling_hooks: hooks reduce with partition_gradients or overlap_comm;
        # stage 1 reduces only at the boundary of accumulation
        if self.strategy.zero.stage == 2 or (self.is_last and self.options.overlap_comm):
            self.reductions.begin()

    def backward(self, visit: UnitVisit) -> None:
        """Run a unit backward; move its gradients into the bucket, or to whole ones in stage 1."""
        self.passes.checkpoints.enter(visit)  # CheckpointFunction.backward
        self.passes.backward(visit, ())
        sources: list[str] = []
        views: dict[str, View] = {}
        for position, run in self.buckets.trained_runs(visit.unit):
            sources.append(self.passes.transient(visit.unit, position))
            start = 0
            for parameter in run.trained:
                size = parameter.elements
                views[parameter.name] = View(buffer=sources[-1], start=start, size=size)
                start += size
        ready: list[Parameter] = []
        for parameter in reversed(self.model.units[visit.unit].parameters):
            if not parameter.frozen:
                ready += self._contribute(parameter, views[parameter.name])
        self.writer.free(*sources)
        if self.is_last and self.options.overlap_comm:
            for parameter in ready:
                self._bucket(parameter, self._accumulated(parameter), divides=False)

    def _contribute(self, parameter: Parameter, source: View) -> list[Parameter]:
        """Move a gradient; return the parameter if its whole gradient is now complete."""
        first = not self._contributed[parameter.name]
        self._contributed[parameter.name] += 1
        complete = self._contributed[parameter.name] == self._uses[parameter.name]
        if self.strategy.zero.stage == 1:
            self._accumulate(parameter, source, adds=not first or self.micro_batch > 0)
            return [parameter] if complete else []
        if self._uses[parameter.name] == 1:
            self._bucket(parameter, source, divides=True)
        else:
            self._tie(parameter, source, first=first, complete=complete)
        return []

    def _bucket(self, parameter: Parameter, source: View, *, divides: bool) -> None:
        # reduce_independent_p_g_buckets_and_remove_grads
        divisor = self.strategy.train.gradient_accumulation_steps if divides else 1
        flat, start = self._places[parameter.name]
        self.reductions.add(parameter.name, source, flat, start, divisor=divisor)

    def _accumulated(self, parameter: Parameter) -> View:
        """Return the view of a parameter in stage 1's whole gradients, in the model's dtype."""
        flat, start = self._places[parameter.name]
        compute = self.strategy.train.precision.compute
        name = flat.buffer(self.writer, "accumulated", compute, Kind.GRADIENT)
        return View(buffer=name, start=start, size=parameter.elements)

    def _accumulate(self, parameter: Parameter, source: View, *, adds: bool) -> None:
        # get_data_types (runtime/engine.py): gradient_accumulation_dtype is the model's, so
        # gradients stay in `param.grad` (use_grad_accum_attribute is False)
        target = self._accumulated(parameter)
        if target.buffer not in self.writer.alive:
            self.writer.allocate(target.buffer)
        divisor = self.strategy.train.gradient_accumulation_steps
        path = f"accumulate/{parameter.name}"
        self.writer.copy(path, source, target, accumulate=adds, divisor=divisor)

    def _tie(self, parameter: Parameter, source: View, *, first: bool, complete: bool) -> None:
        """Sum the gradient of a parameter that several units use, until it is complete."""
        # create_gradient_handling_hooks: autograd's accumulator calls the hook with the sum
        writer = self.writer
        name = writer.buffer(
            f"tied/{parameter.name}",
            parameter.elements,
            self.strategy.train.precision.compute,
            Kind.WORKSPACE,
        )
        if first:
            writer.allocate(name)
        writer.copy(f"tie/{parameter.name}", source, name, accumulate=not first)
        if complete:
            self._bucket(parameter, writer.all(name), divides=True)
            writer.free(name)

    def end_backward(self) -> None:
        """Reduce the remaining gradients; in stage 1 all, and only in the last micro-batch."""
        if self.strategy.zero.stage == 2:
            self.reductions.finish(last=self.is_last)
            return
        if not self.is_last:
            return
        if not self.options.overlap_comm:
            self.reductions.begin()
            # reduce_gradients goes through bit16_groups; backward's order is the reverse
            for group in trained_groups(self.model, self.strategy):
                for parameter in reversed(group):
                    self._bucket(parameter, self._accumulated(parameter), divides=False)
        self.reductions.finish(last=True)
        for flat in self.buckets.trained:
            self.writer.free(f"{flat.name}/accumulated")

    def end(self) -> None:
        """Update the parameters and gather them."""
        flats = {bucket.name: bucket for bucket in self.buckets.trained}

        def gather(writer: ScheduleWriter, item: UpdatedTensor, _updated: str) -> None:
            # all_gather_dp_groups (runtime/utils.py): one gather of the flat tensor, in place
            bucket = flats[item.name]
            parameter = self.states[bucket.index].parameter
            delivered = item.after if self.options.delay_param_update else ()
            gather_updated(writer, bucket, parameter, stream=COMPUTE, after=delivered)

        reduced = self.reductions.reduced
        after = tuple(dict.fromkeys(reduced[each.index].operation for each in flats.values()))
        keeps = self.reductions.host is not None  # the partition's gradients persist
        self.update(reduced, after=after, updated=gather, stream=COMPUTE, keeps_gradients=keeps)
