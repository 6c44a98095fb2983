"""Write the exchanges before and after segments, for all axes.

The input exchange of a segment (`begins`) runs before its forward, and its adjoint after its
backward. The output exchange (`ends`) runs after the forward, and its adjoint before the backward.
Each axis has a class that writes its collectives and names its buffers: `Tokens` for the tensor
axis, `SharedSequence` for ranks that share a sequence, `TokensOfExperts` for expert ranks.
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
from zsim.zero.token_exchange import TokensOfExperts
from zsim.zero.visit_order import SegmentVisit, ValueInstance


class AxisWriter(Protocol):
    """Writer of the exchanges over one axis."""

    def changes(self, segment: Segment, value: str) -> bool:
        """Return True if `segment` reads exchanged data instead of this rank's own `value`."""
        ...

    def contributes(self, segment: Segment, value: str) -> bool:
        """Return False if the gradient of `value` is for another rank, and only passed on."""
        ...

    def partial(self, segment: Segment, value: str) -> tuple[str, ...]:
        """Return the axes over which the gradient of `value` that a backward makes is partial."""
        ...

    def read(self, segment: Segment, part: SegmentVisit, instance: ValueInstance) -> str:
        """Return the buffer that `part` reads instead of the rank's own value."""
        ...

    def before_forward(self, segment: Segment, part: SegmentVisit) -> tuple[str, ...]:
        """Write the input exchange of a segment; return buffers to free after the segment."""
        ...

    def before_backward(
        self, segment: Segment, part: SegmentVisit, gradients: Container[str]
    ) -> tuple[str, ...]:
        """Repeat the input exchange of a segment, and write the adjoint of its output exchange.

        `gradients` are the values that have a gradient. Return buffers to free after the segment.
        """
        ...

    def made_by_backward(self, segment: Segment, value: str, contribution: str) -> str:
        """Return the buffer into which backward writes the gradient of an exchanged value."""
        ...

    def settle(self, segment: Segment, part: SegmentVisit, value: str, gradient: str) -> None:
        """Write the adjoint of the input exchange of a segment, for one gradient."""
        ...

    def end(
        self,
        segment: Segment,
        part: SegmentVisit,
        made: Sequence[tuple[str, str]],
        operation: str,
    ) -> None:
        """Write the output exchange of a segment.

        `made` are the names and buffers of its outputs, and `operation` has written them.
        """
        ...


class ExchangeWeaver:
    """Writes the exchanges of each segment over their axes.

    Attributes:
        tokens: the writer for the tensor axis.
        sequence: the writer for ranks that share a sequence.
        experts: the writer for expert ranks.
    """

    def __init__(self, writer: ScheduleWriter, model: Model, strategy: Strategy) -> None:
        self.experts = _tokens_of_experts(writer, model)
        self.tokens = Tokens(
            writer,
            model,
            strategy.execution.fuses_tokens,
            measures=strategy.execution.measures_tokens,
            rows=self.experts.rows,
        )
        self.sequence = SharedSequence(writer, model, strategy)
        self._by_axis: dict[ExchangeAxis, AxisWriter] = {
            ExchangeAxis.TENSOR: self.tokens,
            ExchangeAxis.CONTEXT: self.sequence,
            ExchangeAxis.EXPERT: self.experts,
        }

    def _over(self, exchange: SegmentExchange | None) -> AxisWriter | None:
        return None if exchange is None else self._by_axis[exchange.axis]

    def changing(self, segment: Segment, value: str) -> AxisWriter | None:
        """Return the writer of the axis over which `value` is exchanged for `segment`, or None."""
        axis = self._over(segment.begins)
        return axis if axis is not None and axis.changes(segment, value) else None

    def read(self, segment: Segment, part: SegmentVisit, instance: ValueInstance) -> str | None:
        """Return the buffer of an input after its exchange; None if it is not exchanged."""
        axis = self.changing(segment, instance.value)
        return None if axis is None else axis.read(segment, part, instance)

    def before_forward(self, segment: Segment, part: SegmentVisit) -> tuple[str, ...]:
        """Write the input exchange of a segment; return buffers to free after the segment."""
        axis = self._over(segment.begins)
        return () if axis is None else axis.before_forward(segment, part)

    def before_backward(
        self, segment: Segment, part: SegmentVisit, gradients: Container[str]
    ) -> tuple[str, ...]:
        """Write the exchanges before a backward; return buffers to free after the backward."""
        axes = dict.fromkeys(
            each.axis for each in (segment.begins, segment.ends) if each is not None
        )
        return tuple(
            buffer
            for axis in axes
            for buffer in self._by_axis[axis].before_backward(segment, part, gradients)
        )

    def arrive(self, segment: Segment, part: SegmentVisit) -> tuple[Edge, ...]:
        """Send values on for the next segment; return the edges that this segment waits for."""
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
        """Write the adjoint of the input exchange of a segment, for one gradient."""
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
        """Write the output exchange of a segment, if any; see `AxisWriter.end`."""
        axis = self._over(segment.ends)
        if axis is not None:
            axis.end(segment, part, made, operation)

    def after_backward(self, segment: Segment, part: SegmentVisit, operation: str) -> None:
        """Free the received buffers of a segment; `operation` was the last to read them."""
        self.sequence.finish(segment, part, operation)

    def after_forward(self, segment: Segment, part: SegmentVisit, operation: str) -> None:
        """Record `operation` as the producer of the outputs; free received buffers."""
        self.sequence.note(part, operation)
        self.sequence.finish(segment, part, operation)
        if segment.reads_all:
            self.experts.after_forward(segment, part)


def _tokens_of_experts(writer: ScheduleWriter, model: Model) -> TokensOfExperts:
    """Return the writer of exchanges over expert ranks: of copies, or gathers of all tokens."""
    if not any(segment.reads_all for unit in model.units for segment in unit.segments):
        return TokensOfExperts(writer, model)
    from zsim.zero.gathered_tokens import GatheredTokens  # noqa: PLC0415 (rare)

    return GatheredTokens(writer, model)
