"""Megatron-LM's pipeline: each stage a role, with as many layers as the others.

What a stage sends and receives at a time is issued as one on the compute stream, which waits for
it, and the host waits for the device (`batch_p2p_comm` with `batch_p2p_sync`). What it has sent it
gives back at once (`deallocate_pipeline_outputs`). Every stage has its own buckets. Only those of
the first one have a size: its gradients are reduced while the last backward goes on, since nothing
else hides it there, and those of the others in the bubble at the end of the step.

The embedding of a head that is tied to it is on the first and on the last stage, in a bucket of its
own, so that ranks of both own the same part. Its gradients are summed over the two stages after
they are reduced; the last stage leaves its copy out of the norm (`param_is_not_shared`).

Functions named in comments are those of `megatron/core` in August 2026 (d98e8a64).
"""

from zsim.model.model import Model, Value
from zsim.model.pipeline_stages import Stage, stages
from zsim.runtimes.megatron.options import Megatron
from zsim.runtimes.megatron.order import (
    Exchange,
    StagePlace,
    Task,
    Way,
    one_forward_one_backward,
    under_way,
)
from zsim.runtimes.megatron.schedule import MegatronStep, aligned, groups
from zsim.runtimes.megatron.volume import VOLUME
from zsim.schedule.mesh import Group, Span
from zsim.schedule.operation_list import COMMUNICATION, COMPUTE
from zsim.schedule.schedule import Kind, Schedule
from zsim.schedule.schedule_writer import ScheduleWriter
from zsim.strategy.strategy import Strategy
from zsim.zero.assemble import assemble, need_fitting, need_single_calls
from zsim.zero.bucket import numbered
from zsim.zero.micro_batch_slots import ChunkSlot, chunk_slots
from zsim.zero.names import EMBEDDING, PIPELINE


def schedule(model: Model, strategy: Strategy) -> Schedule:
    """Return what Megatron-LM does to train `model` in `strategy.parallel.pipeline` stages.

    Raises:
        ModelError: the model was resolved for another tensor degree, or its layers are not a
            multiple of the stages.
    """
    need_fitting(model, strategy)
    need_single_calls(model, "Megatron-LM with a pipeline")
    steps = [StageStep(stage, strategy) for stage in stages(model, strategy)]
    for step in steps:
        step.write()
    return assemble(
        f"Megatron distributed optimizer, {strategy.parallel.pipeline} stages",
        model=model,
        strategy=strategy,
        volume=VOLUME,
        writers=[step.writer for step in steps],
        streams=(COMPUTE, COMMUNICATION),
        layouts=tuple(layout for step in steps for layout in step.layouts),
        groups=_embedding(strategy) if steps[0].stage.tied else (),
    )


def _embedding(strategy: Strategy) -> tuple[Group, ...]:
    """Return the group of the first stage and the last (`get_embedding_group`)."""
    last = strategy.parallel.pipeline - 1
    ends = Span(axis=PIPELINE, start=0, end=last + 1, step=last)
    return (Group(name=EMBEDDING, axes=(PIPELINE,), where=(ends,)),)


class StageStep(MegatronStep):
    """Forward and backward of every micro-batch on one stage, then the update."""

    def __init__(self, stage: Stage, strategy: Strategy) -> None:
        ranks, options = strategy.parallel.data, strategy.options(Megatron)
        # DistributedDataParallel.__init__: `bucket_size` is None if disable_bucketing, pp_rank > 0
        has_size = stage.index == 0 and options.overlap_grad_reduce
        members = [
            group
            for chunk in stage.chunks
            for group in groups(
                chunk.model,
                ranks,
                options,
                has_size=has_size and chunk.given is None,
                alone=stage.tied,
            )
        ]
        name = f"{stage.name}/bucket"
        buckets = numbered(
            stage.model, members, place=aligned(ranks), ranks=ranks, name=name, tied=stage.tied
        )
        box = (Span(axis=PIPELINE, start=stage.index, end=stage.index + 1),)
        writer = ScheduleWriter(stage.name, box)
        super().__init__(stage.model, strategy, buckets, writer=writer, overlaps=has_size)
        self.stage = stage
        place = StagePlace(
            index=stage.index, stages=strategy.parallel.pipeline, chunks=len(stage.chunks)
        )
        count = strategy.train.gradient_accumulation_steps
        self.order = list(one_forward_one_backward(place, count))
        self.slots = chunk_slots(
            writer,
            stage,
            strategy,
            buckets=buckets,
            held=self.held,
            counts=under_way(self.order, len(stage.chunks)),
        )

    def write(self) -> None:
        """Write the rest of setup, and the step."""
        self.write_setup()
        self.writer.begin_step()
        self.begin()
        for action in self.order:
            if isinstance(action, Exchange):
                self._exchange(action)
            elif action.way is Way.FORWARD:
                self._forward(action)
            else:
                self._backward(action)
        self.writer.prefix = "step/backward/end"
        self.end()

    def sum_tied(self) -> None:
        """Sum the gradients of the embedding over the first and the last stage, in place.

        Of the sum, what this rank reduced of it is right; the rest is read by nobody.
        """
        # _allreduce_word_embedding_grads of distributed/finalize_model_grads.py
        for bucket in self.buckets.all:
            if any(piece.parameter in self.stage.tied for piece in bucket.layout.pieces):
                (piece,) = bucket.layout.pieces
                gradient = self.gradients[bucket.index]
                view = self.writer.part(gradient, piece.size, piece.start)
                path, after = f"tie/{bucket.name}", (self.written[bucket.index],)
                self.written[bucket.index] = self.writer.all_reduce(
                    path, EMBEDDING, view, stream=COMPUTE, after=after
                )

    def _slot_of(self, task: Task) -> ChunkSlot:
        own = self.slots[task.chunk]
        return own[task.micro_batch % len(own)]

    def _enter(self, task: Task) -> ChunkSlot:
        """Go on with a micro-batch; return its slot."""
        slot = self._slot_of(task)
        self.passes = slot.passes
        self.enter(task.micro_batch)
        self.writer.prefix = _path(task)
        return slot

    def _forward(self, task: Task) -> None:
        slot = self._enter(task)
        if self.stage.chunks[task.chunk].reads_batch:
            slot.passes.load()
        for visit in slot.forward:
            self.writer.prefix = f"{_path(task)}/{self.model.units[visit.unit].name}"
            self.forward(visit)

    def _backward(self, task: Task) -> None:
        slot = self._enter(task)
        if slot.sent is None:
            slot.passes.seed()
        else:
            slot.passes.begin_gradient(slot.sent.name)
        for visit in slot.backward:
            again = "/again" if visit.only_recomputes else ""
            self.writer.prefix = f"{_path(task)}/{self.model.units[visit.unit].name}{again}"
            self.backward(visit)
        if slot.given is not None:
            slot.passes.end_gradient(slot.given.name)

    def _exchange(self, exchange: Exchange) -> None:
        """Send and receive as one, wait, and give back what is sent."""
        # P2PCommunicator._communicate: tensor_recv_prev and tensor_recv_next are made first
        writer, messages = self.writer, self._messages(exchange)
        for task, _, value, sends in messages:
            if not sends:
                writer.prefix = _path(task)
                name = self._buffer(task, value)
                writer.allocate(writer.buffer(name, value.elements, value.dtype, Kind.WORKSPACE))
        path = done = ""
        for task, offset, value, sends in messages:  # _batched_p2p_ops
            writer.prefix = _path(task)
            name = self._buffer(task, value)
            move, verb = (writer.send, "send") if sends else (writer.receive, "receive")
            path = f"{verb}/{name}"
            done = move(path, PIPELINE, name, offset, stream=COMPUTE)
        if not done:
            return
        if len(messages) > 1:
            path = "exchange"
            done = writer.together(path, len(messages))
        writer.host_wait(f"{path}/wait", done)  # torch.cuda.synchronize
        for task, _, value, sends in messages:
            if sends:
                writer.prefix = _path(task)
                writer.free(self._buffer(task, value))

    def _messages(self, exchange: Exchange) -> list[tuple[Task, int, Value, bool]]:
        """Return task, offset of the other stage, value and whether it is sent, as issued.

        To the stage before and from there, then to the next stage and from there.
        """
        found: list[tuple[Task, int, Value, bool]] = []
        for task in exchange.sends:
            value = self._handed_on(task, sends=True)
            found.append((task, int(task.way), value, True))
        for task in exchange.receives:
            value = self._handed_on(task, sends=False)
            found.append((task, -int(task.way), value, False))
        return sorted(found, key=lambda each: (each[1], not each[3]))

    def _handed_on(self, task: Task, *, sends: bool) -> Value:
        """Return the value that a task makes or reads, or whose gradient it does."""
        slot = self._slot_of(task)
        made = sends == (task.way is Way.FORWARD)
        value = slot.sent if made else slot.given
        assert value is not None
        return value

    @staticmethod
    def _buffer(task: Task, value: Value) -> str:
        return value.name if task.way is Way.FORWARD else f"{value.name}/gradient"


def _path(task: Task) -> str:
    return f"step/{task.way.name.lower()}/mb{task.micro_batch}"
