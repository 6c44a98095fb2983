"""Faults and neighbours of a scenario as values. Needs the cluster, for its fabric's tiers."""

from collections.abc import Iterator, Sequence

from zsim.cluster.absent_hardware import absence, beyond
from zsim.cluster.cluster import Cluster
from zsim.cluster.fault import Fault, FaultError, Flaky, Neighbour
from zsim.scenario.fault_tables import FaultTable, LinkFault, NeighbourTable
from zsim.scenario.tables import ScenarioError


class AbsentHardwareError(ScenarioError):
    """Faults or neighbours that name missing hardware: always a mistake in the scenario."""


def injected(
    faults: Sequence[FaultTable],
    neighbours: Sequence[NeighbourTable],
    cluster: Cluster,
    ranks: int,
) -> tuple[tuple[Fault, ...], tuple[Neighbour, ...]]:
    """Return the faults and the neighbours of a run on `ranks` ranks of `cluster`, in order.

    Raises:
        AbsentHardwareError: some of them name hardware that the cluster does not have.
    """
    wrong = [*_wrong_faults(faults, cluster, ranks), *_wrong_neighbours(neighbours, cluster)]
    if wrong:
        raise AbsentHardwareError(*wrong)
    return (
        tuple(table.on(cluster) for table in faults),
        tuple(table.neighbour() for table in neighbours),
    )


def flaky_of(faults: Sequence[FaultTable], neighbours: Sequence[NeighbourTable]) -> Flaky | None:
    """Return the probability of the only fault; None if all faults are certain.

    Raises:
        AbsentHardwareError: a fault with a probability is not the only one.
    """
    for index, table in enumerate(faults):
        if not isinstance(table, LinkFault) or table.probability is None:
            continue
        if len(faults) > 1 or neighbours:
            raise AbsentHardwareError(
                f"fault.{index}.probability: {table.probability:g} must be of the only fault; "
                "remove the other faults and neighbours"
            )
        return Flaky(probability=table.probability, links=table.links or 1)
    return None


def _wrong_faults(faults: Sequence[FaultTable], cluster: Cluster, ranks: int) -> Iterator[str]:
    for index, table in enumerate(faults):
        try:
            why = absence(table.on(cluster), cluster, ranks)
        except FaultError as error:
            why = str(error)
        if why is not None:
            yield f"fault.{index}.{why}"


def _wrong_neighbours(neighbours: Sequence[NeighbourTable], cluster: Cluster) -> Iterator[str]:
    for index, table in enumerate(neighbours):
        why = beyond("nodes", table.nodes[1], cluster.nodes, "nodes")
        if why is not None:
            yield f"neighbour.{index}.{why}"
