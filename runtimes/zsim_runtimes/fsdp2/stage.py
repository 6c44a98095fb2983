"""A stage of PyTorch's pipelines with FSDP2: the operations of its actions.

Each micro-batch has separate receive buffers, which live as long as the stage (`_RecvInfo.buffer`).
A sent activation is kept until its backward (`fwd_cache`), a sent gradient until the next backward.
Compute waits for a send before its memory is reused; with several chunks, PyTorch's host instead
checks if the send has finished.

A combined send and receive uses the communicator of all stages; others use that of the two ranks,
each on its own stream (`_batch_p2p`; `pointToPoint` of `ProcessGroupNCCL.cpp`).

Functions named in comments are from `torch/distributed/pipelining` in torch 2.13, of
`_PipelineStageBase` in `stage.py` unless another file is named.
"""

from collections import Counter
from collections.abc import Sequence

from zsim.model.pipeline_stages import Chunk, Stage
from zsim.schedule.layout import Layout
from zsim.schedule.mesh import Group, Span
from zsim.schedule.operation import Edge, Previous
from zsim.schedule.operation_list import COMPUTE
from zsim.schedule.schedule import Kind
from zsim.strategy.offload import MemoryTier
from zsim.strategy.strategy import Strategy
from zsim.zero.micro_batch_slots import ChunkSlot, SlotForwardBackward, chunk_slots
from zsim.zero.names import PIPELINE
from zsim.zero.state import update_path
from zsim_runtimes.fsdp2.gather import COPY_IN
from zsim_runtimes.fsdp2.order import Action, Reshard, Unshard, WeightTask
from zsim_runtimes.fsdp2.schedule import FSDP2Step, numbered_groups, shards
from zsim_runtimes.host_checkpoints import CopiedCheckpoints
from zsim_runtimes.stage_actions import Awaited, Direction, Messages, Reduce, StagePlace, Task
from zsim_runtimes.stage_messages import StageMessages
from zsim_runtimes.waiting_writer import WaitingWriter
from zsim_runtimes.wrapping import groups

WITH_NEXT, WITH_PREVIOUS = "pipeline_next", "pipeline_previous"
"""Streams of messages between two neighbors, except for combined exchanges."""


class FSDP2Stage(FSDP2Step):
    """Forward and backward of every micro-batch on one stage, then the update.

    Class attributes:
        visits_of_slot: class that writes the visits of a micro-batch.
    """

    visits_of_slot: type[SlotForwardBackward] = SlotForwardBackward

    def __init__(self, stage: Stage, strategy: Strategy, actions: Sequence[Action]) -> None:
        several, apart = len(stage.chunks) > 1, strategy.has_expert_order
        members = [group for chunk in stage.chunks for group in groups(chunk.model, apart=apart)]
        buckets = numbered_groups(stage.model, members, strategy, f"{stage.name}/bucket")
        self._waiting_writer = WaitingWriter(stage)
        super().__init__(
            stage.model,
            strategy,
            buckets,
            kept=shards(stage.model, buckets, strategy),
            writer=self._waiting_writer,
            collects=True,
            copies_on=COMPUTE if several else COPY_IN,
            model_parts=[chunk.units for chunk in stage.chunks],
        )
        self.stage = stage
        self.actions = actions
        self.place = StagePlace(
            index=stage.index,
            stages=strategy.parallel.pipeline,
            chunks=len(stage.chunks),
            in_v=self.options.stages_in_v,
        )
        count = strategy.train.gradient_accumulation_steps
        slots = chunk_slots(
            self.writer,
            stage,
            strategy,
            buckets=buckets,
            held=self.held,
            counts=[count] * len(stage.chunks),
            keeps_received=True,
            kind=self.visits_of_slot,
        )
        for own in zip(*slots, strict=True):
            own[0].passes.elsewhere = self.gathers.places
            if strategy.checkpoint_tier is MemoryTier.HOST:
                self._move_checkpoints(own)
        self.messages = StageMessages(self.writer, slots)
        self._wrapped = [self._groups_of(chunk) for chunk in stage.chunks]
        self._under_way: dict[tuple[Task, bool], str] = {}
        self._sent: dict[Task, str] = {}
        self._gradient: Task | None = None
        self._times = Counter[str]()
        self._last_update = update_path(self.kept.trained[-1], strategy, has_master=False)

    def _move_checkpoints(self, chunks: Sequence[ChunkSlot]) -> None:
        """Keep the inputs of a micro-batch's blocks in host memory until their backward.

        The received input of the stage stays on the device as well: `_RecvInfo.buffer` holds it.
        """
        passes = chunks[0].passes
        passes.checkpoints = CopiedCheckpoints(
            self.writer,
            passes.model,
            self.strategy,
            visits=[visit for chunk in chunks for visit in chunk.forward],
            stays={chunk.given.name for chunk in chunks if chunk.given is not None},
        )

    @property
    def layouts(self) -> tuple[Layout, ...]:
        """Every layout of the buffers of this step."""
        gathered, reduced = self.gathers.layouts, self.reductions.layouts
        return (*self.buckets.layouts, *self.kept.layouts, *gathered, *reduced)

    def write(self) -> None:
        """Write the rest of setup, and the step."""
        self.write_setup()
        self.writer.begin_step()
        self.begin()
        for action in self.actions:
            self.do(action)
        self._free_gradient()
        self.writer.prefix = "step/backward/end"
        self.end()

    def do(self, action: Action) -> None:
        """Write one action."""
        match action:
            case Messages():
                self._exchange(action)
            case Awaited(task, is_sent):
                done = self._sent[task] if is_sent else self._under_way.pop((task, False))
                self._waiting_writer.wait(done)
            case Unshard(chunk):
                self._unshard(chunk)
            case Reshard(chunk):
                self._reshard(chunk)
            case Reduce(chunk):
                self._reduce_chunk(chunk)
            case Task(direction=Direction.FORWARD):
                self._forward(action)
            case Task():
                self._backward(action)
            case WeightTask():
                raise AssertionError(action)  # of a backward in two parts

    def write_setup(self) -> None:
        """Allocate the receive buffers of every micro-batch, and compute the first scales."""
        super().write_setup()
        # _setup_forward_recv_info, _create_grad_recv_info
        writer = self.writer
        for chunk, own in enumerate(self.messages.slots):
            for number, slot in enumerate(own):
                for direction, value in (
                    (Direction.FORWARD, slot.given),
                    (Direction.BACKWARD, slot.sent),
                ):
                    task = Task(direction, chunk, number)
                    if value is None or not self.place.is_given(task):
                        continue
                    name = self.messages.buffer(task, is_sent=False)
                    writer.prefix = f"setup/received/mb{number}"
                    writer.buffer(name, value.elements, value.dtype, Kind.WORKSPACE)
                    writer.persist(name)

    def after_backward(self, bucket: int, after: tuple[Edge, ...] = ()) -> None:
        """Add whole gradients to those of earlier micro-batches; parameters are kept."""
        # backward_maybe_with_nosync: set_reshard_after_backward(False),
        # set_requires_gradient_sync(False) before each backward, the last one too
        del after
        self.reductions.add_up(bucket)

    def _groups_of(self, chunk: Chunk) -> tuple[int | None, list[int]]:
        """Return the bucket of a chunk's root, or None, and the buckets of its blocks."""
        blocks = [group for unit in chunk.units for group in self.groups_of(unit)]
        own = [each.index for each in self.buckets.all if each.units[0] in chunk.units]
        return next((number for number in own if number not in blocks), None), blocks

    def _buckets_of(self, chunk: int) -> list[int]:
        """Return the groups of a chunk in module order, the root first."""
        root, blocks = self._wrapped[chunk]
        return blocks if root is None else [root, *blocks]

    def _unshard(self, chunk: int) -> None:
        """Start to gather all groups of a chunk."""
        # UNSHARD: submodule.unshard(async_op=True) of each
        self.writer.prefix = self._again(f"step/unshard/chunk{chunk}")
        for bucket in self._buckets_of(chunk):
            self.gathers.gather(bucket)

    def _reshard(self, chunk: int) -> None:
        self.writer.prefix = self._again(f"step/reshard/chunk{chunk}")
        for bucket in self._buckets_of(chunk):
            self.gathers.reshard(bucket)

    def _again(self, path: str) -> str:
        """Return `path`, with a number from its second use on."""
        self._times[path] += 1
        return path if self._times[path] == 1 else f"{path}/{self._times[path]}"

    def _reduce_chunk(self, chunk: int) -> None:
        """Reduce the gradients of a chunk, free its parameters, and wait for all."""
        # perform_reduce_grad: post_backward of all states, then the root's final callback
        self.writer.prefix = f"step/backward/reduce{chunk}"
        self.is_last = True
        for bucket in self._buckets_of(chunk):
            self.before_reduction(bucket)
            self.gathers.reshard(bucket)
            self.reductions.reduce_sum(bucket)
        self.reductions.end_backward()

    def before_reduction(self, bucket: int) -> None:
        """Add up remaining gradients of a bucket; nothing here, because each backward does so."""

    def _enter(self, task: Task, part: str = "") -> ChunkSlot:
        """Continue with a task's micro-batch, in a `part` of the task; return its slot."""
        slot = self.messages.slot_of(task)
        self.passes = slot.passes
        self.enter(task.micro_batch)
        self.root, groups = self._wrapped[task.chunk]
        self.order = [group for group in groups if self.wrapped_with(group)[0] == group]
        self.last_unit = self.stage.chunks[task.chunk].units[-1]
        self.writer.prefix = f"{self.messages.path(task)}{part}"
        # _assert_unsharded: wait_for_unshard of all groups
        for bucket in self._buckets_of(task.chunk):
            self.gathers.copy_out(bucket, forward=False)
        return slot

    def _forward(self, task: Task) -> None:
        # forward_one_chunk
        self._enter(task).begin_forward()
        self.begin_forward()
        for visit in self.messages.visits(task):
            self.forward(visit)

    def _backward(self, task: Task) -> None:
        # backward_one_chunk
        slot = self._enter(task)
        self._full_backward(slot, task)
        if slot.sent is not None:
            self._free_sent(Task(Direction.FORWARD, task.chunk, task.micro_batch))
        self._hand_back(task)

    def _full_backward(self, slot: ChunkSlot, task: Task) -> None:
        slot.begin_backward()
        self.begin_backward()
        for visit in self.messages.visits(task):
            self.backward(visit)
        self.writer.prefix = f"{self.messages.path(task)}/end"
        self.end_backward()
        slot.end_backward()

    def _hand_back(self, task: Task) -> None:
        """Keep only this backward's gradient, which is sent to the previous stage."""
        self._free_gradient()
        self._gradient = task if self.place.hands_on(task) else None

    def end_backward(self) -> None:
        """Add up gradients of the root, and of blocks whose inputs have none."""
        for block in [*([] if self.root is None else [self.root]), *self._late]:
            for bucket in reversed(self.wrapped_with(block)):
                self.after_backward(bucket)

    def _free_sent(self, task: Task) -> None:
        """Free the output of a task; a forward output was kept until its backward."""
        buffer = self.messages.buffer(task, is_sent=True)
        if task.direction is Direction.FORWARD:
            self.writer.count_as_saved(buffer)
        uses = (self._sent[task],) if self.place.hands_on(task) else ()
        self.writer.free(buffer, uses=uses)

    def _free_gradient(self) -> None:
        """Free the gradient that the last backward sent."""
        if self._gradient is not None:
            self._free_sent(self._gradient)
            self._gradient = None

    def _exchange(self, exchange: Messages) -> None:
        """Send and receive: combined if there are both, otherwise separately."""
        # _batch_p2p; _wait_batch_p2p if it is awaited. A communicator's stream waits for the
        # compute issued so far, or that of the last step.
        computed = self._waiting_writer.computed
        after: tuple[Edge, ...] = (computed or Previous(self._last_update),)
        moves = [
            *((task, True) for task in exchange.sends),
            *((task, False) for task in exchange.receives),
        ]
        together = bool(exchange.sends and exchange.receives)
        done = [self._move(*each, together=together, after=after) for each in moves]
        if together:
            done = [self.writer.together("exchange", len(moves), after=after)] * len(moves)
        for (task, is_sent), operation in zip(moves, done, strict=True):
            if is_sent:
                self._sent[task] = operation
            elif not exchange.is_awaited:
                self._under_way[task, False] = operation
            if exchange.is_awaited:
                self._waiting_writer.wait(operation)

    def _move(
        self,
        task: Task,
        is_sent: bool,  # noqa: FBT001 (of a pair)
        *,
        together: bool,
        after: tuple[Edge, ...],
    ) -> str:
        if together:
            return self.messages.move(task, is_sent=is_sent, stream=PIPELINE)[1]
        own, count = self.stage.index, self.strategy.parallel.pipeline
        other, _ = self.place.other_end(task, is_sent=is_sent)
        pair = pair_of(own, other)
        stream = WITH_NEXT if other == (own + 1) % count else WITH_PREVIOUS
        if pair not in self.writer.groups:
            self.writer.groups.append(pair)
        return self.messages.move(
            task, is_sent=is_sent, stream=stream, after=after, pair=pair.name
        )[1]


def pair_of(one: int, other: int) -> Group:
    """Return the communicator of two stages."""
    low, high = sorted((one, other))
    ends = Span(axis=PIPELINE, start=low, end=high + 1, step=high - low)
    return Group(name=f"{PIPELINE}{low}_{high}", axes=(PIPELINE,), where=(ends,))
