"""Pools of ranks that every test of a process shares; each job finds its ranks as if fresh."""

import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

from rank_state import Fresh
from torch import distributed

from zsim_torch.supervise.ranks import TIMEOUT_S, RankPool

Result = TypeVar("Result")


class SharedPool(RankPool):
    """A pool whose ranks are reset before each job, and replaced if a reset would not suffice."""

    def __init__(self, ranks: int) -> None:
        super().__init__(ranks)
        self._stores = Path(tempfile.mkdtemp(prefix="zsim-stores-"))
        self._jobs = 0

    def run(
        self,
        function: Callable[..., Result],
        *arguments: object,
        on_steps: Callable[[int], object] | None = None,
    ) -> tuple[Result, ...]:
        self._jobs += 1
        group = _Group(self.ranks, self._stores / str(self._jobs), self.timeout_s)
        done = super().run(_as_if_fresh, group, function, arguments, on_steps=on_steps)
        if any(leftovers for _, leftovers in done):
            super().close()
        return tuple(result for result, _ in done)

    def end(self) -> None:
        """Leave no process and no file."""
        self.close()
        shutil.rmtree(self._stores, ignore_errors=True)


class SharedPools:
    """One pool for each number of ranks, started when first asked for."""

    def __init__(self) -> None:
        self._pools: dict[int, SharedPool] = {}

    def __call__(self, ranks: int) -> RankPool:
        """Return the pool of `ranks` ranks, with the usual time-out."""
        if ranks not in self._pools:
            self._pools[ranks] = SharedPool(ranks)
        pool = self._pools[ranks]
        pool.timeout_s = TIMEOUT_S
        return pool

    def end(self) -> None:
        """End the ranks of all pools."""
        for pool in self._pools.values():
            pool.end()


@dataclass(frozen=True, slots=True)
class _Group:
    """The default process group of a job: its ranks meet at `store`."""

    ranks: int
    store: Path
    timeout_s: float


_FRESH: list[tuple[Fresh, int]] = []
"""In a rank: the state in which it started, and its number."""


def _as_if_fresh(
    group: _Group, function: Callable[..., Any], arguments: tuple[object, ...]
) -> tuple[Any, list[str]]:
    """Do a job on a rank that earlier jobs have left; return leftovers that need a new process."""
    if _FRESH:
        fresh, rank = _FRESH[0]
        if distributed.is_initialized():
            distributed.destroy_process_group()
        fresh.restore()
        distributed.init_process_group(
            "gloo",
            init_method=f"file://{group.store}",
            rank=rank,
            world_size=group.ranks,
            timeout=timedelta(seconds=2 * group.timeout_s),
        )
    else:
        fresh = Fresh.taken()
        _FRESH.append((fresh, distributed.get_rank()))
    fresh.learn()
    result = function(*arguments)
    return result, fresh.not_undone()
