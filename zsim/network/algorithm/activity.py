"""The answer of an algorithm for one collective: loads of links, and when bytes begin to flow.

An algorithm is asked with a collective, the number of bytes S of its whole tensor (the gathered
one of an all-gather, the unreduced one of a reduce-scatter, what one rank sends to all others
together in an all-to-all) and the shape of the communicator. Loads are multiples of S, so that
they fit any links; a backend turns them into loads of the links that the group really uses.
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

    Where nodes hold unequal numbers, the mean counts.
    """

    ranks: int
    nodes: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.nodes <= self.ranks:
            raise ValueError(f"nodes: {self.nodes} must be 1 to {self.ranks}, the ranks")

    @property
    def ranks_per_node(self) -> Fraction:
        """Ranks on each node."""
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
        near_hops: hops from GPU to GPU of a node that the first bytes take one after the other.
        far_hops: hops between nodes that they take.
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
        algorithm: its name.
        latency_ps: from the start until bytes flow at the full rate; nothing else slows it.
        gpu_bytes: bytes that each GPU sends to its switch, and receives from it, per byte of S.
        node_bytes: bytes that the ranks of a node together send through its NICs, and receive, per
            byte of S; 0 within one node.
        gpu_efficiency: share of the bandwidth of a GPU's link that the bytes can use, 0 to 1.
        nic_efficiency: the same of the NICs.
    """

    algorithm: str
    protocol: Protocol
    latency_ps: int
    gpu_bytes: Fraction
    node_bytes: Fraction
    gpu_efficiency: Fraction = Fraction(1)
    nic_efficiency: Fraction = Fraction(1)

    def time_ps(self, size_bytes: int, *, gpu_bytes_per_s: int, node_bytes_per_s: int) -> int:
        """Picoseconds that S = `size_bytes` take with the links to themselves.

        `gpu_bytes_per_s` is the bandwidth of a GPU's link, `node_bytes_per_s` that of the NICs
        that the ranks of a node use, together; both per direction.
        """
        seconds_per_byte = max(
            self.gpu_bytes / (self.gpu_efficiency * gpu_bytes_per_s),
            self.node_bytes / (self.nic_efficiency * node_bytes_per_s),
        )
        moving = size_bytes * seconds_per_byte * PICOSECONDS_PER_SECOND
        return self.latency_ps + -(-moving.numerator // moving.denominator)
