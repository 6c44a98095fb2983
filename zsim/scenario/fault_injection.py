"""Faults and neighbours of a scenario as values. Needs its cluster, to know the fabric's tiers."""

from fractions import Fraction

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
from zsim.scenario.faults import absence, beyond
from zsim.scenario.tables import FaultTable, Scenario, ScenarioError

NEEDED = {
    "gpu": ("rank",),
    "switch_link": ("rank",),
    "nic": ("node", "nic"),
    "leaf": ("group",),
    "spine": ("group",),
    "link": ("source", "target"),
    "jitter": ("deviation",),
}
"""Keys of each kind of fault, beside `start` and `end`; all but jitter have a `factor` too."""

CAN_DIE = ("switch_link", "nic", "leaf", "spine", "link")
"""What may be `dead` instead of slower by a factor."""

OPTIONAL = {"leaf": ("rail",), "spine": ("rail",)}


class TroubleError(ScenarioError):
    """A fault or a neighbour that cannot be: a slip, whatever else the scenario says."""


def faults(scenario: Scenario, cluster: Cluster, ranks: int) -> tuple[Fault, ...]:
    """What `[[fault]]` says, in order, of a run on so many ranks of `cluster`.

    Raises:
        TroubleError: a key is missing or does not belong there, or it names what is not there.
    """
    found: list[Fault] = []
    for index, table in enumerate(scenario.fault):
        try:
            fault = _fault(table, cluster)
        except FaultError as error:
            raise TroubleError(f"fault.{index}.{error}") from None
        why = absence(fault, cluster, ranks)
        if why is not None:
            raise TroubleError(f"fault.{index}.{why}")
        found.append(fault)
    return tuple(found)


def neighbours(scenario: Scenario, cluster: Cluster) -> tuple[Neighbour, ...]:
    """What `[[neighbour]]` says, in order.

    Raises:
        TroubleError: its nodes are fewer than two or not there, or it ends before it begins.
    """
    found: list[Neighbour] = []
    for index, table in enumerate(scenario.neighbour):
        try:
            found.append(
                Neighbour(
                    first_node=table.nodes[0],
                    last_node=table.nodes[1],
                    bytes_per_s=table.bandwidth_per_direction,
                    window=Window(start_ps=table.start, end_ps=table.end),
                )
            )
        except FaultError as error:
            raise TroubleError(f"neighbour.{index}.{error}") from None
        why = beyond("nodes", table.nodes[1], cluster.nodes, "nodes")
        if why is not None:
            raise TroubleError(f"neighbour.{index}.{why}")
    return tuple(found)


def _fault(table: FaultTable, cluster: Cluster) -> Fault:
    _must_have(table)
    window = Window(start_ps=table.start, end_ps=table.end)
    factor = table.factor or Fraction(1)
    rank, node, nic, group = (
        value or 0 for value in (table.rank, table.node, table.nic, table.group)
    )
    match table.kind:
        case "gpu":
            return SlowGpu(rank=rank, factor=factor, window=window)
        case "switch_link":
            if table.dead:
                return DeadSwitchLink(rank=rank, window=window)
            return SlowSwitchLink(rank=rank, factor=factor, window=window)
        case "nic":
            if table.dead:
                return DeadNic(node=node, nic=nic, window=window)
            return SlowNic(node=node, nic=nic, factor=factor, window=window)
        case "leaf" | "spine":
            tier = _tier(table.kind, cluster)
            if table.dead:
                return DeadUplinks(tier=tier, group=group, rail=table.rail, window=window)
            return SlowUplinks(
                tier=tier, group=group, rail=table.rail, factor=factor, window=window
            )
        case "link":
            source, target = table.source or "", table.target or ""
            if table.dead:
                return DeadEdge(source=source, target=target, window=window)
            return SlowEdge(source=source, target=target, factor=factor, window=window)
        case "jitter":
            return Jitter(deviation=table.deviation or 0.0, window=window)


def _tier(kind: str, cluster: Cluster) -> int:
    """The number of the tier that a kind of fault names."""
    names = [tier.name for tier in cluster.fabric.tiers]
    if kind not in names:
        tiers = ", ".join(names) or "none"
        raise FaultError(f"kind: {kind!r} has no uplinks here; with some: {tiers}")
    return names.index(kind)


def _must_have(table: FaultTable) -> None:
    """Raise unless the keys are those of the kind."""
    needed = NEEDED[table.kind]
    if table.kind in CAN_DIE and table.dead:
        needed = (*needed, "dead")
    elif table.kind != "jitter":
        needed = (*needed, "factor")
    given = table.model_fields_set - {"kind", "start", "end"}
    for key in needed:
        if key not in given:
            raise FaultError(f"{key}: missing; {table.kind} needs {', '.join(needed)}")
    known = (*needed, *OPTIONAL.get(table.kind, ()))
    for key in sorted(given):
        if key not in known:
            raise FaultError(f"{key}: not a key of {table.kind}, which has {', '.join(known)}")
    if table.factor is not None and table.factor < 1:
        raise FaultError(f"factor: {table.factor} must be at least 1, times slower")
