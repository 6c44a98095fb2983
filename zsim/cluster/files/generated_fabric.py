"""Fabrics whose links follow from a few numbers: torus and dragonfly.

    kind = "torus"                  # each node is joined to the next in each dimension, in rings
    sizes = "4x4x4"                 # nodes are numbered along the last dimension first

    kind = "dragonfly"              # Kim et al. 2008, Technology-driven, highly-scalable dragonfly
    groups = 9                      # routers of a group are all joined; groups are all joined
    routers = 4                     # of a group
    nodes = 2                       # of a router, each with all its NICs
    global = 2                      # links of a router to other groups
    routing = "adaptive"            # also through other groups where the direct way is full

A node of a torus divides its NICs evenly among its neighbours. Links of a dragonfly are as fast as
all NICs of a node together. `bandwidth_per_direction`, `global_bandwidth_per_direction` and
`latency` of a link change this.
"""

from collections import Counter
from collections.abc import Iterator
from itertools import combinations, product
from math import prod
from typing import Annotated, Any, Final

from pydantic import BeforeValidator, Field

from zsim.cluster.cluster import Cluster, Fabric, FabricEdge, FabricRouting, Link
from zsim.cluster.fabric_kind import DRAGONFLY, TORUS
from zsim.cluster.files.fabric_reader import FabricReader, FabricTable
from zsim.cluster.files.table import Bandwidth, Count, Time, TopologyError, read
from zsim.config_error import shown
from zsim.units import UnitError

MOST_LINKS: Final = 65_536
"""Links of a generated fabric, so that a number with a digit too many ends at once."""

HOP_PS: Final = 130_000
"""NVIDIA, Quantum QM8700 datasheet (HDR): sub-130 ns from port to port, without cables."""

GLOBAL_HOPS: Final = 3
"""Hops that a global link counts for, so that the shortest way between groups takes only one.

Two global links count 6, one with a local link at each end 5 (minimal routing of Kim et al. 2008).
"""


def _sizes(value: object) -> object:
    """Return "4x4x2", or a number, as a list; lists as they are; raise UnitError for other text."""
    if not isinstance(value, str):
        return [value] if isinstance(value, int) else value
    parts = value.lower().split("x")
    if not all(map(str.isdecimal, parts)):
        raise UnitError(f"{shown(value)} must be sizes such as 4x4x4")
    return list(map(int, parts))


Sizes = Annotated[tuple[Count, ...], BeforeValidator(_sizes), Field(min_length=1, max_length=6)]


class _TorusFile(FabricTable):
    """The whole file."""

    sizes: Sizes
    bandwidth_per_direction: Bandwidth | None = None
    latency: Time = HOP_PS


def _torus(name: str, table: dict[str, Any], node: Cluster) -> Fabric:
    """Return the links between neighbours in a torus of any number of dimensions."""
    file = read(_TorusFile, name, table)
    ends = sum(min(size - 1, 2) for size in file.sizes)
    if not ends:
        raise TopologyError(f"{name}: sizes: a torus needs at least 2 nodes")
    _need_few(name, "sizes", prod(file.sizes) * ends // 2)
    each = file.bandwidth_per_direction or node.node_bytes_per_s // ends
    link = Link(bytes_per_s=each, latency_ps=file.latency)
    return Fabric(
        kind=TORUS,
        edges=tuple(
            FabricEdge(source=f"node{one}", target=f"node{other}", link=link)
            for one, other in sorted(set(_neighbours(file.sizes)))
        ),
    )


def _neighbours(sizes: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """Yield each pair of neighbours, the smaller number first; some twice."""
    strides = [prod(sizes[index + 1 :]) for index in range(len(sizes))]
    for place in product(*map(range, sizes)):
        here = sum(at * stride for at, stride in zip(place, strides, strict=True))
        for at, size, stride in zip(place, sizes, strides, strict=True):
            there = here + ((at + 1) % size - at) * stride
            if there != here:
                yield min(here, there), max(here, there)


class _DragonflyFile(FabricTable):
    """The whole file."""

    groups: Annotated[Count, Field(ge=2)]
    routers: Count
    nodes: Count
    global_: Annotated[Count, Field(alias="global")]
    bandwidth_per_direction: Bandwidth | None = None
    global_bandwidth_per_direction: Bandwidth | None = None
    latency: Time = HOP_PS
    routing: FabricRouting = FabricRouting.MINIMAL


def _dragonfly(name: str, table: dict[str, Any], node: Cluster) -> Fabric:
    """Return the links of nodes, groups and pairs of groups.

    The global links of a group are divided evenly among the other groups; what is left is unused.
    """
    file = read(_DragonflyFile, name, table)
    ports, others = file.routers * file.global_, file.groups - 1
    if ports < others:
        raise TopologyError(
            f"{name}: global: {file.global_} of {file.routers} routers reach {ports} groups, "
            f"must be at least {-(-others // file.routers)} to reach the {others} others"
        )
    within = file.routers * (file.routers - 1) // 2
    links = file.groups * (within + file.routers * file.nodes + ports)
    _need_few(name, "groups", links)
    speed = file.bandwidth_per_direction or node.node_bytes_per_s
    own = Link(bytes_per_s=node.node_bytes_per_s, latency_ps=file.latency)
    local = Link(bytes_per_s=speed, latency_ps=file.latency)
    far = file.global_bandwidth_per_direction or speed
    routers = list(product(range(file.groups), range(file.routers)))
    edges = [
        FabricEdge(source=f"node{number}", target=_router(*routers[number // file.nodes]), link=own)
        for number in range(len(routers) * file.nodes)
    ]
    edges += [
        FabricEdge(source=_router(group, one), target=_router(group, other), link=local)
        for group in range(file.groups)
        for one, other in combinations(range(file.routers), 2)
    ]
    edges += [
        FabricEdge(
            source=source,
            target=target,
            link=Link(bytes_per_s=far * count, latency_ps=file.latency),
            hops=GLOBAL_HOPS,
        )
        for (source, target), count in Counter(_global_links(file)).items()
    ]
    return Fabric(kind=DRAGONFLY, edges=tuple(edges), routing=file.routing)


def _router(group: int, number: int) -> str:
    return f"group{group}.router{number}"


def _global_links(file: _DragonflyFile) -> Iterator[tuple[str, str]]:
    """Yield the ends of each global link; links side by side several times.

    The ports of a group lead to the groups after it in turn, the same number to each.
    """
    width = file.routers * file.global_ // (file.groups - 1)
    for one, other in combinations(range(file.groups), 2):
        for index in range(width):
            ports = (
                (to - from_ - 1) % file.groups * width + index
                for from_, to in ((one, other), (other, one))
            )
            first, second = (port // file.global_ for port in ports)
            yield _router(one, first), _router(other, second)


def _need_few(name: str, key: str, links: int) -> None:
    if links > MOST_LINKS:
        raise TopologyError(f"{name}: {key}: {links:,} links, must be at most {MOST_LINKS:,}")


READERS = (
    FabricReader(kind=TORUS, read=_torus),
    FabricReader(kind=DRAGONFLY, read=_dragonfly),
)
