"""Optimizer steps of ranks that hold all gradients: each rank measures its own.

After an all-reduce every data rank has the same gradients, so a test for overflow and a norm need
no collective. Ranks of the tensor axis hold different parameters and still exchange both.
"""

from collections.abc import Sequence
from dataclasses import replace

from zsim.schedule.operation import Action, Reduction
from zsim.schedule.schedule_writer import ScheduleWriter
from zsim.zero.bucket import Buckets
from zsim.zero.names import TENSOR
from zsim.zero.optimizer_step import OptimizerStep
from zsim.zero.updated_tensor import UpdatedTensor


def whole(buckets: Buckets) -> Buckets:
    """Return the same buckets as tensors that every rank holds whole."""
    found = []
    for bucket in buckets.all:
        layout = replace(bucket.layout, axis=None)
        found.append(replace(bucket, layout=layout, plain=layout))
    return replace(buckets, all=tuple(found))


class LocalOptimizerStep(OptimizerStep):
    """An update whose overflow flag and norm are exchanged over the tensor axis only."""

    def begin(self) -> None:
        """Measure whole gradients on every rank."""
        self.tensors = [replace(item, measured=item.gradient) for item in self.tensors]
        if self.strategy.parallel.tensor == 1:
            self.norm_ready, self.overflow_ready = "norm/measure", "overflow/measure"

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
        """Reduce one number over the gradients of `trained`, then over the tensor axis."""
        if self.strategy.parallel.tensor > 1:
            super().measure(writer, action, target, reduction, trained=trained, group=TENSOR)
            return
        self.measured(writer, action, target, target, trained=trained)
