"""Lower bounds on the times of collectives, used for lower bounds on the step time."""

from dataclasses import dataclass, field

from zsim.cluster.cluster import Cluster
from zsim.network.algorithm.activity import Collective, GroupShape
from zsim.network.link_load import bandwidths
from zsim.network.tuner import choose, least_link_s
from zsim.units import PICOSECONDS_PER_SECOND


@dataclass(frozen=True, slots=True)
class CollectiveBounds:
    """Times of collectives on a cluster whose network constants are fitted.

    The constants select the algorithm. Each time is computed once and cached.
    """

    cluster: Cluster
    _known: dict[tuple[str, int, int], float] = field(
        default_factory=dict[tuple[str, int, int], float]
    )
    _moved: dict[tuple[str, int, int, int], tuple[float, float]] = field(
        default_factory=dict[tuple[str, int, int, int], tuple[float, float]]
    )

    def alone_s(self, collective: str, size_bytes: int, ranks: int) -> float:
        """Return the seconds of a collective that has the links of one NVLink domain to itself."""
        key = (collective, size_bytes, ranks)
        if key not in self._known:
            assert self.cluster.network is not None
            shape = GroupShape(ranks=ranks)
            links = bandwidths(self.cluster, shape)
            chosen = choose(
                self.cluster.network, Collective(collective), size_bytes, shape, links=links
            )
            taken_ps = chosen.time_ps(
                size_bytes, gpu_bytes_per_s=links.gpu, node_bytes_per_s=links.node
            )
            self._known[key] = taken_ps / PICOSECONDS_PER_SECOND
        return self._known[key]

    def moving_s(
        self, collective: str, size_bytes: float, ranks: int, domains: int
    ) -> tuple[float, float]:
        """Return lower bounds in seconds for a GPU's link and for the NICs of a domain.

        One of the two is 0: a collective within one domain uses no NIC, and data that leaves a
        domain need not cross a GPU's link.
        """
        key = (collective, round(size_bytes), ranks, domains)
        if key not in self._moved:
            assert self.cluster.network is not None
            shape = GroupShape(ranks=ranks, nodes=domains)
            near, far = least_link_s(
                self.cluster.network,
                Collective(collective),
                round(size_bytes),
                shape,
                links=bandwidths(self.cluster, shape),
            )
            self._moved[key] = (near, 0.0) if domains == 1 else (0.0, far)
        return self._moved[key]
