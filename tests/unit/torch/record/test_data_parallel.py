"""Data parallelism of torch: its reducer, which waits below Python, and its sharded optimizer."""

import warnings
from collections.abc import Callable
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from zsim.proof import prove
from zsim.schedule.operation import Compute
from zsim_torch import recording
from zsim_torch.record.recorded_collectives import RecordedWork
from zsim_torch.record.tape import UnrecordableError

with warnings.catch_warnings(action="ignore"):  # torch 2.13 compiles with what it deprecates
    from torch.distributed.optim import ZeroRedundancyOptimizer


def net() -> nn.Module:
    return nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)]).to("zsim")


def replicated(*, views: bool, steps: int = 4, micro_batches: int = 1) -> None:
    """Train with DDP; its second step makes buckets anew, in the order of the first backward."""
    dist.init_process_group("nccl")
    module = DistributedDataParallel(net(), gradient_as_bucket_view=views, bucket_cap_mb=0.02)
    optimizer = torch.optim.AdamW(module.parameters())
    for _ in range(steps):
        for number in range(micro_batches):
            module.require_backward_grad_sync = number == micro_batches - 1
            backward(module)
        optimizer.step()
        optimizer.zero_grad()


def backward(module: Callable[..., torch.Tensor]) -> None:
    loss = module(torch.randn(8, 64, device="zsim")).square().mean()
    cast("Any", loss).backward()


def sharded(*, views: bool) -> None:
    """Train with an optimizer of which each rank has a part, and broadcasts what it updated."""
    dist.init_process_group("nccl")
    module = net()
    optimizer = ZeroRedundancyOptimizer(
        module.parameters(),
        optimizer_class=torch.optim.AdamW,
        parameters_as_bucket_view=views,
        lr=1e-3,
    )
    for _ in range(3):
        backward(module)
        for parameter in module.parameters():
            dist.all_reduce(cast("torch.Tensor", parameter.grad))
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_ddp_has_no_finding_and_is_proved(micro_batches: int, *, views: bool) -> None:
    with recording(world=4, lifts=True) as tape:
        replicated(views=views, micro_batches=micro_batches)
    assert tape.findings == []
    assert tape.refused == {}
    schedule = tape.schedule()
    assert prove(schedule).findings == ()
    reduced = schedule.contract.wire_bytes
    assert reduced is not None
    # Each parameter once: 2 (n - 1) / n of it, here of 4 layers of 64 x 64 weights and 64 biases.
    computes = [each for each in schedule.programs[0].step if isinstance(each, Compute)]
    turns = len({each.micro_batch for each in computes})
    assert sum(each.bytes for each in reduced) == turns * 4 * 65 * 64 * 4 * 2 * 3 // 4


@pytest.mark.parametrize("views", [False, True])
def test_a_reducer_that_does_not_wait_is_found(*, views: bool) -> None:
    with recording(world=4) as tape, patch.object(RecordedWork, "wait", lambda *_: True):
        replicated(views=views, steps=2)
    assert "race" in {hazard.kind.value for hazard in tape.findings}


@pytest.mark.parametrize("views", [False, True])
def test_the_sharded_optimizer_of_torch_has_no_finding_and_is_proved(*, views: bool) -> None:
    with recording(world=4, lifts=True) as tape:
        sharded(views=views)
    assert tape.findings == []
    assert tape.refused == {}
    assert prove(tape.schedule()).findings == ()


def test_a_future_of_a_collective_outside_of_backward_is_refused() -> None:
    with recording(world=2) as tape:
        dist.init_process_group("nccl")
        work: Any = dist.all_reduce(torch.ones(4, device="zsim"), async_op=True)
        with pytest.raises(UnrecordableError, match="get_future"):
            work.get_future()
    assert tape.refused
