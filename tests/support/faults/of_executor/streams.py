# ruff: noqa: ANN401  # a wrong function takes whatever the right one takes
"""Executors whose streams do not wait where the schedule says so, on a pretended device."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

from faults.of_executor.patches import Function, altered, plant
from zsim_record.record.pretended_streams import PretendedEvent, PretendedStream
from zsim_torch.execute.cuda_streams import CudaStreams
from zsim_torch.execute.flights import PendingWork, StreamEntry


@plant("stage 0", CudaStreams, "_events_of", why="race")
@altered
def operations_have_no_events_to_wait_for(right: Function, *given: Any) -> list[object]:
    return []


@plant("fsdp1", CudaStreams, "_events_of", why="race")
@altered
def operations_have_one_event_to_wait_for(right: Function, *given: Any) -> list[object]:
    return [*right(*given)[:1]]


@plant("stage 3", CudaStreams, "home_waits", why="reuse")
@altered
def frees_have_no_uses(
    right: Function, streams: CudaStreams, home: str, buffer: str, _: Any, drop: Any, *, lent: bool
) -> Any:
    return right(streams, home, buffer, (), drop, lent=lent)


@plant("stage 2", CudaStreams, "end_step", why="race")
@altered
def steps_forget_the_events_of_earlier_ones(right: Function, streams: CudaStreams) -> None:
    streams.workers.end_step()
    vars(streams)["_current"].clear()


@plant("stage 3", CudaStreams, "on", why="reuse")
@altered
def memory_is_taken_wherever_the_host_is(right: Function, *given: Any) -> Any:
    return nullcontext()


@plant("stage 3", CudaStreams, "compute", why="race")
@altered
def events_come_before_their_operations(
    right: Function,
    streams: CudaStreams,
    entry: StreamEntry,
    action: Callable[[], None],
    awaited: Any = (),
) -> None:
    right(streams, entry, lambda: None, awaited)
    with streams.on(entry.stream):
        action()


@plant("stage 1", CudaStreams, "communicate", why="race")
@altered
def collectives_run_on_a_stream_of_their_own(
    right: Function,
    streams: CudaStreams,
    entry: StreamEntry,
    issue: Callable[[], list[PendingWork]],
) -> None:
    aside = torch.get_device_module("zsim").Stream()

    def action() -> None:
        with aside:
            for work in issue():
                work.wait()

    streams.compute(entry, action)


@plant("stage 2", PretendedStream, "wait_event", why="race")
@altered
def the_current_stream_waits_instead(
    right: Function, _: PretendedStream, event: PretendedEvent
) -> None:
    event.wait()
