"""Faults of a cluster, and other jobs on it. They are values; the simulation applies them.

Times start at the first step. A factor is how many times slower something is.
"""

from dataclasses import dataclass
from fractions import Fraction
from math import expm1, inf, log1p


class FaultError(ValueError):
    """Invalid fault; the message starts with the name of the field."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """From `start_ps` until just before `end_ps`; None means forever."""

    start_ps: int = 0
    end_ps: int | None = None

    def __post_init__(self) -> None:
        if self.start_ps < 0:
            raise FaultError(f"start: {self.start_ps} must be at least 0")
        if self.end_ps is not None and self.end_ps <= self.start_ps:
            raise FaultError(f"end: {self.end_ps} must be later than the start, {self.start_ps}")

    def holds(self, at_ps: int) -> bool:
        """Return True if `at_ps` is in the window."""
        return self.start_ps <= at_ps and (self.end_ps is None or at_ps < self.end_ps)


ALWAYS = Window()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Slower:
    """Hardware that is slower by a factor."""

    factor: Fraction
    window: Window = ALWAYS

    def __post_init__(self) -> None:
        if self.factor < 1:
            raise FaultError(f"factor: {self.factor} must be at least 1, times slower")


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowGpu(_Slower):
    """Kernels of one rank take `factor` times as long."""

    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowNic(_Slower):
    """One NIC has its bandwidth divided by `factor`, in both directions."""

    node: int
    nic: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowSwitchLink(_Slower):
    """The link of one rank to the switch of its domain has its bandwidth divided by `factor`."""

    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowUplinks(_Slower):
    """Divide the bandwidth between group `group` of a tier and the tier above by `factor`.

    `tier` counts from the nodes. If the group has a switch for each rail, only the switch of
    `rail` is slow, or all if `rail` is None.
    """

    tier: int
    group: int
    rail: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowEdge(_Slower):
    """One link of an explicit fabric has its bandwidth divided by `factor`, in both directions."""

    source: str
    target: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadNic:
    """One NIC does not work; its GPUs use the next working NIC of the node."""

    node: int
    nic: int
    window: Window = ALWAYS


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadSwitchLink:
    """The link of one rank to the switch of its domain does not work.

    It reaches the others through the GPUs on its PCIe switch, else through the NICs there.
    """

    rank: int
    window: Window = ALWAYS


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadUplinks:
    """All uplinks of a group of a tier, or of its switch of one rail, do not work.

    On rails, the nodes of the group use other rails; elsewhere the group is disconnected.
    """

    tier: int
    group: int
    rail: int | None = None
    window: Window = ALWAYS


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadEdge:
    """One link of an explicit fabric does not work; bytes take the shortest remaining path."""

    source: str
    target: str
    window: Window = ALWAYS


@dataclass(frozen=True, slots=True, kw_only=True)
class Jitter:
    """Random duration of every kernel of every rank: a log-normal factor with median 1.

    `deviation` is the standard deviation of the logarithm, so about the relative one. The factor
    depends only on the seed of the run, the rank, the step and the operation. All ranks then
    differ, so the cost of the simulation grows with the number of ranks.
    """

    deviation: float
    window: Window = ALWAYS

    def __post_init__(self) -> None:
        if not 0 < self.deviation < inf:
            raise FaultError(f"deviation: {self.deviation} must be more than 0 and finite")


@dataclass(frozen=True, slots=True, kw_only=True)
class Flaky:
    """A fault of some steps: each of `links` equal links has it with `probability`.

    Steps and links are independent. Several links with the fault cost as much as one, since all
    ranks wait for the slowest link.
    """

    probability: float
    links: int = 1

    @property
    def chance(self) -> float:
        """Share of steps in which at least one link has the fault."""
        if self.probability >= 1:
            return 1.0
        return -expm1(self.links * log1p(-self.probability))

    def expected_s(self, healthy_s: float, faulty_s: float) -> float:
        """Return the expected step time, from those without and with the fault."""
        return healthy_s + self.chance * (faulty_s - healthy_s)


Slow = SlowNic | SlowSwitchLink | SlowUplinks | SlowEdge
Dead = DeadNic | DeadSwitchLink | DeadUplinks | DeadEdge
Fault = SlowGpu | Slow | Dead | Jitter


@dataclass(frozen=True, slots=True, kw_only=True)
class Neighbour:
    """Another job: a ring over the nodes from `first_node` to `last_node`, through all their NICs.

    Every NIC sends and receives `bytes_per_s` if possible; overloaded links are shared fairly.
    """

    first_node: int
    last_node: int
    bytes_per_s: int
    window: Window = ALWAYS

    def __post_init__(self) -> None:
        if not 0 <= self.first_node < self.last_node:
            raise FaultError(
                f"nodes: {self.first_node} to {self.last_node} must be two or more, ascending"
            )
        if self.bytes_per_s < 1:
            raise FaultError(f"bandwidth: {self.bytes_per_s} must be more than 0")
