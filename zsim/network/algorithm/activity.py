"""The activity of one collective: loads of links, and the latency before bytes flow.

The input of an algorithm is a collective, the number of bytes S of its whole tensor (the gathered
tensor of an all-gather, the unreduced one of a reduce-scatter, all bytes that one rank sends in an
all-to-all) and the shape of the communicator. Loads are multiples of S, so that they apply to any
links; a backend converts them to loads of the links that the group uses.
"""

from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction

from zsim.units import PICOSECONDS_PER_SECOND


class Collective(StrEnum):
    """A collective, by its name in NCCL's tests."""

    ALL_REDUCE = "all_reduce"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    BROADCAST = "broadcast"
    REDUCE = "reduce"
    ALL_TO_ALL = "all_to_all"
    SEND_RECEIVE = "send_receive"


class Protocol(StrEnum):
    """A protocol of links: flags in every 8 bytes (LL), every 128 (LL128), or per chunk."""

    LL = "ll"
    LL128 = "ll128"
    SIMPLE = "simple"


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupShape:
    """A communicator as algorithms see it: `ranks` over `nodes` (NVSwitch domains), evenly.

    If nodes hold unequal numbers of ranks, the mean counts.
    """

    ranks: int
    nodes: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.nodes <= self.ranks:
            raise ValueError(f"nodes: {self.nodes} must be 1 to {self.ranks}, the ranks")

    @property
    def ranks_per_node(self) -> Fraction:
        """Mean number of ranks on each node."""
        return Fraction(self.ranks, self.nodes)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkBytes:
    """Bytes and hops of an algorithm for a collective, at any speed of links.

    Bytes are per byte of S.

    Attributes:
        gpu_bytes: bytes that each GPU sends to its switch, and receives from it.
        node_bytes: bytes that the ranks of a node together send through its NICs, and receive; 0
            within one node.
        local_bytes: bytes that a rank copies or reduces while it sends nothing.
        near_hops: sequential hops of the first bytes from GPU to GPU within nodes.
        far_hops: sequential hops of the first bytes between nodes.
    """

    gpu_bytes: Fraction
    node_bytes: Fraction = Fraction(0)
    local_bytes: Fraction = Fraction(0)
    near_hops: int = 0
    far_hops: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Activity:
    """One collective on the links.

    Attributes:
        algorithm: name of the algorithm.
        latency_ps: from the start until bytes flow at the full rate, in picoseconds.
        gpu_bytes: bytes that each GPU sends to its switch, and receives from it, per byte of S.
        node_bytes: bytes that the ranks of a node together send through its NICs, and receive, per
            byte of S; 0 within one node.
        gpu_efficiency: share of the bandwidth of a GPU's link that the bytes can use, 0 to 1.
        nic_efficiency: the same share for the NICs.
    """

    algorithm: str
    protocol: Protocol
    latency_ps: int
    gpu_bytes: Fraction
    node_bytes: Fraction
    gpu_efficiency: Fraction = Fraction(1)
    nic_efficiency: Fraction = Fraction(1)

    def time_ps(self, size_bytes: int, *, gpu_bytes_per_s: int, node_bytes_per_s: int) -> int:
        """Return the picoseconds for S = `size_bytes` without other traffic.

        `gpu_bytes_per_s` is the bandwidth of a GPU's link, `node_bytes_per_s` that of all NICs that
        the ranks of a node use together; both per direction.
        """
        seconds_per_byte = max(
            self.gpu_bytes / (self.gpu_efficiency * gpu_bytes_per_s),
            self.node_bytes / (self.nic_efficiency * node_bytes_per_s),
        )
        moving = size_bytes * seconds_per_byte * PICOSECONDS_PER_SECOND
        return self.latency_ps + -(-moving.numerator // moving.denominator)
