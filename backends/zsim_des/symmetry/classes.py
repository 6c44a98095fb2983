"""Classes of a fold: of ranks, of communicators and of links."""

from dataclasses import dataclass
from fractions import Fraction

from zsim.cluster.fault import Window
from zsim.schedule.schedule import Program

SendKey = tuple[int, str, int]
"""A rank class, a group and an offset: the Sends of all ranks of the class.

Host-side traffic has its flow in place of the group.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommunicatorClass:
    """Equivalent communicators of one group.

    `classes` are the rank classes that meet there; a class meets where its `rank` is. Each
    communicator has `ranks` ranks in `domains` NVSwitch domains. `climb_ps` is, by state, the
    latency once around its ring beyond the domains and their NICs. `seats` are the rank class and
    the domain of each member, in order.
    """

    index: int
    group: str
    classes: tuple[int, ...]
    ranks: int
    domains: int
    climb_ps: tuple[int, ...]
    count: int
    seats: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """The other end of a Send or Receive: its class, and whether it is in another domain.

    `climb_ps` is, by state, the latency of the route beyond the NICs, or between boards.
    """

    rank_class: int
    is_far: bool
    climb_ps: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankClass:
    """`count` ranks that do the same at the same times; `rank` is one of them."""

    index: int
    program: Program
    rank: int
    count: int
    communicators: dict[str, CommunicatorClass]
    peers: dict[tuple[str, int], Peer]


@dataclass(slots=True)
class Taken:
    """Load of one link, per near byte and per far byte of each communicator class.

    `sends` is per byte that each rank of a class sends, `neighbours` per byte that a NIC of each
    neighbour sends.
    """

    near: dict[int, Fraction]
    far: dict[int, Fraction]
    sends: dict[SendKey, Fraction]
    neighbours: dict[int, Fraction]


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldedLink:
    """`count` links of a kind with equal loads, given by `states`; `number` is one of them.

    `slow` has the divisors of their bandwidth, each with its window.
    """

    number: int
    kind: int
    count: Fraction
    states: tuple[Taken, ...]
    slow: tuple[tuple[Fraction, Window], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fold:
    """All classes of a schedule on a cluster.

    `cuts` maps states in which ranks cannot reach each other to a description.
    """

    ranks: tuple[RankClass, ...]
    communicators: tuple[CommunicatorClass, ...]
    links: tuple[FoldedLink, ...]
    cuts: dict[int, str]
