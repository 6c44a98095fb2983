"""The band of a prediction: how fast and how slow collectives over many nodes may be.

A fabric with a name has runs that others published: it is at best as fast as without congestion,
and at worst as slow as its slowest twentieth (`tail`). Of any other fabric nobody knows how
congested it is: it is between the least and the most congested one that has a name.
"""

from zsim.cluster.profile.files import Profiles
from zsim.cluster.profile.network import NetworkProfile
from zsim.network.constant import CONGESTION, FAR_FILL_S, FAR_HOP_S, NIC, TAIL


def band(profiles: Profiles, system: str | None) -> tuple[NetworkProfile, NetworkProfile]:
    """Return the constants of the fastest and of the slowest that `system` may be."""
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
    """Return constants with which all that crosses nodes takes so many times as long."""
    return profile.changed(
        nic=NIC.of(profile) / times,
        far_hop_s=FAR_HOP_S.of(profile) * times,
        far_fill_s=FAR_FILL_S.of(profile) * times,
    )
