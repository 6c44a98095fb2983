"""Faults and neighbours of a scenario as values. Needs its cluster, to know the fabric's tiers."""

from fractions import Fraction

from zsim.cluster import Cluster
from zsim.fault import (
    DeadNic,
    Fault,
    FaultError,
    Jitter,
    Neighbour,
    SlowGpu,
    SlowNic,
    SlowSwitchLink,
    SlowUplinks,
    Window,
)
from zsim.scenario import FaultTable, Scenario, ScenarioError

NEEDED = {
    "gpu": ("rank", "factor"),
    "switch_link": ("rank", "factor"),
    "nic": ("node", "nic", "factor"),
    "leaf": ("group", "factor"),
    "spine": ("group", "factor"),
    "jitter": ("deviation",),
}
"""Keys of each kind of fault, beside `start` and `end`. A NIC may be `dead` instead."""


def faults(scenario: Scenario, cluster: Cluster) -> tuple[Fault, ...]:
    """What `[[fault]]` says, in order.

    Raises:
        ScenarioError: a key is missing or does not belong there, or the fabric has no such tier.
    """
    found: list[Fault] = []
    for index, table in enumerate(scenario.fault):
        try:
            found.append(_fault(table, cluster))
        except FaultError as error:
            raise ScenarioError(f"fault.{index}.{error}") from None
    return tuple(found)


def neighbours(scenario: Scenario) -> tuple[Neighbour, ...]:
    """What `[[neighbour]]` says, in order.

    Raises:
        ScenarioError: its nodes are fewer than two, or it ends before it begins.
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
            raise ScenarioError(f"neighbour.{index}.{error}") from None
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
            return SlowSwitchLink(rank=rank, factor=factor, window=window)
        case "nic":
            if table.dead:
                return DeadNic(node=node, nic=nic)
            return SlowNic(node=node, nic=nic, factor=factor, window=window)
        case "leaf" | "spine":
            names = [tier.name for tier in cluster.fabric.tiers]
            if table.kind not in names:
                tiers = ", ".join(names) or "none"
                raise FaultError(f"kind: {table.kind!r} has no uplinks here; with some: {tiers}")
            tier = names.index(table.kind)
            return SlowUplinks(tier=tier, group=group, factor=factor, window=window)
        case "jitter":
            return Jitter(deviation=table.deviation or 0.0, window=window)


def _must_have(table: FaultTable) -> None:
    """Raise unless the keys are those of the kind."""
    needed = NEEDED[table.kind]
    if table.kind == "nic" and table.dead:
        needed = ("node", "nic", "dead")
    given = table.model_fields_set - {"kind", "start", "end"}
    for key in needed:
        if key not in given:
            raise FaultError(f"{key}: missing; {table.kind} needs {', '.join(needed)}")
    for key in sorted(given):
        if key not in needed:
            raise FaultError(f"{key}: not a key of {table.kind}, which has {', '.join(needed)}")
    if table.factor is not None and table.factor < 1:
        raise FaultError(f"factor: {table.factor} must be at least 1, times slower")
    if table.dead and table.model_fields_set & {"start", "end"}:
        raise FaultError("dead: a NIC is dead for the whole run; leave out start and end")
