"""Measure collectives of each kind by size, and the time that kernels lose to them.

Between two collectives every rank computes briefly. As in training, the thread that transfers bytes
has then gone to sleep, caches hold other data, and ranks arrive at slightly different times.

On CPUs, further rounds measure how long the host needs to notice the end of a finished collective,
and the time that kernels on the host lose while a collective is in flight.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any, Final

import torch
from torch import Tensor, distributed

from zsim.schedule.operation import Reduction
from zsim_record.measure.ladder import LADDER, Ladder
from zsim_record.measure.stopwatch import Stopwatch
from zsim_record.measure.time_budget import TimeBudget
from zsim_torch.execute.collectives import ALL_GATHER, REDUCE_SCATTER
from zsim_torch.execute.flights import PendingWork, StreamEntry
from zsim_torch.execute.gloo_exchange import Exchanged, GlooExchange
from zsim_torch.execute.streams import CpuStreams
from zsim_torch.supervise.progress_record import note

ROUNDS: Final = 9
"""Desired number of rounds; more if there is time. The first round is not counted."""

ROUNDS_LEAST: Final = 3
"""Rounds that always run: one for the time, one for noticing the end, one next to kernels."""

POLL_S: Final = 2e-5
BETWEEN: Final = 192
"""Size of the matrix products between collectives: some hundred microseconds on a core."""

BESIDE_TIMES, BESIDE_S = 2, 2e-3
"""Kernels run next to a collective for BESIDE_TIMES its time plus BESIDE_S seconds."""

SHORTEST_S: Final = 1e-6
PAIR: Final = "send_receive"
"""A send to one rank, and its receive."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveSample:
    """One collective of `size_bytes` on this rank, in each round.

    Attributes:
        issue_s: median seconds to issue it.
        handed_s, ended_s: times when it had been issued, and when the host had noticed its end, on
            the clock that all processes of a machine share.
        landing_s: median seconds for the host to notice the end of a finished collective; None on a
            GPU, and for messages, whose end Gloo reports only to a waiting thread.
        lost_s: median seconds that kernels on the host lose to it; None in the same cases.
    """

    collective: str
    size_bytes: int
    issue_s: float
    handed_s: tuple[float, ...]
    ended_s: tuple[float, ...]
    landing_s: float | None = None
    lost_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Collective:
    name: str
    size_bytes: int
    issue: Callable[[], Any]


def collective_samples(
    watch: Stopwatch, budget: TimeBudget, ladder: Ladder = LADDER
) -> tuple[CollectiveSample, ...]:
    """Return the times of all collectives on this rank; every rank calls it."""
    if distributed.get_world_size() == 1:
        return ()
    device = watch.device
    asynchronous = device.type == "cpu"
    square = torch.ones(BETWEEN, BETWEEN, device=device)
    kernels = _Kernels(watch, square)
    collectives = tuple(_collectives(device, ladder.tensors, asynchronous=asynchronous))
    taken: dict[tuple[str, int], list[tuple[float, float, float]]] = {}
    landed: dict[tuple[str, int], list[float]] = {}
    lost: dict[tuple[str, int], list[float]] = {}
    rounds, goes_on = 0, True
    while goes_on:
        note(f"measuring collectives, round {rounds}")
        for each in collectives:
            torch.mm(square, square)
            watch.settle()
            key, asks = (each.name, each.size_bytes), rounds % 3
            if asynchronous and asks and each.name != PAIR:
                if asks == 1:
                    landed.setdefault(key, []).append(_landing_s(each))
                else:
                    start, _, end = taken[key][-1]
                    lost.setdefault(key, []).append(kernels.lost_s(each, end - start))
                continue
            start = time.perf_counter()
            work = each.issue()
            handed = time.perf_counter()
            if work is not None:
                work.wait()
            watch.settle()
            times = (start, handed, time.perf_counter())
            taken.setdefault(key, []).append(times)
        rounds += 1
        goes_on = bool(agreed(rounds < ROUNDS_LEAST or not budget.is_over, device))
    budget.note("collectives", rounds, ROUNDS)
    warm = 1 if rounds > ROUNDS_LEAST else 0
    return tuple(
        CollectiveSample(
            collective=name,
            size_bytes=size,
            issue_s=median(handed - start for start, handed, _ in times[warm:]),
            handed_s=tuple(handed for _, handed, _ in times[warm:]),
            ended_s=tuple(ended for _, _, ended in times[warm:]),
            landing_s=median(landed[name, size]) if (name, size) in landed else None,
            lost_s=median(lost[name, size]) if (name, size) in lost else None,
        )
        for (name, size), times in taken.items()
    )


def shared_s(samples: Sequence[CollectiveSample]) -> float:
    """Return the median seconds of a collective over rounds, from its samples on all ranks.

    A round starts when the last rank has issued it, and ends when the last rank has noticed its
    end, so that an early rank's wait for a late one does not count.
    """
    begins = (max(each) for each in zip(*(one.handed_s for one in samples), strict=True))
    ends = (max(each) for each in zip(*(one.ended_s for one in samples), strict=True))
    taken: list[float] = [end - begin for begin, end in zip(begins, ends, strict=True)]
    return max(SHORTEST_S, float(median(taken)))


def _landing_s(collective: _Collective) -> float:
    """Return the seconds that the streams of a training need to notice a finished collective."""
    streams = CpuStreams(keeps_trace=False)
    flying: list[Any] = []

    def issue() -> list[PendingWork]:
        flying.append(collective.issue())
        return [*flying]

    streams.communicate(StreamEntry(operation=collective.name, stream=collective.name), issue)
    for work in flying:
        for each in work.works if isinstance(work, Exchanged) else [work]:
            while not each.is_completed():
                time.sleep(POLL_S)
    start = time.perf_counter()
    streams.host_waits((collective.name,))
    return time.perf_counter() - start


class _Kernels:
    """Kernels that the host runs while collectives are in flight."""

    def __init__(self, watch: Stopwatch, square: Tensor) -> None:
        self._watch = watch
        self._square = square
        self._each_s = self._taken_s(20) / 20

    def lost_s(self, collective: _Collective, alone_s: float) -> float:
        """Return the seconds that kernels lose to `collective`, which takes `alone_s` by itself.

        The loss is capped at the CPU time of the rank's other threads; the rest is due to other
        programs.
        """
        count = max(1, round((BESIDE_TIMES * alone_s + BESIDE_S) / self._each_s))
        distributed.barrier()
        self._each_s = min(self._each_s, self._taken_s(count) / count)
        distributed.barrier()
        work = collective.issue()
        begin_s = _others_s()
        beside_s = self._taken_s(count)
        work.wait()
        return max(0.0, min(beside_s - count * self._each_s, _others_s() - begin_s))

    def _taken_s(self, count: int) -> float:
        square = self._square
        return self._watch.once_s(lambda: torch.mm(square, square), count) * count


def _others_s() -> float:
    """Return the CPU time of all threads but this one."""
    return time.process_time() - time.thread_time()


def agreed(number: int, device: torch.device) -> int:
    """Return the first rank's number on all ranks, so that all do equally many rounds."""
    held = torch.tensor([number], device=device)
    distributed.broadcast(held, src=0)
    return int(held.item())


def _collectives(
    device: torch.device, sizes: tuple[int, ...], *, asynchronous: bool
) -> Iterator[_Collective]:
    ranks, rank = distributed.get_world_size(), distributed.get_rank()
    average = distributed.ReduceOp.AVG
    exchange, world = GlooExchange(), distributed.group.WORLD
    assert world is not None
    for size in sizes:
        count = max(1, size // 4 // ranks)
        whole, part = torch.ones(count * ranks, device=device), torch.ones(count, device=device)

        def gather(whole: Tensor = whole, part: Tensor = part) -> object:
            if asynchronous:
                return exchange.all_gather(whole, part, world)
            return ALL_GATHER(whole, part)

        def scatter(whole: Tensor = whole, part: Tensor = part) -> object:
            if asynchronous:
                return exchange.reduce_scatter(part, whole, world, Reduction.AVERAGE)
            return REDUCE_SCATTER(part, whole, op=average)

        def reduce(whole: Tensor = whole) -> object:
            return distributed.all_reduce(whole, op=average, async_op=asynchronous)

        def broadcast(whole: Tensor = whole) -> object:
            return distributed.broadcast(whole, src=0, async_op=asynchronous)

        size_bytes = count * ranks * 4
        yield _Collective(name="all_gather", size_bytes=size_bytes, issue=gather)
        yield _Collective(name="reduce_scatter", size_bytes=size_bytes, issue=scatter)
        yield _Collective(name="all_reduce", size_bytes=size_bytes, issue=reduce)
        yield _Collective(name="broadcast", size_bytes=size_bytes, issue=broadcast)
        if ranks % 2 == 0:
            yield _Collective(
                name=PAIR, size_bytes=size_bytes, issue=partial(_send_or_receive, whole, rank)
            )


def _send_or_receive(tensor: Tensor, rank: int) -> object:
    if rank % 2 == 0:
        return distributed.isend(tensor, dst=rank + 1)
    return distributed.irecv(tensor, src=rank - 1)
