"""Constants of the formulas of collectives: what each means, and what it may be.

An algorithm of collectives declares those of its own beside these, which all share.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from zsim.cluster.profile.network import NetworkProfile, ProfileError


@dataclass(frozen=True, slots=True, kw_only=True)
class Constant:
    """One number of a profile, which is more than 0.

    Attributes:
        default: its value in profiles that do not have it; None if they must.
        is_share: it is at most 1.
        may_be_zero: 0 is allowed: the hardware cannot do what the constant describes.
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
        """Check that its value can be.

        Raises:
            ProfileError: it cannot.
        """
        value = self.of(profile)
        if value < 0 or (value == 0 and not self.may_be_zero):
            raise ProfileError(f"{self.name}: {value} must be more than 0")
        if self.is_share and value > 1:
            raise ProfileError(f"{self.name}: {value} must be at most 1, it is a share")


LAUNCH_S = Constant(name="launch_s")
"""The host's time for one collective: back to back, none takes less."""
BASE_S = Constant(name="base_s")
"""Start and end of a collective on the device."""
LL_HOP_S = Constant(name="ll_hop_s")
"""From a GPU to the next within a node, with the LL protocol; the other two likewise."""
LL128_HOP_S = Constant(name="ll128_hop_s")
SIMPLE_HOP_S = Constant(name="simple_hop_s")
FAR_BASE_S = Constant(name="far_base_s")
"""What crossing nodes costs once."""
FAR_HOP_S = Constant(name="far_hop_s")
"""What a hop between nodes costs on top of one within a node."""
LINK = Constant(name="link", is_share=True)
"""Share of a GPU's link that a ring with the simple protocol reaches."""
LL = Constant(name="ll", is_share=True)
"""Share of what the simple protocol reaches that LL reaches; LL128 likewise."""
LL128 = Constant(name="ll128", is_share=True)
NIC = Constant(name="nic", is_share=True)
"""Share of the NICs' bandwidth."""
CONGESTION = Constant(name="congestion", default=0.0, may_be_zero=True)
"""Exponent of congestion: with n nodes all that crosses the fabric takes (n / 2) ** congestion
times as long as with two. A ring is as slow as its slowest link, and the more links there are, the
more flows meet on one of them: paths chosen by hash collide, bursts arrive at once."""
TAIL = Constant(name="tail", default=1.0)
"""How many times as long what crosses nodes took in the slowest twentieth of runs."""
COPY = Constant(name="copy")
"""Speed of a local copy of a rank's own shard, in bandwidths of the link."""
ADD = Constant(name="add")
"""Speed of a local addition of it."""
FILL_S = Constant(name="fill_s")
"""Time to fill the pipeline of large messages, in rings and trees."""
FILL_BYTES = Constant(name="fill_bytes")
"""Bytes per link from which on messages are large."""
FAR_FILL_S = Constant(name="far_fill_s")
"""Fill time on top, for each hop between nodes and S that a node passes on."""
FAR_FILL_BYTES = Constant(name="far_fill_bytes")
TENSOR_WAIT_S = Constant(name="tensor_wait_s", default=0.0, may_be_zero=True)
"""Time that a collective of the tensor axis waits for each of its ranks where they span nodes, once
for each lap of a ring. Benchmarks issue one collective at a time and do not show it."""

COMMON = (
    LAUNCH_S, BASE_S, LL_HOP_S, LL128_HOP_S, SIMPLE_HOP_S, FAR_BASE_S, FAR_HOP_S, LINK, LL, LL128,
    NIC, CONGESTION, TAIL, COPY, ADD, FILL_S, FILL_BYTES, FAR_FILL_S, FAR_FILL_BYTES, TENSOR_WAIT_S,
)  # fmt: skip


def check(profile: NetworkProfile, constants: Iterable[Constant]) -> None:
    """Check that `profile` has all `constants`, each as it may be, and no others.

    Raises:
        ProfileError: it does not; one line.
    """
    known = {constant.name: constant for constant in constants}
    for name in profile.numbers:
        if name not in known:
            raise ProfileError(f"{name} is not a constant")
    for constant in known.values():
        constant.check(profile)
