"""A step by hand of two ranks whose collectives fly beside each other, through one group."""

import math
import weakref
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import gettempdir
from unittest.mock import patch

import numpy as np
import torch
from torch import distributed, nn

from zsim.schedule.builder import ScheduleBuilder
from zsim.schedule.operation import FreeMode
from zsim.schedule.schedule import Schedule
from zsim_torch.execute.host_memory import FileRange, HostBlock, HostPools
from zsim_torch.execute.live_memory import LiveMemory
from zsim_torch.execute.memory_part import Remains
from zsim_torch.execute.poison import Poison
from zsim_torch.execute.rank_machine import Bench
from zsim_torch.module.unit import resolve

RANKS, STEPS = 2, 2
SEED = 5
LEFT: Mapping[str, float] = {
    "kept": STEPS * (4 * 4 + 8 * 7 + 2 * 4 * 20 + 4 * 10 + 8 * 22 + 8 * 26),
}
"""Sum of what each persistent buffer holds after the steps, on either rank."""


def flying() -> Schedule:
    """Return collectives whose views the next one writes; one is ordered by the group alone."""
    build = ScheduleBuilder.of("flying", data=RANKS)
    data, side = build.group("data", "data"), build.stream("side")
    kept = build.buffer("kept", 8, home="compute", persistent=True)
    build.setup.allocate(kept)
    build.setup.fill("zero", kept.all, 0.0)
    step = build.step
    # A gather writes what the reduction before it reads; two sums overlap and begin elsewhere.
    whole, sums = build.buffer("whole", 8), build.buffer("sums", 8)
    part, own = build.buffer("part", 4), build.buffer("own", 4)
    step.allocate(whole, sums, part, own)
    ready = [
        step.fill("fill whole", whole.all, 2.0),
        step.fill("fill own", own.all, 7.0),
        step.fill("fill sums", sums.all, 5.0),
    ]
    step.reduce_scatter("scatter", data, whole.all, part.all, after=ready)
    step.all_gather("gather", data, own.all, whole.all)
    step.all_reduce("low", data, sums[0:6])
    summed = step.all_reduce("high", data, sums[2:8])
    # The stream's order alone tells that the first three have ended.
    ends = [
        step.copy("add part", part.all, kept[0:4], accumulate=True, after=[summed]),
        step.copy("add whole", whole.all, kept.all, accumulate=True),
        step.copy("add sums", sums.all, kept.all, accumulate=True),
        step.copy("add middle", sums[2:6], kept[0:4], accumulate=True),
    ]
    step.free(whole, sums, part, own, uses=[summed, ends[-1]])
    # The group's order alone tells that the first of two has ended.
    first, second = build.buffer("first", 8), build.buffer("second", 8)
    step.allocate(first, second)
    step.fill("fill first", first.all, 11.0)
    made = step.fill("fill second", second.all, 13.0)
    step.all_reduce("first sum", data, first.all, after=[made])
    other = step.all_reduce("second sum", data, second.all, stream=side, after=[made])
    step.copy("add first", first.all, kept.all, accumulate=True, after=[other])
    step.copy("add second", second.all, kept.all, accumulate=True)
    step.free(first, second, uses=[other])
    # Memory whose home is the stream of its collective is freed behind it without an edge.
    for name, mode in (("waited", FreeMode.WAITED), ("deferred", FreeMode.DEFERRED)):
        away = build.buffer(name, 8, home="communication")
        step.allocate(away)
        step.fill(f"fill {name}", away.all, 17.0, stream="communication")
        step.all_reduce(f"{name} sum", data, away.all)
        step.free(away, mode=mode)
    again = build.buffer("again", 8, home="compute")
    step.allocate(again)
    step.fill("fill again", again.all, 0.0)
    step.free(again)
    return build.schedule()


@contextmanager
def outliving() -> Generator[list[str]]:
    """Yield a list of buffers whose memory is held longer than it is theirs, by name."""
    found: list[str] = []
    right = LiveMemory.drop

    def drop(
        memory: LiveMemory,
        name: str,
        remains: Remains,
        held: HostBlock | FileRange | None,
        *,
        travelled: bool,
    ) -> None:
        assert remains.flat is not None
        storage = weakref.ref(remains.flat.untyped_storage())
        right(memory, name, remains, held, travelled=travelled)
        if storage() is not None:
            found.append(name)

    with patch.object(LiveMemory, "drop", drop):
        yield found


def run_flying(*, poison: bool) -> dict[str, float]:
    """Run the steps on this rank; return the sums of what is left, and what outlived its buffer."""
    schedule, device, rank = flying(), torch.device("cpu"), distributed.get_rank()
    program = schedule.program_of(rank)
    pools = HostPools(schedule, program, folder=Path(gettempdir()), device=device, poison=poison)
    bench = Bench(schedule, program, rank=rank, device=device, observer=None, pools=pools)
    with bench, outliving() as late:
        executor = bench.executor(
            resolve(nn.Identity(), ("",)),
            initial=dict[str, torch.Tensor]().__getitem__,
            next_batch=lambda: None,
            on_loss=lambda _: None,
            on_norm=lambda *_: None,
            poison=Poison(np.random.default_rng(SEED) if poison else None),
        )
        executor.run_setup()
        for number in range(STEPS):
            executor.run_step(number, {})
        executor.machine.streams.drain()
        left = executor.machine.memory.left
        sums = {name: float(left(name).sum()) for name in program.persistent}
        return sums | dict.fromkeys(late, math.nan)
