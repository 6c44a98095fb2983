"""A cluster whose host launches parts of a step as CUDA graphs."""

from dataclasses import replace

from zsim.cluster.cluster import Cluster
from zsim.cluster.profile.graph_launch import GraphedWork
from zsim.cluster.profile.host_launch import FREE, LaunchCosts
from zsim.model.model import Model, Unit
from zsim.strategy.cuda_graphs import CudaGraphs

Key = tuple[str, int]
"""The name of a unit, and the number of a segment."""

OF_MLP = frozenset(("ln2", "gate", "up", "down"))
"""Names of the parameters of a block's MLP and of the norm before it."""


def with_graphs(cluster: Cluster, model: Model, graphs: CudaGraphs) -> Cluster:
    """Return `cluster` with the host times of a step whose parts are in `graphs`.

    A segment that computes the end of attention and the MLP counts as MLP. A segment that is
    a whole block counts as two equal parts.
    """
    gpu = cluster.gpu
    if gpu.launch_costs == FREE or gpu.measured is not None:
        return cluster
    costs = gpu.launch_costs
    if graphs.iteration:
        costs = replace(costs, graphs=GraphedWork(iteration=True))
    else:
        costs = _of_blocks(costs, model, graphs)
    if gpu.kernels is None:
        return replace(cluster, gpu=replace(gpu, launch=costs))
    return replace(cluster, gpu=gpu.timed_by(replace(gpu.kernels, launch=costs)))


def _of_blocks(costs: LaunchCosts, model: Model, graphs: CudaGraphs) -> LaunchCosts:
    """Return `costs` if each block is in one or two graphs."""
    captured: list[list[Key]] = []
    halved: list[Key] = []
    half_ps, is_half = costs.unit_ps // 2, graphs.attention is not graphs.mlp
    for unit in model.units:
        attention, mlp = _halves(unit)
        if not mlp:  # an embedding or a head
            continue
        if graphs.joined or (not attention and not is_half):
            captured.append([*attention, *mlp])
        elif not attention:
            halved += mlp
        else:
            wanted = ((graphs.attention, attention), (graphs.mlp, mlp))
            captured += [half for is_wanted, half in wanted if is_wanted]
    work = GraphedWork(
        segments=frozenset(key for run in captured for key in run),
        halved=frozenset(halved),
        first=frozenset([*(run[0] for run in captured), *halved]),
        last=frozenset([*(run[-1] for run in captured), *halved]),
        python_ps=half_ps if is_half and graphs.attention and not halved else 0,
    )
    unit_ps = half_ps if is_half and graphs.mlp and not halved else costs.unit_ps
    return replace(costs, graphs=work, unit_ps=unit_ps)


def _halves(unit: Unit) -> tuple[list[Key], list[Key]]:
    """Return the segments of a unit before and from the first that computes its MLP."""
    halves: tuple[list[Key], list[Key]] = ([], [])
    in_mlp = False
    for number, segment in enumerate(unit.segments):
        in_mlp = in_mlp or any(name.split(".")[-2] in OF_MLP for name in segment.parameters)
        halves[in_mlp].append((unit.name, number))
    return halves
