"""Skeleton of a step: forward and backward of every micro-batch, then the update.

zsim's own stages and every runtime subclass it. Each overrides the operations before and after a
unit, a direction and the step.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from zsim.closed_form import DataVolume
from zsim.model.model import Model
from zsim.schedule.layout import Layout
from zsim.schedule.operation import Edge
from zsim.schedule.operation_list import COMMUNICATION, COMPUTE
from zsim.schedule.schedule import Schedule
from zsim.schedule.schedule_writer import ScheduleWriter
from zsim.strategy.cuda_graphs import OF_ITERATION
from zsim.strategy.strategy import Strategy
from zsim.zero.assemble import PeakOf, assemble, need_fitting
from zsim.zero.bucket import Buckets
from zsim.zero.forward_backward import ForwardBackward
from zsim.zero.optimizer_step import OptimizerStep, Updated, nothing
from zsim.zero.state import Holding, Reduced, write_setup
from zsim.zero.updated_tensor import updated_tensors
from zsim.zero.visit_order import UnitVisit, visits

if TYPE_CHECKING:
    from zsim.zero.load_sums import BiasesOfExperts


class Step:
    """One step of a role, written unit by unit.

    Attributes:
        states: persistent buffers by bucket. Persistent buckets may be split differently from the
            gathered ones; `kept` are the persistent ones.
        micro_batch: the micro-batch that is being written.
        is_last: True in the last micro-batch of the step.
    """

    optimizer_step: type[OptimizerStep] = OptimizerStep

    def __init__(
        self,
        model: Model,
        strategy: Strategy,
        buckets: Buckets,
        holding: Holding,
        *,
        kept: Buckets | None = None,
        writer: ScheduleWriter | None = None,
    ) -> None:
        need_fitting(model, strategy)
        self.model = model
        self.strategy = strategy
        self.buckets = buckets
        self.kept = kept or buckets
        self.writer: Final = writer or ScheduleWriter()
        runtime = strategy.zero.emulate
        graphs = None if runtime is None else runtime.cuda_graphs
        if graphs is not None and graphs.iteration:
            self.writer.captured = OF_ITERATION
        self.states = write_setup(self.writer, strategy, self.kept, holding)
        self.visits = visits(model, strategy)
        self.passes = ForwardBackward(self.writer, model, strategy, buckets=buckets, held=self.held)
        self.biases = _biases(self.writer, model, strategy)
        self.micro_batch = 0
        self.is_last = False

    def held(self, bucket: int, visit: UnitVisit) -> str:
        """Return the name of the buffer that holds a bucket's parameters during a visit."""
        del visit
        return self.states[bucket].parameter

    def write(self) -> None:
        """Write the rest of setup, and the step."""
        self.write_setup()
        self.write_biases()
        self.writer.begin_step()
        self.begin()
        forward = [visit for visit in self.visits if not visit.backward]
        backward = [visit for visit in self.visits if visit.backward]
        for micro_batch in range(self.strategy.train.gradient_accumulation_steps):
            self.enter(micro_batch)
            part = self.writer.prefix = f"step/forward/mb{micro_batch}"
            self.passes.load()
            self.begin_forward()
            for visit in forward:
                self.writer.prefix = f"{part}/{self.model.units[visit.unit].name}"
                self.forward(visit)
            part = self.writer.prefix = f"step/backward/mb{micro_batch}"
            if backward:
                self.passes.seed()
                self.begin_backward()
            for visit in backward:
                again = "/again" if visit.only_recomputes else ""
                self.writer.prefix = f"{part}/{self.model.units[visit.unit].name}{again}"
                self.backward(visit)
            self.writer.prefix = f"{part}/end"
            self.end_backward()
        self.writer.prefix = "step/backward/end"
        self.end()

    def enter(self, micro_batch: int) -> None:
        """Start another micro-batch."""
        self.micro_batch = self.passes.micro_batch = micro_batch
        self.is_last = micro_batch == self.strategy.train.gradient_accumulation_steps - 1

    def write_biases(self) -> None:
        """Write the setup of biases of experts, if there are any."""
        if self.biases is not None:
            self.biases.write_setup()

    @property
    def bias_layouts(self) -> tuple[Layout, ...]:
        """The layouts of biases of experts."""
        return () if self.biases is None else self.biases.layouts

    def write_setup(self) -> None:
        """Write setup operations other than those of the states; nothing here."""

    def begin(self) -> None:
        """Write operations before the first micro-batch; nothing here."""

    def begin_forward(self) -> None:
        """Write operations before the first unit of a forward; nothing here."""

    def forward(self, visit: UnitVisit) -> None:
        """Write the forward of a unit."""
        self.passes.forward(visit, ())

    def begin_backward(self) -> None:
        """Write operations before the first unit of a backward; nothing here."""

    def backward(self, visit: UnitVisit) -> None:
        """Write the backward of a unit; a subclass also moves its gradients."""
        self.passes.backward(visit, ())

    def end_backward(self) -> None:
        """Write operations after the last unit of a backward; nothing here."""

    def end(self) -> None:
        """Write operations after the last micro-batch; nothing here."""

    def update(
        self,
        reduced: Mapping[int, Reduced],
        *,
        after: tuple[Edge, ...],
        updated: Updated = nothing,
        stream: str = COMMUNICATION,
        keeps_gradients: bool = False,
    ) -> None:
        """Write the end of the step: the update of all reduced gradients.

        Args:
            reduced: gradients by number of the bucket.
            after: edges to the operations that complete all of them.
            updated: called after the update of each tensor.
            stream: the stream that reduces the overflow flag and norms.
            keeps_gradients: True if gradient buffers outlive the step.
        """
        if self.biases is not None:
            self.biases.update()
        tensors = updated_tensors(
            self.writer,
            self.strategy,
            self.kept,
            states=self.states,
            reduced=reduced,
            keeps=keeps_gradients,
        )
        self.end_of_step(
            self.optimizer_step(
                self.writer, self.strategy, tensors, after=after, updated=updated, stream=stream
            )
        )

    def end_of_step(self, step: OptimizerStep) -> None:
        """Append the optimizer's operations to the schedule; subclasses may change `step`."""
        step.write()

    def schedule(
        self,
        name: str,
        volume: DataVolume,
        *,
        streams: tuple[str, ...] = (COMPUTE, COMMUNICATION),
        layouts: tuple[Layout, ...] | None = None,
        peak_of: PeakOf | None = None,
    ) -> Schedule:
        """Return the schedule in which all ranks run the operations written here."""
        return assemble(
            name,
            model=self.model,
            strategy=self.strategy,
            volume=volume,
            writers=[self.writer],
            streams=streams,
            layouts=(
                *(self.buckets.layouts if layouts is None else layouts),
                *self.bias_layouts,
            ),
            peak_of=peak_of,
        )


def _biases(writer: ScheduleWriter, model: Model, strategy: Strategy) -> "BiasesOfExperts | None":
    """Return the writer of biases of experts; None if the model has none."""
    if not model.biases:
        return None
    from zsim.zero.load_sums import BiasesOfExperts  # noqa: PLC0415 (most models have no experts)

    return BiasesOfExperts(writer, model, strategy)


class StepPart:
    """Base class of a step's components, such as gathers of parameters and reductions."""

    def __init__(self, step: Step) -> None:
        self.writer = step.writer
        self.strategy = step.strategy
        self.buckets = step.buckets
        self.states = step.states
        self.passes = step.passes
        self.compute = step.strategy.train.precision.compute
