"""Run all measurements of one rank, while the other ranks do the same."""

import os
import platform
import time
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Final

import torch
from torch import distributed

from zsim.backend.backend import Job
from zsim.cluster.profile.measured import KernelTimes, ProductTimes
from zsim.dtype import DType
from zsim.strategy.optimizer_rule import Adam
from zsim.trace.trace import RankTrace
from zsim_record.measure.collective_times import (
    SHORTEST_S,
    CollectiveSample,
    agreed,
    collective_samples,
)
from zsim_record.measure.cost_fit import WARM_UP
from zsim_record.measure.kernel_times import kernel_tables
from zsim_record.measure.ladder import LADDER, Ladder
from zsim_record.measure.stopwatch import Stopwatch
from zsim_record.measure.time_budget import Clock, Repeats, TimeBudget
from zsim_torch.execute.sharded_optimizer import Updated, update
from zsim_torch.feed import feed
from zsim_torch.run_option import Option
from zsim_torch.supervise.progress_record import note
from zsim_torch.trainer import Trainer

ROUNDS: Final = 5

KERNEL_SHARE, COLLECTIVE_SHARE = 0.5, 0.5
"""Shares of the time for kernels and for collectives."""

STEPS_SHARE: Final = 1.0
"""Additional time for reference steps, as a share of the same time."""

STEPS_LEAST: Final = WARM_UP + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasureOrder:
    """Settings of the measurement on a rank: data types, seconds, reference runs and sizes."""

    dtypes: tuple[DType, ...]
    seconds: float
    jobs: tuple[Job, ...]
    ladder: Ladder = LADDER
    clock: Clock = time.monotonic


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTimes:
    """Times of one rank. Rates are in bytes per second, while all ranks do the same."""

    device: str
    processor: str
    products: tuple[ProductTimes, ...]
    kernels: tuple[KernelTimes, ...]
    collectives: tuple[CollectiveSample, ...]
    copy_bytes_per_s: float
    adam_bytes_per_s: float
    cast_bytes_per_s: float
    traces: tuple[RankTrace, ...]
    repeats: tuple[Repeats, ...] = ()


def measure_rank(order: MeasureOrder) -> RankTimes:
    """Measure this process's rank of the process group; every rank calls it."""
    device = rank_device()
    watch, ladder = Stopwatch(device), order.ladder

    def part(share: float) -> TimeBudget:
        return TimeBudget.of(order.seconds * share, order.clock)

    steps = part(STEPS_SHARE)
    traces = tuple(
        _reference_trace(job, steps, left=len(order.jobs) - place)
        for place, job in enumerate(order.jobs)
    )
    of_kernels = part(KERNEL_SHARE)
    products, kernels = kernel_tables(watch, order.dtypes, of_kernels, ladder)
    _meet()
    of_collectives = part(COLLECTIVE_SHARE)
    samples = collective_samples(watch, of_collectives, ladder)
    _meet()
    copied = _copied_bytes_per_s(watch, ladder.copied_bytes)
    _meet()
    updated, cast = _host_rates(ladder.updated)
    return RankTimes(
        device=device.type,
        processor=processor_name(device),
        products=products,
        kernels=kernels,
        collectives=samples,
        copy_bytes_per_s=copied,
        adam_bytes_per_s=updated,
        cast_bytes_per_s=cast,
        traces=traces,
        repeats=tuple(
            each for budget in (steps, of_kernels, of_collectives) for each in budget.repeats
        ),
    )


def rank_device() -> torch.device:
    """Return the device of this rank."""
    if distributed.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def processor_name(device: torch.device) -> str:
    """Return the name of the device or CPU."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    try:
        with Path("/proc/cpuinfo").open(encoding="utf-8") as lines:
            found = (line.partition(":")[2] for line in lines if line.startswith("model name"))
            return next(found, "").strip() or platform.machine()
    except OSError:
        return platform.machine()


def _reference_trace(job: Job, budget: TimeBudget, *, left: int) -> RankTrace:
    """Return this rank's trace of a reference run; `left` runs share `budget`.

    The number of steps is decided after the first, slowest step, so that no later step starts with
    the communication for this decision.
    """
    note(f"reference steps of {job.schedule.name}")
    batches = feed(job, distributed.get_rank(), data=None, seed=0)
    with Trainer.of_job(job, option=Option(keep_trace=True, write_back=False)) as trainer:
        begin, most_s = budget.clock(), budget.left_s / left
        trainer.step(*islice(batches, trainer.micro_batches))
        fitting = int(most_s / max(budget.clock() - begin, SHORTEST_S))
        steps = agreed(min(job.steps, max(fitting, STEPS_LEAST)), trainer.run.device)
        for _ in range(1, steps):
            trainer.step(*islice(batches, trainer.micro_batches))
        trace = trainer.trace().ranks[0]
    trainer.run.close_files()
    budget.note("reference steps", steps, job.steps)
    return replace(trace, book=(), transfers=(), losses=())


def _meet() -> None:
    distributed.barrier()


def _copied_bytes_per_s(watch: Stopwatch, size_bytes: int) -> float:
    """Return the bytes per second that a copy in device memory reads and writes."""
    note("measuring memory")
    source = torch.ones(size_bytes, dtype=torch.uint8, device=watch.device)
    target = torch.empty_like(source)
    watch.once_s(lambda: target.copy_(source))
    taken = median(watch.once_s(lambda: target.copy_(source)) for _ in range(ROUNDS))
    return 2 * size_bytes / taken


def _host_rates(count: int) -> tuple[float, float]:
    """Return bytes of host memory per second of an Adam update and of a cast to 16 bits.

    Bytes are those that `zsim.compute.host_kernel` counts: 28 and 6 per element.
    """
    watch = Stopwatch(torch.device("cpu"))
    tensors = [torch.ones(count) for _ in range(4)]
    operands = Updated(gradient=tensors[0], trained=tensors[1], moments=tuple(tensors[2:]))
    rule = Adam(learning_rate=1e-3)
    narrow = torch.empty(count, dtype=torch.bfloat16)

    def updated() -> None:
        update(rule, operands, {"step": 1.0})

    watch.once_s(updated)
    adam = median(watch.once_s(updated) for _ in range(ROUNDS))
    cast = median(watch.once_s(lambda: narrow.copy_(tensors[0])) for _ in range(ROUNDS))
    return 28 * count / adam, 6 * count / cast


def memory_bytes(device: str, ranks: int) -> int:
    """Return the memory of a rank: its GPU's, or its share of the machine's."""
    if device == "cuda":
        return int(torch.cuda.get_device_properties(0).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // ranks
