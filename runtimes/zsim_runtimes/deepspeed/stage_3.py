"""DeepSpeed's ZeRO stage 3, in the order of its runtime from the second iteration on.

Parameters are padded and sharded one by one. Each unit is a submodule. It gathers those of its
parameters that are not whole, waits, and gathers the next parameters of the recorded order ahead,
up to a limit of elements. After it, parameters that are not used again soon are freed. Small
parameters stay whole from one update to the next. Gradients are reduced in every micro-batch. A
checkpointed unit is recomputed right before its backward; both are one visit here.

A unit is a leaf module of DeepSpeed (`set_z3_leaf_modules`). Without leaf modules, its submodules
are single layers: gathers are smaller, and more of them are ahead.

Functions named in comments are from DeepSpeed 0.19, of `DeepSpeedZeroOptimizer_Stage3` in
`runtime/zero/stage3.py` unless another file of that folder is named.
"""

from zsim.model.model import Model
from zsim.schedule.operation_list import COMPUTE
from zsim.schedule.schedule import Schedule
from zsim.schedule.schedule_writer import CPU, NVME_READ, NVME_WRITE
from zsim.strategy.offload import MemoryTier
from zsim.strategy.strategy import Strategy
from zsim.zero.optimizer_step import OptimizerStep
from zsim.zero.state import Holding, Reduced, update_path
from zsim.zero.step_skeleton import Step
from zsim.zero.visit_order import UnitVisit
from zsim_runtimes.deepspeed.checkpoint_engine import checkpoint_streams, move_checkpoints
from zsim_runtimes.deepspeed.filed_update import FiledSubGroupStep
from zsim_runtimes.deepspeed.host_update import HostSubGroupStep
from zsim_runtimes.deepspeed.options import TIER, DeepSpeed, OffloadDevice
from zsim_runtimes.deepspeed.stage_3_gather import CoalescedGathers
from zsim_runtimes.deepspeed.stage_3_reduce import FilledBuckets
from zsim_runtimes.deepspeed.stage_3_shards import Shards, shards
from zsim_runtimes.deepspeed.stage_3_trace import fetches
from zsim_runtimes.deepspeed.stage_3_volume import VOLUME
from zsim_runtimes.deepspeed.update import NormPerGroup, NormPerGroupToHost
from zsim_runtimes.late_frees import worst_case

# __init__: reduce_and_partition_stream, and the gather stream of parameter_offload.py; without
# overlap_comm both are the current stream
ALL_GATHER = "all_gather"
REDUCE = "reduce"


def schedule(model: Model, strategy: Strategy) -> Schedule:
    """Return the schedule of DeepSpeed training `model` in stage 3.

    Raises:
        ModelError: the model was built for other parallel degrees, or a checkpoint cannot be
            partitioned.
    """
    step = Stage3Step(model, strategy, shards(model, strategy))
    step.write()
    gathers, reductions = step.gathers, step.reductions
    tiers = strategy.options(DeepSpeed).tiers(stage=3).values()
    copies = checkpoint_streams(strategy)
    threads: tuple[str, ...] = (CPU,) if tiers else ()
    if MemoryTier.NVME in tiers:
        threads = (*threads, NVME_READ, NVME_WRITE)
    measured = () if reductions.host is None else reductions.host.layouts
    layouts = (*step.shards.layouts, *gathers.layouts, *reductions.layouts, *measured)
    return step.schedule(
        "DeepSpeed ZeRO-3",
        VOLUME,
        streams=tuple(
            dict.fromkeys((COMPUTE, gathers.stream, reductions.stream, *copies, *threads))
        ),
        layouts=tuple({layout.name: layout for layout in layouts}.values()),
        peak_of=worst_case,
    )


class Stage3Step(Step):
    """Forward and backward of every micro-batch, then the update."""

    optimizer_step: type[OptimizerStep] = NormPerGroup

    def __init__(self, model: Model, strategy: Strategy, shards: Shards) -> None:
        # _create_fp32_partitions: sub-groups on the device in the dtype of masters are themselves
        # the masters (since 0.18.2)
        options = strategy.options(DeepSpeed)
        has_master = strategy.train.precision.has_master or bool(options.tiers(stage=3))
        holding = Holding(
            parameter=strategy.train.precision.compute,
            parameter_sharded=True,
            has_master=has_master,
            parameter_tier=TIER[options.offload_param.device],
            optimizer_tier=TIER[options.offload_optimizer.device],
            host_parameters=frozenset(range(len(shards.groups.all))) - shards.filed_groups,
            file_elements=-(
                -options.least_file_bytes // strategy.train.precision.optimizer.size_bytes
            ),
        )
        super().__init__(model, strategy, shards.parameters, holding, kept=shards.groups)
        if options.offload_optimizer.is_on:
            on_nvme = options.offload_optimizer.device is OffloadDevice.NVME
            self.optimizer_step = FiledSubGroupStep if on_nvme else HostSubGroupStep
        elif options.offload_param.is_on:
            self.optimizer_step = NormPerGroupToHost
        move_checkpoints(self)
        self.shards = shards
        overlaps = options.overlap_comm is not False  # stage 3 has it on by default
        updated = update_path(shards.groups.trained[-1], strategy, has_master=has_master)
        if options.offload_optimizer.is_on and not options.offload_param.is_on:
            updated = updated.replace("/cast", "/upload")
        self.gathers = CoalescedGathers(
            self, shards, stream=ALL_GATHER if overlaps else COMPUTE, updated=updated
        )
        self.reductions = FilledBuckets(
            self, options, shards, stream=REDUCE if overlaps else COMPUTE
        )
        self._needs = [
            tuple(sorted(run.bucket for run in self.buckets.runs[visit.unit]))
            for visit in self.visits
        ]
        sizes = [bucket.elements for bucket in self.buckets.all]
        self._trace = fetches(self._needs, sizes, shards.persistent, options, filed=shards.filed)
        self._number = 0
        self._used = ""

    def end_of_step(self, step: OptimizerStep) -> None:
        """Write the update, after giving `step` the objects that access files."""
        host = self.reductions.host
        if isinstance(step, HostSubGroupStep):
            step.filed_parameters = self.gathers.files
        if isinstance(step, FiledSubGroupStep) and host is not None and host.files is not None:
            step.files = host.files
        super().end_of_step(step)

    def held(self, bucket: int, visit: UnitVisit) -> str:
        """Return the buffer of a whole parameter."""
        del visit
        return self.gathers.whole(bucket)

    def write_setup(self) -> None:
        """Allocate the persistent memory: gradients, the bucket and small parameters."""
        self.reductions.write_setup()
        self.writer.prefix = "setup/parameters"
        self.gathers.files.write_setup()
        self.writer.prefix = "setup/persistent"
        self.gathers.setup_persistent()

    def begin_forward(self) -> None:
        """Restart the recorded order."""
        # as in reset_step of partitioned_param_coordinator.py
        self._number = 0

    def forward(self, visit: UnitVisit) -> None:
        """Write a visit between the fetch of a submodule and its release."""
        # The hooks of setup_zero_stage3_hooks (parameter_offload.py) call fetch_sub_module and
        # release_sub_module of partitioned_param_coordinator.py.
        self.passes.checkpoints.enter(visit)  # CheckpointFunction, before submodules are fetched
        number, self._number = self._number, self._number + 1
        after = self.gathers.fetch(self._needs[number], self._trace[number])
        run = self.passes.backward if visit.backward else self.passes.forward
        self._used = run(visit, after)
        if visit.backward:
            self.reductions.collect(visit.unit, self._used, self.micro_batch)
        self.gathers.release(self._trace[number].freed, self._used)

    def backward(self, visit: UnitVisit) -> None:
        """Write a visit; `forward` reduces its gradients."""
        self.forward(visit)

    def end_backward(self) -> None:
        """Reduce the remaining gradients."""
        self.reductions.end_backward(self.micro_batch)

    def end(self) -> None:
        """Update the sub-groups one by one, and gather small parameters again."""
        self.writer.prefix = "step/update"
        self.gathers.free_persistent(self._used)  # step: _partition_all_parameters
        finished, gradient = self.reductions.finished, self.reductions.gradient
        reduced = {
            group.index: Reduced(gradient(group), finished) for group in self.shards.groups.trained
        }
        after = (finished,) if finished else ()
        self.update(reduced, after=after, stream=COMPUTE, keeps_gradients=True)
        self.writer.prefix = "step/end"
        self.gathers.end_step()
