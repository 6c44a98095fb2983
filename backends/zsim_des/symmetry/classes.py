"""Classes of a fold: of ranks, of communicators and of links."""

from dataclasses import dataclass
from fractions import Fraction

from zsim.cluster.fault import Window
from zsim.schedule.schedule import Program

SendKey = tuple[int, str, int]
"""A rank class, a group and an offset: the Sends of all ranks of the class.

Or a host flow instead of the group: what all of them move on the host side of their nodes.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommunicatorClass:
    """Communicators of one group that no one can tell apart.

    `classes` are the rank classes in them; each communicator has `ranks` ranks in `domains`
    NVSwitch domains, and once around its ring it takes `climb_ps` beyond these and the NICs, by
    state.
    """

    index: int
    group: str
    classes: tuple[int, ...]
    ranks: int
    domains: int
    climb_ps: tuple[int, ...]
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """The other end of a Send or Receive: its class, whether it is in another domain.

    The way there takes `climb_ps` beyond the NICs, or between boards, by state.
    """

    rank_class: int
    is_far: bool
    climb_ps: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankClass:
    """`count` ranks that do the same at the same times; `rank` is the first of them."""

    index: int
    program: Program
    rank: int
    count: int
    communicators: dict[str, CommunicatorClass]
    peers: dict[tuple[str, int], Peer]


@dataclass(slots=True)
class Taken:
    """Load of one link: per byte of each communicator class, of near bytes and far ones.

    `sends` is per byte that each rank of a class sends, `neighbours` per byte that a NIC of each
    neighbour sends.
    """

    near: dict[int, Fraction]
    far: dict[int, Fraction]
    sends: dict[SendKey, Fraction]
    neighbours: dict[int, Fraction]


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldedLink:
    """`count` links of a kind that carry the same, as `states` say; `number` is one of them.

    `slow` says by how much their bandwidth is divided, and when.
    """

    number: int
    kind: int
    count: Fraction
    states: tuple[Taken, ...]
    slow: tuple[tuple[Fraction, Window], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fold:
    """All classes of a schedule on a cluster.

    `cuts` has the states in which ranks have no way to each other, and which.
    """

    ranks: tuple[RankClass, ...]
    communicators: tuple[CommunicatorClass, ...]
    links: tuple[FoldedLink, ...]
    cuts: dict[int, str]
