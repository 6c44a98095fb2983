"""Checks that a fault or a neighbour names hardware that the cluster has."""

from typing import assert_never

from zsim.cluster.cluster import Cluster
from zsim.cluster.fault import (
    DeadEdge,
    DeadNic,
    DeadSwitchLink,
    DeadUplinks,
    Fault,
    Jitter,
    SlowEdge,
    SlowGpu,
    SlowNic,
    SlowSwitchLink,
    SlowUplinks,
)
from zsim.cluster.links import edges_in_use, has_rails, rail_count


def absence(fault: Fault, cluster: Cluster, ranks: int) -> str | None:
    """Return one line if a fault names missing hardware: field, value, allowed; else None.

    `ranks` is the number of ranks of the run; GPUs of the last node of `cluster` may be unused.
    """
    found: list[str | None] = []
    match fault:
        case SlowGpu(rank=rank) | SlowSwitchLink(rank=rank) | DeadSwitchLink(rank=rank):
            found = [beyond("rank", rank, ranks, "ranks")]
        case SlowNic(node=node, nic=nic) | DeadNic(node=node, nic=nic):
            found = [
                beyond("node", node, cluster.nodes, "nodes"),
                beyond("nic", nic, cluster.nics_per_node, "NICs of a node"),
            ]
        case SlowUplinks() | DeadUplinks():
            found = [_without_uplinks(fault, cluster)]
        case SlowEdge(source=source, target=target) | DeadEdge(source=source, target=target):
            edges = {frozenset((e.source, e.target)) for e in edges_in_use(cluster)}
            if frozenset((source, target)) not in edges:
                found = [f"source, target: the fabric lists no link from {source} to {target}"]
        case Jitter():
            pass
        case _:
            assert_never(fault)
    return next((each for each in found if each is not None), None)


def _without_uplinks(fault: SlowUplinks | DeadUplinks, cluster: Cluster) -> str | None:
    tiers = cluster.fabric.tiers
    above = beyond("tier", fault.tier, len(tiers), "tiers of the fabric")
    if above is not None:
        return above
    tier = tiers[fault.tier]
    groups = -(-cluster.nodes // tier.nodes_below)
    beside = beyond("group", fault.group, groups, f"groups of {tier.name}")
    if beside is not None or fault.rail is None:
        return beside
    count = rail_count(cluster) if has_rails(cluster, fault.tier) else 0
    return beyond("rail", fault.rail, count, f"rails of {tier.name}")


def beyond(field: str, number: int, limit: int, what: str) -> str | None:
    """Return an error line unless 0 <= `number` < `limit`, the count of `what`; else None."""
    if 0 <= number < limit:
        return None
    if limit == 1:
        return f"{field}: {number} must be 0: there are no other {what}"
    allowed = f"must be 0 to {limit - 1}" if limit else "is none"
    return f"{field}: {number} {allowed}: there are {limit} {what}"
