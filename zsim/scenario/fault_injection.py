"""Faults and neighbours of a scenario as values. Needs its cluster, to know the fabric's tiers."""

from collections.abc import Iterator

from zsim.cluster.cluster import Cluster
from zsim.cluster.fault import Fault, FaultError, Neighbour
from zsim.config_error import joined
from zsim.scenario.faults import absence, beyond
from zsim.scenario.tables import Scenario, ScenarioError


class TroubleError(ScenarioError):
    """Faults or neighbours that name what is not there: a slip, whatever else a scenario says."""


def injected(
    scenario: Scenario, cluster: Cluster, ranks: int
) -> tuple[tuple[Fault, ...], tuple[Neighbour, ...]]:
    """Return the faults and the neighbours of a run on so many ranks of `cluster`, in order.

    Raises:
        TroubleError: some of them name what the cluster does not have.
    """
    wrong = [*_wrong_faults(scenario, cluster, ranks), *_wrong_neighbours(scenario, cluster)]
    if wrong:
        raise TroubleError(joined(wrong))
    return (
        tuple(table.on(cluster) for table in scenario.fault),
        tuple(table.neighbour() for table in scenario.neighbour),
    )


def _wrong_faults(scenario: Scenario, cluster: Cluster, ranks: int) -> Iterator[str]:
    for index, table in enumerate(scenario.fault):
        try:
            why = absence(table.on(cluster), cluster, ranks)
        except FaultError as error:
            why = str(error)
        if why is not None:
            yield f"fault.{index}.{why}"


def _wrong_neighbours(scenario: Scenario, cluster: Cluster) -> Iterator[str]:
    for index, table in enumerate(scenario.neighbour):
        why = beyond("nodes", table.nodes[1], cluster.nodes, "nodes")
        if why is not None:
            yield f"neighbour.{index}.{why}"
