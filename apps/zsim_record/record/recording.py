"""Record a training script on the CPU: `with recording(world=8) as tape: ...`."""

import gc
import os
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from zsim_record.clocks.call_stack import StackFrame
from zsim_record.record.operator_recorder import OperatorRecorder
from zsim_record.record.pretended_cuda import cuda_masked
from zsim_record.record.pretended_streams import DeviceStreams, set_active
from zsim_record.record.script_surroundings import register_device, replaced
from zsim_record.record.tape import Item, Tape, UnrecordableError

NO_QUEUE = "device_ready_queues_"
"""Text in the autograd engine's error for a device that did not exist when it started."""


@contextmanager
def recording(
    *,
    world: int,
    rank: int = 0,
    cuda: bool = False,
    items: Callable[[StackFrame], Item | None] | None = None,
    lifts: bool = False,
) -> Generator[Tape]:
    """Record the code in the context as rank `rank` of `world`, on a device of type "zsim".

    Nothing is computed: tensors have shapes but no values. With `cuda`, "cuda" and the functions of
    `torch.cuda` refer to the pretended device. `items` provides values that the script reads from
    tensors; see `Tape`. With `lifts`, `Tape.schedule` returns the repeated step; garbage is
    collected only at the end of steps, so that equal steps free memory at equal positions.

    Raises:
        ValueError: `world` or `rank` is out of range.
        UnrecordableError: a backward ran in this process before the pretended device existed.
    """
    if world < 1:
        raise ValueError(f"world must be at least 1, got {world}")
    if not 0 <= rank < world:
        raise ValueError(f"rank must be from 0 to {world - 1}, got {rank}")
    register_device()
    tape = Tape(rank, world, items, lifts=lifts)
    streams = DeviceStreams(tape)
    environment = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank % 8),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(min(world, 8)),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "29500",
    }
    fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
    recorder = OperatorRecorder(tape, streams, fake_mode)
    gc.collect()
    set_active(streams)
    try:
        with ExitStack() as stack:
            stack.enter_context(patch.dict(os.environ, environment))
            stack.enter_context(replaced(tape, streams, recorder.collectives))
            if cuda:
                stack.enter_context(cuda_masked(tape))
            if lifts:
                stack.enter_context(_steps_ended(tape))
            stack.enter_context(fake_mode)
            stack.enter_context(recorder)
            yield tape
    except RuntimeError as error:
        if NO_QUEUE not in str(error):
            raise
        why = "a backward ran in this process before a recording began: record in a new process"
        raise UnrecordableError(why) from None
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        set_active(None)


@contextmanager
def _steps_ended(tape: Tape) -> Generator[None]:
    """Return a context in which each outermost optimizer step ends a step of the journal."""
    journal = tape.journal
    assert journal is not None
    under_way: list[object] = []

    def begin(optimizer: object, *_: object) -> None:
        under_way.append(optimizer)

    def end(optimizer: object, *_: object) -> None:
        del under_way[under_way.index(optimizer) :]
        if not under_way:
            gc.collect()
            tape.begin_operation()
            journal.end_step(by_optimizer=True)

    collected = gc.isenabled()
    handles = register_optimizer_step_pre_hook(begin), register_optimizer_step_post_hook(end)
    gc.disable()
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        if collected:
            gc.enable()
