"""Loads of rings, Sends and neighbours on links.

For each byte that neighbours of a plain ring exchange, a collective puts some bytes on the links of
each GPU (near) and some on the links between domains (far). Each entry belongs to one of the two.
Bytes that leave a domain over PCIe bypass the GPU's link to its switch: far entries with a negative
divisor subtract them there.
"""

from dataclasses import dataclass

import numpy as np

from zsim.cluster.host_links import HostFlow, Level, path
from zsim_des.network.communicator_placement import Flows, Ints, Spread
from zsim_des.network.link_numbering import Wiring
from zsim_des.network.routes import Hops, Routes


@dataclass(slots=True)
class LoadTable:
    """Loads on links: entry i is 1 / `divisor[i]` of the bytes of `owner[i]`.

    Owners are communicators for rings, and ranks for Sends. A negative divisor subtracts a load.
    """

    owner: Ints
    link: Ints
    divisor: Ints


@dataclass(frozen=True, slots=True)
class RingTable:
    """Bytes that the rings of a group put on links: inside nodes (near) and between them (far)."""

    near: LoadTable
    far: LoadTable


def _table(flows: Flows, *parts: tuple[Hops, Ints, int]) -> LoadTable:
    """Return entries for hops of `flows`; each part has hops, a divisor by flow, and a sign."""
    owner, link, divisor = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)], [np.ones(0, np.int64)]
    for hops, over, sign in parts:
        links, flow, parted = hops.joined()
        owner.append(flows.owner[flow])
        link.append(links)
        divisor.append(sign * parted * over[flow])
    return LoadTable(np.concatenate(owner), np.concatenate(link), np.concatenate(divisor))


def _both(one: LoadTable, other: LoadTable) -> LoadTable:
    return LoadTable(
        np.concatenate([one.owner, other.owner]),
        np.concatenate([one.link, other.link]),
        np.concatenate([one.divisor, other.divisor]),
    )


def no_ring() -> RingTable:
    """Return the empty loads of a group without collectives."""
    return RingTable(_nothing(), _nothing())


def _nothing() -> LoadTable:
    return LoadTable(*(np.zeros(0, np.int64) for _ in range(3)))


def ring_table(spread: Spread, wiring: Wiring, routes: Routes) -> RingTable:
    """Return the loads that the rings of a group put on links.

    Raises:
        CutError: no route is left between two of its ranks.
    """
    inner, outer = spread.inner, spread.outer
    within = routes.near(inner.source, inner.target)
    whole = np.ones_like(inner.owner)
    leaves = np.flatnonzero(inner.divisor)
    some = inner.some(leaves)
    by_pcie = wiring.cluster.pcie_link is not None
    beyond = routes.far(outer.source, outer.target, ports=False)
    far = _table(outer, (beyond, outer.divisor, 1))
    if by_pcie:
        off = routes.near(some.source, some.target)
        far = _both(far, _table(some, (off, some.divisor, -1)))
        return RingTable(_table(inner, (within, whole, 1)), far)
    # NICs are attached to the switch: all bytes of a rank pass its own link, also those that leave.
    ranks = np.flatnonzero((spread.domains > 1) | (spread.on_domain > 1))
    ports = Hops()
    every = np.arange(len(ranks))
    ports.add(wiring.up + ranks, every)
    ports.add(wiring.down + ranks, every)
    members = Flows(spread.communicator[ranks], ranks, ranks, np.ones_like(ranks))
    near = _table(members, (ports, members.divisor, 1))
    boards, turned = Hops(), Hops()
    routes.cross(boards, inner.source, inner.target)
    routes.cross(turned, some.source, some.target)
    near = _both(near, _table(inner, (boards, whole, 1)))
    far = _both(far, _table(some, (turned, some.divisor, -1)))
    return RingTable(near, far)


def send_table(spread: Spread, offset: int, routes: Routes) -> LoadTable:
    """Return by rank the loads of Sends to the member `offset` away.

    Raises:
        CutError: no route is left between two of the ranks.
    """
    peer, far = spread.peer[offset], spread.far[offset]
    found = _nothing()
    for is_far in (False, True):
        ranks = np.flatnonzero((far == is_far) & (peer >= 0))
        target = peer[ranks]
        hops = routes.far(ranks, target, ports=True) if is_far else routes.near(ranks, target)
        one = np.ones_like(ranks)
        found = _both(found, _table(Flows(ranks, ranks, target, one), (hops, one, 1)))
    return found


def host_flow_table(flow: HostFlow, ranks: Ints, wiring: Wiring) -> LoadTable:
    """Return by rank the loads of a host-side flow; empty if no link carries it.

    Raises:
        ClusterError: the nodes lack the hardware that it needs.
    """
    cluster = wiring.cluster
    node, place = np.divmod(ranks, cluster.gpus_per_node)
    per_switch = cluster.gpus_per_pcie_switch
    number = {
        Level.RANK: ranks,
        Level.PCIE_SWITCH: node * cluster.pcie_switches + place // per_switch,
        Level.ROOT_PORT: node * cluster.root_ports
        + place // (cluster.gpus_per_root_port or per_switch),
        Level.NODE: node,
    }
    hops = path(cluster, flow)
    if not hops:
        return _nothing()
    link = np.concatenate([wiring.first(name) + number[level] for name, level in hops])
    return LoadTable(np.tile(ranks, len(hops)), link, np.ones_like(link))


def neighbour_table(first: int, last: int, wiring: Wiring, routes: Routes) -> LoadTable:
    """Return the loads of a ring over nodes `first` to `last`, through all NICs."""
    rails = wiring.rails
    nodes = np.repeat(np.arange(first, last + 1), rails)
    before = np.where(nodes == first, last, nodes - 1)
    rail = np.tile(np.arange(rails), last + 1 - first)
    hops = routes.above(before, nodes, rail)
    every = np.arange(len(nodes))
    hops.add(wiring.out + nodes * rails + rail, every)
    hops.add(wiring.into + nodes * rails + rail, every)
    one = np.ones_like(nodes)
    return _table(Flows(np.zeros_like(nodes), nodes, nodes, one), (hops, one, 1))


def laps_ps(spread: Spread, node: Ints, routes: Routes, board_ps: int) -> Ints:
    """Return the latency once around each communicator's ring, beyond domains and their NICs.

    Picoseconds. The sum of the latency of the fabric between domains, by the longest route of the
    rings, and of the links between boards in both directions.
    """
    total = np.zeros(len(spread.members), np.int64)
    outer = spread.outer
    if len(outer.source):
        climb = routes.climb_ps(node[outer.source], node[outer.target])
        longest = np.zeros(int(spread.block.max()) + 1, np.int64)
        np.maximum.at(longest, spread.block, climb)
        blocks, firsts = np.unique(spread.block, return_index=True)
        np.add.at(total, outer.owner[firsts], longest[blocks])
    inner = spread.inner
    if board_ps and len(inner.source):
        crossed = np.flatnonzero(routes.crossings(inner.source, inner.target))
        two = spread.on_domain[inner.source] == 2  # between two ranks a chunk goes in one direction
        crossed = crossed[~two[crossed] | (inner.source < inner.target)[crossed]]
        np.add.at(total, inner.owner[crossed], board_ps)
    return total
