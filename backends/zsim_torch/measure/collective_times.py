"""Collectives of each kind by size, between kernels as in a step; and what they take from kernels.

Between two collectives every rank computes for a moment. So the thread that carries bytes has gone
to sleep, caches hold something else, and ranks arrive at slightly different times, as in training.
Every second round asks what a host has to do with an end that has come long before: the streams of
a training wait for it then.
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
from zsim_torch.execute.collectives import ALL_GATHER, REDUCE_SCATTER
from zsim_torch.execute.flights import PendingWork, StreamEntry
from zsim_torch.execute.gloo_exchange import Exchanged, GlooExchange
from zsim_torch.execute.streams import CpuStreams
from zsim_torch.measure.ladder import LADDER, Ladder
from zsim_torch.measure.stopwatch import Stopwatch
from zsim_torch.measure.time_budget import TimeBudget
from zsim_torch.supervise.progress_record import note

ROUNDS: Final = 6
"""Each collective is issued so often, or more often if there is time; of the first is none told."""

ROUNDS_LEAST: Final = 2
"""However late it is: one that is timed, and one in which its end is looked for."""

POLL_S: Final = 2e-5
BETWEEN: Final = 192
"""Extent of the products between collectives: some hundred microseconds on a core."""

OVERLAPS: Final = 9
SHORTEST_S: Final = 1e-6
SHARE_MAX: Final = 0.9
PAIR: Final = "send_receive"
"""A send to one rank, and its receive."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveSample:
    """One collective of so many bytes on this rank, in each round.

    Attributes:
        issue_s: median seconds until it was handed over.
        handed_s, ended_s: when it had been, and when the host had learnt of its end, on the clock
            that all processes of a machine share.
        landing_s: median seconds of the host to learn of an end that has come; None of a device
            beside its host, and of messages, whose end Gloo tells to who waits alone.
    """

    collective: str
    size_bytes: int
    issue_s: float
    handed_s: tuple[float, ...]
    ended_s: tuple[float, ...]
    landing_s: float | None = None


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
    collectives = tuple(_collectives(device, ladder.tensors, asynchronous=asynchronous))
    taken: dict[tuple[str, int], list[tuple[float, float, float]]] = {}
    landed: dict[tuple[str, int], list[float]] = {}
    rounds, goes_on = 0, True
    while goes_on:
        note(f"measuring collectives, round {rounds}")
        for each in collectives:
            torch.mm(square, square)
            watch.settle()
            if asynchronous and rounds % 2 and each.name != PAIR:
                landed.setdefault((each.name, each.size_bytes), []).append(_landing_s(each))
                continue
            start = time.perf_counter()
            work = each.issue()
            handed = time.perf_counter()
            if work is not None:
                work.wait()
            watch.settle()
            times = (start, handed, time.perf_counter())
            taken.setdefault((each.name, each.size_bytes), []).append(times)
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
        )
        for (name, size), times in taken.items()
    )


def shared_s(samples: Sequence[CollectiveSample]) -> float:
    """Return the median seconds of a collective over rounds, from its samples on all ranks.

    It begins when the last rank has handed it over, and ends when the last has learnt of its end:
    that an early rank waits for a late one is not its own time.
    """
    begins = (max(each) for each in zip(*(one.handed_s for one in samples), strict=True))
    ends = (max(each) for each in zip(*(one.ended_s for one in samples), strict=True))
    taken: list[float] = [end - begin for begin, end in zip(begins, ends, strict=True)]
    return max(SHORTEST_S, float(median(taken)))


def _landing_s(collective: _Collective) -> float:
    """Return the seconds in which the streams of a training learn of an end that has come."""
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


def agreed(number: int, device: torch.device) -> int:
    """Return the number of the first rank: all ranks do as many rounds."""
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


def taken_share(watch: Stopwatch, budget: TimeBudget, ladder: Ladder = LADDER) -> float | None:
    """Return the share of a rank that a collective beside its kernels takes; None with one rank.

    It is what kernels lose while a collective goes on, over the time that this takes alone.
    """
    if distributed.get_world_size() == 1 or watch.device.type != "cpu":
        return None
    tensor = torch.ones(ladder.overlapped_bytes // 4)
    square = torch.ones(BETWEEN, BETWEEN)

    def kernels(count: int) -> float:
        return watch.once_s(lambda: torch.mm(square, square), count) * count

    def alone() -> float:
        start = time.perf_counter()
        distributed.all_reduce(tensor, op=distributed.ReduceOp.AVG)
        return time.perf_counter() - start

    each = kernels(20) / 20
    of_collective = median(alone() for _ in range(OVERLAPS))
    longest = torch.tensor([3 * of_collective / each])
    distributed.all_reduce(longest, op=distributed.ReduceOp.MAX)
    count = max(4, min(2000, round(float(longest))))
    lost: list[float] = []
    while agreed(not lost or (len(lost) < OVERLAPS and not budget.is_over), watch.device):
        distributed.barrier()
        without = kernels(count)
        distributed.barrier()
        work = distributed.all_reduce(tensor, op=distributed.ReduceOp.AVG, async_op=True)
        beside = kernels(count)
        assert work is not None
        work.wait()
        lost.append((beside - without) / of_collective)
    budget.note("kernels beside a collective", len(lost), OVERLAPS)
    return min(SHARE_MAX, max(0.0, median(lost)))
