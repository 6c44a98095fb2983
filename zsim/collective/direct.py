"""Direct exchange: every rank sends to each peer by itself, as in all-to-all and send/receive."""

from fractions import Fraction

from zsim.collective.activity import Collective, Shape, Work


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
