"""Times of a machine that does not exist: known, so that what is fitted can be judged."""

from dataclasses import replace

from zsim.cluster.cluster import Cluster, Gpu, Link, Rate
from zsim.cluster.profile.measured import (
    CollectiveTimes,
    HostTimes,
    KernelTimes,
    MeasuredTimes,
    OperationCost,
    ProductTimes,
    TimeCurve,
)
from zsim.dtype import DType
from zsim.model.kernel import KernelKind

FLOPS_PER_S, BYTES_PER_S, LAUNCH_S = 5e10, 1e10, 2e-6
EXTENTS = (16, 64, 256, 1024)
SIZES = (2.0**10, 2.0**16, 2.0**20, 2.0**25)


def moving(launch_s: float, bytes_per_s: float) -> TimeCurve:
    """A launch, then bytes at a rate, where both are points of the curve."""
    return TimeCurve(sizes=SIZES, seconds=tuple(launch_s + size / bytes_per_s for size in SIZES))


def products(*, backward: bool) -> ProductTimes:
    """Products of matrices at one rate, whatever their extents."""
    rate = FLOPS_PER_S * (0.8 if backward else 1.0)
    return ProductTimes(
        dtype=DType.FP32,
        backward=backward,
        extents=EXTENTS,
        seconds=tuple(2 * m * n * k / rate for m in EXTENTS for n in EXTENTS for k in EXTENTS),
    )


KINDS = [each for each in KernelKind if each is not KernelKind.MATMUL]

ALONE = MeasuredTimes(
    runs_on_host=True,
    host=HostTimes(stream_s=0.0, collective_s=0.0, book_s=0.0),
    products=(products(backward=False), products(backward=True)),
    kernels=tuple(
        KernelTimes(
            kind=kind,
            dtype=DType.FP32,
            backward=backward,
            curve=moving(LAUNCH_S, BYTES_PER_S * (1 + place / 4)),
        )
        for place, kind in enumerate(KINDS)
        for backward in (False, True)
    ),
    operations=(OperationCost(name="other"),),
    collectives=tuple(
        CollectiveTimes(collective=name, ranks=2, curve=moving(1e-4, 1e9))
        for name in ("all_gather", "reduce_scatter", "all_reduce", "broadcast", "send_receive")
    ),
)
"""Kernels alone, on a host that takes no time."""

TIMES = replace(
    ALONE,
    host=HostTimes(stream_s=2e-5, collective_s=8e-5, book_s=5e-6, step_s=3e-4),
    operations=(
        OperationCost(name="backward", own_s=2e-4, kernel_s=8e-6, product=1.3, moving=1.6),
        OperationCost(name="copy", own_s=1e-5, moving=1.5),
        OperationCost(name="fill", own_s=1e-5, moving=1.5),
        OperationCost(name="forward", own_s=1e-4, kernel_s=6e-6, product=1.2, moving=1.4),
        OperationCost(name="load", own_s=3e-5, moving=1.0),
        OperationCost(name="other", own_s=1e-5, moving=1.5),
        OperationCost(name="update", own_s=4e-5, moving=2.5),
    ),
)
"""The same in a training."""


def cluster(times: MeasuredTimes, ranks: int = 2) -> Cluster:
    """So many ranks with these times."""
    link = Link(bytes_per_s=10**9)
    rate = Rate(dtype=DType.FP32, peak=5 * 10**10, matmul=5 * 10**10, elementwise=5 * 10**10)
    gpu = Gpu(
        name="rank",
        memory_bytes=10**10,
        memory_bytes_per_s=10**10,
        rates=(rate,),
        measured=times,
    )
    return Cluster(
        name="measured",
        nodes=1,
        gpus_per_node=ranks,
        gpu=gpu,
        switch_link=link,
        nics_per_node=1,
        nic_link=link,
    )
