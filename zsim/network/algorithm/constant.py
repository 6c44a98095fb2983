"""Constants of the formulas of collectives: their meaning and valid range.

An algorithm of collectives declares its own constants; the ones here are common to all.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from zsim.cluster.profile.network import NetworkProfile, ProfileError


@dataclass(frozen=True, slots=True, kw_only=True)
class Constant:
    """One number of a profile, which is more than 0.

    Attributes:
        default: its value in profiles that do not have it; None if it is required.
        is_share: it is at most 1.
        may_be_zero: 0 is allowed: the hardware lacks the described feature.
    """

    name: str
    default: float | None = None
    is_share: bool = False
    may_be_zero: bool = False

    def of(self, profile: NetworkProfile) -> float:
        """Return its value in `profile`.

        Raises:
            ProfileError: it is missing there and has no default.
        """
        value = profile.numbers.get(self.name, self.default)
        if value is None:
            raise ProfileError(f"{self.name} is missing")
        return value

    def check(self, profile: NetworkProfile) -> None:
        """Raise ProfileError unless its value in `profile` is in range.

        Raises:
            ProfileError: it is missing or out of range.
        """
        value = self.of(profile)
        if value < 0 or (value == 0 and not self.may_be_zero):
            raise ProfileError(f"{self.name}: {value} must be more than 0")
        if self.is_share and value > 1:
            raise ProfileError(f"{self.name}: {value} must be at most 1, it is a share")


LAUNCH_S = Constant(name="launch_s")
"""The host's time for one collective: a lower bound per collective in a loop."""
BASE_S = Constant(name="base_s")
"""Start and end of a collective on the device."""
LL_HOP_S = Constant(name="ll_hop_s")
"""Hop from a GPU to the next within a node, with the LL protocol; the other two likewise."""
LL128_HOP_S = Constant(name="ll128_hop_s")
SIMPLE_HOP_S = Constant(name="simple_hop_s")
FAR_BASE_S = Constant(name="far_base_s")
"""Cost of crossing nodes, once per collective."""
FAR_HOP_S = Constant(name="far_hop_s")
"""Additional latency of a hop between nodes over one within a node."""
LINK = Constant(name="link", is_share=True)
"""Share of a GPU's link that a ring with the simple protocol reaches."""
LL = Constant(name="ll", is_share=True)
"""Bandwidth of LL as a share of that of the simple protocol; LL128 likewise."""
LL128 = Constant(name="ll128", is_share=True)
NIC = Constant(name="nic", is_share=True)
"""Share of the NICs' bandwidth."""
CONGESTION = Constant(name="congestion", default=0.0, may_be_zero=True)
"""Exponent of congestion: with n nodes, traffic over the fabric takes (n / 2) ** congestion times
as long as with two. A ring is as slow as its slowest link. The more links there are, the more flows
meet on one of them: paths chosen by hash collide, bursts arrive at once."""
TAIL = Constant(name="tail", default=1.0)
"""Slowdown of traffic between nodes in the slowest twentieth of runs."""
COPY = Constant(name="copy")
"""Speed of a local copy of a rank's own shard, relative to the link's bandwidth."""
ADD = Constant(name="add")
"""Speed of a local addition of the shard, in the same unit."""
FILL_S = Constant(name="fill_s")
"""Time to fill the pipeline of large messages, in rings and trees."""
FILL_BYTES = Constant(name="fill_bytes")
"""Scale, in bytes per link, at which the fill time saturates."""
FAR_FILL_S = Constant(name="far_fill_s")
"""Additional fill time for each hop between nodes and S that a node forwards."""
FAR_FILL_BYTES = Constant(name="far_fill_bytes")
TENSOR_WAIT_S = Constant(name="tensor_wait_s", default=0.0, may_be_zero=True)
"""Time that a collective of the tensor axis waits for each of its ranks where they span nodes, once
for each lap of a ring. Benchmarks issue one collective at a time and do not show it."""

COMMON = (
    LAUNCH_S, BASE_S, LL_HOP_S, LL128_HOP_S, SIMPLE_HOP_S, FAR_BASE_S, FAR_HOP_S, LINK, LL, LL128,
    NIC, CONGESTION, TAIL, COPY, ADD, FILL_S, FILL_BYTES, FAR_FILL_S, FAR_FILL_BYTES, TENSOR_WAIT_S,
)  # fmt: skip


def check(profile: NetworkProfile, constants: Iterable[Constant]) -> None:
    """Raise ProfileError unless `profile` has all `constants`, with valid values, and no others.

    Raises:
        ProfileError: a constant is missing, unknown or out of range; one line.
    """
    known = {constant.name: constant for constant in constants}
    for name in profile.numbers:
        if name not in known:
            raise ProfileError(f"{name} is not a constant")
    for constant in known.values():
        constant.check(profile)
