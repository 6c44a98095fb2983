"""Exchange of keys and values among ranks that share a sequence, and of their gradients.

Attention over a rank's tokens reads the keys and values of all tokens of the sequence. There are
two methods. With an all-gather, keys and values are gathered before attention, again before its
backward, and freed after it. Their gradients are partial sums and are reduce-scattered (Llama Team
2024, section 3.3.2; `AttnFuncWithCPAndKVAllGather` of Transformer Engine 2.9). These collectives
run on the compute stream, because the next kernel needs them at once.

With a ring (Liu et al. 2023; `AttnFuncWithCPAndKVP2P`, and `_AllToAllRotater` of PyTorch's
`_context_parallel`), one segment attends to the keys of one rank while those of the next arrive on
a separate stream. Segments run backward from last to first, so the ring then turns in the other
direction. Each rank's keys first reach the rank that makes the last partial gradient of them. The
sum of the gradients follows them to their owner in the optimizer's dtype (`convert_to_f32`).
"""

from collections.abc import Container, Sequence

from zsim.model.model import Model, ModelError, Segment
from zsim.schedule.operation import Action, Edge
from zsim.schedule.operation_list import COMPUTE
from zsim.schedule.schedule import Kind
from zsim.schedule.schedule_writer import ScheduleWriter
from zsim.strategy.strategy import Strategy
from zsim.zero.names import CONTEXT
from zsim.zero.visit_order import SegmentVisit, ValueInstance


def context_streams(strategy: Strategy) -> tuple[str, ...]:
    """Return the stream that passes keys and values around the ring; empty without a ring."""
    return (CONTEXT,) if strategy.execution.passes_keys else ()


class SharedSequence:
    """Writes these exchanges to `writer`, and names the buffers received from other ranks."""

    def __init__(self, writer: ScheduleWriter, model: Model, strategy: Strategy) -> None:
        self.writer = writer
        self.model = model
        self.ranks = strategy.parallel.context
        self.wide = strategy.train.precision.optimizer
        self._made: dict[str, str] = {}
        self._came: dict[str, str] = {}

    def gathers(self, segment: Segment, value: str) -> bool:
        """Return True if `segment` reads its input `value` for all tokens of a sequence."""
        return self.ranks > 1 and value == segment.shared_input

    def passes(self, segment: Segment, value: str) -> bool:
        """Return True if `segment` reads another rank's `value`."""
        return self.ranks > 1 and value == segment.passed_input

    def comes_home(self, segment: Segment, value: str) -> bool:
        """Return True if `segment` is the last to add to the gradient of `value`."""
        is_own = self.ranks > 1 and segment.offset == 0
        return is_own and value == segment.inputs[-1]

    def changes(self, segment: Segment, value: str) -> bool:
        """Return True if `segment` reads the `value` of other ranks, or of all of them."""
        return value in (segment.shared_input, segment.passed_input)

    def contributes(self, segment: Segment, value: str) -> bool:
        """Return False if the gradient of `value` is for the rank that passed it here."""
        return not self.passes(segment, value)

    def partial(self, segment: Segment, value: str) -> tuple[str, ...]:
        """Return the axis of the ranks that share a sequence if `value` was gathered."""
        return (CONTEXT,) if self.gathers(segment, value) else ()

    def made_by_backward(self, segment: Segment, value: str, contribution: str) -> str:
        """Return the buffer of the gradient: of another rank's keys, or of those of all ranks."""
        if self.passes(segment, value):
            return self.part(value, segment)
        return self.summands(value, contribution) if self.ranks > 1 else contribution

    def end(
        self,
        segment: Segment,
        part: SegmentVisit,
        made: Sequence[tuple[str, str]],
        operation: str,
    ) -> None:
        """Raise ModelError: no segment ends in an exchange of a sequence."""
        del part, made, operation
        raise ModelError(f"segment: ends in {segment.ends}, must end in a sum over the tensor axis")

    def settle(self, segment: Segment, part: SegmentVisit, value: str, gradient: str) -> None:
        """Sum the gradient of a gathered input, or send that of a passed one to its owner."""
        path = f"backward{part.segment}"
        if self.passes(segment, value):
            self.bring_gradient(value, segment, self.part(value, segment), f"{path}/{value}")
        elif self.comes_home(segment, value):
            self.bring_gradient(value, segment, gradient, f"{path}/{value}")
        elif self.gathers(segment, value):
            self.scatter(value, gradient, f"{path}/scatter/{value}")

    def before_backward(
        self, segment: Segment, part: SegmentVisit, gradients: Container[str]
    ) -> tuple[str, ...]:
        """Gather the inputs that `segment` reads for all tokens; return their new buffers."""
        del gradients
        return self.before_forward(segment, part)

    def before_forward(self, segment: Segment, part: SegmentVisit) -> tuple[str, ...]:
        """Gather the inputs that `segment` reads for all tokens; return their new buffers."""
        return tuple(
            self._gather(each, part) for each in part.reads if self.gathers(segment, each.value)
        )

    def _gather(self, instance: ValueInstance, part: SegmentVisit) -> str:
        whole = self._whole(part, instance)
        self.writer.allocate(whole)
        path = f"{part.action}{part.segment}/gather/{instance.buffer}"
        self.writer.all_gather(path, CONTEXT, instance.buffer, whole, stream=COMPUTE)
        return whole

    def scatter(self, value: str, gradient: str, path: str) -> None:
        """Reduce-scatter partial sums into `gradient`, allocated here; free the partial sums."""
        summands = self.summands(value, gradient)
        self.writer.allocate(gradient)
        self.writer.reduce_scatter(path, CONTEXT, summands, gradient, stream=COMPUTE)
        self.writer.free(summands)

    def note(self, part: SegmentVisit, operation: str) -> None:
        """Record `operation` as the producer of the values that `part` makes."""
        for instance in part.makes:
            self._made[instance.buffer] = operation

    def exchange(self, segment: Segment, part: SegmentVisit) -> tuple[Edge, ...]:
        """Pass keys on for the next segment; return the edges that `segment` itself waits for."""
        if self.ranks == 1 or segment.offset is None:
            return ()
        instance = part.reads[-1]
        own, last = segment.offset, self.ranks - 1
        if part.action is Action.BACKWARD:
            if own == last:
                self._pass_on(part, instance, 0, last)
            if own > 1:
                self._pass_on(part, instance, own, own - 1)
        elif own < last:
            self._pass_on(part, instance, own, own + 1)
        came = self._came.get(self._there(part, instance, own))
        return () if own == 0 or came is None else (came,)

    def _pass_on(self, part: SegmentVisit, instance: ValueInstance, have: int, want: int) -> None:
        """Pass on keys of the rank `have` places before; receive those of `want` places before."""
        source, target = (self._there(part, instance, each) for each in (have, want))
        self.writer.allocate(target)
        direction = -1 if part.action is Action.BACKWARD else 1
        path = f"{part.action}{part.segment}/pass/{target}"
        self._rotate(path, source, target, direction, after=self._made.pop(source, ""))

    def _rotate(self, path: str, source: str, target: str, direction: int, *, after: str) -> None:
        """Send `source` to one neighbor, and receive `target` from the other."""
        writer = self.writer
        writer.send(f"{path}/send", CONTEXT, source, direction, stream=CONTEXT)
        writer.receive(f"{path}/receive", CONTEXT, target, -direction, stream=CONTEXT)
        self._came[target] = writer.together(path, 2, after=(after,) if after else ())

    def finish(self, segment: Segment, part: SegmentVisit, operation: str) -> None:
        """Free the keys received for `segment`; `operation` was the last to read them."""
        if self.ranks > 1 and segment.offset:
            came = self._there(part, part.reads[-1], segment.offset)
            self.writer.free(came, uses=(operation,))

    def bring_gradient(self, value: str, segment: Segment, own: str, path: str) -> None:
        """Add `own`, the gradient of `segment`, to the sum received, and pass the sum on.

        The first segment, which attends to a rank's own keys, runs last: there the sum reaches its
        owner.
        """
        offset = segment.offset
        assert offset is not None
        writer, last = self.writer, self.ranks - 1
        here = self._sum(value, offset)
        if not offset:
            added = writer.copy(
                f"{path}/add", here, own, accumulate=True, after=(self._came[here],)
            )
            writer.free(here, uses=(added,))
        elif offset == last:
            writer.allocate(here)
            added = writer.copy(f"{path}/begin", own, here)
        else:
            added = writer.copy(
                f"{path}/add", own, here, accumulate=True, after=(self._came[here],)
            )
        if offset == last - 1:  # sent by now; an earlier free would stall compute
            writer.free(self._sum(value, last))
        if not offset:
            return
        writer.free(own)
        there = self._sum(value, offset - 1)
        writer.allocate(there)
        self._rotate(f"{path}/bring", here, there, -1, after=added)
        if offset != last:
            writer.free(here)

    def _sum(self, value: str, offset: int) -> str:
        """Return the buffer of the sum of gradients for the rank `offset` places before."""
        home = COMPUTE if offset == self.ranks - 1 else CONTEXT
        name, elements = f"{value}/gradient/sum{offset}", self.model.values[value].elements
        return self.writer.buffer(name, elements, self.wide, Kind.WORKSPACE, home=home)

    def read(self, segment: Segment, part: SegmentVisit, instance: ValueInstance) -> str:
        """Return the buffer of the values that `part` reads from other ranks, one for each pass."""
        if segment.shared_input is not None:
            return self._whole(part, instance)
        return self._there(part, instance, segment.offset or 0)

    def _there(self, part: SegmentVisit, instance: ValueInstance, offset: int) -> str:
        """Return the buffer of the value from the rank `offset` places before (0: this rank)."""
        if not offset:
            return instance.buffer
        name, value = f"{instance.buffer}/{part.action}/from{offset}", instance.value
        own = self.model.values[value]
        return self.writer.buffer(name, own.elements, own.dtype, Kind.WORKSPACE, home=CONTEXT)

    def _whole(self, part: SegmentVisit, instance: ValueInstance) -> str:
        name = f"{instance.buffer}/{part.action}/sequence"
        return self._all_tokens(instance.value, name, produced=False)

    def summands(self, value: str, gradient: str) -> str:
        """Return the buffer of partial sums of the gradients of all tokens of `value`."""
        return self._all_tokens(value, f"{gradient}/summands", produced=True)

    def part(self, value: str, segment: Segment) -> str:
        """Return the buffer of the gradient that `segment` makes of another rank's `value`."""
        own = self.model.values[value]
        name = f"{value}/gradient/part{segment.offset}"
        return self.writer.buffer(name, own.elements, own.dtype, Kind.WORKSPACE, produced=True)

    def _all_tokens(self, value: str, name: str, *, produced: bool) -> str:
        own = self.model.values[value]
        elements = own.elements * self.ranks
        return self.writer.buffer(name, elements, own.dtype, Kind.WORKSPACE, produced=produced)
