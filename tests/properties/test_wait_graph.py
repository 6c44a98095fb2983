"""Cycles among waits: there is one to name exactly where no order of the nodes exists."""

from graphlib import CycleError, TopologicalSorter

from hypothesis import given
from hypothesis import strategies as st

from zsim.proof.wait_graph import WaitGraph

WAITS = st.lists(st.tuples(st.integers(0, 7), st.integers(0, 7)), max_size=20)


def graph_of(waits: list[tuple[int, int]]) -> WaitGraph:
    graph = WaitGraph()
    for number in range(8):
        graph.node("", f"{number}")
    for node, other in waits:
        graph.wait(node, other, "it is drawn so")
    return graph


def has_order(waits: list[tuple[int, int]]) -> bool:
    try:
        TopologicalSorter(dict(enumerate(graph_of(waits).before))).prepare()
    except CycleError:
        return False
    return True


@given(waits=WAITS)
def test_a_cycle_is_named_where_there_is_no_order(waits: list[tuple[int, int]]) -> None:
    cycles = list(graph_of(waits).cycles())
    assert bool(cycles) is not has_order(waits)
    for cycle in cycles:
        nodes = [node for node, _ in cycle]
        pairs = zip(nodes, [*nodes[1:], nodes[0]], strict=True)
        assert all(pair in waits for pair in pairs)
    named = [node for cycle in cycles for node, _ in cycle]
    assert len(named) == len(set(named))
