"""Files that describe published runs: every number has a source, and no wait is theirs."""

import ast
import inspect
import tomllib
from collections.abc import Iterator, Mapping
from importlib.resources import files
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zsim_lab.rows import csv_rows, expression, training_tables
from zsim_lab.rows.expression import ExpressionError, evaluated
from zsim_lab.rows.training_tables import TABLES

FORMS: dict[str, dict[str, Any]] = {
    path.name: tomllib.loads(path.read_text("utf-8"))
    for path in (files("zsim_lab") / "runs").iterdir()
}
STRUCTURAL = {0, 1}
"""Numbers that an expression may have without a source: no rank, one more, the first stage."""
LINES = 2
"""Number of the first line below a header, which is no constant of a run."""


def leaves(value: object, path: str = "") -> Iterator[tuple[str, object]]:
    if isinstance(value, dict):
        for key, each in value.items():
            yield from leaves(each, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list):
        for each in value:
            yield from leaves(each, path)
    else:
        yield path, value


def numbers_in(text: str) -> set[float]:
    return {
        node.value
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Constant)
        and isinstance(node.value, int | float)
        and not isinstance(node.value, bool)
    }


def names_in(form: Mapping[str, Any], text: str) -> set[str]:
    """Return the names that an expression uses, those of `[let]` with all that they use."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(text, mode="eval")):
        if isinstance(node, ast.Name) and node.id not in found:
            found.add(node.id)
            given_as = form.get("let", {}).get(node.id)
            if isinstance(given_as, str):
                found |= names_in(form, given_as.removeprefix("= "))
    return found


@pytest.mark.parametrize("name", FORMS)
def test_every_number_of_a_publication_has_its_source(name: str) -> None:
    form = FORMS[name]
    for value, source in form.get("stated", {}).values():
        assert isinstance(value, int | float | str)
        assert source
    sourced = ("stated", "words", "dates", "system.memory_gb")
    for path, value in leaves(form):
        if path.startswith(sourced):
            continue
        if isinstance(value, str) and value.startswith("= "):
            assert numbers_in(value.removeprefix("= ")) <= STRUCTURAL, path
        elif isinstance(value, int | float) and not isinstance(value, bool):
            assert value in STRUCTURAL, path


@pytest.mark.parametrize("name", FORMS)
def test_kernels_hosts_and_networks_of_a_row_are_profiles_that_anyone_may_take(name: str) -> None:
    form = FORMS[name]
    assert set(form["scenario"]["compute"]) == {"profile"}
    assert set(form["scenario"]["network"]) == {"profile"}
    for way in form.get("way", ()):
        assert set(way["set"]) <= {"zero"}


@pytest.mark.parametrize("name", FORMS)
def test_no_key_of_a_scenario_depends_on_a_number_of_nodes(name: str) -> None:
    form = FORMS[name]
    for path, value in leaves([form["scenario"], form.get("way", [])]):
        if isinstance(value, str) and value.startswith("= "):
            assert "nodes" not in names_in(form, value.removeprefix("= ")), path


def test_what_reads_rows_has_no_number_that_reaches_a_prediction() -> None:
    for module in (training_tables, expression, csv_rows):
        allowed = STRUCTURAL | {LINES}
        if module is training_tables:
            allowed |= {training_tables.NEAR_GB}  # it chooses among the GPUs of a file
        assert numbers_in(inspect.getsource(module)) <= allowed, module.__name__


def test_every_file_of_runs_is_described_once() -> None:
    described = [file for form in FORMS.values() for file in form["files"]]
    assert sorted(described) == sorted(TABLES)
    for form in FORMS.values():
        assert set(form.get("judges", ())) <= set(form["files"])


@given(a=st.integers(1, 99), b=st.integers(1, 99), flag=st.booleans())
def test_an_expression_is_arithmetic_on_its_names(a: int, b: int, *, flag: bool) -> None:
    names = {"a": a, "b": b, "flag": flag, "least": min}
    assert evaluated("-(-a // b) if flag else least(a, b) + 1", names) == (
        -(-a // b) if flag else min(a, b) + 1
    )


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("a.real", "Attribute is not allowed"),
        ("[x for x in a]", "ListComp is not allowed"),
        ("lambda: a", "Lambda is not allowed"),
        ("a +", "invalid syntax"),
        ("b", "name 'b' is not defined"),
        ("open('x')", "name 'open' is not defined"),
    ],
)
def test_an_expression_has_nothing_else(text: str, why: str) -> None:
    with pytest.raises(ExpressionError, match=why):
        evaluated(text, {"a": 1})
