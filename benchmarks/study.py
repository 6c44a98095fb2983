"""How many runs of a study a second, and the memory of 10,000 of them.

    python -m benchmarks.study

The workload is that of step_96_layers.py: studies of it change the nodes, the NICs of a node, their
speed and what is broken. All is as in `zsim sweep`: runs are planned, their schedules made and
checked, outcomes stored in SQLite and read back; only the model and the GPU are given instead of
named. Rates are by wall time on 2 cores, and by CPU time of all processes over the cores, which
other work on the machine does not change. Memory is the most of this process and of each worker.
"""

import os
import sys
import tempfile
import time
from collections.abc import Container, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import cast

from benchmarks.step_96_layers import GPUS_PER_NODE, cluster, model
from zsim.backend.backend import ReusableBackend
from zsim.cluster.cluster import Cluster
from zsim.files.installed import (
    network_profile,
)
from zsim.files.nearest_gpu import kernel_profile
from zsim.proof import check
from zsim.runtimes.registry import make_schedule
from zsim.scenario.resolve import resolve
from zsim.scenario.resolved_scenario import ResolvedScenario
from zsim.scenario.sized_cluster import placed
from zsim.schedule.schedule import Schedule
from zsim.strategy.optimizer_rule import SGD
from zsim.strategy.precision import Precision
from zsim.strategy.strategy import Parallel, Strategy, Zero
from zsim.strategy.train import Train
from zsim_des import SimBackend
from zsim_study.study.file import parse
from zsim_study.study.outcome import StudyOutcome
from zsim_study.study.proved import Proved
from zsim_study.study.result import result_of
from zsim_study.study.study_plan import Reader, StudyPlan, planned
from zsim_study.workers.code_version import code_version
from zsim_study.workers.store import opened
from zsim_study.workers.work import keys_of, left_of, work_off
from zsim_study.workers.worker import FinishedRun, RunBatch
from zsim_study.workers.worker_pool import worker_pool

CORES = 2
SPEEDS = 17
"""Speeds of NICs in the smaller of two studies."""

TARGET_PER_S, TARGET_MIB = 200, 1024

STUDY = """
question = "What does a step of 96 layers need?"
hold = "nothing"
[base]
title = "96 layers"
model = {{ parameters = 1e9 }}
cluster = {{ topology = "12500", nodes = 32 }}
zero = {{ stage = 3 }}
train = {{ micro_batch_size = 1, gradient_accumulation_steps = 1, steps = 1, precision = "bf16" }}
[[axis]]
name = "nodes"
field = "cluster.nodes"
values = [16, 24, 32]
[[axis]]
name = "NICs"
field = "cluster.nics_per_node"
values = [16, 8, 4]
[[axis]]
name = "broken"
variants.nothing = {{}}
variants."slow GPU".fault = [{{ kind = "gpu", rank = 7, factor = 1.25 }}]
variants."slow NIC".fault = [{{ kind = "nic", node = 3, nic = 1, factor = 2 }}]
variants."dead NIC".fault = [{{ kind = "nic", node = 5, nic = 2, dead = true }}]
[[axis]]
name = "GB/s of a NIC"
field = "cluster.topology"
values = [{speeds}]
"""
"""36 runs for each speed. Names of topologies are the speed of a NIC in MB/s."""


def study(speeds: int) -> StudyPlan:
    """Return a study with so many speeds, each run planned."""
    names = ", ".join(f'"{12_500 + 10 * number}"' for number in range(speeds))
    file = parse(STUDY.format(speeds=names))
    return planned(file, file.base, READER)


@cache
def made(gpus: int) -> Schedule:
    """Return the schedule, as step_96_layers.py has it."""
    return make_schedule(LAYERS, strategy(gpus))


def strategy(gpus: int) -> Strategy:
    """Stage 3 on so many GPUs."""
    return Strategy(
        parallel=Parallel(data=gpus),
        zero=Zero(stage=3),
        train=Train(precision=Precision.BF16, optimizer=SGD()),
    )


@cache
def topology(
    name: str,
    fabric: str | None,
    nodes: int,
    gpu: str | None,
    /,
    *,
    nodes_per_domain: int | None,
) -> Cluster:
    """Return `nodes` nodes whose NICs have `name` MB/s."""
    assert fabric is gpu is None
    gpus = nodes * GPUS_PER_NODE
    like = cluster(gpus, made(gpus))
    return replace(like, nic_link=replace(like.nic_link, bytes_per_s=int(name) * 10**6))


def proved_step(resolved: ResolvedScenario) -> Proved | StudyOutcome:
    """Generate and check the 96 layers on so many GPUs as the scenario says."""
    found = make_schedule(LAYERS, resolved.strategy)
    assert not check(found, LAYERS, compares=False)
    return Proved(LAYERS, found, cast("ReusableBackend", SimBackend()))


LAYERS = model()
READER = Reader(
    configured=lambda scenario: scenario,
    replicas=lambda scenario: placed(scenario, topology)[1],
    resolve=lambda scenario: resolve(scenario, topology, network_profile, kernel_profile),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What one process took: CPU seconds, and the most memory."""

    process: int
    cpu_s: float
    memory_mib: float


def usage(process: int) -> Usage:
    """Return the CPU time and memory of a process so far, as the kernel counts them."""
    folder = Path("/proc") / str(process)
    ticks = (folder / "stat").read_text("utf-8").rpartition(")")[2].split()[11:13]
    status = (folder / "status").read_text("utf-8").splitlines()
    peak = next(line for line in status if line.startswith("VmHWM:"))
    return Usage(
        process=process,
        cpu_s=sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK"),
        memory_mib=int(peak.split()[1]) / 1024,
    )


def all_usage(others: Container[int] = ()) -> list[Usage]:
    """Return the usage of this process and of every worker, which a child of it forks.

    `others` are the processes that are not workers of the study.
    """
    parents: dict[int, int] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            parents[int(folder.name)] = int(
                (folder / "stat").read_text("utf-8").rpartition(")")[2].split()[1]
            )
    own = os.getpid()
    workers = [
        each
        for each, parent in parents.items()
        if parents.get(parent) == own and each not in others
    ]
    return [usage(own), *map(usage, workers)]


def swept(plan: StudyPlan, path: Path) -> tuple[str, list[Usage]]:
    """Run the study into a new store at `path`: runs a second, and what each process took."""
    keys = keys_of(plan.runs, code_version())
    names = {key: name for name, key in keys.items()}
    others = {each.process for each in all_usage()}
    with opened(path) as store, worker_pool(CORES, None) as found:
        known: dict[str, StudyOutcome] = {}

        def keep(done: Sequence[tuple[str, FinishedRun]]) -> None:
            store.put((key, names[key], each.outcome, each.seconds) for key, each in done)
            known.update({key: each.outcome for key, each in done})

        before = all_usage(others)
        begin = time.monotonic()
        work_off(left_of(plan.runs, keys, {}), found, RunBatch((), proved_step), keep)
        result = result_of(plan, {name: known[key] for name, key in keys.items()})
        taken_s = time.monotonic() - begin
        after = all_usage(others)
    cpu_s = sum(each.cpu_s for each in after) - sum(each.cpu_s for each in before)
    assert all(row.outcome.summary is not None for row in result.rows)
    runs = len(plan.runs)
    return f"{runs / taken_s:.0f} ({runs / cpu_s * CORES:.0f} by CPU time)", after


def main(runs: int) -> None:
    """Print the table."""
    with tempfile.TemporaryDirectory() as folder:
        plan = study(SPEEDS)
        rate, _ = swept(plan, Path(folder) / "small.sqlite")
        print(f"{len(plan.runs):,} runs, a second            {rate:>24}   target {TARGET_PER_S}")
        begin = time.process_time()
        plan = study(-(-runs // 36))
        planned_s = time.process_time() - begin
        print(f"{len(plan.runs):,} runs are planned in   {planned_s:>22.1f} s")
        rate, used = swept(plan, Path(folder) / "large.sqlite")
        print(f"{len(plan.runs):,} runs, a second         {rate:>24}   target {TARGET_PER_S}")
        memory = [each.memory_mib for each in used]
        each = " + ".join(f"{mib:.0f}" for mib in memory)
        print(f"their memory, {each} MiB {sum(memory):>14.0f}   target {TARGET_MIB}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 10_000)
