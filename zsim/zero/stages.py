"""zsim's own ZeRO stages, composed of the techniques in the other files of this package."""

from collections.abc import Sequence

from zsim.closed_form.zero_stages import VOLUME
from zsim.model.model import Model
from zsim.schedule.operation_list import COMMUNICATION, COMPUTE
from zsim.schedule.schedule import Schedule
from zsim.schedule.schedule_writer import (
    CPU,
    FROM_HOST,
    HOST_POOL,
    NVME_READ,
    NVME_WRITE,
    TO_HOST,
    ScheduleWriter,
)
from zsim.strategy.offload import MemoryTier
from zsim.strategy.strategy import Strategy
from zsim.zero.bucket import fill
from zsim.zero.checkpoints import Checkpoints, CheckpointStore
from zsim.zero.contiguous import ContiguousStore, allocate_gradients
from zsim.zero.delayed_update import DelayedOptimizerStep, late_bytes, persist_landing
from zsim.zero.filed_checkpoints import FiledCheckpoints
from zsim.zero.filed_optimizer import NvmeOptimizerStep
from zsim.zero.gather import GatheredParameters, ReplicatedParameters, gather_updated
from zsim.zero.offloaded_checkpoints import OffloadedCheckpoints
from zsim.zero.offloaded_gradients import GradientsToHost
from zsim.zero.offloaded_optimizer import HostOptimizerStep
from zsim.zero.optimizer_step import OptimizerStep
from zsim.zero.reduce import BucketReductions
from zsim.zero.state import Holding
from zsim.zero.step_skeleton import Step
from zsim.zero.twin_flow import TwinFlowStep, kept_on_device
from zsim.zero.updated_tensor import UpdatedTensor
from zsim.zero.visit_order import UnitVisit


def schedule(model: Model, strategy: Strategy) -> Schedule:
    """Return the schedule of the ZeRO stage in `strategy`.

    Raises:
        ModelError: the model was built for other parallel degrees, or a checkpoint cannot be
            partitioned.
    """
    step = StageStep(model, strategy)
    step.write()
    offload = strategy.offload
    moving: tuple[str, ...] = ()
    if offload.uses_host:
        moving = (TO_HOST, FROM_HOST)
    threads = (CPU,) if offload.moves_states else ()
    handles = (NVME_READ, NVME_WRITE) if offload.uses_nvme else ()
    return step.schedule(
        f"ZeRO stage {strategy.zero.stage}",
        VOLUME,
        streams=(COMPUTE, COMMUNICATION, *moving, *threads, *handles),
        layouts=(*step.buckets.layouts, *step.parameters.layouts),
    )


_OPTIMIZER_STEPS = {
    MemoryTier.DEVICE: OptimizerStep,
    MemoryTier.HOST: HostOptimizerStep,
    MemoryTier.NVME: NvmeOptimizerStep,
}
"""Class of the optimizer step, by the tier of the optimizer states."""


class StageStep(Step):
    """A step of a stage: optimizer state is sharded from stage 1 on, parameters in stage 3."""

    def __init__(self, model: Model, strategy: Strategy) -> None:
        buckets = fill(model, strategy)
        stays = kept_on_device(buckets, strategy)
        holding = Holding(
            parameter=strategy.train.precision.compute,
            parameter_sharded=strategy.zero.stage == 3,
            optimizer_sharded=strategy.zero.stage >= 1,
            has_master=strategy.keeps_master,
            parameter_tier=strategy.offload.parameters,
            optimizer_tier=strategy.offload.optimizer,
            device_optimizer=stays,
        )
        super().__init__(model, strategy, buckets, holding)
        if strategy.zero.contiguous:
            allocate_gradients(self.writer, strategy, self.buckets)
        self.passes.checkpoints = _checkpoints(self.writer, model, strategy, self.visits)
        self.parameters: GatheredParameters | ReplicatedParameters
        sequence = self.visits * strategy.train.gradient_accumulation_steps
        states = self.states
        if strategy.zero.stage == 3:
            self.parameters = GatheredParameters(
                self.writer, strategy, buckets=buckets, states=states, sequence=sequence
            )
        else:
            self.parameters = ReplicatedParameters(
                strategy, buckets=buckets, states=states, sequence=sequence
            )
        self.reductions = BucketReductions(self.writer, model, strategy, self.passes)
        self.optimizer_step = _OPTIMIZER_STEPS[strategy.offload.optimizer]
        if strategy.offload.delayed_update:
            self.optimizer_step = DelayedOptimizerStep
        if stays:
            self.optimizer_step = TwinFlowStep
        if strategy.offload.optimizer is not MemoryTier.DEVICE:
            self.reductions.to_host = GradientsToHost(self.writer, strategy, stays=stays)
        self._done: list[str] = []

    def write_setup(self) -> None:
        """Allocate host memory for the updated parameters of a delayed update."""
        if not self.strategy.offload.delayed_update:
            return
        for bucket, state in zip(self.buckets.all, self.states, strict=True):
            if state.master is not None:
                self.writer.prefix = f"setup/{bucket.name}"
                persist_landing(self.writer, self.strategy, bucket, state.master)

    def begin(self) -> None:
        """Count the previous step's gradients, which the host still applies."""
        if self.strategy.offload.delayed_update:
            self.writer.count_late(HOST_POOL, late_bytes(self.strategy, self.buckets))

    def held(self, bucket: int, visit: UnitVisit) -> str:
        """Return the name of the buffer that holds a bucket's parameters during a visit."""
        return self.parameters.held(bucket, visit)

    def forward(self, visit: UnitVisit) -> None:
        """Write the forward of a unit, or its backward, between gathers and frees."""
        self._limit_host()
        index = len(self._done)
        after = self.parameters.before(index)
        run = self.passes.backward if visit.backward else self.passes.forward
        self._done.append(run(visit, after))
        self.parameters.after(index, self._done[-1])

    def _limit_host(self) -> None:
        """Make the host wait if it is `host_ahead_units` visits ahead of the device."""
        ahead = self.strategy.zero.host_ahead_units
        if ahead is not None and len(self._done) >= ahead:
            self.writer.host_wait("host_wait", self._done[-ahead])

    def backward(self, visit: UnitVisit) -> None:
        """Write the backward of a unit, and reduce its gradients."""
        self.forward(visit)
        if not visit.only_recomputes:
            self.reductions.contribute(visit.unit, last=self.is_last)

    def end(self) -> None:
        """Update every trained bucket; in stages 1 and 2 gather the updated parameters."""
        self.reductions.finish()
        reduced = self.reductions.reduced
        numbers = {bucket.name: bucket.index for bucket in self.buckets.all}

        def gather(writer: ScheduleWriter, item: UpdatedTensor, updated: str) -> None:
            if self.strategy.zero.stage in (1, 2):
                number = numbers[item.name]
                parameter = self.states[number].parameter
                gather_updated(writer, self.buckets.all[number], parameter, after=(updated,))

        # The last reduction, and the last copy out: each stream runs in order, so they end after
        # all others.
        ends = {self.states[index].tier: each.operation for index, each in reduced.items()}
        last = tuple(ends.values())
        on_device = self.strategy.offload.optimizer is MemoryTier.DEVICE
        keeps = self.strategy.zero.contiguous and on_device
        self.update(reduced, after=last, updated=gather, keeps_gradients=keeps)
        self.parameters.end()


def _checkpoints(
    writer: ScheduleWriter, model: Model, strategy: Strategy, once: Sequence[UnitVisit]
) -> Checkpoints:
    """Return the checkpoints of a stage: on the device or offloaded, separate or contiguous."""
    tier = strategy.offload.checkpoints
    store = CheckpointStore(writer, model, strategy)
    if strategy.zero.contiguous:
        store = ContiguousStore(writer, model, strategy, visits=once)
    if tier is MemoryTier.DEVICE:
        return Checkpoints(writer, model, strategy, store)
    kind = OffloadedCheckpoints if tier is MemoryTier.HOST else FiledCheckpoints
    return kind(writer, model, strategy, store, visits=once)
