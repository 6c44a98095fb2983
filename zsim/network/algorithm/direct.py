"""Direct exchange: every rank sends to each peer by itself, as in all-to-all and send/receive."""

from fractions import Fraction

from zsim.network.algorithm.activity import Collective, Shape, Work

CHANNELS = 32
"""Channels of one GPU for sends and receives: NCCL rounds the links of a GPU up to a power of 2."""

NEAR_PART_BYTES, FAR_PART_BYTES = 16 * 2**20, 128 * 2**10
"""Most that a channel carries for a peer, within and between nodes, while there are more channels.

NCCL's scheduleP2pTasksToPlan and calcP2pChannelCount (src/enqueue.cc) double the channels of a
peer while each carries more than 32 chunks of 512 KiB over NVLink, or one of 128 KiB over a net.
"""


def peers(collective: Collective, shape: Shape) -> int:
    """Peers that a rank exchanges with directly; 0 if it is no direct exchange."""
    match collective:
        case Collective.ALL_TO_ALL:
            return shape.ranks - 1
        case Collective.SEND_RECEIVE:
            return min(1, shape.ranks - 1)
        case _:
            return 0


def channels(collective: Collective, size_bytes: int, shape: Shape) -> int:
    """Channels that carry S = `size_bytes` for one GPU; 0 if it is no direct exchange.

    Channels are first shared out evenly among all ranks of the group, whether they take part.
    """
    count = peers(collective, shape)
    if not count:
        return 0
    each = CHANNELS
    while each > 1 and each * shape.ranks > CHANNELS:
        each //= 2
    part = size_bytes if collective is Collective.SEND_RECEIVE else -(-size_bytes // shape.ranks)
    most = NEAR_PART_BYTES if shape.nodes == 1 else FAR_PART_BYTES
    while each < CHANNELS and part > most * each:
        each *= 2
    return min(CHANNELS, each * count)


def work(collective: Collective, shape: Shape) -> Work | None:
    """What is exchanged, or None: only an all-to-all and a send/receive are direct.

    Each rank of a send/receive sends S to the next one, so a node sends S and receives S.
    """
    if shape.ranks == 1:
        return Work(gpu_bytes=Fraction(0))
    crossing = int(shape.nodes > 1)
    near = 1 - crossing
    match collective:
        case Collective.ALL_TO_ALL:
            peers = shape.ranks - 1
            outside = (shape.ranks - shape.ranks_per_node) / shape.ranks
            return Work(
                gpu_bytes=Fraction(peers, shape.ranks),
                node_bytes=shape.ranks_per_node * outside,
                near_hops=near,
                far_hops=crossing,
            )
        case Collective.SEND_RECEIVE:
            return Work(
                gpu_bytes=Fraction(1),
                node_bytes=Fraction(crossing),
                near_hops=near,
                far_hops=crossing,
            )
        case _:
            return None
