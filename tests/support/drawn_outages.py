"""What Hypothesis draws to be dead, as faults and as the graph of all devices takes it."""

from hypothesis import strategies as st
from link_graph import DeadThings

from zsim.cluster.cluster import Cluster, FabricEdge
from zsim.cluster.fault import DeadEdge, DeadNic, DeadSwitchLink, DeadUplinks, Fault
from zsim.cluster.links import has_rails


@st.composite
def outages(draw: st.DrawFn, cluster: Cluster) -> tuple[tuple[Fault, ...], DeadThings]:
    """NICs, links of GPUs, uplinks and edges, a few at most and often none."""
    nodes, nics = st.integers(0, cluster.nodes - 1), st.integers(0, cluster.nics_per_node - 1)
    dead_nics = draw(st.sets(st.tuples(nodes, nics), max_size=2))
    if cluster.nics_per_node > cluster.gpus_per_node:
        dead_nics = set()  # of a bundle the others carry it all: it is slow, not dead
    ranks = draw(st.sets(st.integers(0, cluster.ranks - 1), max_size=1))
    uplinks: set[tuple[int, int, int]] = set()
    rails = min(cluster.gpus_per_node, cluster.nics_per_node)
    for number, tier in enumerate(cluster.fabric.tiers):
        groups = st.integers(0, -(-cluster.nodes // tier.nodes_below) - 1)
        rail = st.integers(0, rails - 1) if has_rails(cluster, number) else st.just(0)
        uplinks |= {(number, *each) for each in draw(st.sets(st.tuples(groups, rail), max_size=1))}
    cut: list[FabricEdge] = []
    if cluster.fabric.edges:
        cut = draw(st.lists(st.sampled_from(cluster.fabric.edges), max_size=2))
    faults: list[Fault] = [DeadNic(node=node, nic=nic) for node, nic in sorted(dead_nics)]
    faults += [DeadSwitchLink(rank=rank) for rank in ranks]
    for tier_number, group, each in uplinks:
        on_rail = each if has_rails(cluster, tier_number) else None
        faults.append(DeadUplinks(tier=tier_number, group=group, rail=on_rail))
    faults += [DeadEdge(source=edge.target, target=edge.source) for edge in cut]
    return tuple(faults), DeadThings(
        nics=frozenset(dead_nics),
        ranks=frozenset(ranks),
        uplinks=frozenset(uplinks),
        edges=frozenset(frozenset((edge.source, edge.target)) for edge in cut),
    )
