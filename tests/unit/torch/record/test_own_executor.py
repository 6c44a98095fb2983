"""zsim's executor for CUDA on recorded streams: no finding, and what its waits are for."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from unittest.mock import patch

import pytest
from recorded_executor import recorded

from zsim.backend.backend import Job
from zsim.cluster.cluster import Cluster, Gpu, Link
from zsim.model.architecture import GPT
from zsim.model.gpt import gpt
from zsim.runtimes.registry import make_schedule
from zsim.strategy.strategy import Strategy
from zsim_torch.execute.cuda_streams import CudaStreams

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


def job(stage: int) -> Job:
    strategy = Strategy.of(
        {
            "zero.stage": stage,
            "zero.bucket_elements": 2000,
            "parallel.data": 4,
            "train.gradient_accumulation_steps": 2,
            "train.clip_norm": 1.0,
        }
    )
    model = gpt(SHAPE, micro_batch_size=2, precision=strategy.train.precision)
    return Job(schedule=make_schedule(model, strategy), model=model, cluster=CLUSTER, steps=2)


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_executor_has_no_finding(stage: int) -> None:
    tape = recorded(job(stage))
    assert tape.findings == []
    assert tape.refused == {}
    assert tape.operation_count > 1000


def without_waits_for_operations() -> AbstractContextManager[object]:
    return patch.object(CudaStreams, "_events_of", lambda *_: [])


def without_waits_before_frees() -> AbstractContextManager[object]:
    return patch.object(CudaStreams, "home_waits", lambda *_: None)


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
@pytest.mark.parametrize(
    ("mutant", "kind"),
    [
        (without_waits_for_operations, "race"),
        (without_waits_before_frees, "reuse"),
    ],
)
def test_an_executor_that_does_not_wait_is_found(
    mutant: Callable[[], AbstractContextManager[object]], kind: str
) -> None:
    with mutant():
        tape = recorded(job(3))
    assert kind in {hazard.kind.value for hazard in tape.findings}
