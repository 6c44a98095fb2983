"""zsim's executor for CUDA on recorded streams: no finding, and what its waits are for."""

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
from recorded_executor import recorded

from zsim.backend.backend import Job
from zsim.cluster.cluster import Cluster, Gpu, Link
from zsim.model.architecture import GPT
from zsim.model.gpt import gpt
from zsim.runtimes.fsdp1.options import FSDP1
from zsim.runtimes.fsdp2.options import FSDP2
from zsim.runtimes.registry import make_schedule
from zsim.schedule.operation import Edge
from zsim.strategy.strategy import Strategy
from zsim_torch.execute.cuda_streams import CudaStreams
from zsim_torch.execute.streams import PendingWork, StreamEntry
from zsim_torch.record.pretended_streams import PretendedEvent, PretendedStream

CLUSTER = Cluster(
    name="none",
    nodes=1,
    gpus_per_node=4,
    gpu=Gpu(name="none", memory_bytes=1, memory_bytes_per_s=1, rates=()),
    switch_link=Link(bytes_per_s=1),
    nics_per_node=1,
    nic_link=Link(bytes_per_s=1),
)
SHAPE = GPT(layers=2, hidden_size=16, attention_heads=2, sequence_length=8, vocab_size=256)


TRAINING: dict[str, object] = {"parallel.data": 4, "train.gradient_accumulation_steps": 2}
OWN: dict[str, object] = {**TRAINING, "zero.bucket_elements": 2000, "train.clip_norm": 1.0}
VARIANTS: dict[str, dict[str, object]] = {
    "": {},
    "bf16": {"train.precision": "bf16"},
    "fp16": {"train.precision": "fp16"},
    "one micro-batch": {"train.gradient_accumulation_steps": 1, "train.clip_norm": None},
    "replicas": {"parallel.data": 2, "parallel.replicate": 2},
    "checkpoints": {"activations.checkpointing": "full"},
    "offload": {"offload.optimizer": "host"},
}
RUNTIMES = {
    "fsdp1": FSDP1(),
    "fsdp2": FSDP2(),
    "fsdp2, never resharded": FSDP2(reshard_after_forward=False),
}
CONFIGURATIONS: dict[str, dict[str, object]] = {
    **{
        f"stage {stage} {name}".strip(): {**OWN, "zero.stage": stage, **changes}
        for stage in range(4)
        for name, changes in VARIANTS.items()
        if stage or name != "offload"
    },
    **{
        name: {**TRAINING, "zero.stage": 3, "zero.emulate": options}
        for name, options in RUNTIMES.items()
    },
}
DRAWN = {"stage 0 bf16", "stage 1 fp16", "stage 2 replicas", "stage 3", "stage 3 offload", "fsdp2"}
"""Configurations of the suite; the others are under `long`."""


def job(name: str) -> Job:
    given = {key: value for key, value in CONFIGURATIONS[name].items() if value is not None}
    strategy = Strategy.of(given)
    model = gpt(SHAPE, micro_batch_size=2, precision=strategy.train.precision)
    return Job(schedule=make_schedule(model, strategy), model=model, cluster=CLUSTER, steps=2)


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


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
@pytest.mark.parametrize(
    ("owner", "method", "mutant", "name", "kind"),
    [
        (CudaStreams, "_events_of", without_waits_for_operations, "stage 0", "race"),
        (CudaStreams, "home_waits", without_waits_before_frees, "stage 3", "reuse"),
        (CudaStreams, "end_step", without_edges_to_earlier_steps, "stage 2", "race"),
        (CudaStreams, "on", with_memory_of_the_default_stream, "stage 3", "reuse"),
        pytest.param(
            *(CudaStreams, "_events_of", with_its_first_wait_only, "stage 1", "race"),
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
