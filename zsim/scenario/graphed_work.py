"""A cluster whose host launches parts of a step as CUDA graphs."""

from collections.abc import Iterator
from dataclasses import replace

from zsim.cluster.cluster import Cluster
from zsim.cluster.profile.graph_launch import GraphedWork
from zsim.cluster.profile.host_launch import FREE
from zsim.model.model import Model, Unit
from zsim.strategy.cuda_graphs import CudaGraphs

OF_MLP = frozenset(("ln2", "gate", "up", "down"))
"""Names of the parameters of a block's MLP and of the norm before it."""


def with_graphs(cluster: Cluster, model: Model, graphs: CudaGraphs | None) -> Cluster:
    """Return `cluster` with the host times of a step whose parts are in `graphs`.

    A segment that computes the end of attention and the MLP counts as MLP.
    """
    gpu = cluster.gpu
    if graphs is None or gpu.launch_costs == FREE or gpu.measured is not None:
        return cluster
    costs = gpu.launch_costs
    is_half = graphs.attention is not graphs.mlp
    if graphs.iteration:
        costs = replace(costs, graphs=GraphedWork(iteration=True))
    else:
        runs = [run for unit in model.units for run in _runs(unit, graphs)]
        half_ps = costs.unit_ps // 2
        work = GraphedWork(
            segments=frozenset(key for run in runs for key in run),
            first=frozenset(run[0] for run in runs),
            last=frozenset(run[-1] for run in runs),
            python_ps=half_ps if is_half and graphs.attention else 0,
        )
        unit_ps = half_ps if is_half and graphs.mlp else costs.unit_ps
        costs = replace(costs, graphs=work, unit_ps=unit_ps)
    if gpu.kernels is None:
        return replace(cluster, gpu=replace(gpu, launch=costs))
    return replace(cluster, gpu=gpu.timed_by(replace(gpu.kernels, launch=costs)))


def _runs(unit: Unit, graphs: CudaGraphs) -> Iterator[list[tuple[str, int]]]:
    """Yield the segments of a block that each graph captures."""
    halves: tuple[list[tuple[str, int]], list[tuple[str, int]]] = ([], [])
    in_mlp = False
    for number, segment in enumerate(unit.segments):
        in_mlp = in_mlp or any(name.split(".")[-2] in OF_MLP for name in segment.parameters)
        halves[in_mlp].append((unit.name, number))
    attention, mlp = halves
    if not in_mlp or not attention:  # an embedding or a head
        return
    if graphs.joined:
        yield [*attention, *mlp]
        return
    if graphs.attention:
        yield attention
    if graphs.mlp:
        yield mlp
