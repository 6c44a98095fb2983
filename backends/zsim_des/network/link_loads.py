"""Loads of rings, Sends and neighbours on links.

A collective takes some bytes of each GPU's own link (near) and some of what is between domains
(far) for each byte that neighbours of a plain ring exchange, so each entry belongs to one of them.
What leaves a domain over PCIe does not pass the GPU's link to its switch: there it counts off.
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

    Owners are communicators in a ring, and ranks in a Send. A negative divisor takes off.
    """

    owner: Ints
    link: Ints
    divisor: Ints


@dataclass(frozen=True, slots=True)
class RingTable:
    """Loads of the rings of a group on links: of near bytes, and of far bytes."""

    near: LoadTable
    far: LoadTable


def _table(flows: Flows, *parts: tuple[Hops, Ints, int]) -> LoadTable:
    """Entries for hops of flows (their numbers in `flows`), over a divisor with a sign."""
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
    """Of a group without collectives."""
    return RingTable(_nothing(), _nothing())


def _nothing() -> LoadTable:
    return LoadTable(*(np.zeros(0, np.int64) for _ in range(3)))


def ring_table(spread: Spread, wiring: Wiring, ways: Routes) -> RingTable:
    """Return what the rings of a group put on links.

    Raises:
        CutError: no way is left between two of its ranks.
    """
    inner, outer = spread.inner, spread.outer
    within = ways.near(inner.source, inner.target)
    whole = np.ones_like(inner.owner)
    leaves = np.flatnonzero(inner.divisor)
    some = inner.some(leaves)
    by_pcie = wiring.cluster.pcie_link is not None
    beyond = ways.far(outer.source, outer.target, ports=False)
    far = _table(outer, (beyond, outer.divisor, 1))
    if by_pcie:
        off = ways.near(some.source, some.target)
        far = _both(far, _table(some, (off, some.divisor, -1)))
        return RingTable(_table(inner, (within, whole, 1)), far)
    # NICs hang on the switch: all bytes of a rank pass its own link, also those that leave.
    ranks = np.flatnonzero((spread.domains > 1) | (spread.on_domain > 1))
    ports = Hops()
    every = np.arange(len(ranks))
    ports.add(wiring.up + ranks, every)
    ports.add(wiring.down + ranks, every)
    members = Flows(spread.communicator[ranks], ranks, ranks, np.ones_like(ranks))
    near = _table(members, (ports, members.divisor, 1))
    boards, turned = Hops(), Hops()
    ways.cross(boards, inner.source, inner.target)
    ways.cross(turned, some.source, some.target)
    near = _both(near, _table(inner, (boards, whole, 1)))
    far = _both(far, _table(some, (turned, some.divisor, -1)))
    return RingTable(near, far)


def send_table(spread: Spread, offset: int, ways: Routes) -> LoadTable:
    """Return what Sends to the member `offset` away put on links, by rank.

    Raises:
        CutError: no way is left between two of the ranks.
    """
    peer, far = spread.peer[offset], spread.far[offset]
    found = _nothing()
    for is_far in (False, True):
        ranks = np.flatnonzero((far == is_far) & (peer >= 0))
        target = peer[ranks]
        hops = ways.far(ranks, target, ports=True) if is_far else ways.near(ranks, target)
        one = np.ones_like(ranks)
        found = _both(found, _table(Flows(ranks, ranks, target, one), (hops, one, 1)))
    return found


def host_flow_table(flow: HostFlow, ranks: Ints, wiring: Wiring) -> LoadTable:
    """Return loads of a flow on the host side of nodes, by rank; none where no link carries it.

    Raises:
        ClusterError: the nodes lack what it needs.
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


def neighbour_table(first: int, last: int, wiring: Wiring, ways: Routes) -> LoadTable:
    """Return what a ring over the nodes from `first` to `last`, through all NICs, puts on links."""
    rails = wiring.rails
    nodes = np.repeat(np.arange(first, last + 1), rails)
    before = np.where(nodes == first, last, nodes - 1)
    rail = np.tile(np.arange(rails), last + 1 - first)
    hops = ways.above(before, nodes, rail)
    every = np.arange(len(nodes))
    hops.add(wiring.out + nodes * rails + rail, every)
    hops.add(wiring.into + nodes * rails + rail, every)
    one = np.ones_like(nodes)
    return _table(Flows(np.zeros_like(nodes), nodes, nodes, one), (hops, one, 1))


def laps_ps(spread: Spread, node: Ints, ways: Routes, board_ps: int) -> Ints:
    """Once around the ring of each communicator: what it takes beyond a domain and its NICs.

    That is the fabric between each two domains, the longest of the ways that the rings take, and
    the links between boards, there and back.
    """
    total = np.zeros(len(spread.members), np.int64)
    outer = spread.outer
    if len(outer.source):
        climb = ways.climb_ps(node[outer.source], node[outer.target])
        longest = np.zeros(int(spread.block.max()) + 1, np.int64)
        np.maximum.at(longest, spread.block, climb)
        blocks, firsts = np.unique(spread.block, return_index=True)
        np.add.at(total, outer.owner[firsts], longest[blocks])
    inner = spread.inner
    if board_ps and len(inner.source):
        crossed = np.flatnonzero(ways.crossings(inner.source, inner.target))
        two = spread.on_domain[inner.source] == 2  # of two ranks a chunk goes one way only
        crossed = crossed[~two[crossed] | (inner.source < inner.target)[crossed]]
        np.add.at(total, inner.owner[crossed], board_ps)
    return total
