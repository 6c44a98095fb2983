"""The double binary tree: an all-reduce whose latency grows with the logarithm of the nodes.

There are two trees over the nodes, each for half of the bytes. A leaf of one is an inner node of
the other, so every node sends and receives about 2 S for S bytes; with two nodes each is the root
of one tree, and S suffices. Within a node the ranks form a chain: bytes are reduced up the chain,
and the result returns down. Source: Sanders, Speck and Träff 2009, "Two-tree algorithms for full
bandwidth broadcast, reduction and scan"; NCCL uses it for all-reduce since release 2.4.
"""

from fractions import Fraction

from zsim.cluster.profile.network import NetworkProfile
from zsim.network.algorithm.activity import Collective, GroupShape, LinkBytes
from zsim.network.algorithm.algorithm import ALL_PROTOCOLS, Algorithm
from zsim.network.algorithm.constant import LINK, Constant

TREE = Constant(name="tree", is_share=True)
"""Share of the link bandwidth of a ring that trees reach."""


def depth(nodes: int) -> int:
    """Return the hops from a leaf to the root of a binary tree over `nodes`."""
    return (nodes - 1).bit_length()


def between_nodes(nodes: int) -> Fraction:
    """Return the bytes that a node sends, and receives, per byte of an all-reduce."""
    return Fraction(0) if nodes == 1 else Fraction(1) if nodes == 2 else Fraction(2)


class Tree(Algorithm):
    """The double binary tree."""

    name = "tree"
    protocols = ALL_PROTOCOLS
    constants = (TREE,)

    def link_bytes(self, collective: Collective, shape: GroupShape) -> LinkBytes | None:
        """Return bytes and hops of an all-reduce, else None."""
        if collective is not Collective.ALL_REDUCE:
            return None
        chain = -(-shape.ranks // shape.nodes) - 1
        inner = Fraction(0) if not chain else Fraction(1) if chain == 1 else Fraction(2)
        far = between_nodes(shape.nodes)
        return LinkBytes(
            gpu_bytes=max(inner, far / shape.ranks_per_node),
            node_bytes=far,
            near_hops=2 * chain,
            far_hops=2 * depth(shape.nodes),
        )

    def share(self, profile: NetworkProfile) -> float:
        """Return the share of a GPU's link that the trees reach."""
        return LINK.of(profile) * TREE.of(profile)
