"""How the cost of simulating one ZeRO-3 step of 96 layers grows, and how many what-ifs a second.

    python -m benchmarks.scale

The workload is that of step_96_layers.py, generated and simulated without the check. Folded, ranks
that no one can tell apart are simulated once, so cost grows with classes and operations. Unfolded,
every rank and every link is its own class. What-if questions change bandwidths, fabric, nodes and
NICs, and three of eight have a fault; the schedule is made once for each number of GPUs. CPU
seconds of one process unless said otherwise. ASTRA-sim's figures: see step_96_layers.py.
"""

import resource
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from fractions import Fraction

from benchmarks.step_96_layers import ASTRA_SIM, cluster, model
from zsim.backend import Job
from zsim.cluster import Cluster, Fabric, FabricKind, Tier
from zsim.fault import DeadNic, Fault, SlowGpu, SlowNic
from zsim.rule import SGD
from zsim.schedule import Schedule
from zsim.strategy import Precision, Strategy
from zsim.zero import schedule
from zsim_des import SimBackend

TARGETS_S = {512: 0.04, 1024: 0.04, 16_384: 0.2, 131_072: 2.0}
UNFOLDED_GPUS, UNFOLDED_TARGET_S = 512, 10.0
WHAT_IFS, WHAT_IFS_PER_S = 600, 300
CORES = 2
FAULTS: tuple[tuple[Fault, ...], ...] = (
    (SlowGpu(rank=17, factor=Fraction(5, 4)),),
    (SlowNic(node=3, nic=1, factor=Fraction(2)),),
    (DeadNic(node=2, nic=0),),
    *[()] * 5,
)
REPETITIONS = 7
LAYERS = model()


def step(gpus: int) -> Schedule:
    """The schedule."""
    return schedule(LAYERS, Strategy(stage=3, data=gpus, precision=Precision.BF16, optimizer=SGD()))


def cpu_s(work: Callable[[], object], repetitions: int = REPETITIONS) -> float:
    """Median CPU seconds of `work`, called again and again."""
    taken: list[float] = []
    for _ in range(repetitions):
        begin = time.process_time()
        work()
        taken.append(time.process_time() - begin)
    return statistics.median(taken)


def fabrics() -> list[Fabric]:
    """A single switch, and leaves that are wide or narrow, with rails and without."""
    kinds = (FabricKind.FAT_TREE, FabricKind.RAIL_OPTIMIZED, FabricKind.RAIL_ONLY)
    trees = [
        Fabric(
            kind=kind,
            tiers=(Tier(name="leaf", nodes_below=8, oversubscription=Fraction(narrow)),),
        )
        for kind in kinds
        for narrow in (1, 2, 4)
    ]
    return [Fabric(), *trees]


def what_ifs(first: int) -> float:
    """CPU seconds for every other what-if question from `first` on."""
    schedules = {gpus: step(gpus) for gpus in (256, 512)}
    everything = fabrics()
    backends = {gpus: SimBackend() for gpus in schedules}
    begin = time.process_time()
    for number in range(first, WHAT_IFS, CORES):
        gpus = 512 if number < WHAT_IFS // 2 else 256
        given = question(cluster(gpus, schedules[gpus]), everything, number)
        job = Job(schedule=schedules[gpus], model=LAYERS, cluster=given)
        backends[gpus].step_ends_ps(job, faults=FAULTS[number // CORES % len(FAULTS)])
    return time.process_time() - begin


def question(given: Cluster, everything: list[Fabric], number: int) -> Cluster:
    """A cluster with another fabric, and faster or fewer NICs."""
    nic = replace(given.nic_link, bytes_per_s=given.nic_link.bytes_per_s + number * 10**7)
    return replace(
        given,
        fabric=everything[number % len(everything)],
        nic_link=nic,
        nics_per_node=(16, 8, 4)[number // len(everything) % 3],
    )


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
    with ProcessPoolExecutor(CORES) as pool:
        seconds = max(pool.map(what_ifs, range(CORES)))
    print(f"what-ifs per second on {CORES} cores {WHAT_IFS / seconds:>17.0f} {WHAT_IFS_PER_S:>9}")


if __name__ == "__main__":
    main()
