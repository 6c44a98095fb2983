"""Locations that functions may read: attributes of objects, by name."""

import networkx as nx
import pytest

from zsim_torch.module.python_state import PythonState


class _Own:
    def __init__(self) -> None:
        self.rate = 1
        self.label = ""


def _by_name(thing: object) -> object:
    return thing.rate  # type: ignore[attr-defined]


def _by_string(thing: object) -> object:
    return getattr(thing, "rate", 0)


def _otherwise(thing: object) -> str:
    return str(thing)


@pytest.mark.parametrize("function", [_by_name, _by_string, _otherwise])
def test_an_attribute_of_an_installed_object_is_read_by_functions_that_name_it(
    function: object,
) -> None:
    graph: nx.Graph[int] = nx.Graph()
    vars(graph).update(rate=1, label="")
    state = PythonState.of([graph, function])
    assert {(id(graph), "rate"), (id(graph), "label")} <= state.locations
    assert state.reads((id(graph), "rate")) is (function is not _otherwise)
    assert not state.reads((id(graph), "label"))


def test_every_attribute_of_a_users_object_may_be_read() -> None:
    own = _Own()
    state = PythonState.of([own, _otherwise])
    assert state.reads((id(own), "rate"))
    assert state.reads((id(own), "label"))
    assert not state.reads((id(own), "missing"))
    assert not PythonState.of([_otherwise]).reads((id(own), "rate"))


def test_a_container_that_is_reached_may_be_read() -> None:
    own = _Own()
    vars(own)["rates"] = rates = [1]
    state = PythonState.of([own])
    assert state.reads((id(rates), None))
    assert not state.reads((id(rates), "rates"))
