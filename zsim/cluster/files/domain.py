"""NVSwitch domains of several nodes (NVL72 racks) that a job uses in part."""

from dataclasses import replace
from typing import Final

from zsim.cluster.cluster import Cluster, ClusterError

EVEN_SHARE: Final = (
    "a job on more than one domain takes as many nodes of each: NVIDIA recommends segments of 16 "
    "trays for jobs of 128 GPUs and more (developer blog, 2026: Slurm topology-aware job "
    "scheduling on GB200 NVL72)"
)
"""The rule by which a job is spread over NVSwitch domains, with its source."""


def domain_share(nodes: int, most: int) -> int:
    """Return the nodes of each NVSwitch domain that a job of `nodes` nodes uses.

    Schedulers spread a job evenly over domains (Slurm's `--segment`): the share is the largest
    divisor of `nodes` that fits a domain of `most` nodes. Without a divisor of at least half a
    domain, the job fills domains, and the last one has fewer of its nodes.
    """
    if nodes <= most:
        return most
    halves = range(most, (most - 1) // 2, -1)
    return next((count for count in halves if nodes % count == 0), most)


def in_domains(node: Cluster, nodes: int, given: int | None) -> Cluster:
    """Return `node` with the nodes that a job of `nodes` nodes uses of each NVSwitch domain.

    They are `given`, or an even share.

    Raises:
        ClusterError: a domain has fewer than `given` nodes.
    """
    most = node.nodes_per_domain
    if given is None:
        share = domain_share(nodes, most)
        if share == most:
            return node
        return replace(
            node,
            nodes_per_domain=share,
            cites=(
                *node.cites,
                ("nodes_per_domain", f"{share} of the {most} nodes of a domain; {EVEN_SHARE}"),
            ),
        )
    if given > most:
        why = "it is for nodes that share an NVSwitch" if most == 1 else "the nodes of a domain"
        raise ClusterError(f"nodes_per_domain: {given} must be at most {most}, {why}")
    return replace(node, nodes_per_domain=given)
