"""An algorithm of collectives: parallel aggregated trees (PAT), with as few steps as a tree.

Its bytes are a ring's, its steps the logarithm of the ranks: for all-gathers and reduce-scatters of
few bytes over many ranks. NVIDIA, "PAT: a new algorithm for all-gather and reduce-scatter
operations at scale" (Jeaugey 2025, arXiv:2506.20252); NCCL has it since release 2.23. The values of
its constants here are examples, fitted to nothing.
"""

from fractions import Fraction

from zsim.cluster.profile.network import NetworkProfile
from zsim.network.algorithm.activity import Collective, GroupShape, LinkBytes, Protocol
from zsim.network.algorithm.algorithm import Algorithm
from zsim.network.algorithm.constant import Constant

HOP_S = Constant(name="pat_hop_s", default=4e-6)
"""From a GPU to the next of its tree, within a node."""
SHARE = Constant(name="pat", default=0.5, is_share=True)
"""Share of a GPU's link that it reaches: chunks for several ranks are copied together."""


class AggregatedTrees(Algorithm):
    """One binomial tree from each rank, over which chunks for several ranks go together."""

    name = "pat"
    constants = (HOP_S, SHARE)

    def link_bytes(self, collective: Collective, shape: GroupShape) -> LinkBytes | None:
        """Return what the trees do, or None: they gather and scatter."""
        if collective not in {Collective.ALL_GATHER, Collective.REDUCE_SCATTER}:
            return None
        passed = 1 - Fraction(1, shape.ranks)
        far = (shape.nodes - 1).bit_length()
        return LinkBytes(
            gpu_bytes=passed,
            node_bytes=passed if far else Fraction(0),
            near_hops=(shape.ranks - 1).bit_length() - far,
            far_hops=far,
        )

    def share(self, profile: NetworkProfile) -> float:
        """Return the share of a GPU's link that the trees reach."""
        return SHARE.of(profile)

    def near_hop_s(self, profile: NetworkProfile, protocol: Protocol) -> float:
        """Return the seconds of a step within a node."""
        del protocol
        return HOP_S.of(profile)


PAT = AggregatedTrees()
