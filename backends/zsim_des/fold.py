"""Ranks that no one can tell apart, and the links that their groups use.

Two ranks are of one class if they run the same program on equal hardware, their communicators look
alike (ranks, domains, what they put on which links), and the ranks that they meet in communicators,
by Send and Receive and on links are of the same classes. So one rank stands exactly for its class,
one collective of a class of communicators for all of them, and one link for its class.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from zsim.fault import Window
from zsim.schedule import Program, Schedule
from zsim_des.colour import Colours, mixed, numbered, sums
from zsim_des.spread import Ints, Spread, Used, spreads, used_groups
from zsim_des.trouble import Trouble
from zsim_des.wiring import Table, Wiring

SendKey = tuple[int, str, int]
"""A rank class, a group and an offset: the Sends of all ranks of the class."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommunicatorClass:
    """Communicators of one group that no one can tell apart.

    `classes` are the rank classes in them; each communicator has `ranks` ranks in `domains`
    NVSwitch domains, and once around its ring the fabric takes `climb_ps` beyond the NICs.
    """

    index: int
    group: str
    classes: tuple[int, ...]
    ranks: int
    domains: int
    climb_ps: int
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """The other end of a Send or Receive: its class, whether it is in another domain.

    The way there takes `climb_ps` beyond the NICs.
    """

    rank_class: int
    is_far: bool
    climb_ps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankClass:
    """`count` ranks that do the same at the same times; `rank` is the first of them.

    `shares` has, by group, the part of its communicator's bytes that leaves the domain from this
    rank: 1/m for a ring with m ranks in the domain, 0 if it stays there.
    """

    index: int
    program: Program
    rank: int
    count: int
    communicators: dict[str, CommunicatorClass]
    shares: dict[str, Fraction]
    peers: dict[tuple[str, int], Peer]


@dataclass(frozen=True, slots=True, kw_only=True)
class FarLinks:
    """`count` links between nodes that carry the same; `number` is one of them.

    `rings` has the bytes on one of them per byte of each communicator class, `sends` per byte that
    each rank of a class sends, `neighbours` per byte that a NIC of each neighbour sends. `slow`
    says by how much they are divided, and when.
    """

    number: int
    names: tuple[str, ...]
    count: Fraction
    bytes_per_s: Fraction
    rings: dict[int, Fraction]
    sends: dict[SendKey, Fraction]
    neighbours: dict[int, Fraction]
    slow: tuple[tuple[Fraction, Window], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fold:
    """All classes of a schedule on a cluster."""

    ranks: tuple[RankClass, ...]
    communicators: tuple[CommunicatorClass, ...]
    links: tuple[FarLinks, ...]


def fold(
    schedule: Schedule, trouble: Trouble, *, unfold: bool = False, used: Used | None = None
) -> Fold:
    """The classes of `schedule` on the cluster of `trouble`, a rank in trouble apart from others.

    With `unfold` every rank and link is its own. `used` are the groups of the schedule in use, if
    they are known.

    Raises:
        CutError: ranks that have to exchange bytes have no way left.
    """
    known = used_groups(schedule) if used is None else used
    return _Folding(schedule, trouble, known, unfold=unfold).fold()


class _Folding:
    """What is known by rank, by communicator and by link, on the way to classes."""

    def __init__(self, schedule: Schedule, trouble: Trouble, used: Used, *, unfold: bool) -> None:
        cluster = trouble.cluster
        every = np.arange(schedule.mesh.size)
        self._schedule = schedule
        self._wiring = wiring = Wiring(cluster, trouble.dead)
        self._neighbours = trouble.tables(wiring)
        self._slow = trouble.links(wiring)
        self._rank_marks = trouble.rank_marks(schedule.mesh.size)
        self._node, place = np.divmod(every, cluster.gpus_per_node)
        rail = wiring.rail(self._node, place)
        places, self._spreads = spreads(
            schedule, used, self._node, per_domain=cluster.nodes_per_domain
        )
        self._rings = [wiring.ring(spread, self._node, rail) for spread in self._spreads]
        self._laps_ps = [wiring.laps_ps(spread, self._node) for spread in self._spreads]
        self._sends = [
            (spread, offset, wiring.send(spread, offset, self._node, rail))
            for spread in self._spreads
            for offset in spread.peer
        ]
        if unfold:
            traits, marks = [every], np.arange(wiring.link_count)
        else:
            traits, marks = self._traits(places), self._marks()
        self._colours = Colours(
            traits=traits,
            marks=marks,
            spreads=self._spreads,
            rings=self._rings,
            sends=self._sends,
        )
        self._colours.refine(keep_ranks=unfold)
        self._index_of, self._firsts, self._counts = _by_first(self._colours.ranks)

    def _traits(self, places: dict[str, Ints]) -> list[Ints]:
        """What tells ranks apart before anyone is met."""
        mesh, roles = self._schedule.mesh, self._schedule.roles
        role = np.zeros(mesh.size, np.int64)
        if len(roles) > 1:
            for index, ranks in enumerate(roles):
                for box in ranks.boxes:
                    inside = np.ones(mesh.size, bool)
                    for name, limit in mesh.limits(box).items():
                        inside &= (places[name] >= limit.start) & (places[name] < limit.stop)
                    role[inside] = index
        found = [role, self._rank_marks]
        for spread, laps_ps in zip(self._spreads, self._laps_ps, strict=True):
            found += [spread.on_domain, spread.domains, *spread.far.values()]
            held = spread.communicator >= 0
            found.append(np.where(held, laps_ps[spread.communicator], -1))
        return found

    def _marks(self) -> Ints:
        marks = np.zeros(self._wiring.link_count, np.int64)
        for index, kind in enumerate(self._wiring.kinds):
            marks[kind.first : kind.first + kind.count] = index
        total = mixed(marks, 0)
        for number, table in enumerate(self._neighbours):
            total += sums(table.link, mixed(table.owner, 10 + number), len(total))
        kinds = list(dict.fromkeys(map(tuple, self._slow.values())))
        slow = np.zeros(len(total), np.int64)
        for link, ways in self._slow.items():
            slow[link] = kinds.index(tuple(ways)) + 1
        total += mixed(slow, 1)
        return numbered(total)

    def fold(self) -> Fold:
        """The classes."""
        communicators: list[CommunicatorClass] = []
        of_rank_class: list[dict[str, CommunicatorClass]] = [{} for _ in self._firsts]
        numbers: list[list[int]] = []
        for spread, colour, laps_ps in zip(
            self._spreads, self._colours.communicators, self._laps_ps, strict=True
        ):
            class_of, firsts, counts = _by_first(colour)
            numbers.append((class_of + len(communicators)).tolist())
            for where, count in zip(firsts, counts, strict=True):
                members = spread.members[where]
                classes = np.unique(self._index_of[members]).tolist()
                made = CommunicatorClass(
                    index=len(communicators),
                    group=spread.name,
                    classes=tuple(classes),
                    ranks=len(members),
                    domains=int(spread.domains[members[0]]),
                    climb_ps=int(laps_ps[where]),
                    count=count,
                )
                communicators.append(made)
                for index in made.classes:
                    of_rank_class[index][spread.name] = made
        ranks = tuple(
            RankClass(
                index=index,
                program=self._schedule.program_of(rank),
                rank=rank,
                count=count,
                communicators=of_rank_class[index],
                shares=_shares(rank, self._spreads),
                peers=self._peers(rank),
            )
            for index, (rank, count) in enumerate(zip(self._firsts, self._counts, strict=True))
        )
        links = self._links(numbers)
        return Fold(ranks=ranks, communicators=tuple(communicators), links=links)

    def _peers(self, rank: int) -> dict[tuple[str, int], Peer]:
        found: dict[tuple[str, int], Peer] = {}
        for spread in self._spreads:
            for offset, peer in spread.peer.items():
                other = int(peer[rank])
                if other < 0:
                    continue
                is_far = bool(spread.far[offset][rank])
                way = self._node[[rank]], self._node[[other]]
                found[spread.name, offset] = Peer(
                    rank_class=int(self._index_of[other]),
                    is_far=is_far,
                    climb_ps=int(self._wiring.climb_ps(*way)[0]) if is_far else 0,
                )
        return found

    def _links(self, numbers: Sequence[list[int]]) -> tuple[FarLinks, ...]:
        """Classes of the links that something uses, each with what one of them carries."""
        tables = [*self._rings, *(table for _, _, table in self._sends)]
        used = np.unique(np.concatenate([np.zeros(0, np.int64), *(each.link for each in tables)]))
        _, firsts, counts = _by_first(self._colours.links[used])
        chosen = [int(used[where]) for where in firsts]
        index = np.full(self._wiring.link_count, -1)
        index[chosen] = np.arange(len(chosen))
        rings: list[dict[int, Fraction]] = [{} for _ in chosen]
        sends: list[dict[SendKey, Fraction]] = [{} for _ in chosen]
        for ring, class_of in zip(self._rings, numbers, strict=True):
            for owner, link, share in _entries(ring, index):
                key = class_of[owner]
                rings[link][key] = rings[link].get(key, Fraction(0)) + share
        for spread, offset, table in self._sends:
            for owner, link, share in _entries(table, index):
                sender = (int(self._index_of[owner]), spread.name, offset)
                sends[link][sender] = sends[link].get(sender, Fraction(0)) + share
        found: list[FarLinks] = []
        for number, count, ring_loads, send_loads in zip(chosen, counts, rings, sends, strict=True):
            kind = next(kind for kind in reversed(self._wiring.kinds) if kind.first <= number)
            found.append(
                FarLinks(
                    number=number,
                    names=kind.names,
                    count=count * kind.multiple,
                    bytes_per_s=kind.bytes_per_s,
                    rings={key: load / kind.multiple for key, load in ring_loads.items()},
                    sends={key: load / kind.multiple for key, load in send_loads.items()},
                    neighbours=self._of_neighbours(number),
                    slow=tuple(self._slow.get(number, ())),
                )
            )
        return tuple(found)

    def _of_neighbours(self, link: int) -> dict[int, Fraction]:
        """Bytes on a link per byte that a NIC of each neighbour sends."""
        counts = [int((table.link == link).sum()) for table in self._neighbours]
        return {number: Fraction(count) for number, count in enumerate(counts) if count}


def _entries(table: Table, index: Ints) -> list[tuple[int, int, Fraction]]:
    """Entries on chosen links: the owner, the link's index among them, and the share."""
    which = np.flatnonzero(index[table.link] >= 0)
    owners, links = table.owner[which].tolist(), index[table.link[which]].tolist()
    divisors = table.divisor[which].tolist()
    shares = {divisor: Fraction(1, divisor) for divisor in set(divisors)}
    return [
        (owner, link, shares[divisor])
        for owner, link, divisor in zip(owners, links, divisors, strict=True)
    ]


def _by_first(colour: Ints) -> tuple[Ints, list[int], list[int]]:
    """Class of each, and by class the first that is in it and how many; numbered by the first."""
    _, firsts, inverse, counts = np.unique(
        colour, return_index=True, return_inverse=True, return_counts=True
    )
    order = np.argsort(firsts)
    number = np.empty_like(order)
    number[order] = np.arange(len(order))
    return number[inverse], firsts[order].tolist(), counts[order].tolist()


def _shares(rank: int, spreads: Sequence[Spread]) -> dict[str, Fraction]:
    return {
        spread.name: Fraction(1, int(spread.on_domain[rank]))
        if spread.domains[rank] > 1
        else Fraction(0)
        for spread in spreads
    }
