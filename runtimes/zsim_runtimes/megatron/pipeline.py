"""Megatron-LM's pipeline: each stage a role, with equally many layers, optionally in chunks.

The messages of a stage at one time are issued together on the compute stream, which waits for them,
and the host waits for the device (`batch_p2p_comm` with `batch_p2p_sync`). With several chunks and
`overlap_p2p_comm`, messages have a separate stream and are issued one by one; compute waits for
each as the order sets. A sent value is freed once compute has waited for it
(`deallocate_pipeline_outputs`).

With `scatter_gather_tensors_in_pipeline`, each tensor rank sends its part of a hidden state or of
its gradient, and receivers gather the parts once the host has waited (`_communicate` of
`megatron/p2p_communication.py` until March 2023, 0b44909c). No version of Megatron-LM combines this
with overlapping messages.

Every chunk has separate buckets. Only those of the first chunk of the first stage have a size
limit. Without interleaving, they are reduced during its last backward, because nothing else hides
the reduction there; other stages reduce in the bubble at the end of the step. With several chunks,
each chunk is reduced after its last backward, simultaneously on all stages (`align_grad_reduce`).

A tied embedding is on the first and on the last stage, in a separate bucket, so that ranks of both
own the same part. Its gradients are summed over the two stages after their reduction; the last
stage excludes its copy from the norm (`param_is_not_shared`).

Functions named in comments are from `megatron/core` in August 2026 (d98e8a64).
"""

from collections.abc import Iterable, Sequence

from zsim.model.model import Model
from zsim.model.pipeline_stages import Stage, stages
from zsim.schedule.mesh import Group, Span
from zsim.schedule.operation import Edge
from zsim.schedule.operation_list import COMMUNICATION, COMPUTE
from zsim.schedule.schedule import Schedule
from zsim.strategy.strategy import Strategy
from zsim.zero.assemble import assemble, need_fitting, need_single_calls
from zsim.zero.bucket import Bucket, numbered
from zsim.zero.micro_batch_slots import ChunkSlot, chunk_slots
from zsim.zero.names import EMBEDDING, PIPELINE
from zsim_runtimes.megatron.interleaved_limits import need_interleaved
from zsim_runtimes.megatron.message_parts import MessageParts
from zsim_runtimes.megatron.options import Megatron
from zsim_runtimes.megatron.order import Action, Gather, Interleaved, one_forward_one_backward
from zsim_runtimes.megatron.schedule import (
    MegatronStep,
    expert_streams,
    groups,
    of_experts,
    packing,
    promised_peak,
    title,
)
from zsim_runtimes.megatron.volume import VOLUME, has_sizes
from zsim_runtimes.stage_actions import (
    Awaited,
    Direction,
    Messages,
    Reduce,
    StagePlace,
    Task,
    in_flight,
)
from zsim_runtimes.stage_messages import offset_of
from zsim_runtimes.stage_times import StageSeconds, least_s
from zsim_runtimes.waiting_writer import WaitingWriter


def need(made: Sequence[Stage], strategy: Strategy) -> None:
    """Raise ModelError unless the micro-batches fit the chunks of the stages.

    Raises:
        ModelError: they do not.
    """
    if len(made[0].chunks) > 1:
        need_interleaved(strategy)


def schedule(model: Model, strategy: Strategy) -> Schedule:
    """Return the schedule of Megatron-LM training `model` in pipeline stages.

    Raises:
        ModelError: the model was built for other parallel degrees, its layers do not fit the
            stages, or its micro-batches do not fit several chunks.
    """
    need_fitting(model, strategy)
    need_single_calls(model, "Megatron-LM with a pipeline")
    made = stages(model, strategy)
    need(made, strategy)
    chunks = len(made[0].chunks)
    steps = [MegatronStage(stage, strategy) for stage in made]
    for step in steps:
        step.write()
    messages = [PIPELINE] if steps[0].overlaps_messages else []
    streams = (COMPUTE, COMMUNICATION, *expert_streams(strategy), *messages)
    interleaved = f", {chunks} chunks each" if chunks > 1 else ""
    return assemble(
        f"{title(strategy)}, {strategy.parallel.pipeline} stages{interleaved}",
        model=model,
        strategy=strategy,
        volume=VOLUME,
        writers=[step.writer for step in steps],
        streams=streams,
        layouts=tuple(layout for step in steps for layout in (*step.layouts, *step.bias_layouts)),
        peak_of=promised_peak(strategy),
    )


def actions(index: int, strategy: Strategy, *, chunks: int) -> list[Action]:
    """Return the actions of stage `index` in order."""
    count, options = strategy.train.gradient_accumulation_steps, strategy.options(Megatron)
    place = StagePlace(index=index, stages=strategy.parallel.pipeline, chunks=chunks)
    if chunks == 1:
        return list(one_forward_one_backward(place, count))
    order = Interleaved(place, count, overlaps=_overlaps(strategy, chunks=chunks))
    return list(
        order.actions(gathers=options.overlap_param_gather, reduces=options.overlap_grad_reduce)
    )


def pace(strategy: Strategy, chunks: int, tasks: StageSeconds, messages: StageSeconds) -> float:
    """Return the least seconds of all tasks and messages of the stages."""
    count = strategy.parallel.pipeline
    places = [StagePlace(index=index, stages=count, chunks=chunks) for index in range(count)]
    return least_s(
        places,
        [actions(index, strategy, chunks=chunks) for index in range(count)],
        tasks,
        messages,
        issued=issue_order if _overlaps(strategy, chunks=chunks) else None,
    )


def _overlaps(strategy: Strategy, *, chunks: int) -> bool:
    return chunks > 1 and strategy.options(Megatron).overlap_p2p_comm


def issue_order(index: int, messages: Sequence[tuple[Task, bool]]) -> list[tuple[Task, bool]]:
    """Return messages in the order in which stage `index` issues them on their stream."""
    # _p2p_ops: even stages send first, odd ones receive first; first to the next stage and from
    # the previous one, then in the other direction
    first_sends = index % 2 == 0
    return sorted(
        messages,
        key=lambda each: (each[0].direction is Direction.BACKWARD, each[1] is not first_sends),
    )


class MegatronStage(MegatronStep):
    """Forward and backward of every micro-batch on one stage, then the update.

    Attributes:
        overlaps_messages: True if sends and receives have a separate stream.
    """

    def __init__(self, stage: Stage, strategy: Strategy) -> None:
        ranks, options = strategy.parallel.data, strategy.options(Megatron)
        shards = strategy.zero.stage == 1
        # DistributedDataParallel.__init__: `bucket_size` is None if disable_bucketing, pp_rank > 0
        is_first = stage.index == 0
        members = [
            groups(
                chunk.model,
                ranks,
                options,
                has_size=has_sizes(options, is_first=is_first and chunk.given is None),
                has_gaps=shards,
                alone=stage.tied if shards else frozenset(),
                apart=strategy.has_expert_order,
            )
            for chunk in stage.chunks
        ]
        name = f"{stage.name}/bucket"
        buckets = numbered(
            stage.model,
            [group for own in members for group in own],
            place=packing(strategy),
            ranks=ranks,
            name=name,
            tied=stage.tied,
            experts=of_experts(strategy),
        )
        self.is_interleaved = len(stage.chunks) > 1
        self._messages_writer = WaitingWriter(stage)
        super().__init__(
            stage.model,
            strategy,
            buckets,
            writer=self._messages_writer,
            overlaps=is_first and options.overlap_grad_reduce and not self.is_interleaved,
        )
        if stage.tied:
            self.writer.groups.append(_ends(strategy))
        self.stage = stage
        self.overlaps_messages = _overlaps(strategy, chunks=len(stage.chunks))
        self.order = actions(stage.index, strategy, chunks=len(stage.chunks))
        slots = chunk_slots(
            self.writer,
            stage,
            strategy,
            buckets=buckets,
            held=self.held,
            counts=in_flight(self.order, len(stage.chunks)),
        )
        for own in slots:
            for slot in own:
                slot.passes.elsewhere = self.casts.places
        self.messages = MessageParts(self.writer, slots, strategy)
        self._reduced: set[int] = set()
        self._under_way: dict[tuple[Task, bool], str] = {}
        self._sent: list[tuple[Task, str]] = []

    def write(self) -> None:
        """Write the rest of setup, and the step."""
        self.write_setup()
        self.write_biases()
        self.writer.begin_step()
        self.begin()
        for action in self.order:
            match action:
                case Messages():
                    self._exchange(action)
                case Awaited():
                    self._wait(action.task, is_sent=action.is_sent)
                case Gather(chunk):
                    self.writer.prefix = f"step/forward/chunk{chunk}"
                    for bucket in self._buckets_of(chunk):
                        self.gather_ahead(bucket.index)
                case Reduce(chunk):
                    self._reduce_chunk(chunk)
                case Task(direction=Direction.FORWARD):
                    self._forward(action)
                case Task():
                    self._backward(action)
        self._free_sent()
        self.writer.prefix = "step/backward/end"
        self.end()

    def arrival(self, number: int) -> Edge:
        """Return the edge that the first reads of a bucket wait for."""
        if self.is_interleaved and self.options.overlap_param_gather:
            return self.gathered[number]  # `align_param_gather`: dispatched by chunk
        return super().arrival(number)

    def reduce_rest(self) -> None:
        """Reduce the chunks that are not yet reduced, one by one."""
        for chunk in range(len(self.stage.chunks)):
            if chunk not in self._reduced:
                self.reduce(self._buckets_of(chunk))

    def sum_tied(self) -> None:
        """Sum the gradients of the embedding over the first and the last stage, in place.

        Only the rank's reduced part of the sum is valid; the rest is never read.
        """
        # _allreduce_word_embedding_grads of distributed/finalize_model_grads.py
        for bucket in self.buckets.all:
            for piece in bucket.layout.pieces:
                if piece.parameter not in self.stage.tied:
                    continue
                gradient = self.gradients[bucket.index]
                view = self.writer.part(gradient, piece.size, piece.start)
                path, after = f"tie/{bucket.name}", (self.written[bucket.index],)
                self.written[bucket.index] = self.writer.all_reduce(
                    path, EMBEDDING, view, stream=COMPUTE, after=after
                )

    def _buckets_of(self, chunk: int) -> list[Bucket]:
        units = self.stage.chunks[chunk].units
        return [each for each in self.buckets.all if each.units[0] in units]

    def _reduce_chunk(self, chunk: int) -> None:
        """Start to reduce the gradients of a chunk, a bucket at a time."""
        self.writer.prefix = f"step/backward/chunk{chunk}"
        for bucket in self._buckets_of(chunk):
            self.reduce((bucket,))
        self._reduced.add(chunk)

    def _enter(self, task: Task) -> ChunkSlot:
        """Continue with a task's micro-batch; return its slot."""
        self._free_sent()
        slot = self.messages.slot_of(task)
        self.passes = slot.passes
        self.enter(task.micro_batch)
        self.writer.prefix = self.messages.path(task)
        return slot

    def _forward(self, task: Task) -> None:
        self._enter(task).begin_forward()
        for visit in self.messages.visits(task):
            self.forward(visit)

    def _backward(self, task: Task) -> None:
        slot = self._enter(task)
        slot.begin_backward()
        for visit in self.messages.visits(task):
            self.backward(visit)
        slot.end_backward()

    def _exchange(self, exchange: Messages) -> None:
        """Send and receive, combined or one by one; wait, and free sent values."""
        for task in exchange.receives:  # tensor_recv_prev and tensor_recv_next are allocated first
            self.writer.prefix = self.messages.path(task)
            self.writer.allocate(self.messages.received(task))
        messages = [
            *((task, True) for task in exchange.sends),
            *((task, False) for task in exchange.receives),
        ]
        if not messages:
            return
        if not self.overlaps_messages:
            self._batch(messages)
            return
        self._one_by_one(messages)
        if exchange.is_awaited:
            for task, is_sent in messages:
                self._wait(task, is_sent=is_sent)

    def _batch(self, messages: Iterable[tuple[Task, bool]]) -> None:
        """Send and receive together on the compute stream; the host waits."""
        # P2PCommunicator._communicate with _batched_p2p_ops: the previous stage first; for each
        # stage, the send first
        ordered = sorted(
            messages, key=lambda each: (offset_of(each[0], is_sent=each[1]), not each[1])
        )
        path = done = ""
        for task, is_sent in ordered:
            path, done = self.messages.move(task, is_sent=is_sent, stream=COMPUTE)
        if len(ordered) > 1:
            path = "exchange"
            done = self.writer.together(path, len(ordered))
        self.writer.host_wait(f"{path}/wait", done)  # torch.cuda.synchronize
        for task, is_sent in ordered:
            if is_sent:
                self.writer.prefix = self.messages.path(task)
                self.writer.free(self.messages.buffer(task, is_sent=True))
        for task, is_sent in ordered:
            if not is_sent:
                self.messages.gather(task)

    def _one_by_one(self, messages: Sequence[tuple[Task, bool]]) -> None:
        """Send and receive on the stream of messages, after the compute issued so far."""
        for task, is_sent in issue_order(self.stage.index, messages):
            after = (self._messages_writer.computed,)
            _, done = self.messages.move(task, is_sent=is_sent, stream=PIPELINE, after=after)
            self._under_way[task, is_sent] = done

    def _wait(self, task: Task, *, is_sent: bool) -> None:
        """Make compute wait for a message."""
        done = self._under_way.pop((task, is_sent))
        if is_sent:
            self._sent.append((task, done))
        else:
            self._messages_writer.wait(done)

    def _free_sent(self) -> None:
        """Free sent values that compute has waited for."""
        for task, done in self._sent:
            self.writer.prefix = self.messages.path(task)
            self.writer.free(self.messages.buffer(task, is_sent=True), uses=(done,))
        self._sent = []


def _ends(strategy: Strategy) -> Group:
    """Return the group of the first stage and the last (`get_embedding_group`)."""
    last = strategy.parallel.pipeline - 1
    ends = Span(axis=PIPELINE, start=0, end=last + 1, step=last)
    return Group(name=EMBEDDING, axes=(PIPELINE,), where=(ends,))
