"""Tensors that a rank updates at the end of a step: one for each trained bucket."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from zsim.schedule.layout import Layout
from zsim.schedule.operation import Edge, View
from zsim.schedule.schedule_writer import ScheduleWriter
from zsim.strategy.strategy import Strategy
from zsim.zero.bucket import Buckets
from zsim.zero.state import BucketState, Reduced, own_view, updated_view


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdatedTensor:
    """A tensor that one rank updates.

    Attributes:
        name: last part of the path of its operations.
        layout: layout of the whole tensor; the rank updates all of it or its shard.
        gradient: the reduced gradient; its buffer is freed after the update unless it is kept.
        measured: the part of the gradient that counts in a norm; every rank measures a different
            part.
        after: edges to the operations that complete the gradient.
        parameter: the parameters that the update writes, or their copy in the compute dtype.
        master: the masters that the optimizer updates, or None if it updates `parameter`.
        moments: one view for each moment of the optimizer.
        keeps_gradient: True if the gradient's buffer outlives the step.
    """

    name: str
    layout: Layout
    gradient: View
    measured: View
    after: tuple[Edge, ...]
    parameter: View
    master: View | None
    moments: tuple[View, ...]
    keeps_gradient: bool = False


def updated_tensors(
    writer: ScheduleWriter,
    strategy: Strategy,
    buckets: Buckets,
    *,
    states: Sequence[BucketState],
    reduced: Mapping[int, Reduced],
    keeps: bool,
) -> list[UpdatedTensor]:
    """Return the tensor of every trained bucket; with `keeps`, gradients outlive the step."""
    return [
        UpdatedTensor(
            name=bucket.name,
            layout=bucket.layout,
            gradient=updated_view(writer, bucket, gradient.buffer, strategy),
            measured=own_view(writer, bucket, gradient.buffer),
            after=(gradient.operation,) if gradient.operation else (),
            parameter=updated_view(writer, bucket, state.parameter, strategy),
            master=None if state.master is None else writer.all(state.master),
            moments=tuple(map(writer.all, state.moments)),
            keeps_gradient=keeps,
        )
        for bucket, state in zip(buckets.all, states, strict=True)
        for gradient in ([] if bucket.frozen else [reduced[bucket.index]])
    ]
