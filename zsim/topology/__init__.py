"""Clusters from files: nodes, fabrics and systems; what they can carry, and their picture."""

from zsim.topology.compose import Find, cluster_of
from zsim.topology.table import Part, TopologyError, UnknownTopologyError

__all__ = ["Find", "Part", "TopologyError", "UnknownTopologyError", "cluster_of"]
