"""A small cluster on which communication and computation take alike."""

from drawn_clusters import CPU, DRIVES

from zsim.cluster.cluster import Cluster, Gpu, Link, Rate
from zsim.cluster.host_side import Host
from zsim.dtype import BlockFormat, DType

GPU = Gpu(
    name="drawn",
    memory_bytes=10**9,
    memory_bytes_per_s=10**11,
    rates=tuple(
        Rate(dtype=dtype, peak=10**12, matmul=10**12, elementwise=10**12)
        for dtype in (*DType, *BlockFormat)
    ),
)


def cluster(ranks: int, gpus_per_node: int) -> Cluster:
    """Enough nodes for `ranks`; times that make communication and computation alike."""
    return Cluster(
        name="drawn",
        nodes=-(-ranks // gpus_per_node),
        gpus_per_node=gpus_per_node,
        gpu=GPU,
        switch_link=Link(bytes_per_s=10**10, latency_ps=10**6),
        nics_per_node=gpus_per_node,
        nic_link=Link(bytes_per_s=10**9, latency_ps=10**6),
        host=Host(memory_bytes=10**13, memory_bytes_per_s=10**10, cpu=CPU),
        drives=DRIVES,
    )
