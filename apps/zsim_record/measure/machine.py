"""Measure the ranks of this machine as a node: run, fit and describe them."""

import os
import platform
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import mean, median
from typing import Final

import torch

from zsim.cluster.files.measured_node import MeasuredDrives, MeasuredHost, MeasuredNode
from zsim.cluster.profile.measured import (
    OTHER,
    CollectiveTimes,
    HostTimes,
    KernelTimes,
    MeasuredTimes,
    OperationCost,
    ProductTimes,
    TimeCurve,
)
from zsim.dtype import DType
from zsim_record.measure.collective_times import PAIR, SHORTEST_S, shared_s
from zsim_record.measure.cost_fit import (
    ReferenceTrace,
    fitted_costs,
    fitted_host,
)
from zsim_record.measure.drive_times import DriveTimes, drive_times
from zsim_record.measure.ladder import LADDER, Ladder
from zsim_record.measure.rank_times import MeasureOrder, RankTimes, measure_rank, memory_bytes
from zsim_record.measure.reference_run import reference_jobs
from zsim_record.measure.time_budget import Clock, Repeats
from zsim_torch.supervise.process_group import DeviceChoice, under_torchrun
from zsim_torch.supervise.ranks import run_ranks

DTYPES: Final = (DType.FP32, DType.BF16)
LOCAL_RANKS: Final = 2
LANDING_MOST: Final = 0.9
"""Maximum share of a collective's time spent on noticing its end, to limit clock errors."""

SHARING, BUCKET_BYTES = "all_reduce", 2**22
SHARE_MAX: Final = 0.9
"""Maximum share of a collective's time that kernels lose; larger values are unreliable."""

NO_LINK: Final = (1e9, 0.0)
"""Bytes per second and latency of the unused link of a single rank."""


class SeveralNodesError(ValueError):
    """Ranks on several nodes, whose clocks differ; the message is one line."""


def measure_machine(
    *,
    ranks: int | None,
    seconds: float,
    drive: Path | None = None,
    device: DeviceChoice = DeviceChoice.AUTO,
    ladder: Ladder = LADDER,
    clock: Clock = time.monotonic,
) -> MeasuredNode:
    """Measure `ranks` ranks of this machine, or those that torchrun started.

    By default there are as many as GPUs, or two. Everything is measured at least once, however slow
    the machine is; repetitions stop after `seconds` by `clock`.

    Raises:
        DriveError: the folder cannot be measured.
        SeveralNodesError: torchrun started ranks on several nodes.
        RankFailedError: a rank failed.
    """
    placement = under_torchrun()
    if placement is not None and placement.local_ranks < placement.ranks:
        raise SeveralNodesError(
            f"ranks: torchrun started {placement.local_ranks} of {placement.ranks} here; "
            "one node is measured at a time"
        )
    tells = placement is None or placement.rank == 0
    drives = drive_times(drive) if drive is not None and tells else None
    if ranks is None:
        ranks = torch.cuda.device_count() or LOCAL_RANKS
        ranks = ranks if placement is None else placement.ranks
    jobs = reference_jobs(ranks, ladder)
    order = MeasureOrder(dtypes=DTYPES, seconds=seconds, jobs=jobs, ladder=ladder, clock=clock)
    found = run_ranks(measure_rank, order, ranks=ranks, timeout_s=60.0 + seconds, device=device)
    traces = [
        ReferenceTrace(schedule=job.schedule, trace=trace)
        for rank in found
        for job, trace in zip(jobs, rank.traces, strict=True)
    ]
    return node_of_times(found, traces, drives, cores=os.cpu_count() or 1)


def node_of_times(
    found: Sequence[RankTimes],
    traces: Sequence[ReferenceTrace],
    drives: DriveTimes | None,
    *,
    cores: int,
) -> MeasuredNode:
    """Return the node described by the times of its ranks."""
    first, ranks = found[0], len(found)
    times = times_of(found, traces, drives)
    pair = next((each for each in times.collectives if each.collective == PAIR), None)
    bytes_per_s, latency_s = NO_LINK
    if pair is not None:
        bytes_per_s = pair.curve.sizes[-1] / pair.curve.seconds[-1]
        latency_s = pair.curve.seconds[0]
    of_node = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    copied = mean(each.copy_bytes_per_s for each in found)
    return MeasuredNode(
        title=f"{_ranks(ranks)} on {first.processor}",
        source=source_line(ranks, first.device),
        ranks=ranks,
        rank_name=f"{first.device} rank on {first.processor}",
        memory_bytes=memory_bytes(first.device, ranks),
        memory_bytes_per_s=copied,
        flops_per_s={each.dtype: _rate(each) for each in times.products if not each.backward},
        link_bytes_per_s=bytes_per_s,
        link_latency_s=latency_s,
        collective_share=share_of(times),
        host=MeasuredHost(
            memory_bytes=of_node,
            memory_bytes_per_s=ranks * copied,
            cores=cores,
            adam_bytes_per_s=sum(each.adam_bytes_per_s for each in found),
            cast_bytes_per_s=sum(each.cast_bytes_per_s for each in found),
            copy_bytes_per_s=copied / 2,
        ),
        drives=_drives(drives),
        times=times,
    )


def share_of(times: MeasuredTimes) -> float:
    """Return the share of an all-reduce's time by which it slows down concurrent kernels."""
    for each in times.collectives:
        if each.collective == SHARING and each.taken is not None:
            return min(SHARE_MAX, each.taken.at(BUCKET_BYTES) / each.curve.at(BUCKET_BYTES))
    return 0.0


def source_line(ranks: int, device: str) -> str:
    """Return the date, machine and software of the measurement."""
    today = datetime.now(UTC).date().isoformat()
    backend = "NCCL" if device == "cuda" else "Gloo"
    return (
        f"zsim measure, {today}, {platform.node()}, {_ranks(ranks)}, {backend}, "
        f"torch {torch.__version__}, Python {platform.python_version()}"
    )


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"


def times_of(
    found: Sequence[RankTimes], traces: Sequence[ReferenceTrace], drives: DriveTimes | None
) -> MeasuredTimes:
    """Return the tables: means over ranks, and costs fitted to their reference steps."""
    first = found[0]
    runs_on_host = first.device == "cpu"
    issue_s = median([each.issue_s for rank in found for each in rank.collectives] or [0.0])
    alone = MeasuredTimes(
        runs_on_host=runs_on_host,
        host=HostTimes(stream_s=0.0, collective_s=issue_s, book_s=0.0),
        products=tuple(
            _mean_products([rank.products[place] for rank in found])
            for place in range(len(first.products))
        ),
        kernels=tuple(
            _mean_kernels([rank.kernels[place] for rank in found])
            for place in range(len(first.kernels))
        ),
        operations=(OperationCost(name=OTHER),),
        collectives=_collectives(found),
        missing=_missing(found, drives),
        hurried=_repeated_too_little(found),
    )
    costs = fitted_costs(traces, alone)
    names = {each.name for each in costs}
    return replace(
        alone,
        host=fitted_host(traces, issue_s) if runs_on_host else alone.host,
        operations=(*costs, *(() if OTHER in names else (OperationCost(name=OTHER),))),
    )


def _missing(found: Sequence[RankTimes], drives: DriveTimes | None) -> tuple[str, ...]:
    missing: list[str] = ["nodes beyond this one"]
    if len(found) == 1:
        missing.append("collectives")
    if drives is None:
        missing.append("drives")
    elif not drives.direct:
        missing.append("drives: the file system has no O_DIRECT")
    if found[0].device != "cpu":
        missing.append("host time of operations, what collectives take from kernels")
    return tuple(missing)


def _repeated_too_little(found: Sequence[RankTimes]) -> tuple[str, ...]:
    """Return the measurements that were repeated less often than desired on some rank."""
    least: dict[str, Repeats] = {}
    for each in (repeats for rank in found for repeats in rank.repeats):
        known = least.get(each.what, each)
        least[each.what] = min(known, each, key=lambda one: one.done / one.wanted)
    fewer = (each for each in least.values() if each.done < each.wanted)
    return tuple(f"{each.what}, {each.done} of {each.wanted} times" for each in fewer)


def _mean_products(alike: Sequence[ProductTimes]) -> ProductTimes:
    seconds = tuple(mean(each) for each in zip(*(one.seconds for one in alike), strict=True))
    return replace(alike[0], seconds=seconds)


def _mean_kernels(alike: Sequence[KernelTimes]) -> KernelTimes:
    each = zip(*(one.curve.seconds for one in alike), strict=True)
    curve = replace(alike[0].curve, seconds=tuple(mean(seconds) for seconds in each))
    return replace(alike[0], curve=curve)


def _collectives(found: Sequence[RankTimes]) -> tuple[CollectiveTimes, ...]:
    points: dict[str, dict[float, float]] = {}
    landings: dict[str, list[tuple[float, float]]] = {}
    lost: dict[str, list[tuple[float, float]]] = {}
    for samples in zip(*(rank.collectives for rank in found), strict=True):
        name, size = samples[0].collective, float(samples[0].size_bytes)
        points.setdefault(name, {})[size] = whole_s = shared_s(samples)
        parts = [each.landing_s for each in samples if each.landing_s is not None]
        if parts:
            landing_s = min(max(parts), LANDING_MOST * whole_s)
            landings.setdefault(name, []).append((size, landing_s))
        losses = [each.lost_s for each in samples if each.lost_s is not None]
        if losses:
            lost.setdefault(name, []).append((size, max(SHORTEST_S, mean(losses))))
    return tuple(
        CollectiveTimes(
            collective=name,
            ranks=2 if name == PAIR else len(found),
            curve=TimeCurve(
                sizes=tuple(sorted(of_kind)),
                seconds=tuple(of_kind[size] for size in sorted(of_kind)),
            ),
            landing_s=tuple(seconds for _, seconds in sorted(landings.get(name, []))),
            taken_s=tuple(seconds for _, seconds in sorted(lost.get(name, []))),
        )
        for name, of_kind in points.items()
    )


def _rate(times: ProductTimes) -> float:
    """Return the highest FLOP/s of a matrix product."""
    extents = times.extents
    flops = (2 * m * n * k for m in extents for n in extents for k in extents)
    return max(each / seconds for each, seconds in zip(flops, times.seconds, strict=True))


def _drives(found: DriveTimes | None) -> MeasuredDrives | None:
    if found is None:
        return None
    return MeasuredDrives(
        capacity_bytes=found.free_bytes,
        read_bytes_per_s=found.read_bytes_per_s,
        write_bytes_per_s=found.write_bytes_per_s,
        latency_s=found.latency_s,
    )
