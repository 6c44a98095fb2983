"""Every kind of operation has a row, and every interpreter in its row knows it."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

from zsim.dtype import DType
from zsim.network.algorithm.activity import Collective
from zsim.network.volume import ring_equivalent_bytes
from zsim.schedule.access import accesses
from zsim.schedule.communication import Communication, listed
from zsim.schedule.operation import CollectiveOperation, Operand, Operation, View
from zsim.schedule.operation_kinds import KINDS, LOCAL_VALUES, READERS, VALUES, OperationKind

ROOT = Path(__file__).parents[3]
INTERPRETERS = (*READERS, *VALUES, *LOCAL_VALUES)


@cache
def matched(interpreter: str) -> frozenset[str]:
    """Return the names of classes in the patterns of an interpreter, which must be complete."""
    name = interpreter.partition(":")[2]
    tree = ast.parse(Path(str(_spec(interpreter).origin)).read_text("utf-8"))
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


PLANT = ROOT / "tests" / "plants" / "operation" / "reduce_to_root.py"


def planted() -> type[CollectiveOperation]:
    """Return the class of the planted operation."""
    known: dict[str, type[CollectiveOperation]] = {}
    exec(compile(PLANT.read_text("utf-8"), str(PLANT), "exec"), known)
    return known["Reduce"]


def test_a_new_communication_is_missing_where_values_are_computed_and_nowhere_else() -> None:
    row = OperationKind(kind=planted(), order="", interpreters=INTERPRETERS)
    lacking = [each for each in missing(row) if each not in LOCAL_VALUES]
    assert lacking == list(VALUES)
    files = {each.partition(":")[0] for each in lacking} | {"zsim.schedule.communication"}
    assert len(files) == 4


def test_the_attributes_of_a_new_communication_say_all_that_other_readers_ask() -> None:
    view = View(buffer="x", size=8)
    wire = DType.BF16
    kind: Any = planted()
    made: CollectiveOperation = kind(
        id="a",
        stream="s",
        group="data",
        source=view,
        target=view,
        wire=wire,
        accumulate=wire,
        root=1,
    )
    assert {each.view for each in accesses(made)} == {view}
    assert ring_equivalent_bytes(made, 4) == 3 * 2 * 2
    assert Collective(made.name) is Collective.REDUCE
    assert made.addressed(3) == (1,)
    with pytest.raises(TypeError, match="Reduce is not in AnyCommunication"):
        listed(made)


@pytest.mark.long
def test_a_type_checker_names_each_interpreter_that_lacks_a_new_communication(
    tmp_path: Path,
) -> None:
    """The plant takes the place of the real file for mypy, which reads the rest as it is."""
    path = ROOT / "zsim" / "schedule" / "communication.py"
    union = "AnyCommunication = AllGather"
    text, plant = path.read_text("utf-8"), PLANT.read_text("utf-8")
    assert union in text
    added = plant[plant.index("class Reduce") :]
    shadow = tmp_path / "communication.py"
    shadow.write_text(text.replace(union, f"{added}\n\n{union} | Reduce"), "utf-8")
    run = subprocess.run(
        [
            *(sys.executable, "-m", "mypy", "--cache-dir", str(tmp_path / "cache")),
            *("--shadow-file", str(path), str(shadow), "zsim", *BACKENDS),
        ],
        check=False,
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    named = {line.partition(":")[0] for line in run.stdout.splitlines() if ": error: " in line}
    wanted = {Path(str(_spec(each).origin)).relative_to(ROOT).as_posix() for each in VALUES}
    assert named == wanted
    assert len(named) + 1 <= 4, "with the class itself"


BACKENDS = [str(path.relative_to(ROOT)) for path in sorted((ROOT / "backends").glob("zsim_*"))]


def _spec(interpreter: str) -> ModuleSpec:
    spec = find_spec(interpreter.partition(":")[0])
    assert spec is not None
    return spec
