"""How long zsim takes for one ZeRO-3 step of 96 layers on 512 GPUs: generate, check, simulate.

    python benchmarks/step_96_layers.py [GPUS]

The workload is one that ASTRA-sim 2 was given: 96 equal layers of 12 x 12288^2 parameters, 2 bytes,
each gathered, used and freed, forward and backward, its gradient reduced to shards; 150 ms forward
and 450 ms backward per layer (recompute included), 50 ms for the update; 16 GPUs per node on a
switch of 300 GB/s per direction, one NIC of 12.5 GB/s for each GPU. Medians of repetitions in one
process, after import. ASTRA-sim's figures were measured on a machine with 2 cores, whole process;
its network (analytical, no contention) runs a ring in each of two dimensions, ours one ring over
all GPUs of the group, so the simulated times differ by what is exposed.
"""

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace

from zsim.analysis.summary import summary
from zsim.backend.backend import Job
from zsim.cluster.cluster import Cluster, Gpu, Link, Rate
from zsim.dtype import DType
from zsim.model.kernel import Kernel, KernelKind
from zsim.model.model import BATCH, Model, Parameter, Segment, Unit, Value
from zsim.proof import check
from zsim.runtimes.registry import make_schedule
from zsim.schedule.operation import Action, Compute
from zsim.schedule.schedule import Schedule
from zsim.strategy.optimizer_rule import SGD
from zsim.strategy.precision import Precision
from zsim.strategy.strategy import Parallel, Strategy, Zero
from zsim.strategy.train import Train
from zsim_des import SimBackend

LAYERS = 96
LAYER_ELEMENTS = 12 * 12288**2
FORWARD_MS, BACKWARD_MS, UPDATE_MS = 150, 450, 50
FLOPS_PER_MS = 10**12  # any number: only times are given
GPUS_PER_NODE = 16
REPETITIONS = 9
TARGET_S = 0.05
ASTRA_SIM = {64: (1.5, 57.6995), 400: (26.0, 57.7122), 512: (41.0, 57.7131), 1024: (140.0, 57.7158)}
"""ASTRA-sim 2, analytical backend: wall seconds and simulated seconds, by GPUs."""


def model() -> Model:
    """96 layers, each one matrix; one element flows between them."""
    units: list[Unit] = []
    source = BATCH
    for index in range(LAYERS):
        weight = Parameter(name=f"layer{index}.weight", shape=(LAYER_ELEMENTS,))
        output = Value(name=f"layer{index}/output", elements=1, dtype=DType.BF16)
        segment = Segment(
            inputs=(source,),
            outputs=(output,),
            parameters=(weight.name,),
            forward=(_kernel(FORWARD_MS),),
            backward=(_kernel(BACKWARD_MS),),
        )
        units.append(Unit(name=f"layer{index}", parameters=(weight,), segments=(segment,)))
        source = output.name
    batch = Value(name=BATCH, elements=1, dtype=DType.INT64, requires_gradient=False)
    return Model(name="96 layers", units=tuple(units), batch=batch)


def _kernel(milliseconds: int) -> Kernel:
    flops = milliseconds * FLOPS_PER_MS
    return Kernel(kind=KernelKind.MATMUL, flops=flops, bytes=0, dtype=DType.BF16)


def cluster(gpus: int, made: Schedule) -> Cluster:
    """Return the cluster, with a GPU on which layers and update take the times given."""
    update_flops = sum(
        kernel.flops
        for operation in made.programs[0].step
        if isinstance(operation, Compute) and operation.action is Action.UPDATE
        for kernel in operation.kernels
    )
    rate = Rate(
        dtype=DType.BF16,
        peak=1000 * FLOPS_PER_MS,
        matmul=1000 * FLOPS_PER_MS,
        elementwise=max(1, update_flops * 1000 // UPDATE_MS),
    )
    gpu = Gpu(
        name="given times",
        memory_bytes=10**12,
        memory_bytes_per_s=10**18,
        rates=(rate, replace(rate, dtype=DType.FP32)),
    )
    return Cluster(
        name="16 per node",
        nodes=-(-gpus // GPUS_PER_NODE),
        gpus_per_node=GPUS_PER_NODE,
        gpu=gpu,
        switch_link=Link(bytes_per_s=300 * 10**9, latency_ps=500_000),
        nics_per_node=GPUS_PER_NODE,
        nic_link=Link(bytes_per_s=12_500_000_000, latency_ps=2_500_000),
    )


def median_s(work: Callable[[], object]) -> float:
    """Median seconds of `work`, called again and again."""
    taken: list[float] = []
    for _ in range(REPETITIONS):
        begin = time.perf_counter()
        work()
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken)


def main(gpus: int) -> None:
    """Print the table."""
    layers = model()
    strategy = Strategy(
        parallel=Parallel(data=gpus),
        zero=Zero(stage=3),
        train=Train(precision=Precision.BF16, optimizer=SGD()),
    )
    made = make_schedule(layers, strategy)
    job = Job(schedule=made, model=layers, cluster=cluster(gpus, made))
    backend = SimBackend()
    trace = backend.run(job, seed=0)
    figures = summary(job, trace)
    findings = check(made, layers, compares=False)
    parts = {
        "generation": median_s(lambda: make_schedule(layers, strategy)),
        "check": median_s(lambda: check(made, layers, compares=False)),
        "simulation": median_s(lambda: backend.run(job, seed=0)),
    }
    wall_s, simulated_s = ASTRA_SIM.get(gpus, (None, None))
    print(f"96 layers, ZeRO-3, {gpus} GPUs: {len(made.programs[0].step)} operations per rank")
    for name, seconds in parts.items():
        print(f"{name:<12} {seconds:.4f} s")
    total_s = sum(parts.values())
    print(f"{'total':<12} {total_s:.4f} s   target {TARGET_S} s, ASTRA-sim 2 {wall_s} s")
    print(
        f"simulated    {figures.step_time_s:.4f} s   ASTRA-sim 2 {simulated_s} s, "
        f"at least {LAYERS * (FORWARD_MS + BACKWARD_MS) / 1000 + UPDATE_MS / 1000:.2f} s"
    )
    print(f"findings     {len(findings)}, exposed {figures.exposed_communication_s:.4f} s")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 512)
