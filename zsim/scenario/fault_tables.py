"""`[[fault]]` and `[[neighbour]]`: slow or dead hardware of a cluster, and other jobs on it.

Each kind of fault is a separate table class, selected by `kind`, which defines its keys. `on`
converts it to a value of `zsim.cluster.fault` for a cluster, whose fabric defines the tiers.
"""

import fractions
from collections.abc import Callable
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, Strict, model_validator

from zsim.cluster.cluster import Cluster
from zsim.cluster.fault import (
    DeadEdge,
    DeadNic,
    DeadSwitchLink,
    DeadUplinks,
    Fault,
    FaultError,
    Jitter,
    Neighbour,
    SlowEdge,
    SlowGpu,
    SlowNic,
    SlowSwitchLink,
    SlowUplinks,
    Window,
)
from zsim.config_error import refusal, refuse
from zsim.strategy.config_table import Bandwidth, Count, Flag, Positive, Ratio, Table, Time, Whole


def _slower(factor: fractions.Fraction) -> fractions.Fraction:
    if factor < 1:
        raise ValueError("must be at least 1, times slower")
    return factor


Factor = Annotated[Ratio, AfterValidator(_slower)]


class TimedTable(Table):
    """Something that lasts from `start` to `end`, both counted from the start of the first step."""

    start: Time = 0
    end: Time | None = None

    @model_validator(mode="after")
    def _ends_after_it_begins(self) -> Self:
        if self.end is not None and self.end <= self.start:
            refuse([refusal("end", self.end, f"must be later than the start, {self.start}")])
        return self

    @property
    def window(self) -> Window:
        """Return the window in which it lasts."""
        return Window(start_ps=self.start, end_ps=self.end)


Probability = Annotated[float, Strict(), Field(gt=0, le=1)]


class GpuFault(TimedTable):
    """Kernels of one rank take `factor` times as long."""

    kind: Literal["gpu"]
    rank: Whole
    factor: Factor

    def on(self, cluster: Cluster) -> Fault:
        """Return the fault on a cluster."""
        del cluster
        return SlowGpu(rank=self.rank, factor=self.factor, window=self.window)


class LinkFault(TimedTable):
    """Links that are `dead`, or slower by `factor`.

    With `probability`, each of `links` equal links has the fault in a step with this probability.
    """

    factor: Factor | None = None
    dead: Flag = False
    probability: Probability | None = None
    links: Count | None = None

    @model_validator(mode="after")
    def _is_slow_or_dead(self) -> Self:
        if self.factor is None and not self.dead:
            refuse([refusal("factor", None, "missing; give it, or dead")])
        if self.factor is not None and self.dead:
            refuse([refusal("factor", str(self.factor), "stands beside dead = true")])
        if self.links is not None and self.probability is None:
            refuse([refusal("links", self.links, "needs probability, that of each link")])
        return self

    def _on(self, slow: Callable[..., Fault], dead: Callable[..., Fault], **links: object) -> Fault:
        if self.factor is None:
            return dead(**links, window=self.window)
        return slow(**links, factor=self.factor, window=self.window)


class SwitchLinkFault(LinkFault):
    """The link of one rank to the switch of its domain."""

    kind: Literal["switch_link"]
    rank: Whole

    def on(self, cluster: Cluster) -> Fault:
        """Return the fault on a cluster."""
        del cluster
        return self._on(SlowSwitchLink, DeadSwitchLink, rank=self.rank)


class NicFault(LinkFault):
    """One NIC of a node."""

    kind: Literal["nic"]
    node: Whole
    nic: Whole

    def on(self, cluster: Cluster) -> Fault:
        """Return the fault on a cluster."""
        del cluster
        return self._on(SlowNic, DeadNic, node=self.node, nic=self.nic)


class UplinkFault(LinkFault):
    """Links up from a group of a tier, or from its switch of one rail."""

    kind: Literal["leaf", "spine"]
    group: Whole
    rail: Whole | None = None

    def on(self, cluster: Cluster) -> Fault:
        """Return the fault on a cluster.

        Raises:
            FaultError: the fabric has no such tier.
        """
        names = [tier.name for tier in cluster.fabric.tiers]
        if self.kind not in names:
            tiers = ", ".join(names) or "none"
            raise FaultError(f"kind: {self.kind!r} has no uplinks here; with some: {tiers}")
        tier = names.index(self.kind)
        return self._on(SlowUplinks, DeadUplinks, tier=tier, group=self.group, rail=self.rail)


class EdgeFault(LinkFault):
    """One link of a fabric that lists its links."""

    kind: Literal["link"]
    source: str
    target: str

    def on(self, cluster: Cluster) -> Fault:
        """Return the fault on a cluster."""
        del cluster
        return self._on(SlowEdge, DeadEdge, source=self.source, target=self.target)


class JitterFault(TimedTable):
    """Every kernel of every rank takes a random time."""

    kind: Literal["jitter"]
    deviation: Positive

    def on(self, cluster: Cluster) -> Fault:
        """Return the fault on a cluster."""
        del cluster
        return Jitter(deviation=self.deviation, window=self.window)


FaultTable = Annotated[
    GpuFault | SwitchLinkFault | NicFault | UplinkFault | EdgeFault | JitterFault,
    Field(discriminator="kind"),
]
"""`[[fault]]`: slow or dead hardware, from `start` to `end`."""


class NeighbourTable(TimedTable):
    """`[[neighbour]]`: another job on the nodes from the first to the last of `nodes`."""

    nodes: tuple[Whole, Whole]
    bandwidth_per_direction: Bandwidth

    @model_validator(mode="after")
    def _are_two_nodes_or_more(self) -> Self:
        first, last = self.nodes
        if first >= last:
            refuse([refusal("nodes", None, f"{first} to {last} must be two or more, ascending")])
        return self

    def neighbour(self) -> Neighbour:
        """Return the job as a value."""
        return Neighbour(
            first_node=self.nodes[0],
            last_node=self.nodes[1],
            bytes_per_s=self.bandwidth_per_direction,
            window=self.window,
        )
