"""Tokens that every expert rank gathers, and the sums of what its experts make of them.

Before a segment that reads all tokens come gathers over the ranks that hold different experts, or
parts of the same ones (`gather_for_experts`). Its outputs are partial sums of all tokens, which are
reduce-scattered (`SUM_OF_EXPERTS`). Backward gathers gradients of the sums, and reduce-scatters
gradients of the tokens. All of this is on the compute stream (`token_dispatch` and `token_combine`
of MoEAllGatherTokenDispatcher, megatron/core/transformer/moe/token_dispatcher.py in August 2026,
d98e8a64, `mappings.py` of megatron/core/tensor_parallel).

Gathered hidden states are in one buffer that all layers share and that is never freed
(`use_global_buffer`, `GlobalMemoryBuffer` of megatron/core/utils.py). The host copies the rows of
each own expert from the gathered map, and waits for them (`tokens_per_expert` in
`dispatch_postprocess`).
"""

from collections.abc import Container, Sequence

from zsim.model.model import Model, Segment
from zsim.schedule.operation import Action
from zsim.schedule.operation_list import COMPUTE
from zsim.schedule.schedule import Kind
from zsim.schedule.schedule_writer import HOST_POOL, ScheduleWriter
from zsim.zero.token_exchange import COUNTS_ON_HOST, TokensOfExperts, counting_group
from zsim.zero.visit_order import SegmentVisit, ValueInstance

GLOBAL_BUFFER = "gathered_tokens"
"""Gathered hidden states of the current layer, in memory that persists."""


class GatheredTokens(TokensOfExperts):
    """Writes these gathers and sums to `writer`."""

    def __init__(self, writer: ScheduleWriter, model: Model) -> None:
        super().__init__(writer, model)
        self.group, self.ranks = counting_group(model)
        readers = [each for unit in model.units for each in unit.segments if each.reads_all]
        self._tokens = {each.inputs[-1] for each in readers}
        if GLOBAL_BUFFER not in writer.alive:
            most = max(
                (model.values[name] for name in self._tokens), key=lambda each: each.elements
            )
            writer.prefix = "setup"
            writer.buffer(GLOBAL_BUFFER, most.elements * self.ranks, most.dtype, Kind.WORKSPACE)
            writer.persist(GLOBAL_BUFFER)

    def _of_all(self, value: str, name: str, *, produced: bool = False) -> str:
        """Return the buffer `name` of a `value`, or of its gradient, of all ranks."""
        own = self.model.values[value]
        return self.writer.buffer(
            name, own.elements * self.ranks, own.dtype, Kind.WORKSPACE, produced=produced
        )

    def sent(self, value: str, buffer: str) -> str:
        """Return the buffer of partial sums of all tokens of `buffer`, which is a `value`."""
        return self._of_all(value, f"{buffer}/summands", produced=True)

    def gradient(self, value: str) -> str:
        """Return the buffer of the gradients of the sums of all tokens."""
        return self._of_all(value, f"{value}/gradient/whole")

    def changes(self, segment: Segment, value: str) -> bool:
        """Return True if `segment` reads the tokens of all ranks."""
        del value
        return segment.reads_all

    def read(self, segment: Segment, part: SegmentVisit, instance: ValueInstance) -> str:
        """Return the buffer of all tokens that a segment reads."""
        del segment
        if instance.value in self._tokens:
            return GLOBAL_BUFFER
        return self._of_all(instance.value, f"{instance.buffer}/{part.action}/all")

    def before_forward(self, segment: Segment, part: SegmentVisit) -> tuple[str, ...]:
        """Gather the inputs unless the segment before left them; return the buffers to free."""
        found = {self.read(segment, part, each): each for each in part.reads}
        rest = tuple(each for each in found if each != GLOBAL_BUFFER)
        if not any(each in self.writer.alive for each in rest):
            self.writer.allocate(*rest)
            for whole, each in found.items():
                path = f"{part.action}{part.segment}/gather/{each.value}"
                self.writer.all_gather(path, self.group, each.buffer, whole, stream=COMPUTE)
        return () if segment.leaves_gathered else rest

    def before_backward(
        self, segment: Segment, part: SegmentVisit, gradients: Container[str]
    ) -> tuple[str, ...]:
        """Gather the gradients of the sums of all tokens; return the buffers to free."""
        made = [each.name for each in segment.outputs if segment.adds_all]
        found = [name for name in made if name in gradients]
        for value in found:
            whole, own = self.gradient(value), f"{value}/gradient"
            path = f"{part.action}{part.segment}/gather/{own}"
            self.writer.allocate(whole)
            self.writer.all_gather(path, self.group, own, whole, stream=COMPUTE)
        return tuple(map(self.gradient, found))

    def made_by_backward(self, segment: Segment, value: str, contribution: str) -> str:
        """Return the buffer of partial sums of the gradients of all tokens."""
        del segment
        return self.sent(value, contribution)

    def settle(self, segment: Segment, part: SegmentVisit, value: str, gradient: str) -> None:
        """Add up the gradients of a rank's own tokens, in `gradient`, which is allocated here."""
        del segment
        self._scatter(value, gradient, f"{part.action}{part.segment}/scatter/{value}")

    def end(
        self,
        segment: Segment,
        part: SegmentVisit,
        made: Sequence[tuple[str, str]],
        operation: str,
    ) -> None:
        """Add up the results of all experts for a rank's own tokens."""
        del operation
        for value, buffer in made if segment.adds_all else ():
            self._scatter(value, buffer, f"{part.action}{part.segment}/scatter/{value}")

    def after_forward(self, segment: Segment, part: SegmentVisit) -> None:
        """Copy the rows of each own expert to host memory, and wait for them."""
        count = self.rows.count
        if not segment.routes or part.action is not Action.FORWARD or count is None:
            return
        writer, (made,) = self.writer, part.makes
        value = self.model.values[made.value]
        on_host = writer.buffer(
            COUNTS_ON_HOST,
            value.elements,
            value.dtype,
            Kind.WORKSPACE,
            pool=HOST_POOL,
            home=COMPUTE,
        )
        path = f"{part.action}{part.segment}/counts"
        writer.allocate(on_host)
        copied = writer.copy(f"{path}/copy", made.buffer, on_host)
        layer, batch = self.rows.layer(made.value), writer.micro_batch
        writer.read_counts(
            f"{path}/read", copied, on_host, count.name, layer=layer, micro_batch=batch
        )
        writer.free(on_host)

    def _scatter(self, value: str, buffer: str, path: str) -> None:
        """Reduce-scatter partial sums into `buffer`, allocated here; free the partial sums."""
        summands = self.sent(value, buffer)
        self.writer.allocate(buffer)
        self.writer.reduce_scatter(path, self.group, summands, buffer, stream=COMPUTE)
        self.writer.free(summands)
