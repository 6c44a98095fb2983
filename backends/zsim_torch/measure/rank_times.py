"""Everything that one rank measures, while the others do the same."""

import os
import platform
from dataclasses import dataclass, replace
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
from zsim_torch.backend import Assignment, train_on_rank
from zsim_torch.execute.sharded_optimizer import Updated, update
from zsim_torch.measure.collective_times import CollectiveSample, collective_samples, taken_share
from zsim_torch.measure.kernel_times import kernel_tables
from zsim_torch.measure.ladder import LADDER, Ladder
from zsim_torch.measure.stopwatch import Stopwatch
from zsim_torch.supervise.progress_record import note

ROUNDS: Final = 5

KERNEL_SHARE, COLLECTIVE_SHARE = 0.5, 0.5
"""Parts of the time that kernels and collectives get."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasureOrder:
    """Orders of a rank: formats of kernels, seconds, reference runs, and sizes."""

    dtypes: tuple[DType, ...]
    seconds: float
    jobs: tuple[Job, ...]
    ladder: Ladder = LADDER


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTimes:
    """Times of one rank. Rates are in bytes per second, while all ranks do the same."""

    device: str
    processor: str
    products: tuple[ProductTimes, ...]
    kernels: tuple[KernelTimes, ...]
    collectives: tuple[CollectiveSample, ...]
    collective_share: float | None
    copy_bytes_per_s: float
    adam_bytes_per_s: float
    cast_bytes_per_s: float
    traces: tuple[RankTrace, ...]


def measure_rank(order: MeasureOrder) -> RankTimes:
    """Measure this process's rank of the process group; every rank calls it."""
    device = rank_device()
    watch = Stopwatch(device)
    traces = tuple(_reference_trace(job) for job in order.jobs)
    ladder, seconds = order.ladder, order.seconds
    products, kernels = kernel_tables(watch, order.dtypes, seconds * KERNEL_SHARE, ladder)
    _meet()
    samples = collective_samples(watch, seconds * COLLECTIVE_SHARE, ladder)
    note("measuring what a collective takes from kernels")
    share = taken_share(watch, ladder)
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
        collective_share=share,
        copy_bytes_per_s=copied,
        adam_bytes_per_s=updated,
        cast_bytes_per_s=cast,
        traces=traces,
    )


def rank_device() -> torch.device:
    """Return the device that this rank computes on."""
    if distributed.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def processor_name(device: torch.device) -> str:
    """Return what the machine calls the device."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    try:
        with Path("/proc/cpuinfo").open(encoding="utf-8") as lines:
            found = (line.partition(":")[2] for line in lines if line.startswith("model name"))
            return next(found, "").strip() or platform.machine()
    except OSError:
        return platform.machine()


def _reference_trace(job: Job) -> RankTrace:
    """Return what this rank does in a reference run, unobserved."""
    note(f"reference steps of {job.schedule.name}")
    work = Assignment(job=job, seed=0, data=None, poison=False, observe=False)
    trace = train_on_rank(work).ranks[0]
    return replace(trace, book=(), transfers=(), losses=())


def _meet() -> None:
    distributed.barrier()


def _copied_bytes_per_s(watch: Stopwatch, size_bytes: int) -> float:
    """Return what a copy in the memory of the device reads and writes in a second."""
    note("measuring memory")
    source = torch.ones(size_bytes, dtype=torch.uint8, device=watch.device)
    target = torch.empty_like(source)
    watch.once_s(lambda: target.copy_(source))
    taken = median(watch.once_s(lambda: target.copy_(source)) for _ in range(ROUNDS))
    return 2 * size_bytes / taken


def _host_rates(count: int) -> tuple[float, float]:
    """Return bytes of host memory per second of an update by Adam, and of a cast to 16 bits.

    Bytes are those that `zsim.compute.host_kernel` counts: 28 and 6 of an element.
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
    """Return the memory of a rank: of its GPU, or its part of the machine's."""
    if device == "cuda":
        return int(torch.cuda.get_device_properties(0).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // ranks
