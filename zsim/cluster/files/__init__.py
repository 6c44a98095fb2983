"""Clusters from files: nodes, fabrics and systems."""

from zsim.cluster.files.compose import Find, cluster_of
from zsim.cluster.files.table import Part, TopologyError, UnknownTopologyError

__all__ = ["Find", "Part", "TopologyError", "UnknownTopologyError", "cluster_of"]
