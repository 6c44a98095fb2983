"""Exchange of copies of tokens among expert ranks, there and back, and of their gradients.

A segment ends in the exchange (`SWAP_EXPERTS`): it writes the copies for all experts in order, a
block for each expert rank. The value after the exchange has a block from each rank. Before the
segment's backward the gradient is exchanged in the same manner, which returns each block to its
rank. All of this runs on the compute stream, because the next kernel needs it at once. The result
is kept for backward if the reader keeps its inputs, so it is exchanged again only in recomputation.

The first exchange of a block has counted rows. Before it, all ranks gather the counts of copies for
each expert and copy them to host memory, and the host waits for them (`preprocess` and
`_maybe_dtoh_and_synchronize` of MoEAlltoAllTokenDispatcher, megatron/core/transformer/moe). Counts
are kept: recomputation, whose router chooses the same experts, and backward do not read them again.

If weights stay at their source (`weighs_at_source`), ranks exchange counts in an all-to-all, and
copy them to host memory on the compute stream, as `_token_count_exchange` and
`_sync_token_count_exchange` of torchtitan do (torchtitan/models/common/token_dispatcher.py).

A library may exchange tokens in place of NCCL (`transport_of`). It plans the first exchange of a
layer for all others, and sends weights of tokens with the tokens.
"""

from collections.abc import Container, Sequence
from dataclasses import replace

from zsim.model.expert_transport import ExpertTransport, transport_of
from zsim.model.model import Model, ModelError, Segment
from zsim.schedule.operation import Action
from zsim.schedule.operation_list import COMPUTE
from zsim.schedule.schedule import Kind
from zsim.schedule.schedule_writer import HOST_POOL, TO_HOST, ScheduleWriter
from zsim.zero.names import EXPERT, TENSOR_EXPERT
from zsim.zero.token_rows import TokenRows
from zsim.zero.visit_order import SegmentVisit, ValueInstance

COUNTS_ON_HOST = "expert_counts"
"""Pinned host memory for the counts of a block, until the host has read them."""


def count_streams(model: Model) -> tuple[str, ...]:
    """Return the stream of copies of counts to host memory; empty if the host reads none."""
    routing = model.routing
    gathers = routing is not None and not routing.padded and not swaps_counts(model)
    shape = model.architecture
    gathers = gathers and not (shape is not None and shape.execution.gathers_experts)
    return (TO_HOST,) if gathers else ()


def swaps_counts(model: Model) -> bool:
    """Return True if ranks exchange counts in an all-to-all; if False, they gather all counts."""
    return model.architecture is not None and model.architecture.execution.weighs_at_source


def counting_group(model: Model) -> tuple[str, int]:
    """Return the group over which counts are gathered, Megatron-LM's `tp_ep`, and its ranks.

    Without parts of experts these are the ranks of `ep`. A separate communicator matters if
    exchanges of another micro-batch run meanwhile.
    """
    shape = model.architecture
    merges = shape is not None and shape.execution.merges_micro_batches
    if model.expert_tensor == 1 and not merges:
        return EXPERT, model.expert
    return TENSOR_EXPERT, model.expert * model.expert_tensor


class TokensOfExperts:
    """Writes these exchanges to `writer`, and names the buffers of blocks that are sent.

    `rows` are the rows of exchanged values.
    """

    def __init__(self, writer: ScheduleWriter, model: Model) -> None:
        self.writer = writer
        self.model = model
        self.rows = TokenRows(model)
        self._transport = transport_of(model.architecture)
        self._returned = frozenset(
            value.name
            for unit in model.units
            for segment in [each for each in unit.segments if each.swaps][1:]
            for value in segment.outputs
        )

    def sent(self, value: str, buffer: str) -> str:
        """Return the buffer of the blocks of `buffer`, which is a `value`, before the exchange."""
        own = self.model.values[value]
        elements, rows = self.rows.of_value(own, sent=True)
        return self.writer.buffer(
            f"{buffer}/sent", elements, own.dtype, Kind.WORKSPACE, produced=True, rows=rows
        )

    def gradient(self, value: str) -> str:
        """Return the buffer of the gradient of the blocks that this rank has sent."""
        own = self.model.values[value]
        elements, rows = self.rows.of_value(own, sent=True)
        return self.writer.buffer(
            f"{value}/gradient/returned", elements, own.dtype, Kind.WORKSPACE, rows=rows
        )

    def _by(self, segment: Segment, value: str, *, backward: bool) -> ExpertTransport | None:
        """Return the library's exchange of `value`, or of its gradient; None if NCCL does it."""
        transport = self._transport
        if transport is None:
            return None
        own = self.model.values[value].elements
        rides = own < max(each.elements for each in segment.outputs)
        returns = (value in self._returned) is not backward
        return replace(
            transport,
            width=1 if rides else transport.width,
            plans=not (returns or backward or rides),
            returns=returns,
            rides=rides,
        )

    def end(
        self,
        segment: Segment,
        part: SegmentVisit,
        made: Sequence[tuple[str, str]],
        operation: str,
    ) -> None:
        """Exchange the outputs of a segment in sequence; first gather their counts."""
        del operation
        for value, buffer in made:
            if value == segment.routes and part.action is Action.FORWARD:
                self._read_counts(part, value, buffer)
        for value, buffer in made:
            if value not in self.rows.swapped:
                continue
            sent = self.sent(value, buffer)
            path = f"{part.action}{part.segment}/exchange/{value}"
            self.writer.allocate(buffer)
            by = self._by(segment, value, backward=False)
            self.writer.all_to_all(path, EXPERT, sent, buffer, stream=COMPUTE, by=by)
            self.writer.free(sent)

    def _read_counts(self, part: SegmentVisit, value: str, buffer: str) -> None:
        """Gather counts on all ranks that run the rows, or exchange them, and read them."""
        writer, count = self.writer, self.rows.count
        assert count is not None
        group, ranks = counting_group(self.model)
        swaps, dtype = swaps_counts(self.model), self.model.values[value].dtype
        elements = count.experts * (1 if swaps else ranks)
        stream = COMPUTE if swaps else TO_HOST
        every = writer.buffer(f"{buffer}/every", elements, dtype, Kind.WORKSPACE)
        on_host = writer.buffer(
            COUNTS_ON_HOST, elements, dtype, Kind.WORKSPACE, pool=HOST_POOL, home=stream
        )
        path = f"{part.action}{part.segment}/counts"
        writer.allocate(every, on_host)
        if swaps:
            came = writer.all_to_all(f"{path}/exchange", EXPERT, buffer, every, stream=COMPUTE)
        else:
            came = writer.all_gather(f"{path}/gather", group, buffer, every, stream=COMPUTE)
        after = () if swaps else (came,)
        copied = writer.copy(f"{path}/copy", every, on_host, stream=stream, after=after)
        writer.read_counts(
            f"{path}/read",
            copied,
            on_host,
            count.name,
            layer=self.rows.layer(value),
            micro_batch=writer.micro_batch,
        )
        writer.free(every, uses=(copied,))
        writer.free(on_host)

    def before_backward(
        self, segment: Segment, part: SegmentVisit, gradients: Container[str]
    ) -> tuple[str, ...]:
        """Exchange the gradients of the segment's outputs; return the buffers to free."""
        found: list[str] = []
        for value in segment.outputs:
            if segment.exchanges_rows(value) and value.name in gradients:
                returned, came = self.gradient(value.name), f"{value.name}/gradient"
                path = f"{part.action}{part.segment}/exchange/{came}"
                self.writer.allocate(returned)
                by = self._by(segment, value.name, backward=True)
                self.writer.all_to_all(path, EXPERT, came, returned, stream=COMPUTE, by=by)
                found.append(returned)
        return tuple(found)

    def before_forward(self, segment: Segment, part: SegmentVisit) -> tuple[str, ...]:
        """Raise ModelError: no segment has an input exchange of expert ranks."""
        del part
        raise _unknown(segment)

    def after_forward(self, segment: Segment, part: SegmentVisit) -> None:
        """Raise ModelError: no segment has an input exchange of expert ranks."""
        del part
        raise _unknown(segment)

    def changes(self, segment: Segment, value: str) -> bool:
        """Return False: segments read their inputs as they are."""
        del segment, value
        return False

    def contributes(self, segment: Segment, value: str) -> bool:
        """Return True: each gradient is of the rank's own value."""
        del segment, value
        return True

    def partial(self, segment: Segment, value: str) -> tuple[str, ...]:
        """Return no axis: gradients are not summed."""
        del segment, value
        return ()

    def read(self, segment: Segment, part: SegmentVisit, instance: ValueInstance) -> str:
        """Raise ModelError: no segment has an input exchange of expert ranks."""
        del part, instance
        raise _unknown(segment)

    def made_by_backward(self, segment: Segment, value: str, contribution: str) -> str:
        """Return the buffer of the gradient of an input, which is not exchanged."""
        del segment, value
        return contribution

    def settle(self, segment: Segment, part: SegmentVisit, value: str, gradient: str) -> None:
        """Raise ModelError: no segment has an input exchange of expert ranks."""
        del part, value, gradient
        raise _unknown(segment)


def _unknown(segment: Segment) -> ModelError:
    return ModelError(f"segment: begins with {segment.begins}, must not begin over expert ranks")
