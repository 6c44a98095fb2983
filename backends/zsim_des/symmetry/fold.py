"""Classes of equivalent ranks, and the links that their groups use.

Two ranks are in one class if they run the same program on equal hardware and their communicators
are equivalent (ranks, domains, loads on links). The ranks that they meet in communicators, by Send
and Receive and on links must also be in the same classes. So one rank represents its class exactly,
and one link its class; one collective represents the collectives of all communicators of a class.
If links die during the run, classes must hold before and after.

If one member of every expert group is the busiest, the others are in one class with each other, as
if none was: they wait for the same exchanges at the same times. The fold then keeps the busiest
member and one of the others (docs/adr/0056-large-mixtures-are-folded-further.md).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TypeVar

import numpy as np

from zsim.schedule.schedule import RankRole, Schedule
from zsim_des.network.communicator_placement import Ints, Spread, Used, used_of
from zsim_des.network.edge_routes import CutError
from zsim_des.network.link_loads import (
    LoadTable,
    RingTable,
    host_flow_table,
    laps_ps,
    neighbour_table,
    no_ring,
    ring_table,
    send_table,
)
from zsim_des.network.link_numbering import Wiring
from zsim_des.network.outage import NOTHING_DEAD, Outage
from zsim_des.network.routes import Routes
from zsim_des.symmetry.classes import CommunicatorClass, Fold, FoldedLink, Peer, RankClass, Taken
from zsim_des.symmetry.fault_state import Disturbances
from zsim_des.symmetry.refinement import Colours, Mixes, by_first, mixed, sums

Key = TypeVar("Key")


def fold(
    schedule: Schedule,
    disturbances: Disturbances,
    *,
    unfold: bool = False,
    used: Used | None = None,
    whole: Schedule | None = None,
) -> Fold:
    """Return the classes of `schedule` on a cluster; a rank with a fault is in a separate class.

    With `unfold`, every rank and link is its own class. `used` is the traffic of the schedule, if
    already known. `whole` is the schedule whose roles are not divided by numbers of rows: the parts
    of one of its roles are classes that do not divide each other.

    Raises:
        CutError: ranks that exchange bytes cannot reach each other even with nothing dead.
    """
    known = used_of(schedule) if used is None else used
    return _Folding(schedule, disturbances, known, unfold=unfold, whole=whole).fold()


@dataclass(slots=True)
class _State:
    """Loads on links, and durations of laps, during one outage."""

    routes: Routes
    rings: list[RingTable]
    sends: list[tuple[Spread, int, LoadTable]]
    neighbours: list[LoadTable]
    laps_ps: list[Ints]

    def tables(self) -> list[LoadTable]:
        """Return all load tables."""
        rings = [table for ring in self.rings for table in (ring.near, ring.far)]
        return rings + [table for _, _, table in self.sends] + self.neighbours


class _Folding:
    """Properties of ranks, communicators and links, from which the classes are computed."""

    def __init__(
        self,
        schedule: Schedule,
        disturbances: Disturbances,
        used: Used,
        *,
        unfold: bool,
        whole: Schedule | None,
    ) -> None:
        cluster = disturbances.cluster
        every = np.arange(schedule.mesh.size)
        self._schedule = schedule
        self._trouble = disturbances
        self._wiring = wiring = Wiring(cluster)
        self._slow = disturbances.links(wiring)
        self._node = every // cluster.gpus_per_node
        places, self._spreads = used.placed(schedule, cluster)
        self._rings = used.rings
        self._cuts: dict[int, str] = {}
        self._states = [
            self._state(index, outage) for index, outage in enumerate(disturbances.outages.states)
        ]
        self._host_flows = {flow: host_flow_table(flow, every, wiring) for flow in used.host_flows}
        self._used = self._number_links()
        if unfold:
            traits, marks = [every], mixed(np.arange(len(self._used)), 0)
        else:
            roles = schedule.roles if whole is None else whole.roles
            traits, marks = self._traits(places, roles), self._marks()
        self._colours = Colours(
            traits=traits,
            marks=marks,
            spreads=self._spreads,
            rings=[
                [
                    table
                    for state in self._states
                    for table in (state.rings[index].near, state.rings[index].far)
                ]
                for index in range(len(self._spreads))
            ],
            sends=[send for state in self._states for send in state.sends],
            host_flows=list(self._host_flows.values()),
        )
        self._colours.refine(keep_ranks=unfold)
        if whole is not None and not unfold:
            self._divide(self._roles(places, schedule.roles))
        else:
            self._index_of, self._firsts, self._counts = by_first(self._colours.ranks)

    def _state(self, index: int, outage: Outage) -> _State:
        """Return the tables of a state; if it cuts ranks off, those without an outage."""
        routes = Routes(self._wiring, outage)
        cluster, spreads = self._trouble.cluster, self._spreads
        board_ps = 0 if cluster.board_link is None else cluster.board_link.latency_ps
        try:
            return _State(
                routes=routes,
                rings=[
                    ring_table(spread, self._wiring, routes)
                    if spread.name in self._rings
                    else no_ring()
                    for spread in spreads
                ],
                sends=[
                    (spread, offset, send_table(spread, offset, routes))
                    for spread in spreads
                    for offset in spread.peer
                ],
                neighbours=[
                    neighbour_table(each.first_node, each.last_node, self._wiring, routes)
                    for each in self._trouble.neighbours
                ],
                laps_ps=[
                    laps_ps(spread, self._node, routes, board_ps)
                    if spread.name in self._rings
                    else np.zeros(len(spread.members), np.int64)
                    for spread in spreads
                ],
            )
        except CutError as error:
            if outage == NOTHING_DEAD:
                raise
            self._cuts[index] = str(error)
            return self._state(index, NOTHING_DEAD)

    def _number_links(self) -> Ints:
        """Return the links that some rank uses; renumber the tables to indices of this array."""
        is_used = np.zeros(self._wiring.link_count, bool)
        for table in self._host_flows.values():
            is_used[table.link] = True
        for state in self._states:
            for table in state.tables()[: len(state.tables()) - len(state.neighbours)]:
                is_used[table.link] = True
        number = np.cumsum(is_used) - 1
        for table in self._host_flows.values():
            table.link = number[table.link]
        for state in self._states:
            for table in state.tables():
                kept = np.flatnonzero(is_used[table.link])
                table.owner, table.divisor = table.owner[kept], table.divisor[kept]
                table.link = number[table.link[kept]]
        return np.flatnonzero(is_used)

    def _divide(self, parts: Ints) -> None:
        """Divide classes by `parts` alone if possible; a typical rank represents each class."""
        from zsim_des.symmetry.divided_classes import meet_alike, typical  # noqa: PLC0415 (few schedules have parts of roles)

        is_last = meet_alike(self._colours.ranks, parts, self._spreads)
        self._colours.divide(parts, further=not is_last)
        self._index_of, firsts, self._counts = by_first(self._colours.ranks)
        groups = zip(self._spreads, self._colours.communicators, strict=True)
        self._firsts = typical(self._index_of, len(firsts), list(groups))

    def _roles(self, places: dict[str, Ints], roles: Sequence[RankRole]) -> Ints:
        """Return by rank the number of its role."""
        mesh = self._schedule.mesh
        role = np.zeros(mesh.size, np.int64)
        if len(roles) > 1:
            for index, ranks in enumerate(roles):
                for box in ranks.boxes:
                    inside = np.ones(mesh.size, bool)
                    for name, limit in mesh.limits(box).items():
                        inside &= (places[name] >= limit.start) & (places[name] < limit.stop)
                    role[inside] = index
        return role

    def _traits(self, places: dict[str, Ints], roles: Sequence[RankRole]) -> list[Ints]:
        """Return the initial properties that distinguish ranks."""
        ranks = self._schedule.mesh.size
        found = [self._roles(places, roles), self._trouble.rank_marks(ranks)]
        for index, spread in enumerate(self._spreads):
            found += [spread.on_domain, spread.domains, *spread.far.values()]
            held = spread.communicator >= 0
            for state in self._states:
                laps = state.laps_ps[index]
                found.append(np.where(held, laps[spread.communicator], -1))
        return found

    def _marks(self) -> Mixes:
        """Return the initial marks that distinguish links."""
        kind = np.searchsorted(self._wiring.firsts, self._used, side="right")
        total = mixed(kind, 0)
        for salt, state in enumerate(self._states):
            for number, table in enumerate(state.neighbours):
                meets = mixed(table.divisor, 10 + 1000 * salt + number)
                total += sums(table.link, meets, len(total))
        routes = list(dict.fromkeys(map(tuple, self._slow.values())))
        slow = np.zeros(len(total), np.int64)
        for link, changes in self._slow.items():
            slow[self._used == link] = routes.index(tuple(changes)) + 1
        return total + mixed(slow, 1)

    def fold(self) -> Fold:
        """Return the classes."""
        communicators: list[CommunicatorClass] = []
        of_rank_class: list[dict[str, CommunicatorClass]] = [{} for _ in self._firsts]
        numbers: list[list[int]] = []
        for index, (spread, colour) in enumerate(
            zip(self._spreads, self._colours.communicators, strict=True)
        ):
            class_of, firsts, counts = by_first(colour)
            numbers.append((class_of + len(communicators)).tolist())
            own = {
                each: class_of[spread.communicator[rank]] for each, rank in enumerate(self._firsts)
            }
            for number, (where, count) in enumerate(zip(firsts, counts, strict=True)):
                members = spread.members[where]
                domain = self._node[members] // self._trouble.cluster.nodes_per_domain
                member_classes = self._index_of[members]
                found = np.flatnonzero(np.bincount(member_classes)).tolist()
                classes = [each for each in found if own[each] == number]
                made = CommunicatorClass(
                    index=len(communicators),
                    group=spread.name,
                    classes=tuple(classes),
                    ranks=len(members),
                    domains=int(spread.domains[members[0]]),
                    climb_ps=tuple(int(state.laps_ps[index][where]) for state in self._states),
                    count=count,
                    seats=tuple(zip(member_classes.tolist(), domain.tolist(), strict=True)),
                )
                communicators.append(made)
                for rank_class in made.classes:
                    of_rank_class[rank_class][spread.name] = made
        ranks = tuple(
            RankClass(
                index=index,
                program=self._schedule.program_of(rank),
                rank=rank,
                count=count,
                communicators=of_rank_class[index],
                peers=self._peers(rank),
            )
            for index, (rank, count) in enumerate(zip(self._firsts, self._counts, strict=True))
        )
        links = self._links(numbers)
        return Fold(ranks=ranks, communicators=tuple(communicators), links=links, cuts=self._cuts)

    def _peers(self, rank: int) -> dict[tuple[str, int], Peer]:
        found: dict[tuple[str, int], Peer] = {}
        for spread in self._spreads:
            for offset, peer in spread.peer.items():
                other = int(peer[rank])
                if other < 0:
                    continue
                is_far = bool(spread.far[offset][rank])
                found[spread.name, offset] = Peer(
                    rank_class=int(self._index_of[other]),
                    is_far=is_far,
                    climb_ps=tuple(
                        self._climb_ps(state.routes, rank, other, is_far=is_far)
                        for state in self._states
                    ),
                )
        return found

    def _climb_ps(self, routes: Routes, rank: int, other: int, *, is_far: bool) -> int:
        if is_far:
            return int(routes.climb_ps(self._node[[rank]], self._node[[other]])[0])
        board = self._trouble.cluster.board_link
        if board is None or not routes.crossings(np.array([rank]), np.array([other]))[0]:
            return 0
        return board.latency_ps

    def _links(self, numbers: Sequence[list[int]]) -> tuple[FoldedLink, ...]:
        """Return the classes of links, each with the load of one of them."""
        _, firsts, counts = by_first(self._colours.links)
        index = np.full(len(self._used), -1)
        index[firsts] = np.arange(len(firsts))
        states = [self._taken(state, numbers, index, len(firsts)) for state in self._states]
        found: list[FoldedLink] = []
        for where, (first, count) in enumerate(zip(firsts, counts, strict=True)):
            number = int(self._used[first])
            kind = int(np.searchsorted(self._wiring.firsts, number, side="right")) - 1
            found.append(
                FoldedLink(
                    number=number,
                    kind=kind,
                    count=count * self._wiring.directions[kind][1].multiple,
                    states=tuple(taken[where] for taken in states),
                    slow=tuple(self._slow.get(number, ())),
                )
            )
        return tuple(found)

    def _taken(
        self, state: _State, numbers: Sequence[list[int]], index: Ints, count: int
    ) -> list[Taken]:
        """Return the load of each chosen link in a state; `index` is -1 for other links."""
        found = [Taken({}, {}, {}, {}) for _ in range(count)]
        for ring, class_of in zip(state.rings, numbers, strict=True):
            for owner, link, share in _entries(ring.near, index):
                _add(found[link].near, class_of[owner], share)
            for owner, link, share in _entries(ring.far, index):
                _add(found[link].far, class_of[owner], share)
        for spread, offset, table in state.sends:
            for owner, link, share in _entries(table, index):
                _add(found[link].sends, (int(self._index_of[owner]), spread.name, offset), share)
        for flow, table in self._host_flows.items():
            for owner, link, share in _entries(table, index):
                _add(found[link].sends, (int(self._index_of[owner]), flow, 0), share)
        for number, table in enumerate(state.neighbours):
            for _, link, share in _entries(table, index):
                _add(found[link].neighbours, number, share)
        return found


def _add(total: dict[Key, Fraction], key: Key, share: Fraction) -> None:
    total[key] = total.get(key, Fraction(0)) + share


def _entries(table: LoadTable, index: Ints) -> list[tuple[int, int, Fraction]]:
    """Return entries on chosen links: the owner, the link's index among them, and the share."""
    which = np.flatnonzero(index[table.link] >= 0)
    owners, links = table.owner[which].tolist(), index[table.link[which]].tolist()
    divisors = table.divisor[which].tolist()
    shares = {divisor: Fraction(1, divisor) for divisor in set(divisors)}
    return [
        (owner, link, shares[divisor])
        for owner, link, divisor in zip(owners, links, divisors, strict=True)
    ]
