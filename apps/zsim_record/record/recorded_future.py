"""Futures of collectives: callbacks on other streams, and waits of the current stream.

Mirrors `ivalue::Future` of torch 2.13 with streams of a device. `then` runs its callback at once; a
stream of torch's pool is current, which waits for the future. The future that it returns completes
after the operations on that stream. `wait` orders the current stream. Both record the use of the
future's tensors on their stream in the allocator.
"""

# pyright: reportPrivateUsage=false
# Private names of torch are listed in tests/unit/torch/record/test_recording.py.

import functools
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from importlib import import_module
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from zsim_record.clocks.stream_clock import ClockMark, ClockTimeline
from zsim_record.record.operator_access import tensors_in
from zsim_record.record.pretended_streams import DEVICE_TYPE, DeviceStreams

HOOKS = "torch.distributed.algorithms.ddp_comm_hooks.default_hooks"


class RecordedFuture(torch.futures.Future[Any]):
    """A future that is done on the host, while streams still have to wait for `marks`.

    `on_wait` is called with each stream that waits.
    """

    def __init__(
        self,
        streams: DeviceStreams,
        marks: Sequence[ClockMark],
        value: object,
        on_wait: Callable[[ClockTimeline], object],
    ) -> None:
        super().__init__()
        self._streams = streams
        self.marks = tuple(marks)
        self.on_wait = on_wait
        self._tensors = [each for each in tensors_in(value) if each.device.type == DEVICE_TYPE]
        self.set_result(value)

    def wait(self) -> Any:
        """Order the current stream after the future and return its value."""
        self._order()
        return super().wait()

    def then(self, callback: Callable[[torch.futures.Future[Any]], Any]) -> "RecordedFuture":
        """Call `callback` on a stream of the pool and return the future of its result."""
        streams = self._streams
        stream = streams.of_pool()
        with streams.on(stream):
            self._order()
            value = callback(self)
        mark = streams.tape.clocks.record(streams.tape.host, stream.timeline)
        return RecordedFuture(streams, [mark], value, self.on_wait)

    def add_done_callback(self, callback: Callable[[torch.futures.Future[Any]], None]) -> None:
        """Call `callback` on a stream of the pool."""
        self.then(callback)

    def _order(self) -> None:
        tape, timeline = self._streams.tape, self._streams.current.timeline
        for mark in self.marks:
            tape.clocks.wait(timeline, mark, tape.stack())
        for tensor in self._tensors:
            block = tape.block(tensor, timeline)
            if block is not None:
                tape.contract.record_stream(block, timeline)
        self.on_wait(timeline)


def _collect_all(futures: Sequence[Any]) -> Any:
    """Return a future of all `futures`, as `torch.futures.collect_all` does."""
    known = [each for each in futures if isinstance(each, RecordedFuture)]
    if not known:
        return _COLLECT_ALL(futures)

    def on_wait(timeline: ClockTimeline) -> None:
        for each in known:
            each.on_wait(timeline)

    marks = [mark for each in known for mark in each.marks]
    return RecordedFuture(vars(known[0])["_streams"], marks, list(futures), on_wait)


_COLLECT_ALL: Any = torch.futures.collect_all


def _wait_all(futures: Sequence[Any]) -> list[Any]:
    """Wait for all `futures` and return their values, as `torch.futures.wait_all` does."""
    return [each.wait() for each in futures]


def _register_builtin(module: DistributedDataParallel, kind: object) -> None:
    """Register the Python version of a DDP hook in C++, where waits are not recorded."""
    builtin: Any = vars(dist)["BuiltinCommHookType"]
    names = {builtin.ALLREDUCE: "allreduce_hook", builtin.FP16_COMPRESS: "fp16_compress_hook"}
    hook = getattr(import_module(HOOKS), next(name for key, name in names.items() if key == kind))
    module.register_comm_hook(module.process_group, hook)


@contextmanager
def futures_followed() -> Generator[None]:
    """Return a context in which DDP's reducer waits for the future of a hook, as it does in C++.

    It waits in a callback at the end of backward (torch 2.13, `reducer.cpp`, `finalize_backward`),
    queued after its last hook has returned. The callback here runs before it.
    """
    register: Any = vars(dist)["_register_comm_hook"]

    def _register_comm_hook(reducer: object, state: object, hook: Callable[..., Any]) -> None:
        @functools.wraps(hook)
        def call(*args: Any) -> Any:
            future = hook(*args)
            if isinstance(future, RecordedFuture):
                engine: Any = torch.autograd.Variable._execution_engine
                engine.queue_callback(future.wait)
            return future

        register(reducer, state, call)

    with ExitStack() as stack:
        for owner, name, value in (
            (dist, "_register_comm_hook", _register_comm_hook),
            (DistributedDataParallel, "_register_builtin_comm_hook", _register_builtin),
            (torch.futures, "collect_all", _collect_all),
            (torch.futures, "wait_all", _wait_all),
        ):
            stack.enter_context(patch.object(owner, name, value))
        yield
