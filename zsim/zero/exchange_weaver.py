"""Exchanges before and after segments: one weaving for all axes.

The exchange that begins a segment runs before its forward, and its adjoint after its backward; the
exchange that ends it, the reverse. Each axis has a writer of its collectives and names of buffers:
`Tokens` for the tensor axis, `SharedSequence` for ranks that share a sequence.
"""

from collections.abc import Container, Sequence
from typing import Protocol

from zsim.model.model import Model, Segment
from zsim.model.segment_exchange import ExchangeAxis, SegmentExchange
from zsim.schedule.operation import Edge
from zsim.schedule.schedule_writer import ScheduleWriter
from zsim.strategy.strategy import Strategy
from zsim.zero.key_exchange import SharedSequence
from zsim.zero.sequence import Tokens
from zsim.zero.visit_order import SegmentVisit, ValueInstance


class AxisWriter(Protocol):
    """Writer of the exchanges over one axis."""

    def changes(self, segment: Segment, value: str) -> bool:
        """Return True if `segment` reads other numbers than this rank's of its input `value`."""
        ...

    def contributes(self, segment: Segment, value: str) -> bool:
        """Return False if the gradient of `value` is for another rank, and only passed on."""
        ...

    def partial(self, segment: Segment, value: str) -> tuple[str, ...]:
        """Return the axes over which the gradient of `value` that a backward makes is partial."""
        ...

    def read(self, segment: Segment, part: SegmentVisit, instance: ValueInstance) -> str:
        """Return the buffer of the numbers that `part` reads in place of its own."""
        ...

    def before_forward(self, segment: Segment, part: SegmentVisit) -> tuple[str, ...]:
        """Write the exchange that begins a segment; return buffers to free after it."""
        ...

    def before_backward(
        self, segment: Segment, part: SegmentVisit, gradients: Container[str]
    ) -> tuple[str, ...]:
        """Repeat the exchange that begins a segment, and write the adjoint of the one that ends it.

        `gradients` are the values that have a gradient. Return buffers to free after the segment.
        """
        ...

    def made_by_backward(self, segment: Segment, value: str, contribution: str) -> str:
        """Return the buffer to which backward writes the gradient of a value that it `changes`."""
        ...

    def settle(self, segment: Segment, part: SegmentVisit, value: str, gradient: str) -> None:
        """Write the adjoint of the exchange that begins a segment, for one gradient."""
        ...

    def end(
        self,
        segment: Segment,
        part: SegmentVisit,
        made: Sequence[tuple[str, str]],
        operation: str,
    ) -> None:
        """Write the exchange that ends a segment.

        `made` are the names and buffers of its outputs, and `operation` has written them.
        """
        ...


class ExchangeWeaver:
    """Writes the exchanges of each segment over their axes.

    Attributes:
        tokens: the writer for the tensor axis.
        sequence: the writer for ranks that share a sequence.
    """

    def __init__(self, writer: ScheduleWriter, model: Model, strategy: Strategy) -> None:
        self.tokens = Tokens(writer, model, strategy.execution.fuses_tokens)
        self.sequence = SharedSequence(writer, model, strategy)
        self._by_axis: dict[ExchangeAxis, AxisWriter] = {
            ExchangeAxis.TENSOR: self.tokens,
            ExchangeAxis.CONTEXT: self.sequence,
        }

    def _over(self, exchange: SegmentExchange | None) -> AxisWriter | None:
        return None if exchange is None else self._by_axis[exchange.axis]

    def changing(self, segment: Segment, value: str) -> AxisWriter | None:
        """Return the axis over which `segment` reads other numbers of `value`; None if its own."""
        axis = self._over(segment.begins)
        return axis if axis is not None and axis.changes(segment, value) else None

    def read(self, segment: Segment, part: SegmentVisit, instance: ValueInstance) -> str | None:
        """Return the buffer of an input after the exchange; None if a segment reads its own."""
        axis = self.changing(segment, instance.value)
        return None if axis is None else axis.read(segment, part, instance)

    def before_forward(self, segment: Segment, part: SegmentVisit) -> tuple[str, ...]:
        """Write the exchange that begins a segment; return buffers to free after it."""
        axis = self._over(segment.begins)
        return () if axis is None else axis.before_forward(segment, part)

    def before_backward(
        self, segment: Segment, part: SegmentVisit, gradients: Container[str]
    ) -> tuple[str, ...]:
        """Write the exchanges before a backward; return buffers to free after it."""
        axes = dict.fromkeys(
            each.axis for each in (segment.begins, segment.ends) if each is not None
        )
        return tuple(
            buffer
            for axis in axes
            for buffer in self._by_axis[axis].before_backward(segment, part, gradients)
        )

    def arrive(self, segment: Segment, part: SegmentVisit) -> tuple[Edge, ...]:
        """Send values on for the next segment; return what this segment waits for."""
        return self.sequence.exchange(segment, part)

    def come(self) -> tuple[Edge, ...]:
        """Return the edges that a segment's next `Compute` waits for, or may be fused with."""
        return self.tokens.come()

    def contributes(self, segment: Segment, value: str) -> bool:
        """Return False if the gradient of `value` is for another rank, and only passed on."""
        axis = self._over(segment.begins)
        return axis is None or axis.contributes(segment, value)

    def partial(self, segment: Segment, value: str) -> tuple[str, ...]:
        """Return the axes over which the gradient of `value` that a backward makes is partial."""
        axis = self._over(segment.begins)
        return () if axis is None else axis.partial(segment, value)

    def settle(self, segment: Segment, part: SegmentVisit, value: str, gradient: str) -> None:
        """Write the adjoint of the exchange that begins a segment, for one gradient."""
        axis = self._over(segment.begins)
        if axis is not None:
            axis.settle(segment, part, value, gradient)

    def end(
        self,
        segment: Segment,
        part: SegmentVisit,
        made: Sequence[tuple[str, str]],
        operation: str,
    ) -> None:
        """Write the exchange that ends a segment, if any; see `AxisWriter.end`."""
        axis = self._over(segment.ends)
        if axis is not None:
            axis.end(segment, part, made, operation)

    def after_backward(self, segment: Segment, part: SegmentVisit, operation: str) -> None:
        """Free what was received for a segment; `operation` was the last to read it."""
        self.sequence.finish(segment, part, operation)

    def after_forward(self, segment: Segment, part: SegmentVisit, operation: str) -> None:
        """Note `operation` as the producer of outputs, and free what was received for it."""
        self.sequence.note(part, operation)
        self.sequence.finish(segment, part, operation)
