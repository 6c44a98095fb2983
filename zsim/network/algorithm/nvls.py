"""NVLS: the NVSwitch reduces reads and multicasts writes, so no bytes go around a ring.

Each of n ranks owns 1/n of the tensor. It reads its part through the switch, which fetches it from
every GPU and adds (each GPU sends S, receives S/n), and writes the sum through the switch, which
delivers it to every GPU (each sends S/n, receives S): 1 + 1/n per direction, against 2 (n - 1)/n
of a ring. Between nodes the owners of equal parts all-reduce over the two trees, each through its
nearest NIC. One chunk of every owner passes before the first is done. Sources: Klenk et al. 2020,
"An in-network architecture for accelerating shared-memory multiprocessor collectives" (ISCA);
NVLink SHARP in NCCL since release 2.17.

NCCL rates in-switch reduction by a bandwidth that does not depend on the group. So it considers
NVLS only in large enough groups (`nvls_choice`), and then prefers it to rings and trees if it is
faster.
"""

from zsim.cluster.profile.network import NetworkProfile
from zsim.network.algorithm.activity import Collective, GroupShape, LinkBytes, Protocol
from zsim.network.algorithm.algorithm import Algorithm, Number, Terms, saturating
from zsim.network.algorithm.constant import Constant
from zsim.network.algorithm.tree import between_nodes, depth

NVLS = Constant(name="nvls", is_share=True, may_be_zero=True)
"""Share of a GPU's link that in-switch reduction reaches; 0 if the switch cannot reduce."""
HOP_S = Constant(name="nvls_hop_s")
"""Latency through the switch, for which all GPUs wait."""
CHOICE = Constant(name="nvls_choice")
"""NVLS is considered in groups of n on a node if n / (2 (n - 1)) is below this."""
FILL_S = Constant(name="nvls_fill_s")
"""Time to fill the pipeline of large messages, for each rank of a node."""
FILL_BYTES = Constant(name="nvls_fill_bytes")
"""Scale, in bytes per link, at which the fill time saturates."""


class Nvls(Algorithm):
    """Reduction in the NVSwitch."""

    name = "nvls"
    constants = (NVLS, HOP_S, CHOICE, FILL_S, FILL_BYTES)

    def link_bytes(self, collective: Collective, shape: GroupShape) -> LinkBytes | None:
        """Return bytes and hops of an all-reduce with 3 or more ranks per node, else None."""
        if collective is not Collective.ALL_REDUCE or shape.ranks_per_node <= 2:
            return None
        far = between_nodes(shape.nodes)
        return LinkBytes(
            gpu_bytes=1 + 1 / shape.ranks_per_node,
            node_bytes=far,
            near_hops=2,
            far_hops=2 * depth(shape.nodes),
        )

    def is_possible(self, profile: NetworkProfile) -> bool:
        """Return True if the switch can reduce."""
        return NVLS.of(profile) > 0

    def is_considered(self, profile: NetworkProfile, ranks: int) -> bool:
        """Return True if NCCL considers it for a group with `ranks` on a node."""
        return self.is_possible(profile) and 1 < ranks < CHOICE.of(profile) * 2 * (ranks - 1)

    def share(self, profile: NetworkProfile) -> float:
        """Return the share of a GPU's link that the switch reaches."""
        return NVLS.of(profile)

    def near_hop_s(self, profile: NetworkProfile, protocol: Protocol) -> float:
        """Return the seconds of one pass through the switch."""
        del protocol
        return HOP_S.of(profile)

    def fill_s(self, profile: NetworkProfile, terms: Terms[Number]) -> Number:
        """Return the seconds in which one chunk of every owner passes."""
        share = saturating(terms.link_bytes, FILL_BYTES.of(profile))
        return share * FILL_S.of(profile) * terms.ranks
