"""Every kind of operation has a row, and every interpreter in its row knows it."""

import ast
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import ClassVar, get_args, get_type_hints

import pytest

from zsim.schedule.communication import Communication
from zsim.schedule.operation import CollectiveOperation, Operand, Operation, View
from zsim.schedule.operation_kinds import KINDS, LOCAL_VALUES, READERS, VALUES, OperationKind

INTERPRETERS = (*READERS, *VALUES, *LOCAL_VALUES)


@cache
def matched(interpreter: str) -> frozenset[str]:
    """Return the names of classes in the patterns of an interpreter, which must be complete."""
    module, _, name = interpreter.partition(":")
    spec = find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    tree = ast.parse(Path(spec.origin).read_text("utf-8"))
    found = [
        node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == name
    ]
    (function,) = found
    nodes = list(ast.walk(function))
    assert "assert_never" in {node.id for node in nodes if isinstance(node, ast.Name)}
    return frozenset(
        ast.unparse(node.cls) for node in nodes if isinstance(node, ast.MatchClass)
    ) | frozenset(chain.from_iterable(map(_tested, nodes)))


def _tested(node: ast.AST) -> Iterator[str]:
    """Yield the names of classes that an `isinstance` or a comparison of types tests."""
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "isinstance":
        yield from ast.unparse(node.args[1]).split(" | ")
    if isinstance(node, ast.Compare) and ast.unparse(node.left).startswith("type("):
        yield from map(ast.unparse, node.comparators)


def missing(row: OperationKind) -> list[str]:
    """Return the interpreters in a row that have no pattern for its kind or a class above it."""
    known = {each.__name__ for each in row.kind.__mro__}
    return [each for each in row.interpreters if known.isdisjoint(matched(each))]


def test_each_kind_of_operation_has_one_row() -> None:
    union = {kind for each in get_args(Operation) for kind in _kinds_of(each)}
    assert [row.kind for row in KINDS] == list(dict.fromkeys(row.kind for row in KINDS))
    assert {row.kind for row in KINDS} == union


def _kinds_of(kind: type[Operation]) -> tuple[type[Operation], ...]:
    return kind.kinds() if issubclass(kind, Communication) else (kind,)


@pytest.mark.parametrize("row", KINDS, ids=lambda row: row.kind.__name__)
def test_every_interpreter_in_its_row_knows_a_kind(row: OperationKind) -> None:
    assert missing(row) == []


@pytest.mark.parametrize("row", KINDS, ids=lambda row: row.kind.__name__)
def test_the_operands_of_a_row_are_the_fields_with_views(row: OperationKind) -> None:
    holders = (View, Operand, Communication)
    hints = get_type_hints(row.kind)
    views = [
        name
        for name in row.kind.__struct_fields__
        if any(_holds(hints[name], holder) for holder in holders)
    ]
    assert list(row.operands) == views


def _holds(hint: object, kind: type) -> bool:
    if isinstance(hint, type):
        return issubclass(hint, kind)
    return any(_holds(each, kind) for each in get_args(hint))


def test_a_row_sends_if_its_kind_counts_bytes() -> None:
    for row in KINDS:
        if issubclass(row.kind, CollectiveOperation):
            assert row.laps > 0
            assert row.sends
        elif not issubclass(row.kind, Communication):
            assert row.laps == 0


class AllToAll(CollectiveOperation, frozen=True, kw_only=True):
    """A kind that no interpreter knows: block i of each source goes to member i."""

    name: ClassVar[str] = "all_to_all"
    splits: ClassVar[bool] = True
    joins: ClassVar[bool] = True
    moves_in_place: ClassVar[bool] = False


def test_a_new_communication_is_missing_where_values_are_computed_and_nowhere_else() -> None:
    row = OperationKind(kind=AllToAll, order="", interpreters=INTERPRETERS)
    lacking = [each for each in missing(row) if each not in LOCAL_VALUES]
    assert lacking == list(VALUES)
    files = {each.partition(":")[0] for each in lacking} | {"zsim.schedule.communication"}
    assert len(files) == 4
