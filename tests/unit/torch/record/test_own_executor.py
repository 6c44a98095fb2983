"""zsim's executor for CUDA on recorded streams: no finding, and what its waits are for."""

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
from executor_jobs import CONFIGURATIONS, job
from recorded_executor import recorded

from zsim.schedule.operation import Edge
from zsim_torch.execute.cuda_streams import CudaStreams
from zsim_torch.execute.flights import PendingWork, StreamEntry
from zsim_torch.record.pretended_streams import PretendedEvent, PretendedStream

DRAWN = {"stage 0 bf16", "stage 1 fp16", "stage 2 replicas", "stage 3", "stage 3 offload", "fsdp2"}
"""Configurations of the suite; the others are under `long`."""


@pytest.mark.matrix(3)
@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
@pytest.mark.parametrize(
    "name",
    [
        each if each in DRAWN else pytest.param(each, marks=pytest.mark.long)
        for each in CONFIGURATIONS
    ],
)
def test_the_executor_has_no_finding(name: str) -> None:
    tape = recorded(job(name))
    assert tape.findings == []
    assert tape.refused == {}
    assert tape.operation_count > 500


def without_waits_for_operations(_: CudaStreams, __: object) -> list[object]:
    return []


def without_waits_before_frees(
    streams: CudaStreams, home: str, buffer: str, _: object, drop: Callable[[], None], *, lent: bool
) -> object:
    return HOME_WAITS(streams, home, buffer, (), drop, lent=lent)


def with_its_first_wait_only(streams: CudaStreams, edges: Iterable[Edge]) -> list[object]:
    return [*EVENTS_OF(streams, edges)[:1]]


def without_edges_to_earlier_steps(streams: CudaStreams) -> None:
    streams.workers.end_step()
    vars(streams)["_current"].clear()


def with_memory_of_the_default_stream(_: CudaStreams, __: str) -> object:
    return nullcontext()


def with_events_before_their_operations(
    streams: CudaStreams, entry: StreamEntry, action: Callable[[], None], awaited: object = ()
) -> None:
    COMPUTE(streams, entry, lambda: None, cast("Any", awaited))
    with streams.on(entry.stream):
        action()


def with_collectives_on_a_stream_of_their_own(
    streams: CudaStreams, entry: StreamEntry, issue: Callable[[], list[PendingWork]]
) -> None:
    aside = torch.get_device_module("zsim").Stream()

    def action() -> None:
        with aside:
            for work in issue():
                work.wait()

    streams.compute(entry, action)


def with_waits_on_the_current_stream(_: PretendedStream, event: PretendedEvent) -> None:
    event.wait()


HOME_WAITS, EVENTS_OF = CudaStreams.home_waits, vars(CudaStreams)["_events_of"]
COMPUTE = CudaStreams.compute


@pytest.mark.matrix(4)
@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
@pytest.mark.parametrize(
    ("owner", "method", "mutant", "name", "kind"),
    [
        (CudaStreams, "_events_of", without_waits_for_operations, "stage 0", "race"),
        (CudaStreams, "home_waits", without_waits_before_frees, "stage 3", "reuse"),
        (CudaStreams, "end_step", without_edges_to_earlier_steps, "stage 2", "race"),
        (CudaStreams, "on", with_memory_of_the_default_stream, "stage 3", "reuse"),
        pytest.param(
            *(CudaStreams, "_events_of", with_its_first_wait_only, "fsdp1", "race"),
            marks=pytest.mark.long,
        ),
        pytest.param(
            *(CudaStreams, "compute", with_events_before_their_operations, "stage 3", "race"),
            marks=pytest.mark.long,
        ),
        pytest.param(
            *(CudaStreams, "communicate", with_collectives_on_a_stream_of_their_own),
            *("stage 1", "race"),
            marks=pytest.mark.long,
        ),
        pytest.param(
            *(PretendedStream, "wait_event", with_waits_on_the_current_stream, "stage 2", "race"),
            marks=pytest.mark.long,
        ),
    ],
)
def test_an_executor_that_does_not_wait_is_found(
    owner: type, method: str, mutant: Callable[..., object], name: str, kind: str
) -> None:
    with patch.object(owner, method, mutant):
        tape = recorded(job(name))
    assert kind in {hazard.kind.value for hazard in tape.findings}
