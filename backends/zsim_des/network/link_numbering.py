"""Numbers for the links of a cluster: class after class, those of `link_classes` first."""

from collections.abc import Collection

from zsim.cluster.cluster import Cluster
from zsim.cluster.host_links import host_links
from zsim.cluster.links import (
    BOARD,
    FROM_PCIE,
    FROM_SWITCH,
    TO_NIC,
    TO_PCIE,
    TO_SWITCH,
    LinkClass,
    edges_in_use,
    has_rails,
    link_classes,
    rail_count,
)
from zsim_des.network.edge_routes import EdgeRoutes

Direction = tuple[tuple[str, ...], LinkClass]
"""One direction of equal links: the names of their hops, and the link class."""


def directions(cluster: Cluster) -> list[Direction]:
    """Return the directions of all links, in the order of their numbers."""
    classes = *link_classes(cluster), *host_links(cluster)
    return [(names, links) for links in classes for names in links.hops]


class Wiring:
    """Numbers of links: the first number of each direction.

    The link of a GPU adds its rank. A link between boards adds twice its node, plus 1 for the
    opposite direction. A NIC adds its node times the number of rails, plus its rail.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.directions = directions(cluster)
        self.rails = rail_count(cluster)
        self.on_rails = cluster.fabric.kind.on_rails
        self.firsts: list[int] = []
        self.link_count = 0
        for _, links in self.directions:
            self.firsts.append(self.link_count)
            self.link_count += links.loads
        names = [names[0] for names, _ in self.directions]
        self._first_of = dict(zip(reversed(names), reversed(self.firsts), strict=True))
        self.up, self.down = self._first_of[TO_SWITCH], self._first_of[FROM_SWITCH]
        self.to_pcie = self._first_of.get(TO_PCIE, -1)
        self.from_pcie = self._first_of.get(FROM_PCIE, -1)
        self.board = self._first_of.get(BOARD, -1)
        nics = names.index(TO_NIC)
        self.out, self.into = self.firsts[nics : nics + 2]
        tiers = len(cluster.fabric.tiers)
        self.tier_up = self.firsts[nics + 2 : nics + 2 + 2 * tiers : 2]
        self.tier_down = self.firsts[nics + 3 : nics + 2 + 2 * tiers : 2]
        self._edges = nics + 2 + 2 * tiers

    def first(self, name: str) -> int:
        """Return the number of the first link with this name."""
        return self._first_of[name]

    def has_rails(self, tier: int) -> bool:
        """Return True if a group of `tier` has one switch per rail."""
        return has_rails(self.cluster, tier)

    def routes(self, dead: Collection[tuple[str, str]]) -> EdgeRoutes | None:
        """Return routes through an explicit fabric without `dead` edges; None for other fabrics."""
        if not self.cluster.fabric.edges:
            return None
        edges, routing = edges_in_use(self.cluster), self.cluster.fabric.routing
        return EdgeRoutes(edges, self.firsts[self._edges], dead, routing)

    def gpu_links(self, rank: int) -> tuple[int, int]:
        """Return both directions of the link between a rank and its switch."""
        return self.up + rank, self.down + rank

    def nic_links(self, node: int, rail: int) -> tuple[int, int]:
        """Return both directions of the NICs of a rail."""
        return self.out + node * self.rails + rail, self.into + node * self.rails + rail

    def uplinks(self, tier: int, group: int, rails: range) -> tuple[int, ...]:
        """Return both directions of the uplinks of a group of a tier."""
        width = self.rails if self.has_rails(tier) else 1
        return tuple(
            first + group * width + rail
            for first in (self.tier_up[tier], self.tier_down[tier])
            for rail in rails
        )

    def edge_links(self, source: str, target: str) -> tuple[int, int]:
        """Return both directions of an edge."""
        return self._first_of[f"{source}->{target}"], self._first_of[f"{target}->{source}"]
