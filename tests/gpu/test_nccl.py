"""The torch backend on a CUDA device: NCCL, real streams, one rank."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from zsim.backend.backend import Job
from zsim.cluster.cluster import Cluster, Gpu, Link
from zsim.model.architecture import GPT
from zsim.model.gpt import gpt
from zsim.runtimes.registry import make_schedule
from zsim.strategy.activations import Activations, Checkpointing
from zsim.strategy.precision import Precision
from zsim.strategy.strategy import Strategy, Zero
from zsim.strategy.train import Train
from zsim.trace.trace import Trace
from zsim_torch import RankPool, TorchBackend
from zsim_torch.supervise.process_group import DeviceChoice

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

CLUSTER = Cluster(
    name="none",
    nodes=1,
    gpus_per_node=1,
    gpu=Gpu(name="none", memory_bytes=1, memory_bytes_per_s=1, rates=()),
    switch_link=Link(bytes_per_s=1),
    nics_per_node=1,
    nic_link=Link(bytes_per_s=1),
)
SHAPE = GPT(layers=3, hidden_size=32, attention_heads=4, sequence_length=16, vocab_size=256)


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(1, device=DeviceChoice.CUDA) as made:
        yield made


def job(stage: int, precision: Precision, checkpointing: Checkpointing) -> Job:
    strategy = Strategy(
        zero=Zero(stage=stage, bucket_elements=5000),
        activations=Activations(checkpointing=checkpointing),
        train=Train(precision=precision, gradient_accumulation_steps=2, clip_norm=1.0),
    )
    model = gpt(SHAPE, micro_batch_size=2, precision=precision)
    schedule = make_schedule(model, strategy)
    return Job(schedule=schedule, model=model, cluster=CLUSTER, steps=3)


def ran(subject: Job, device: DeviceChoice, pool: RankPool | None = None) -> Trace:
    return TorchBackend(device=device, pool=pool).run(subject, seed=0)


@pytest.mark.parametrize("checkpointing", Checkpointing)
@pytest.mark.parametrize("precision", Precision)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_nccl_runs_the_schedule_that_gloo_runs(
    pool: RankPool, stage: int, precision: Precision, checkpointing: Checkpointing
) -> None:
    does_as_on_cpu(pool, job(stage, precision, checkpointing))


@pytest.mark.parametrize("contiguous", [False, True])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_checkpoints_go_to_pinned_memory_and_come_back(
    pool: RankPool, stage: int, *, contiguous: bool
) -> None:
    subject = job(stage, Precision.FP32, Checkpointing.FULL)
    strategy = subject.schedule.contract.strategy
    assert strategy is not None
    moved = strategy.but({"offload.checkpoints": "host", "zero.contiguous": contiguous})
    does_as_on_cpu(pool, replace(subject, schedule=make_schedule(subject.model, moved)))


def test_poison_changes_nothing_that_is_right(pool: RankPool) -> None:
    subject = job(3, Precision.FP32, Checkpointing.FULL)
    poisoned = TorchBackend(device=DeviceChoice.CUDA, pool=pool, poison=True).run(subject, seed=0)
    (plain,) = ran(subject, DeviceChoice.CUDA, pool).ranks
    assert poisoned.ranks[0].losses == plain.losses


def does_as_on_cpu(pool: RankPool, subject: Job) -> None:
    """The same operations, book and transfers; the same training up to the format's precision."""
    strategy = subject.schedule.contract.strategy
    assert strategy is not None
    precision = strategy.train.precision
    (device,) = ran(subject, DeviceChoice.CUDA, pool).ranks
    (host,) = ran(subject, DeviceChoice.CPU).ranks
    assert device.book == host.book
    assert device.transfers == host.transfers
    for stream in subject.schedule.streams:
        issued = [
            [(one.step, one.operation) for one in trace.events if one.stream == stream]
            for trace in (device, host)
        ]
        assert issued[0] == issued[1]
    tolerance = {Precision.FP64: 1e-10, Precision.FP32: 1e-4}.get(precision, 3e-2)
    assert device.losses == pytest.approx(host.losses, rel=tolerance)


def test_a_stream_runs_its_operations_one_after_the_other(pool: RankPool) -> None:
    subject = job(3, Precision.BF16, Checkpointing.FULL)
    (rank,) = ran(subject, DeviceChoice.CUDA, pool).ranks
    for stream in subject.schedule.streams:
        events = [event for event in rank.events if event.stream == stream]
        for before, after in pairwise(events):
            assert before.end_ps <= after.start_ps


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_live_storages_on_the_device_are_those_of_the_book(pool: RankPool, stage: int) -> None:
    trace = ran(job(stage, Precision.BF16, Checkpointing.NONE), DeviceChoice.CUDA, pool)
    observed = dict(trace.observed)
    difference = observed["live_bytes_peak/state"] - observed["booked_bytes_peak/state"]
    assert abs(difference) <= observed["shared_bytes_peak/gradient"]
