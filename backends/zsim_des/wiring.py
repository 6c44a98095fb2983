"""The links between nodes, numbered, and which of them the bytes of a ring or a Send take.

NICs that serve the same GPUs are one bundle; bundle j of a node is its rail j. Where the fabric has
rails, what goes to another node leaves through the rail that its target is on, which it reaches
through the switch inside its own node. Uplinks of one switch, or one group of switches, are one
link that spreads its load evenly.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from zsim.cluster import Cluster, FabricKind
from zsim.collective.graph import NETWORK
from zsim_des.routes import CutError, Routes
from zsim_des.spread import Ints, Spread

RAILS = (FabricKind.RAIL_OPTIMIZED, FabricKind.RAIL_ONLY)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkKind:
    """Equal links with numbers from `first` on; each number is `multiple` links of one load."""

    names: tuple[str, ...]
    first: int
    count: int
    bytes_per_s: Fraction
    multiple: Fraction = Fraction(1)


@dataclass(frozen=True, slots=True)
class Table:
    """Who puts what on which link: entry i is 1 / `divisor[i]` of the bytes of `owner[i]`.

    Owners are communicators in a ring, and ranks in a Send.
    """

    owner: Ints
    link: Ints
    divisor: Ints


class Wiring:
    """Links between the nodes of a cluster, of which `dead` NICs (node, rail) are none."""

    def __init__(self, cluster: Cluster, dead: Iterable[tuple[int, int]] = ()) -> None:
        self.kinds: list[LinkKind] = []
        self.link_count = 0
        self.rails = min(cluster.gpus_per_node, cluster.nics_per_node)
        self._cluster = cluster
        self._on_rails = cluster.fabric.kind in RAILS
        self._alive: npt.NDArray[np.bool_] | None = None
        for node, rail in dead:
            if self._alive is None:
                self._alive = np.ones((cluster.nodes, self.rails), bool)
            self._alive[node, rail] = False
        width = Fraction(cluster.nics_per_node, self.rails)
        speed = Fraction(cluster.nic_link.bytes_per_s)
        nics = cluster.nodes * self.rails
        above = [*(tier.name for tier in cluster.fabric.tiers), NETWORK]
        self._out = self._add(("switch->nic", f"nic->{above[0]}"), nics, speed, width)
        self._in = self._add((f"{above[0]}->nic", "nic->switch"), nics, speed, width)
        self._up: list[int] = []
        self._down: list[int] = []
        for number, tier in enumerate(cluster.fabric.tiers):
            groups = -(-cluster.nodes // tier.nodes_below)
            speed, multiple = cluster.uplink_bytes_per_s(number), Fraction(1)
            if self.has_rails(number):
                groups, speed = groups * self.rails, speed / cluster.nics_per_node
                multiple = width
            low, high = above[number : number + 2]
            self._up.append(self._add((f"{low}->{high}",), groups, speed, multiple))
            self._down.append(self._add((f"{high}->{low}",), groups, speed, multiple))
        self._routes: Routes | None = None
        if cluster.fabric.kind is FabricKind.EXPLICIT:
            self._routes = Routes(cluster.fabric.edges, self.link_count)
            for names, bytes_per_s in self._routes.hops:
                self._add((names,), 1, Fraction(bytes_per_s), Fraction(1))

    def _add(
        self,
        names: tuple[str, ...],
        count: int,
        bytes_per_s: Fraction,
        multiple: Fraction,
    ) -> int:
        kind = LinkKind(
            names=names,
            first=self.link_count,
            count=count,
            bytes_per_s=bytes_per_s,
            multiple=multiple,
        )
        self.kinds.append(kind)
        self.link_count += count
        return kind.first

    def has_rails(self, tier: int) -> bool:
        """Whether a group of `tier` is one switch for each rail."""
        kind = self._cluster.fabric.kind
        return kind is FabricKind.RAIL_ONLY or (kind is FabricKind.RAIL_OPTIMIZED and not tier)

    def rail(self, node: Ints, place: Ints) -> Ints:
        """The rail of GPU number `place` of `node`: its nearest, or the next one that is alive."""
        near = place * self.rails // self._cluster.gpus_per_node
        return near if self._alive is None else self._next(self._alive[node], near, node)

    def _next(self, alive: npt.NDArray[np.bool_], near: Ints, node: Ints) -> Ints:
        """By row of `alive` the first rail from `near` on that is."""
        steps = (near[:, None] + np.arange(self.rails)) % self.rails
        usable = np.take_along_axis(alive, steps, axis=1)
        if not usable.any(axis=1).all():
            cut = int(node[~usable.any(axis=1)][0])
            raise CutError(f"node {cut}: no NIC is left on which it reaches the nodes it needs")
        return np.take_along_axis(steps, usable.argmax(axis=1)[:, None], axis=1)[:, 0]

    def ring(self, spread: Spread, node: Ints, rail: Ints) -> Table:
        """What the rings of a group put on links; `node` and `rail` are by rank."""
        ranks = np.flatnonzero(spread.domains > 1)
        here, before, at = node[ranks], spread.before[ranks], rail[ranks]
        source, target = before, at
        if self._on_rails:
            target = self._common_rail(before, here, at)
        else:
            source = here
        links = [self._out + source * self.rails + target, self._in + here * self.rails + target]
        shares = [np.arange(len(ranks))] * 2
        for link, which in self._climb(before, here, target):
            links.append(link)
            shares.append(which)
        chosen = ranks[np.concatenate(shares)]
        return Table(spread.communicator[chosen], np.concatenate(links), spread.on_domain[chosen])

    def send(self, spread: Spread, offset: int, node: Ints, rail: Ints) -> Table:
        """What Sends to the member `offset` away put on links, by rank."""
        ranks = np.flatnonzero(spread.far[offset] == 1)
        peer = spread.peer[offset][ranks]
        source, target = node[ranks], node[peer]
        leaves, enters = rail[ranks], rail[peer]
        if self._on_rails:
            leaves = enters = self._common_rail(source, target, enters)
        links = [self._out + source * self.rails + leaves, self._in + target * self.rails + enters]
        shares = [np.arange(len(ranks))] * 2
        for link, which in self._climb(source, target, enters):
            links.append(link)
            shares.append(which)
        owner = ranks[np.concatenate(shares)]
        return Table(owner, np.concatenate(links), np.ones_like(owner))

    def neighbour(self, first: int, last: int) -> Table:
        """What a ring over the nodes from `first` to `last`, through all NICs, puts on links."""
        nodes = np.repeat(np.arange(first, last + 1), self.rails)
        before = np.where(nodes == first, last, nodes - 1)
        rail = np.tile(np.arange(self.rails), last + 1 - first)
        links = [self._out + nodes * self.rails + rail, self._in + nodes * self.rails + rail]
        links += [link for link, _ in self._climb(before, nodes, rail)]
        link = np.concatenate(links)
        return Table(np.zeros_like(link), link, np.ones_like(link))

    def nic_links(self, node: int, rail: int) -> tuple[int, ...]:
        """Both directions of the NICs of a rail."""
        return (self._out + node * self.rails + rail, self._in + node * self.rails + rail)

    def uplinks(self, tier: int, group: int) -> tuple[int, ...]:
        """Both directions of all uplinks of a group of a tier."""
        width = self.rails if self.has_rails(tier) else 1
        return tuple(
            first + group * width + rail
            for first in (self._up[tier], self._down[tier])
            for rail in range(width)
        )

    def _common_rail(self, source: Ints, target: Ints, rail: Ints) -> Ints:
        if self._alive is None:
            return rail
        return self._next(self._alive[source] & self._alive[target], rail, target)

    def _climb(self, source: Ints, target: Ints, rail: Ints) -> Iterable[tuple[Ints, Ints]]:
        """Links above the NICs that bytes take, and the ways (by index) that take them."""
        if self._routes is not None:
            yield from self._routes.links(source, target)
            return
        for number, tier in enumerate(self._cluster.fabric.tiers):
            low, high = source // tier.nodes_below, target // tier.nodes_below
            which = np.flatnonzero(low != high)
            if self.has_rails(number):
                low, high = low * self.rails + rail, high * self.rails + rail
            yield self._up[number] + low[which], which
            yield self._down[number] + high[which], which

    def climb_ps(self, source: Ints, target: Ints) -> Ints:
        """Picoseconds that the way from node to node above the NICs takes longer."""
        if self._routes is not None:
            return self._routes.latency_ps(source, target)
        total = np.zeros(len(source), np.int64)
        for tier in self._cluster.fabric.tiers:
            apart = source // tier.nodes_below != target // tier.nodes_below
            total += np.where(apart, tier.latency_ps, 0)
        return total

    def laps_ps(self, spread: Spread, node: Ints) -> Ints:
        """The same once around the ring of each communicator of a group."""
        ranks = np.flatnonzero(spread.domains > 1)
        domain = node[ranks] // self._cluster.nodes_per_domain
        count = self._cluster.domains
        places = spread.communicator[ranks] * count + domain
        places, firsts = np.unique(places, return_index=True)
        ranks = ranks[firsts]
        total = np.zeros(len(spread.members), np.int64)
        np.add.at(total, places // count, self.climb_ps(spread.before[ranks], node[ranks]))
        return total
