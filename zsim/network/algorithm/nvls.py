"""NVLS: the NVSwitch reduces what it reads and copies what it writes, so no bytes go around a ring.

Each of n ranks owns 1/n of the tensor. It reads its part through the switch, which fetches it from
every GPU and adds (each GPU sends S, receives S/n), and writes the sum through the switch, which
delivers it to every GPU (each sends S/n, receives S): 1 + 1/n per direction, against 2 (n - 1)/n
of a ring. Between nodes the owners of equal parts all-reduce over the two trees, each through the
NIC beside it. Sources: Klenk et
al. 2020, "An in-network architecture for accelerating shared-memory multiprocessor collectives"
(ISCA); NVLink SHARP in NCCL since release 2.17.
"""

from zsim.network.algorithm.activity import Collective, Shape, Work
from zsim.network.algorithm.tree import between_nodes, depth


def work(collective: Collective, shape: Shape) -> Work | None:
    """What the switch and its owners do, or None: NCCL takes it for all-reduce, from 3 ranks on."""
    if collective is not Collective.ALL_REDUCE or shape.ranks_per_node <= 2:
        return None
    far = between_nodes(shape.nodes)
    return Work(
        gpu_bytes=1 + 1 / shape.ranks_per_node,
        node_bytes=far,
        near_hops=2,
        far_hops=2 * depth(shape.nodes),
    )
