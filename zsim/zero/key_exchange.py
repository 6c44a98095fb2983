"""Keys and values of ranks that share a sequence: exchanged for attention, their gradients brought.

Attention of a rank's tokens reads keys and values of all tokens of the sequence. Either they are
gathered before it, again before its backward, and freed behind it; the gradients that it makes of
them are summands, which are reduce-scattered (Llama Team 2024, section 3.3.2;
`AttnFuncWithCPAndKVAllGather` of Transformer Engine 2.9). These are on the compute stream: what
follows needs them at once.

Or they go around a ring (Liu et al. 2023; `AttnFuncWithCPAndKVP2P`, and `_AllToAllRotater` of
PyTorch's `_context_parallel`): while a segment attends to those of one rank, those of the next come
in, on a stream of their own. Segments run backward from the last to the first, so the ring turns
the other way then: each rank's keys come to who has made the last gradient of them first, and the
sum of these follows them home, in the format of the optimizer (`convert_to_f32` there).
"""

from zsim.model.model import Model, Segment
from zsim.schedule.operation import Action, Edge
from zsim.schedule.operation_list import COMPUTE
from zsim.schedule.schedule import Kind
from zsim.schedule.schedule_writer import ScheduleWriter
from zsim.strategy.strategy import Strategy
from zsim.zero.names import CONTEXT
from zsim.zero.visit_order import SegmentVisit, ValueInstance


def context_streams(strategy: Strategy) -> tuple[str, ...]:
    """Return the stream on which keys and values are passed on, where they are."""
    return (CONTEXT,) if strategy.execution.passes_keys else ()


class SharedSequence:
    """Writes these exchanges into a writer, and names the buffers of what comes from others."""

    def __init__(self, writer: ScheduleWriter, model: Model, strategy: Strategy) -> None:
        self.writer = writer
        self.model = model
        self.ranks = strategy.parallel.context
        self.wide = strategy.train.precision.optimizer
        self._made: dict[str, str] = {}
        self._came: dict[str, str] = {}

    def gathers(self, segment: Segment, value: str) -> bool:
        """Tell whether `segment` reads its input `value` of all tokens of a sequence."""
        return self.ranks > 1 and value == segment.shared_input

    def passes(self, segment: Segment, value: str) -> bool:
        """Tell whether `segment` reads another rank's `value`."""
        return self.ranks > 1 and value == segment.passed_input

    def comes_home(self, segment: Segment, value: str) -> bool:
        """Tell whether `segment` makes the last gradient of `value`, which others have made."""
        is_own = self.ranks > 1 and segment.context_offset == 0
        return is_own and value == segment.inputs[-1]

    def gather_inputs(self, segment: Segment, part: SegmentVisit) -> tuple[str, ...]:
        """Gather what `segment` reads of all tokens; the buffers that hold it, taken here."""
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
        """Reduce the summands of `gradient`, which is taken here; theirs are given back."""
        summands = self.summands(value, gradient)
        self.writer.allocate(gradient)
        self.writer.reduce_scatter(path, CONTEXT, summands, gradient, stream=COMPUTE)
        self.writer.free(summands)

    def note(self, part: SegmentVisit, operation: str) -> None:
        """Remember which operation has made what `part` makes."""
        for instance in part.makes:
            self._made[instance.buffer] = operation

    def exchange(self, segment: Segment, part: SegmentVisit) -> tuple[Edge, ...]:
        """Pass on keys for the segment that follows; what `segment` itself has to wait for."""
        if self.ranks == 1 or segment.context_offset is None:
            return ()
        instance = part.reads[-1]
        own, last = segment.context_offset, self.ranks - 1
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
        """Send the keys of the rank `have` places before, for those of the one `want` places."""
        source, target = (self._there(part, instance, each) for each in (have, want))
        self.writer.allocate(target)
        way = -1 if part.action is Action.BACKWARD else 1
        path = f"{part.action}{part.segment}/pass/{target}"
        self._turn(path, source, target, way, after=self._made.pop(source, ""))

    def _turn(self, path: str, source: str, target: str, way: int, *, after: str) -> None:
        """Send `source` to the neighbour, and receive `target` from the other one."""
        writer = self.writer
        writer.send(f"{path}/send", CONTEXT, source, way, stream=CONTEXT)
        writer.receive(f"{path}/receive", CONTEXT, target, -way, stream=CONTEXT)
        self._came[target] = writer.together(path, 2, after=(after,) if after else ())

    def finish(self, segment: Segment, part: SegmentVisit, operation: str) -> None:
        """Give back what came for `segment`, which `operation` was the last to read."""
        if self.ranks > 1 and segment.context_offset:
            came = self._there(part, part.reads[-1], segment.context_offset)
            self.writer.free(came, uses=(operation,))

    def bring_gradient(self, value: str, segment: Segment, own: str, path: str) -> None:
        """Add `own`, the gradient of `segment`, to those made before, and pass the sum on.

        The first segment, which attends to a rank's own keys, runs last: there it comes home.
        """
        offset = segment.context_offset
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
        if offset == last - 1:  # sent on by now; given back before, compute would have waited
            writer.free(self._sum(value, last))
        if not offset:
            return
        writer.free(own)
        there = self._sum(value, offset - 1)
        writer.allocate(there)
        self._turn(f"{path}/bring", here, there, -1, after=added)
        if offset != last:
            writer.free(here)

    def _sum(self, value: str, offset: int) -> str:
        """Return the buffer of the sum of gradients for the rank so many places before."""
        home = COMPUTE if offset == self.ranks - 1 else CONTEXT
        name, elements = f"{value}/gradient/sum{offset}", self.model.values[value].elements
        return self.writer.buffer(name, elements, self.wide, Kind.WORKSPACE, home=home)

    def read(self, segment: Segment, part: SegmentVisit, instance: ValueInstance) -> str:
        """Return the buffer of what `part` reads of other ranks, one for each pass."""
        if segment.gathers_context:
            return self._whole(part, instance)
        return self._there(part, instance, segment.context_offset or 0)

    def _there(self, part: SegmentVisit, instance: ValueInstance, offset: int) -> str:
        """Return the buffer of what the rank so many places before has."""
        if not offset:
            return instance.buffer
        name, value = f"{instance.buffer}/{part.action}/from{offset}", instance.value
        own = self.model.values[value]
        return self.writer.buffer(name, own.elements, own.dtype, Kind.WORKSPACE, home=CONTEXT)

    def _whole(self, part: SegmentVisit, instance: ValueInstance) -> str:
        name = f"{instance.buffer}/{part.action}/sequence"
        return self._all_tokens(instance.value, name, produced=False)

    def summands(self, value: str, gradient: str) -> str:
        """Return the buffer of summands of the gradients of all tokens of `value`."""
        return self._all_tokens(value, f"{gradient}/summands", produced=True)

    def part(self, value: str, segment: Segment) -> str:
        """Return the buffer of the gradient that `segment` makes of another rank's `value`."""
        own = self.model.values[value]
        name = f"{value}/gradient/part{segment.context_offset}"
        return self.writer.buffer(name, own.elements, own.dtype, Kind.WORKSPACE, produced=True)

    def _all_tokens(self, value: str, name: str, *, produced: bool) -> str:
        own = self.model.values[value]
        elements = own.elements * self.ranks
        return self.writer.buffer(name, elements, own.dtype, Kind.WORKSPACE, produced=produced)
