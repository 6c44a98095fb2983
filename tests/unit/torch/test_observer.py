import gc
from threading import Thread

import pytest
import torch
from shared_ranks import SharedPools
from torch import distributed

from zsim_torch.observe.observer import Maker, Observer


def test_a_storage_counts_once_while_any_tensor_on_it_lives() -> None:
    observer = Observer()
    with observer:
        whole = torch.zeros(10)
        part = whole[2:4]
        del whole
        again = torch.zeros(5)
        del part
        torch.zeros(3)
        del again
    peak = observer.meter.peak
    assert (peak[Maker.OTHER], peak["all"], peak[Maker.EXECUTOR]) == (60, 60, 0)


def test_storages_are_classed_by_who_made_them() -> None:
    observer = Observer()
    with observer:
        with observer.executor():
            own = torch.ones(4, requires_grad=True)
        loss = (own * 2).sum()
        (gradient,) = torch.autograd.grad(loss, own)
    assert observer.meter.peak[Maker.EXECUTOR] == 16
    assert observer.meter.peak[Maker.GRADIENT] == gradient.untyped_storage().nbytes() == 16
    assert observer.meter.peak["state"] == 32


def test_a_gradient_on_the_executors_storage_stays_the_executors() -> None:
    observer = Observer()
    with observer:
        with observer.executor():
            seed = torch.ones(4)
        value = torch.ones(4, requires_grad=True)
        (gradient,) = torch.autograd.grad(value + 1, value, seed)
    assert gradient.data_ptr() == seed.data_ptr()
    assert observer.meter.peak[Maker.GRADIENT] == 0


def test_a_storage_that_dies_in_another_thread_is_missed() -> None:
    observer = Observer()
    held: list[torch.Tensor] = []
    with observer:
        held.append(torch.zeros(100))
        thread = Thread(target=held.clear)
        thread.start()
        thread.join()
        gc.collect()
        held.append(torch.zeros(10))
    assert observer.meter.peak["all"] == 400


def test_the_watch_ends_with_the_observer() -> None:
    grad = torch.autograd.grad
    with Observer() as observer:
        assert torch.autograd.grad is not grad
    assert torch.autograd.grad is grad
    torch.zeros(3)
    assert observer.meter.peak["all"] == 0


def collectives() -> dict[str, float]:
    """Each collective once, over three ranks, with no schedule in sight."""
    group = distributed.new_group([0, 1, 2], group_desc="some")
    assert isinstance(group, distributed.ProcessGroup)
    rank = distributed.get_rank()
    four, twelve, one = torch.ones(4), torch.ones(12, dtype=torch.float64), torch.ones(1)
    observer = Observer()
    with observer:
        distributed.all_reduce(four, group=group)
        distributed.all_reduce(one, group=group)
        distributed.all_gather_single(twelve, four.double(), group=group)
        distributed.reduce_scatter_single(four.double(), twelve, group=group)
        distributed.broadcast(four, src=1, group=group)
        if rank == 0:
            distributed.send(four, dst=1, group=group)
        if rank == 1:
            distributed.recv(four, src=0, group=group)
        distributed.barrier(group=group)
    return {name: number for name, number in observer.figures() if "wire" in name}


@pytest.mark.one_commit_in(6)
def test_collectives_are_counted_in_ring_equivalent_bytes(pool_of: SharedPools) -> None:
    first, second, third = pool_of(3).run(collectives)
    expected = {
        # 2 x 2 ranks x ceil(4 / 3) elements x 4 bytes; of one element x 1 x 4
        "wire_bytes/some/all_reduce": 32,
        "scalar_wire_bytes/some/all_reduce": 16,
        # 2 ranks x 4 elements x 8 bytes, each
        "wire_bytes/some/all_gather": 64,
        "wire_bytes/some/reduce_scatter": 64,
        # 2 x ceil(4 / 3) elements x 4 bytes
        "wire_bytes/some/broadcast": 16,
    }
    assert {name: n for name, n in third.items() if "_bytes" in name} == expected
    assert {name: n for name, n in third.items() if "_count" in name} == {
        name.replace("_bytes", "_count"): 1 for name in expected
    }
    assert first["wire_bytes/some/send"] == 16
    assert second["wire_bytes/some/receive"] == 0
