"""Data parallelism of torch: its reducer, which waits below Python, and its sharded optimizer."""

import warnings
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import BuiltinCommHookType
from torch.nn.parallel import DistributedDataParallel

from zsim.proof import prove
from zsim.schedule.operation import Compute
from zsim_record import recording
from zsim_record.record.recorded_collectives import RecordedWork
from zsim_record.record.recorded_future import RecordedFuture
from zsim_record.record.tape import Tape

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


@pytest.mark.matrix(12)
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


@pytest.mark.matrix(6)
@pytest.mark.parametrize("views", [False, True])
def test_a_reducer_that_does_not_wait_is_found(*, views: bool) -> None:
    with recording(world=4) as tape, patch.object(RecordedWork, "wait", lambda *_: True):
        replicated(views=views, steps=2)
    assert "race" in {hazard.kind.value for hazard in tape.findings}


@pytest.mark.matrix(6)
@pytest.mark.parametrize("views", [False, True])
def test_the_sharded_optimizer_of_torch_has_no_finding_and_is_proved(*, views: bool) -> None:
    with recording(world=4, lifts=True) as tape:
        sharded(views=views)
    assert tape.findings == []
    assert tape.refused == {}
    assert prove(tape.schedule()).findings == ()


HOOKS = "torch.distributed.algorithms.ddp_comm_hooks"


def hooked(register: Callable[[DistributedDataParallel], object], steps: int = 4) -> Tape:
    """Return a recording of DDP whose gradients a hook reduces."""
    with recording(world=4, cuda=True) as tape:
        dist.init_process_group("nccl")
        module = DistributedDataParallel(net(), bucket_cap_mb=0.02)
        register(module)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        for _ in range(steps):
            backward(module)
            optimizer.step()
            optimizer.zero_grad()
    return tape


def compressed(module: DistributedDataParallel) -> None:
    module.register_comm_hook(None, import_module(f"{HOOKS}.default_hooks").fp16_compress_hook)


def compressed_by_the_builtin_hook(module: DistributedDataParallel) -> None:
    cast("Any", module)._register_builtin_comm_hook(BuiltinCommHookType.FP16_COMPRESS)


def powersgd(module: DistributedDataParallel, *, feedback: bool) -> None:
    hook = import_module(f"{HOOKS}.powerSGD_hook")
    state = hook.PowerSGDState(
        None, 1, start_powerSGD_iter=2, min_compression_rate=1, use_error_feedback=feedback
    )
    module.register_comm_hook(state, hook.powerSGD_hook)


HOOKED = (compressed, compressed_by_the_builtin_hook, partial(powersgd, feedback=False))


@pytest.mark.matrix(6)
@pytest.mark.parametrize("register", HOOKED)
def test_a_hook_that_chains_futures_has_no_finding(
    register: Callable[[DistributedDataParallel], object],
) -> None:
    tape = hooked(register)
    assert tape.findings == []
    assert tape.refused == {}


@pytest.mark.matrix(6)
@pytest.mark.parametrize("register", HOOKED)
def test_a_chain_of_futures_that_orders_no_stream_is_found(
    register: Callable[[DistributedDataParallel], object],
) -> None:
    with patch.object(RecordedFuture, "_order", lambda _: None):
        assert "race" in {hazard.kind.value for hazard in hooked(register).findings}


@pytest.mark.one_commit_in(6)
def test_powersgd_drops_its_copy_of_a_gradient_that_a_callback_still_reads() -> None:
    """The closure of the hook holds it, made on the stream of backward and read on another."""
    found = hooked(partial(powersgd, feedback=True)).findings
    assert {hazard.kind.value for hazard in found} == {"reuse"}
    for hazard in found:
        assert hazard.earlier.stack is not None
        assert hazard.earlier.operation == "aten::sub"
        assert any("decompress" in frame.function for frame in hazard.earlier.stack.frames)


@pytest.mark.parametrize("ordered", [False, True])
def test_a_future_of_a_collective_orders_the_stream_that_waits_for_it(*, ordered: bool) -> None:
    with recording(world=2) as tape:
        dist.init_process_group("nccl")
        values = [torch.ones(4, device="zsim") for _ in range(3)]
        futures = [
            cast("Any", dist.all_reduce(each, async_op=True)).get_future() for each in values
        ]
        doubled = futures[0].then(lambda done: done.value()[0].mul_(2))
        if ordered:
            assert doubled.wait() is values[0]
            torch.futures.wait_all(futures[1:2])
            torch.futures.collect_all(futures[2:]).wait()
        for each in values:
            each.add_(1)
    assert sum(hazard.count for hazard in tape.findings) == (0 if ordered else 3)
