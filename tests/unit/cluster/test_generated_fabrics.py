"""A torus and a dragonfly from a few numbers, as files and as one line."""

from collections import Counter, defaultdict
from math import prod
from pathlib import Path

import networkx as nx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import zsim
from zsim.api.topology_result import read_topology
from zsim.cluster.cluster import Cluster, FabricEdge, FabricRouting, Link
from zsim.cluster.files import TopologyError
from zsim.cluster.links import edges_in_use
from zsim.files.installed import topology
from zsim_des.network.edge_routes import EdgeRoutes

NODE_BYTES_PER_S = 8 * 50 * 10**9
"""Of a DGX H100."""

SIZES = st.lists(st.integers(1, 5), min_size=1, max_size=3).filter(lambda each: prod(each) > 1)


@st.composite
def dragonflies(draw: st.DrawFn, *, routing: str = "minimal") -> str:
    groups, routers = draw(st.integers(2, 6)), draw(st.integers(1, 4))
    least = -(-(groups - 1) // routers)
    wide, nodes = draw(st.integers(least, least + 2)), draw(st.integers(1, 3))
    sizes = f"groups={groups},routers={routers},nodes={nodes},global={wide}"
    return f"dragonfly:{sizes},routing={routing}"


def on(fabric: str) -> Cluster:
    return topology("dgx_h100", fabric, 1)


def nodes_of(edges: tuple[FabricEdge, ...]) -> list[int]:
    ends = {end for edge in edges for end in (edge.source, edge.target)}
    return sorted(int(end[4:]) for end in ends if end.startswith("node"))


@given(SIZES)
def test_neighbours_in_a_torus_are_as_far_as_in_its_rings(sizes: list[int]) -> None:
    edges = on(f"torus:sizes={'x'.join(map(str, sizes))}").fabric.edges
    graph = nx.Graph([(edge.source, edge.target) for edge in edges])
    assert nodes_of(edges) == list(range(prod(sizes)))
    places = list(np.ndindex(*sizes))
    away = nx.single_source_shortest_path_length(graph, "node0")
    for number, place in enumerate(places):
        ring = sum(min(at, size - at) for at, size in zip(place, sizes, strict=True))
        assert away[f"node{number}"] == ring
    ends = sum(min(size - 1, 2) for size in sizes)
    assert {degree for _, degree in graph.degree} == {ends}
    assert {edge.link.bytes_per_s for edge in edges} == {NODE_BYTES_PER_S // ends}


@given(dragonflies())
def test_groups_of_a_dragonfly_are_all_joined_by_as_many_links(line: str) -> None:
    edges = on(line).fabric.edges
    keys = dict(part.split("=") for part in line.partition(":")[2].split(","))
    groups, routers, nodes = (int(keys[each]) for each in ("groups", "routers", "nodes"))
    assert nodes_of(edges) == list(range(groups * routers * nodes))
    width: Counter[frozenset[str]] = Counter()
    ports: Counter[str] = Counter()
    for edge in edges:
        if edge.hops > 1:
            count = edge.link.bytes_per_s // NODE_BYTES_PER_S
            width[frozenset(each.partition(".")[0] for each in (edge.source, edge.target))] += count
            ports += {edge.source: count, edge.target: count}
    assert len(width) == groups * (groups - 1) // 2
    assert set(width.values()) == {routers * int(keys["global"]) // (groups - 1)}
    assert max(ports.values()) <= int(keys["global"])
    within = [edge for edge in edges if edge.hops == 1 and not edge.source.startswith("node")]
    assert len(within) == groups * routers * (routers - 1) // 2


@given(dragonflies(), st.data())
def test_a_minimal_route_of_a_dragonfly_takes_one_link_between_groups(
    line: str, data: st.DataObject
) -> None:
    edges = on(line).fabric.edges
    nodes = st.sampled_from(nodes_of(edges))
    source, target = data.draw(nodes), data.draw(nodes)
    if source == target:
        return
    link, _, divisor = EdgeRoutes(edges, 0).links(np.array([source]), np.array([target]))
    router = {edge.source: edge.target for edge in edges if edge.source.startswith("node")}
    groups = {router[f"node{each}"].partition(".")[0] for each in (source, target)}
    far = sum(1 / part for number, part in zip(link, divisor, strict=True) if is_far(edges, number))
    assert far == pytest.approx(len(groups) - 1)


def is_far(edges: tuple[FabricEdge, ...], link: int) -> bool:
    return edges[link // 2].hops > 1


@given(dragonflies(), st.data())
def test_adaptive_routes_fill_no_link_more_than_minimal_ones(
    line: str, data: st.DataObject
) -> None:
    edges = on(line).fabric.edges
    nodes = nodes_of(edges)
    targets = data.draw(st.permutations(nodes))
    pairs = [pair for pair in zip(nodes, targets, strict=True) if pair[0] != pair[1]]
    if not pairs:
        return
    fullest = [
        busiest(edges, EdgeRoutes(edges, 0, routing=routing), pairs) for routing in FabricRouting
    ]
    assert fullest[1] <= fullest[0] * (1 + 1e-9)


def busiest(
    edges: tuple[FabricEdge, ...], routes: EdgeRoutes, pairs: list[tuple[int, int]]
) -> float:
    """Return the time of the fullest link; what enters and leaves each end is checked."""
    source, target = np.array(pairs).T
    link, which, divisor = routes.links(source, target)
    kept: defaultdict[tuple[int, str], float] = defaultdict(float)
    loads: defaultdict[int, float] = defaultdict(float)
    for number, pair, part in zip(link.tolist(), which.tolist(), divisor.tolist(), strict=True):
        ends = edges[number // 2].source, edges[number // 2].target
        here, there = ends if number % 2 == 0 else ends[::-1]
        kept[pair, here] -= 1 / part
        kept[pair, there] += 1 / part
        loads[number] += 1 / part / edges[number // 2].link.bytes_per_s
    for (pair, end), left in kept.items():
        one, other = (f"node{each}" for each in pairs[pair])
        assert left == pytest.approx({one: -1, other: 1}.get(end, 0), abs=1e-9)
    return max(loads.values())


def test_neighbouring_groups_fill_their_link_and_adaptive_routes_relieve_it() -> None:
    """The worst case of Kim et al. 2008, section 4.2: all nodes send to the next group."""
    line = "dragonfly:groups=9,routers=4,nodes=2,global=2"
    edges = on(line).fabric.edges
    nodes = nodes_of(edges)
    pairs = [(each, (each + 8) % len(nodes)) for each in nodes]
    minimal, adaptive = (
        busiest(edges, EdgeRoutes(edges, 0, routing=routing), pairs) for routing in FabricRouting
    )
    assert minimal * NODE_BYTES_PER_S == pytest.approx(8)  # eight nodes share one link
    assert adaptive < minimal / 3


def test_a_host_on_two_switches_passes_on_nothing() -> None:
    link = Link(bytes_per_s=10**9)
    plugs = [("node0", "a"), ("node1", "a"), ("node1", "b"), ("node2", "b"), ("a", "c"), ("c", "b")]
    edges = tuple(FabricEdge(source=one, target=other, link=link) for one, other in plugs)
    link_numbers, _, _ = EdgeRoutes(edges, 0).links(np.array([0]), np.array([2]))
    assert sorted(number // 2 for number in link_numbers.tolist()) == [0, 3, 4, 5]


def test_idle_nodes_of_a_torus_pass_on_bytes_of_a_job() -> None:
    """A ring of four nodes, two of them in the job, has both ways between these."""
    pair, ring = (topology("dgx_h100", f"torus:sizes={each}", 2) for each in (2, 4))
    assert len(edges_in_use(pair)) == 1
    assert len(edges_in_use(ring)) == 4


WRONG = {
    "torus:": "'' must be KEY=VALUE, each key once",
    "torus:sizes=4x4,sizes=2": "'sizes=2' must be KEY=VALUE, each key once",
    "torus:sizes=1": "sizes: a torus needs at least 2 nodes",
    "torus:sizes=4x0": "sizes.1: 0 must be at least 1",
    "torus:sizes=4*4": "sizes: '4*4' must be sizes such as 4x4x4",
    "torus:size=4": "size: unknown key; did you mean sizes?",
    "torus:sizes=4000x4000": "sizes: 32,000,000 links, must be at most 65,536",
    "dragonfly:groups=9,routers=4,nodes=2": "global: missing",
    "dragonfly:groups=9,routers=4,nodes=2,global=1": (
        "global: 1 of 4 routers reach 4 groups, must be at least 2 to reach the 8 others"
    ),
    "dragonfly:groups=900,routers=40,nodes=2,global=30": "groups: ",
    "dragonfly:groups=9,routers=4,nodes=2,global=2,routing=best": "routing: 'best' must be",
}


@pytest.mark.parametrize("line", WRONG)
def test_a_wrong_line_is_refused_with_the_key(line: str) -> None:
    with pytest.raises(TopologyError) as caught:
        on(line)
    assert str(caught.value).startswith(f"{line}: {WRONG[line]}")


def test_a_generated_fabric_is_written_as_links_that_a_fabric_may_be(tmp_path: Path) -> None:
    line = "dragonfly:groups=4,routers=2,nodes=2,global=2"
    found = read_topology("dgx_h100", nodes=16, fabric=line)
    found.save_links(tmp_path / "links.csv")
    read = read_topology("dgx_h100", nodes=16, fabric=str(tmp_path / "links.csv"))
    assert read.cluster.fabric.edges == found.cluster.fabric.edges
    assert read.narrowest == found.narrowest


def test_only_a_fabric_with_a_list_of_links_is_written(tmp_path: Path) -> None:
    tree = read_topology("dgx_h100", nodes=16, fabric="fat_tree_2")
    with pytest.raises(zsim.MistakeError, match=r"^--links: fat_tree has no list of links; "):
        tree.save_links(tmp_path / "links.csv")


def dead(source: str, target: str) -> str:
    fabric = "dragonfly:groups=4,routers=2,nodes=2,global=2"
    fault = f'[{{kind="link", source="{source}", target="{target}", dead=true}}]'
    changes = {"topology": "none", "node": "dgx_h100", "nodes": "16", "fabric": fabric}
    settings = [f"cluster.{key}={value}" for key, value in changes.items()]
    return dict(zsim.run("llama2_7b", [*settings, f"fault={fault}"]).facts())["dead link"]


def test_an_answer_says_what_becomes_of_the_bytes_of_a_dead_link() -> None:
    used = dead("group0.router0", "group1.router1")
    assert "a step of group0.router0 to group1.router1 take other ways; of the fabric's" in used
    idle = dead("group1.router0", "group3.router0")
    assert idle == "group1.router0 to group3.router0 carries nothing of this run while it works"
