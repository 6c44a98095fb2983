"""Routes of bytes from GPU to GPU around dead hardware.

Within a domain: over the switch, and over the link between boards if source and target are on
different ones. To another domain: to a NIC, up the fabric as far as needed, and down to a NIC. NICs
that serve the same GPUs form one bundle; bundle j of a node is its rail j. In a fabric with rails,
bytes leave on the target's rail; otherwise each end uses its own rail.

A NIC is attached to a PCIe switch, or to the node's switch if no PCIe is described. GPUs on the
same PCIe switch reach it directly. Others go over the node's switch through these GPUs, in equal
parts (NCCL calls this PXN; see the release notes of NCCL 2.12).
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from zsim_des.network.communicator_placement import Ints
from zsim_des.network.edge_routes import CutError
from zsim_des.network.link_numbering import Wiring
from zsim_des.network.outage import NOTHING_DEAD, Outage

Flags = npt.NDArray[np.bool_]


@dataclass(slots=True)
class Hops:
    """Links of flows: entry i puts 1 / `divisor[i]` of flow number `flow[i]` on `link[i]`."""

    link: list[Ints] = field(default_factory=list[Ints])
    flow: list[Ints] = field(default_factory=list[Ints])
    divisor: list[Ints] = field(default_factory=list[Ints])

    def add(self, link: Ints, flow: Ints, divisor: Ints | None = None) -> None:
        """Add flows to links, whole or divided by `divisor`."""
        self.link.append(link)
        self.flow.append(flow)
        self.divisor.append(np.ones_like(link) if divisor is None else divisor)

    def joined(self) -> tuple[Ints, Ints, Ints]:
        """Return links, flows and divisors of all entries."""
        none = [np.zeros(0, np.int64)]
        link, flow, divisor = (
            np.concatenate(none + parts) for parts in (self.link, self.flow, self.divisor)
        )
        return link, flow, divisor


class Routes:
    """Routes over the links of a cluster, around the dead ones in `outage`."""

    def __init__(self, wiring: Wiring, outage: Outage = NOTHING_DEAD) -> None:
        self._wiring = wiring
        self._cluster = cluster = wiring.cluster
        self._rails = wiring.rails
        self._on_rails = wiring.on_rails
        self._outage = outage
        self._routes = wiring.routes(outage.edges)
        self._nics = _alive((cluster.nodes, self._rails), outage.nics)
        self._ports = _alive((cluster.ranks,), {(rank,) for rank in outage.ranks})
        self._is_whole = outage == NOTHING_DEAD

    def near(self, source: Ints, target: Ints) -> Hops:
        """Return the links from GPU to GPU within a domain.

        Raises:
            CutError: no route is left between two of them.
        """
        hops, flow = Hops(), np.arange(len(source))
        if self._outage.ranks:
            works = self._ports[source] & self._ports[target]
            for index in np.flatnonzero(~works).tolist():
                self._around(hops, index, int(source[index]), int(target[index]))
            flow = np.flatnonzero(works)
        source, target = source[flow], target[flow]
        hops.add(self._wiring.up + source, flow)
        hops.add(self._wiring.down + target, flow)
        self._cross(hops, flow, source, (self._board(source), self._board(target)))
        return hops

    def far(self, source: Ints, target: Ints, *, ports: bool) -> Hops:
        """Return the links from GPU to GPU of different domains.

        Without `ports`, omit a GPU's own link to its switch if NICs are attached to the switch.

        Raises:
            CutError: no route is left between two of them.
        """
        hops, flow = Hops(), np.arange(len(source))
        per_node = self._cluster.gpus_per_node
        here, there = source // per_node, target // per_node
        leaves, enters = self._chosen(source, target)
        wiring = self._wiring
        hops.add(wiring.out + here * self._rails + leaves, flow)
        hops.add(wiring.into + there * self._rails + enters, flow)
        self._nic(hops, source, leaves, outward=True, ports=ports)
        self._nic(hops, target, enters, outward=False, ports=ports)
        self._climb(hops, here, there, enters)
        return hops

    def above(self, source: Ints, target: Ints, rail: Ints) -> Hops:
        """Return the links above the NICs of a rail, from node to node."""
        hops = Hops()
        self._climb(hops, source, target, rail)
        return hops

    def climb_ps(self, source: Ints, target: Ints) -> Ints:
        """Return the latency between nodes above their NICs, in picoseconds."""
        if self._routes is not None:
            return self._routes.latency_ps(source, target)
        total = np.zeros(len(source), np.int64)
        for tier in self._cluster.fabric.tiers:
            apart = source // tier.nodes_below != target // tier.nodes_below
            total += np.where(apart, tier.latency_ps, 0)
        return total

    def cross(self, hops: Hops, source: Ints, target: Ints) -> None:
        """Add the links between boards to `hops`, for flows within a domain that change boards."""
        boards = self._board(source), self._board(target)
        self._cross(hops, np.arange(len(source)), source, boards)

    def crossings(self, source: Ints, target: Ints) -> Flags:
        """Return True for each flow within a domain that changes boards."""
        return np.not_equal(self._board(source), self._board(target))

    def _board(self, rank: Ints) -> Ints:
        if self._cluster.board_link is None:
            return np.zeros_like(rank)
        place = rank % self._cluster.gpus_per_node
        return place * 2 // self._cluster.gpus_per_node

    def _cross(self, hops: Hops, flow: Ints, rank: Ints, boards: tuple[Ints, Ints]) -> None:
        """Add the link between boards on the node of `rank`, for flows that change boards."""
        if self._cluster.board_link is None:
            return
        board, other = boards
        which = np.flatnonzero(board != other)
        node = rank[which] // self._cluster.gpus_per_node
        hops.add(self._wiring.board + 2 * node + board[which], flow[which])

    def _pcie(self, rank: Ints) -> Ints:
        """Return the PCIe switch of each rank, by its number in the node."""
        return rank % self._cluster.gpus_per_node // self._cluster.gpus_per_pcie_switch

    def _pcie_of_rail(self, rail: Ints) -> Ints:
        return rail * self._cluster.pcie_switches // self._rails

    def _beside(self, node: Ints, switch: Ints) -> Iterator[tuple[Ints, Flags]]:
        """Yield by position the GPUs on one PCIe switch per node, and which of them are usable."""
        per_node, per_switch = self._cluster.gpus_per_node, self._cluster.gpus_per_pcie_switch
        for each in range(per_switch):
            place = switch * per_switch + each
            rank = node * per_node + np.minimum(place, per_node - 1)
            yield rank, (place < per_node) & self._ports[rank]

    def _nic(self, hops: Hops, rank: Ints, rail: Ints, *, outward: bool, ports: bool) -> None:
        """Add the links between GPUs and NICs of their nodes."""
        wiring, flow = self._wiring, np.arange(len(rank))
        to_switch, from_switch = (wiring.up, wiring.down) if outward else (wiring.down, wiring.up)
        board, other = self._board(rank), rail * 2 // self._rails
        if self._cluster.pcie_link is None:
            if ports:
                hops.add(to_switch + rank, flow)
            sides = (board, other) if outward else (other, board)
            self._cross(hops, flow, rank, sides)
            return
        to_pcie = wiring.to_pcie if outward else wiring.from_pcie
        switch = self._pcie_of_rail(rail)
        local = self._pcie(rank) == switch
        hops.add(to_pcie + rank[local], flow[local])
        flow, rank, switch, board = (each[~local] for each in (flow, rank, switch, board))
        if not len(flow):
            return
        hops.add(to_switch + rank, flow)
        relays = list(self._beside(rank // self._cluster.gpus_per_node, switch))
        count = np.zeros(len(rank), np.int64)
        for _, there in relays:
            count += there
        for relay, there in relays:
            parts = flow[there], count[there]
            hops.add(from_switch + relay[there], *parts)
            hops.add(to_pcie + relay[there], *parts)
            if self._cluster.board_link is not None:
                sides = board[there], self._board(relay[there])
                crossed = np.flatnonzero(sides[0] != sides[1])
                first = sides[0 if outward else 1][crossed]
                node = relay[there][crossed] // self._cluster.gpus_per_node
                hops.add(wiring.board + 2 * node + first, *(each[crossed] for each in parts))

    def _chosen(self, source: Ints, target: Ints) -> tuple[Ints, Ints]:
        """Return the rails on which flows leave and enter: the nearest, or the next that works."""
        leaves, enters = self._nearest(source), self._nearest(target)
        if self._is_whole:
            return (enters, enters) if self._on_rails else (leaves, enters)
        usable, ends = self._usable(source), self._usable(target)
        if not self._on_rails:
            return self._next(usable, leaves, source), self._next(ends, enters, target)
        usable &= ends
        per_node = self._cluster.gpus_per_node
        here, there = source // per_node, target // per_node
        for number, tier in enumerate(self._cluster.fabric.tiers):
            if self._wiring.has_rails(number):
                low, high = here // tier.nodes_below, there // tier.nodes_below
                works = self._uplinks(number)
                usable &= (works[low] & works[high]) | (low == high)[:, None]
        chosen = self._next(usable, enters, target)
        return chosen, chosen

    def _nearest(self, rank: Ints) -> Ints:
        per_node = self._cluster.gpus_per_node
        return rank % per_node * self._rails // per_node

    def _usable(self, rank: Ints) -> Flags:
        """Return by rank and rail whether the rank reaches a NIC there."""
        node = rank // self._cluster.gpus_per_node
        found = self._nics[node]
        if not self._outage.ranks:
            return found
        port = self._ports[rank][:, None]
        if self._cluster.pcie_link is None:
            return found & port
        for rail in range(self._rails):
            switch = self._pcie_of_rail(np.full(len(rank), rail))
            any_relay = np.zeros(len(rank), bool)
            for _, there in self._beside(node, switch):
                any_relay |= there
            local = self._pcie(rank) == switch
            found[:, rail] &= local | (port[:, 0] & any_relay)
        return found

    def _next(self, usable: Flags, near: Ints, rank: Ints) -> Ints:
        """Return by row of `usable` the first usable rail, starting at `near`."""
        steps = (near[:, None] + np.arange(self._rails)) % self._rails
        found = np.take_along_axis(usable, steps, axis=1)
        cut = np.flatnonzero(~found.any(axis=1))
        if len(cut):
            first = int(rank[cut[0]])
            if not self._ports[first]:
                raise CutError(f"rank {first}: without its link to the switch it reaches no NIC")
            node = first // self._cluster.gpus_per_node
            raise CutError(f"node {node}: no NIC is left on which it reaches the nodes it needs")
        return np.take_along_axis(steps, found.argmax(axis=1)[:, None], axis=1)[:, 0]

    def _uplinks(self, tier: int) -> Flags:
        """Return by group and rail of a tier whether its uplink works."""
        groups = -(-self._cluster.nodes // self._cluster.fabric.tiers[tier].nodes_below)
        width = self._rails if self._wiring.has_rails(tier) else 1
        dead = {(group, rail) for number, group, rail in self._outage.uplinks if number == tier}
        return _alive((groups, width), dead)

    def _climb(self, hops: Hops, source: Ints, target: Ints, rail: Ints, *, first: int = 0) -> None:
        """Add the links above the NICs of a rail, from node to node and from tier `first` up."""
        if self._routes is not None:
            hops.add(*self._routes.links(source, target))
            return
        wiring = self._wiring
        for number, tier in enumerate(self._cluster.fabric.tiers):
            if number < first:
                continue
            low, high = source // tier.nodes_below, target // tier.nodes_below
            which = np.flatnonzero(low != high)
            low, high = low[which], high[which]
            if wiring.has_rails(number):
                low, high = low * self._rails + rail[which], high * self._rails + rail[which]
            elif self._outage.uplinks:
                self._must_work(number, np.concatenate([low, high]))
            hops.add(wiring.tier_up[number] + low, which)
            hops.add(wiring.tier_down[number] + high, which)

    def _must_work(self, tier: int, groups: Ints) -> None:
        dead = np.flatnonzero(~self._uplinks(tier)[groups, 0])
        if len(dead):
            name = self._cluster.fabric.tiers[tier].name
            raise CutError(f"{name} {int(groups[dead[0]])}: no uplink is left")

    def _around(self, hops: Hops, flow: int, source: int, target: int) -> None:
        """Route a flow within a domain if one of its ends has no link to the switch."""
        if self._cluster.pcie_link is None:
            self._cut(source, target)
        ends = np.array([source]), np.array([target])
        node = [end // self._cluster.gpus_per_node for end in ends]
        if node[0] == node[1] and self._pcie(ends[0]) == self._pcie(ends[1]):
            hops.add(self._wiring.to_pcie + ends[0], np.array([flow]))
            hops.add(self._wiring.from_pcie + ends[1], np.array([flow]))
            return
        sides = [self._doors(end, where) for end, where in zip(ends, node, strict=True)]
        if not all(sides):
            self._outside(hops, flow, source, target)
            return
        parts = len(sides[0]) * len(sides[1])
        for out in sides[0]:
            for into in sides[1]:
                links = self._through(source, out, into, target)
                entry = np.full(len(links), flow), np.full(len(links), parts)
                hops.add(np.array(links), *entry)

    def _doors(self, end: Ints, node: Ints) -> list[int]:
        """Return the ranks via which `end` reaches the switch: itself, or its PCIe neighbours."""
        if self._ports[end[0]]:
            return [int(end[0])]
        beside = self._beside(node, self._pcie(end))
        return [int(rank[0]) for rank, there in beside if there[0]]

    def _through(self, source: int, out: int, into: int, target: int) -> list[int]:
        """Return the links from `source` via rank `out` over the switch to `into` and `target`."""
        wiring = self._wiring
        links = [wiring.up + out, wiring.down + into]
        if out != source:
            links += [wiring.to_pcie + source, wiring.from_pcie + out]
        if into != target:
            links += [wiring.to_pcie + into, wiring.from_pcie + target]
        boards = [int(self._board(np.array([door]))[0]) for door in (out, into)]
        if boards[0] != boards[1]:
            links.append(wiring.board + 2 * (out // self._cluster.gpus_per_node) + boards[0])
        return links

    def _outside(self, hops: Hops, flow: int, source: int, target: int) -> None:
        """Route a flow that has to leave its domain, through the NICs of both ends."""
        ends = np.array([source]), np.array([target])
        rails = [int(self._nearest(end)[0]) for end in ends]
        alive = [self._usable(end)[0, rail] for end, rail in zip(ends, rails, strict=True)]
        rails_meet = self._cluster.fabric.kind.rails_meet
        nodes = [end // self._cluster.gpus_per_node for end in ends]
        if not all(alive) or not rails_meet or (rails[0] == rails[1] and nodes[0] == nodes[1]):
            self._cut(source, target)
        taken = Hops()
        leaves, enters = (np.array([rail]) for rail in rails)
        taken.add(self._wiring.out + nodes[0] * self._rails + leaves, np.zeros(1, np.int64))
        taken.add(self._wiring.into + nodes[1] * self._rails + enters, np.zeros(1, np.int64))
        self._nic(taken, ends[0], leaves, outward=True, ports=False)
        self._nic(taken, ends[1], enters, outward=False, ports=False)
        self._change(taken, nodes, rails)
        link, _, divisor = taken.joined()
        hops.add(link, np.full(len(link), flow), divisor)

    def _change(self, hops: Hops, nodes: list[Ints], rails: list[int]) -> None:
        """Add the links above the NICs between two rails, which may differ."""
        if not self._on_rails or rails[0] == rails[1]:
            self._climb(hops, nodes[0], nodes[1], np.array([rails[1]]))
            return
        group = [int(node[0]) // self._cluster.fabric.tiers[0].nodes_below for node in nodes]
        works = self._uplinks(0)
        for where, rail in zip(group, rails, strict=True):
            if not works[where, rail]:
                raise CutError(f"{self._cluster.fabric.tiers[0].name} {where}: no uplink is left")
        zero = np.zeros(1, np.int64)
        wiring = self._wiring
        hops.add(wiring.tier_up[0] + np.array([group[0] * self._rails + rails[0]]), zero)
        hops.add(wiring.tier_down[0] + np.array([group[1] * self._rails + rails[1]]), zero)
        self._climb(hops, nodes[0], nodes[1], np.array([rails[1]]), first=1)

    def _cut(self, source: int, target: int) -> None:
        dead = source if not self._ports[source] else target
        other = target if dead == source else source
        raise CutError(
            f"rank {dead}: its link to the switch is dead, and no other way leads to rank {other}"
        )


def _alive(shape: tuple[int, ...], dead: Collection[tuple[int, ...]]) -> Flags:
    """Return an array that is True except at `dead` indices."""
    found = np.ones(shape, bool)
    for where in dead:
        found[where] = False
    return found
