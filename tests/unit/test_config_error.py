"""Whatever stands in a file, what is wrong with it is told in plain words: never in pydantic's."""

from collections.abc import Iterator
from typing import get_args

import pytest
from pydantic import BaseModel, ValidationError

from zsim.cluster.files.explicit_fabric import EdgeTable
from zsim.config_error import CONTRADICTION, WORDING, line
from zsim.scenario.fault_tables import NeighbourTable
from zsim.scenario.tables import Scenario
from zsim_study.study.file import GoalTable, StudyFile

VALUES: tuple[object, ...] = (
    *("x", "", "1", "-3 GB", True, 0, -1, 1.5, 10**30, 10**400, float("nan"), float("inf")),
    *([], [1], [1, 2, 3], ["x", None], [[]], {}, {"a": 1}, {"a": "x"}, {"a": {"b": []}}, [{}]),
    [{"kind": "x"}],
)
"""Values of every kind that TOML has."""


def tables(kind: type[BaseModel]) -> Iterator[type[BaseModel]]:
    """`kind` and the tables inside it."""
    yield kind
    for field in kind.model_fields.values():
        for each in flat(field.annotation):
            if isinstance(each, type) and issubclass(each, BaseModel):
                yield from tables(each)


def flat(hint: object) -> Iterator[object]:
    yield hint
    for each in get_args(hint):
        yield from flat(each)


def told(kind: type[BaseModel], table: object) -> tuple[str, set[str]] | None:
    """What is wrong with `table`, and pydantic's names of it; None if nothing is."""
    try:
        kind.model_validate(table)
    except ValidationError as error:
        errors = error.errors(include_url=False)
        return line(errors, kind), {each["type"] for each in errors}
    return None


def test_every_kind_of_wrong_value_has_plain_words() -> None:
    seen: set[str] = set()
    for kind in [*tables(Scenario), *tables(StudyFile), *tables(EdgeTable)]:
        required = [name for name, field in kind.model_fields.items() if field.is_required()]
        for name in kind.model_fields:
            for value in VALUES:
                found = told(kind, {name: value})
                if found is None:
                    continue
                said, types = found
                seen |= types
                assert "\n" not in said
                assert "should" not in said
                assert "valid" not in said
                fields = said.split(":")[0].split(", ")
                assert {field.split(".")[0] for field in fields} <= {name, *required}
    assert seen == WORDING.keys() | {"extra_forbidden", "union_tag_not_found", CONTRADICTION}


PRICE = "price_per_gpu_hour"

WRONG: dict[str, tuple[type[BaseModel], object]] = {
    "nodes: 3 must be a list": (NeighbourTable, {"nodes": 3}),
    "nodes: [1] must be a list of 2 or more": (NeighbourTable, {"nodes": [1]}),
    "nodes: [1, 2, 3] must be a list of at most 2": (NeighbourTable, {"nodes": [1, 2, 3]}),
    "nodes.1: 'x' must be a whole number": (NeighbourTable, {"nodes": [1, "x"]}),
    f"{PRICE}: 'x' must be a number or a table": (GoalTable, {PRICE: "x"}),
    f"{PRICE}: -1 must be more than 0": (GoalTable, {PRICE: -1}),
    f"{PRICE}.H100: 'x' must be a number": (GoalTable, {PRICE: {"H100": "x"}}),
    "axis: a table must be a list of tables, each under [[axis]]": (
        StudyFile,
        {"question": "?", "base": {}, "axis": {"field": "zero.stage"}},
    ),
    "base: 3 must be a table": (StudyFile, {"question": "?", "base": 3}),
    "source: '' must match": (EdgeTable, {"source": ""}),
    "[] must be a table": (StudyFile, []),
    "true must be a table": (EdgeTable, True),
}


@pytest.mark.parametrize("said", WRONG)
def test_a_list_a_table_and_a_value_of_two_forms_are_called_so(said: str) -> None:
    kind, table = WRONG[said]
    found = told(kind, table)
    assert found is not None
    assert found[0].startswith(said)
