"""Ranks that tests share find no trace of the job before, whatever it left."""

import gc
import os
import random  # noqa: TID251  # its state is what a job leaves
import signal
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import shared_gradients
import torch
from rank_jobs import raise_on, sum_of_ranks
from shared_ranks import SharedPools
from torch import distributed, nn
from torch.utils._python_dispatch import TorchDispatchMode

from zsim_torch.execute import copying
from zsim_torch.execute.executor import Executor
from zsim_torch.supervise.rank_failure import RankFailedError
from zsim_torch.supervise.ranks import RankPool


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    """Two ranks that no other file uses: the first job of a test may meet leftovers of one here."""
    pools = SharedPools()
    yield pools(2)
    pools.end()


def leave_a_group() -> None:
    group = distributed.new_group([0, 1])
    distributed.all_reduce(torch.ones(3), group=group, async_op=True)  # which nobody waits for
    distributed.destroy_process_group()


def groups() -> tuple[int, str, float]:
    count: int = distributed.distributed_c10d._world.group_count  # pyright: ignore[reportPrivateUsage]
    return count, distributed.get_backend(), sum_of_ranks()


def leave_settings() -> None:
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    torch.set_num_threads(2)
    torch.set_grad_enabled(False)
    torch.autograd.set_detect_anomaly(True)
    torch.use_deterministic_algorithms(True)
    torch.set_flush_denormal(True)
    torch.set_autocast_enabled("cpu", True)
    os.chdir("/")
    sys.path.insert(0, "/planted")
    gc.disable()
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def settings() -> tuple[object, ...]:
    return (
        torch.get_default_dtype(),
        torch.empty(1).device,
        torch.get_num_threads(),
        torch.is_grad_enabled(),
        torch.is_anomaly_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        bool(torch.tensor(1e-310, dtype=torch.float64, device="cpu") * 1 > 0),
        torch.is_autocast_enabled("cpu"),
        Path.cwd(),
        tuple(sys.path),
        gc.isenabled(),
        len(warnings.filters),
        signal.getsignal(signal.SIGTERM),
    )


def leave_an_environment() -> None:
    os.environ["ZSIM_PLANTED"] = "1"
    del os.environ["PATH"]


def environment() -> dict[str, str]:
    return dict(os.environ)


def leave_a_seed() -> None:
    torch.manual_seed(7)
    random.seed(7)
    np.random.seed(7)  # noqa: NPY002  # as old code does it


def drawn() -> tuple[float, ...]:
    return float(torch.rand(())), random.random(), float(np.random.rand())  # noqa: NPY002


PATCHES: tuple[tuple[object, str, object], ...] = (
    (copying, "JOINED", 0),
    (copying, "planted", 1),
    (Executor, "run_step", None),
    (Executor, "planted", 1),
    (shared_gradients, "WIDTH", 0),  # of the support of tests
    (nn.functional, "gelu", nn.functional.relu),
    (nn.Linear, "forward", nn.Identity.forward),
    (torch.Tensor, "add_", torch.Tensor.mul_),  # which it inherits
)


def leave_patches() -> None:
    for owner, name, value in PATCHES:
        setattr(owner, name, value)
    copying._DIVISORS[1, torch.float32] = torch.tensor(2.0)  # pyright: ignore[reportPrivateUsage]


def patches() -> tuple[list[bool], int]:
    planted = [getattr(owner, name, None) == value for owner, name, value in PATCHES]
    return planted, len(copying._DIVISORS)  # pyright: ignore[reportPrivateUsage]


class Doubled(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types there
    """Doubles every tensor that torch makes."""

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        made = func(*args, **(kwargs or {}))
        return made * 2 if isinstance(made, torch.Tensor) else made


def leave_hooks() -> None:
    nn.modules.module.register_module_forward_hook(lambda *given: given[2] * 3)
    torch.autograd.graph.saved_tensors_hooks(lambda kept: kept * 0, lambda kept: kept).__enter__()
    doubled: Any = Doubled
    doubled().__enter__()


def differentiated() -> tuple[float, float]:
    value = torch.tensor(3.0, requires_grad=True)
    made = nn.Identity()(value * value)
    (gradient,) = torch.autograd.grad(made, value)
    return float(made), float(gradient)


PLANTED: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
    "a group left open": (leave_a_group, groups),
    "settings of torch and of the process": (leave_settings, settings),
    "an environment": (leave_an_environment, environment),
    "seeds": (leave_a_seed, drawn),
    "patched attributes and caches": (leave_patches, patches),
    "hooks and modes": (leave_hooks, differentiated),
}


@pytest.mark.matrix(12)
@pytest.mark.parametrize("name", PLANTED)
def test_the_next_job_does_not_see_leftovers(pool: RankPool, name: str) -> None:
    plant, look = PLANTED[name]
    before = pool.run(look)
    ranks = pool.run(os.getpid)
    pool.run(plant)
    assert pool.run(look) == before
    assert pool.run(os.getpid) == ranks  # the same processes, made as new


@pytest.mark.parametrize("name", sorted(PLANTED.keys() - {"a group left open"}))
def test_leftovers_are_seen_within_a_job(pool: RankPool, name: str) -> None:
    """So the test above would fail without the reset."""
    assert all(pool.run(changed, name))


def changed(name: str) -> bool:
    plant, look = PLANTED[name]
    before = look()
    plant()
    return look() != before


class Cycle:
    """A tensor that only the collector of cycles frees."""

    def __init__(self, size: int) -> None:
        self.own = self
        self.tensor = torch.zeros(size)


def leave_tensors(folder: Path) -> None:
    cycles = (Cycle(10**6), Cycle(10**6))
    for number, cycle in enumerate(cycles):
        weakref.finalize(cycle.tensor, (folder / f"{distributed.get_rank()}-{number}").touch)
    module: Any = shared_gradients
    module.planted = cycles[0]


def test_tensors_of_a_job_are_freed_before_the_next(pool: RankPool, tmp_path: Path) -> None:
    pool.run(sum_of_ranks)
    pool.run(leave_tensors, tmp_path)
    pool.run(sum_of_ranks)
    assert {path.name for path in tmp_path.iterdir()} == {"0-0", "0-1", "1-0", "1-1"}


def leave_a_thread() -> int:
    threading.Thread(target=threading.Event().wait, name="planted", daemon=True).start()
    return os.getpid()


def leave_a_child() -> int:
    if os.fork() == 0:
        signal.pause()
    return os.getpid()


@pytest.mark.matrix(6)
@pytest.mark.parametrize("leave", [leave_a_thread, leave_a_child])
def test_ranks_are_replaced_after_a_thread_or_a_child_that_goes_on(
    pool: RankPool, leave: Callable[[], int]
) -> None:
    before = pool.run(leave)
    after = pool.run(os.getpid)
    assert not set(before) & set(after)
    assert not any(Path(f"/proc/{pid}").exists() for pid in before)
    assert pool.run(os.getpid) == after


def test_a_job_that_fails_leaves_ranks_that_work(pool: RankPool) -> None:
    with pytest.raises(RankFailedError, match="rank 1: ValueError: planted"):
        pool.run(raise_on, 1, "planted")
    assert pool.run(sum_of_ranks) == (1.0, 1.0)


def test_every_file_gets_the_same_ranks_with_the_usual_time_out(pool_of: SharedPools) -> None:
    ranks = pool_of(2).run(os.getpid)
    usual = pool_of(2).timeout_s
    pool_of(2).timeout_s = 1.0
    assert pool_of(2).timeout_s == usual
    assert pool_of(2).run(os.getpid) == ranks
    assert pool_of(3) is not pool_of(2)
