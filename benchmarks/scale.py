"""How the cost of simulating one ZeRO-3 step of 96 layers grows, and how many what-ifs a second.

    python -m benchmarks.scale

The workload is that of step_96_layers.py, generated and simulated without the check. Folded, ranks
that no one can tell apart are simulated once, so cost grows with classes and operations. Unfolded,
every rank and every link is its own class. What-if questions all differ, in bandwidth, fabric,
NICs, nodes, and three of eight in a fault; the schedule is made once for each number of GPUs, and
the time that takes counts. They are timed by the wall clock, all else in CPU seconds of one
process. ASTRA-sim's figures: see step_96_layers.py.
"""

import resource
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from fractions import Fraction

from benchmarks.step_96_layers import ASTRA_SIM, cluster, model
from zsim.backend.backend import Job
from zsim.cluster.cluster import Cluster, Fabric, Tier
from zsim.cluster.fabric_kind import FAT_TREE, RAIL_ONLY, RAIL_OPTIMIZED
from zsim.cluster.fault import DeadNic, Fault, SlowGpu, SlowNic
from zsim.runtimes.registry import make_schedule
from zsim.schedule.schedule import Schedule
from zsim.strategy.optimizer_rule import SGD
from zsim.strategy.precision import Precision
from zsim.strategy.strategy import Parallel, Strategy, Zero
from zsim.strategy.train import Train
from zsim_des import SimBackend

TARGETS_S = {512: 0.04, 1024: 0.04, 16_384: 0.2, 131_072: 2.0}
UNFOLDED_GPUS, UNFOLDED_TARGET_S = 512, 10.0
WHAT_IFS, WHAT_IFS_PER_S = 600, 300
CORES = 2
WHAT_IF_GPUS = (256, 384, 512)
REPETITIONS = 7
LAYERS = model()


def step(gpus: int) -> Schedule:
    """Return the schedule."""
    strategy = Strategy(
        parallel=Parallel(data=gpus),
        zero=Zero(stage=3),
        train=Train(precision=Precision.BF16, optimizer=SGD()),
    )
    return make_schedule(LAYERS, strategy)


def cpu_s(work: Callable[[], object], repetitions: int = REPETITIONS) -> float:
    """Median CPU seconds of `work`, called again and again."""
    taken: list[float] = []
    for _ in range(repetitions):
        begin = time.process_time()
        work()
        taken.append(time.process_time() - begin)
    return statistics.median(taken)


def fabrics() -> list[Fabric]:
    """Return a single switch, and leaves that are wide or narrow, with rails and without."""
    kinds = (FAT_TREE, RAIL_OPTIMIZED, RAIL_ONLY)
    trees = [
        Fabric(
            kind=kind,
            tiers=(Tier(name="leaf", nodes_below=8, oversubscription=Fraction(narrow)),),
        )
        for kind in kinds
        for narrow in (1, 2, 4)
    ]
    return [Fabric(), *trees]


FABRICS = fabrics()


def fault(number: int, given: Cluster) -> tuple[Fault, ...]:
    """For three questions of eight something slow or dead, now here and now there."""
    node = number % given.nodes
    match number % 8:
        case 0:
            return (SlowGpu(rank=number * 7 % given.ranks, factor=Fraction(5, 4)),)
        case 3:
            return (SlowNic(node=node, nic=number % given.nics_per_node, factor=Fraction(2)),)
        case 6:
            return (DeadNic(node=node, nic=number % given.nics_per_node),)
        case _:
            return ()


def question(given: Cluster, number: int) -> Cluster:
    """Return a cluster with another fabric, and faster or fewer NICs."""
    nic = replace(given.nic_link, bytes_per_s=given.nic_link.bytes_per_s + number * 10**7)
    return replace(
        given,
        fabric=FABRICS[number % len(FABRICS)],
        nic_link=nic,
        nics_per_node=(16, 8, 4)[number // len(FABRICS) % 3],
    )


def what_ifs(numbers: range) -> tuple[float, float, float]:
    """Ask the questions with these numbers: when it began and ended, and CPU seconds.

    Schedules are made here, once for each number of GPUs; all questions go to one backend each.
    """
    begin, begin_cpu = time.monotonic(), time.process_time()
    known: dict[int, tuple[Schedule, Cluster, SimBackend]] = {}
    for number in numbers:
        gpus = WHAT_IF_GPUS[number * len(WHAT_IF_GPUS) // WHAT_IFS]
        if gpus not in known:
            made = step(gpus)
            known[gpus] = made, cluster(gpus, made), SimBackend()
        made, like, backend = known[gpus]
        given = question(like, number)
        job = Job(schedule=made, model=LAYERS, cluster=given)
        backend.step_ends_ps(job, faults=fault(number, given))
    return begin, time.monotonic(), time.process_time() - begin_cpu


def print_what_ifs() -> None:
    """Questions per second by wall clock, on one core and on all of them."""
    begin, end, cpu = what_ifs(range(WHAT_IFS))
    one = f"{WHAT_IFS / (end - begin):.0f} ({WHAT_IFS / cpu:.0f} by CPU time)"
    with ProcessPoolExecutor(CORES) as pool:
        parts = list(pool.map(what_ifs, [range(core, WHAT_IFS, CORES) for core in range(CORES)]))
    begins, ends, cpus = zip(*parts, strict=True)
    print(f"what-ifs per second on 1 core   {one:>29}")
    both = f"{WHAT_IFS / (max(ends) - min(begins)):.0f} ({WHAT_IFS / max(cpus):.0f} by CPU time)"
    print(f"what-ifs per second on {CORES} cores  {both:>29} {WHAT_IFS_PER_S:>9}")


def main() -> None:
    """Print the table."""
    print("96 layers, ZeRO-3       generate  simulate     total    target  ASTRA-sim 2 (wall)")
    for gpus, target_s in TARGETS_S.items():
        made = step(gpus)
        job = Job(schedule=made, model=LAYERS, cluster=cluster(gpus, made))
        generate_s = cpu_s(lambda gpus=gpus: step(gpus))  # type: ignore[misc]
        simulate_s = cpu_s(lambda job=job: SimBackend().run(job, seed=0))  # type: ignore[misc]
        wall = f"{ASTRA_SIM[gpus][0]} s" if gpus in ASTRA_SIM else ""
        print(
            f"{gpus:>7,} GPUs folded   {generate_s:>9.4f} {simulate_s:>9.4f} "
            f"{generate_s + simulate_s:>9.4f} {target_s:>9} {wall:>12}"
        )
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    print(f"peak memory so far      {peak_mib} MiB")
    made = step(UNFOLDED_GPUS)
    job = Job(schedule=made, model=LAYERS, cluster=cluster(UNFOLDED_GPUS, made))
    unfolded_s = cpu_s(lambda: SimBackend(unfold=True).run(job, seed=0), 1)
    print(f"{UNFOLDED_GPUS:>7} GPUs unfolded {unfolded_s:>29.2f} {UNFOLDED_TARGET_S:>9}")
    print_what_ifs()


if __name__ == "__main__":
    main()
