"""The band of a prediction: bounds on the speed of collectives over many nodes.

A named fabric has published runs: it is at best as fast as without congestion, and at worst as slow
as its slowest twentieth (`tail`). The congestion of other fabrics is not known; the bounds are the
least and the most congested named fabric.
"""

from zsim.cluster.profile.files import Profiles
from zsim.cluster.profile.network import NetworkProfile
from zsim.network.algorithm.constant import CONGESTION, FAR_FILL_S, FAR_HOP_S, NIC, TAIL


def band(profiles: Profiles, system: str | None) -> tuple[NetworkProfile, NetworkProfile]:
    """Return the constants for the fastest and for the slowest case of `system`."""
    own = profiles.of(system)
    if not profiles.fabrics:
        return own, own
    if system in profiles.fabrics:
        usual = {each.name: each.of(profiles.shared) for each in (NIC, FAR_HOP_S, FAR_FILL_S)}
        return own.changed(**usual, congestion=0.0), slowed(own, TAIL.of(own))
    least, most = (profiles.systems[each] for each in (profiles.fabrics[0], profiles.fabrics[-1]))
    if system in profiles.systems:
        bounds = (CONGESTION.of(least), CONGESTION.of(most))
        return own.changed(congestion=bounds[0]), own.changed(congestion=bounds[1])
    return least, most


def slowed(profile: NetworkProfile, times: float) -> NetworkProfile:
    """Return constants with which traffic between nodes takes `times` as long."""
    return profile.changed(
        nic=NIC.of(profile) / times,
        far_hop_s=FAR_HOP_S.of(profile) * times,
        far_fill_s=FAR_FILL_S.of(profile) * times,
    )
