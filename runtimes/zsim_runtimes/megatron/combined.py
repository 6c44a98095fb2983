"""Forward of one micro-batch merged with backward of the one before, to hide expert exchanges.

`--overlap-moe-expert-parallel-comm` without a pipeline:
`combined_1f1b_schedule_for_no_pipelining` (megatron/core/pipeline_parallel/combined_1f1b.py) and
`TransformerLayerSchedulePlan.run` (megatron/core/models/common/model_chunk_schedule_plan.py) in
August 2026, d98e8a64. A layer has four nodes in each direction: attention to permutation, the
exchange of tokens, experts, and the exchange of results with the sums after it. Exchanges run on a
communication stream, and so do these sums. A layer of one micro-batch is issued in turn with a
layer of the other; each node waits for the previous node of the same micro-batch (`ScheduleNode`).

Memory belongs to the stream that first uses it. If the other stream uses it as well, it returns
late (`record_stream`). Losses of routers run with the experts, where upstream has them before the
exchange.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from msgspec.structs import replace

from zsim.model.model import Model, ModelError
from zsim.model.pipeline_stages import Chunk, Stage
from zsim.schedule.access import accesses
from zsim.schedule.operation import (
    Allocate,
    AllToAll,
    Free,
    FreeMode,
    Operation,
    StreamOperation,
)
from zsim.schedule.operation_list import COMPUTE
from zsim.schedule.schedule_writer import POOL
from zsim.strategy.activations import Checkpointing
from zsim.strategy.execution import Recomputed
from zsim.strategy.precision import Precision
from zsim.strategy.strategy import Strategy
from zsim.zero.bucket import Buckets
from zsim.zero.micro_batch_slots import ChunkSlot, chunk_slots
from zsim.zero.visit_order import UnitVisit
from zsim_runtimes.megatron.options import Megatron
from zsim_runtimes.megatron.schedule import MegatronStep

EXCHANGES = "expert_exchanges"
"""The stream of exchanges of tokens (`get_comm_stream`)."""
FIELD: Final = "zero.megatron.overlap_moe_expert_parallel_comm: true"


def need(model: Model, strategy: Strategy) -> None:
    """Raise ModelError unless both micro-batches can be merged.

    Raises:
        ModelError: Megatron-LM refuses it (`TransformerConfig.__post_init__`), or zsim does not
            model it.
    """
    options, parallel = strategy.options(Megatron), strategy.parallel
    shape = model.architecture
    for wrong, why in (
        (parallel.expert == 1, "needs parallel.expert above 1"),
        (parallel.pipeline > 1, f"is not modelled with parallel.pipeline = {parallel.pipeline}"),
        (
            strategy.activations.checkpointing is Checkpointing.FULL,
            'excludes activations.checkpointing = "full"',
        ),
        (Recomputed.EXPERTS in strategy.execution.recomputes, "excludes moe in recompute_modules"),
        (
            strategy.train.precision not in (Precision.BF16, Precision.FP16),
            "needs train.precision bf16 or fp16",
        ),
        (options.cuda_graphs is not None, "is not modelled with cuda_graph_impl"),
        (
            shape is not None and shape.mtp_layers > 0,
            "is not modelled with model.mtp_layers",
        ),
        (
            options.cpu_offloading_num_layers > 0,
            "is not modelled with cpu_offloading_num_layers",
        ),
    ):
        if wrong:
            raise ModelError(f"{FIELD} {why}")


@dataclass(slots=True)
class _Lane:
    """A micro-batch: its buffers, and the last operation of its last node."""

    slot: ChunkSlot
    micro_batch: int
    last: str = ""
    stream: str = COMPUTE


class CombinedStep(MegatronStep):
    """A step whose micro-batches overlap: each forward with the backward before it."""

    def __init__(
        self, model: Model, strategy: Strategy, buckets: Buckets, *, overlaps: bool
    ) -> None:
        super().__init__(model, strategy, buckets, overlaps=overlaps)
        chunk = Chunk(first=0, model=model, given=None, sent=None)
        stage = Stage(index=0, model=model, chunks=(chunk,))
        elsewhere = self.passes.elsewhere
        (self._slots,) = chunk_slots(
            self.writer, stage, strategy, buckets=buckets, held=self.held, counts=[2]
        )
        for slot in self._slots:
            slot.passes.elsewhere = elsewhere

    def write(self) -> None:
        """Write the rest of setup, and the step."""
        self.write_setup()
        self.write_biases()
        self.writer.begin_step()
        self.begin()
        count = self.strategy.train.gradient_accumulation_steps
        lanes = [_Lane(self._slots[number % 2], number) for number in range(count)]
        for ahead, behind in zip([*lanes, None], [None, *lanes], strict=True):
            self._phase(ahead, behind)
        self.writer.prefix = "step/backward/end"
        self.end()
        self._settle()

    def _phase(self, ahead: _Lane | None, behind: _Lane | None) -> None:
        """Write a forward, and the backward of the micro-batch before it."""
        forward: Sequence[UnitVisit] = [] if ahead is None else ahead.slot.forward
        backward: Sequence[UnitVisit] = [] if behind is None else behind.slot.backward
        if ahead is not None:
            self._enter(ahead, "forward")
            self._place(ahead, self._written(ahead.slot.begin_forward), COMPUTE)
            self._alone(ahead, forward[0], self.forward)
        if behind is not None:
            self._enter(behind, "backward")
            self._place(behind, self._written(behind.slot.begin_backward), COMPUTE)
            self._alone(behind, backward[0], self.backward)
        pairs = max(len(forward), len(backward)) - 2
        for number in range(1, pairs + 1):
            one = self._nodes(ahead, forward[number], self.forward) if ahead else []
            other = self._nodes(behind, backward[number], self.backward) if behind else []
            self._run(ahead, one, behind, other)
        if ahead is not None:
            self._enter(ahead, "forward")
            self._alone(ahead, forward[-1], self.forward)
        if behind is not None:
            self._enter(behind, "backward")
            self._alone(behind, backward[-1], self.backward)

    def _run(
        self,
        ahead: _Lane | None,
        forward: Sequence[list[Operation]],
        behind: _Lane | None,
        backward: Sequence[list[Operation]],
    ) -> None:
        """Issue the nodes of a layer of each micro-batch in turn."""
        # TransformerLayerSchedulePlan.run: combine, attention, experts, dispatch, dispatch,
        # experts, combine, attention; backward and forward by turns
        for is_ahead, node in (
            *((False, 0), (True, 0), (False, 1), (True, 1)),
            *((False, 2), (True, 2), (True, 3), (False, 3)),
        ):
            lane, nodes = (ahead, forward) if is_ahead else (behind, backward)
            if lane is not None:
                on_exchanges = node % 2 == (1 if is_ahead else 0)
                self._place(lane, nodes[node], EXCHANGES if on_exchanges else COMPUTE)

    def _enter(self, lane: _Lane, way: str) -> None:
        """Continue with a micro-batch."""
        self.passes = lane.slot.passes
        self.enter(lane.micro_batch)
        self.writer.prefix = f"step/{way}/mb{lane.micro_batch}"

    def _alone(self, lane: _Lane, visit: UnitVisit, write: Callable[[UnitVisit], None]) -> None:
        """Write a unit without exchanges."""
        self._place(lane, self._visited(lane, visit, write), COMPUTE)

    def _visited(
        self, lane: _Lane, visit: UnitVisit, write: Callable[[UnitVisit], None]
    ) -> list[Operation]:
        """Return the operations of a unit."""
        way = "backward" if visit.backward else "forward"
        self._enter(lane, way)
        self.writer.prefix += f"/{self.model.units[visit.unit].name}"
        return self._written(lambda: write(visit))

    def _written(self, write: Callable[[], None]) -> list[Operation]:
        """Return the operations that `write` writes, which are not issued yet."""
        before = self.writer.operations
        made = self.writer.operations = list[Operation]()
        write()
        self.writer.operations = before
        return made

    def _nodes(
        self, lane: _Lane, visit: UnitVisit, write: Callable[[UnitVisit], None]
    ) -> list[list[Operation]]:
        """Return the four nodes of a layer, in the order of their direction.

        A layer without experts is one node of the compute stream.
        """
        found = self._visited(lane, visit, write)
        places = [number for number, each in enumerate(found) if isinstance(each, AllToAll)]
        if not places:
            alone: list[list[Operation]] = [[], [], [], []]
            alone[3 if visit.backward else 0] = found
            return alone
        if visit.backward:  # results, then tokens
            ends = places[0] + 1, _begin(found, places[1]), places[-1] + 1
        else:
            after = places[-2] + 1
            while isinstance(found[after], Free):
                after += 1
            ends = _begin(found, places[0]), after, _begin(found, places[-1])
        return [found[low:high] for low, high in zip((0, *ends), (*ends, len(found)), strict=True)]

    def _place(self, lane: _Lane, node: Sequence[Operation], stream: str) -> None:
        """Issue a node on a stream; it waits for the node before it of its micro-batch."""
        waits = lane.last if lane.stream != stream else ""
        for each in node:
            moved = each
            if isinstance(each, StreamOperation) and each.stream == COMPUTE:
                after = (*each.after, waits) if waits else each.after
                moved, waits = replace(each, stream=stream, after=after), ""
                lane.last, lane.stream = each.id, stream
            self.writer.add(moved)

    def _settle(self) -> None:
        """Assign memory to the stream that uses it first; let memory of both return late."""
        operations, buffers = self.writer.operations, self.writer.buffers
        used = defaultdict[str, dict[str, str]](dict)
        persistent = set(self.writer.persistent)
        for place, each in enumerate(operations):
            if isinstance(each, Allocate):
                used.pop(each.buffer, None)
            elif isinstance(each, StreamOperation):
                for access in accesses(each):
                    name = access.view.buffer
                    own = buffers[name]
                    if not used[name] and name not in persistent and own.pool == POOL:
                        home = EXCHANGES if each.stream == EXCHANGES else own.home
                        buffers[name] = replace(own, home=home)
                    if each.stream in (COMPUTE, EXCHANGES):
                        used[name][each.stream] = each.id
            elif isinstance(each, Free):
                home = buffers[each.buffer].home
                late = [use for stream, use in used[each.buffer].items() if stream != home]
                if late and home in (COMPUTE, EXCHANGES):
                    uses = tuple(dict.fromkeys((*each.uses, *late)))
                    operations[place] = replace(each, uses=uses, mode=FreeMode.DEFERRED)


def _begin(operations: Sequence[Operation], place: int) -> int:
    """Return the first of the allocations right before an exchange."""
    while isinstance(operations[place - 1], Allocate):
        place -= 1
    return place
