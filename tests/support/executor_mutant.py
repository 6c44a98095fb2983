"""A mutant of the executor of real ranks: one small change of the text of one function.

A change that does not apply any more, or applies twice, fails; so does one that changes nothing. As
it runs it counts how often the changed statement is reached: what no run reaches is no mutant.
`hint` names the run that is judged first. Where no judge can tell a mutant from the executor,
`same` says why.
"""

import ast
import inspect
import textwrap
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FunctionType
from typing import Any
from unittest.mock import patch

STAGE_0, STAGE_1, STAGE_2, STAGE_3 = "stage 0", "stage 1 replicas", "stage 2 fp16", "stage 3"
OFFLOAD, DEFERRED = "stage 3 offload", "fsdp1"
CROSSED, PINNED = "by hand", "threads by hand"
LENT, ADDING = "a thread by hand beside a device", "shared gradients by hand"
VALUES, NVME = "values", "values from files"
PLAIN, STAYING = "values without poison", "values of stage 1"
ALONE, MOVED = "a trainer that nobody watches", "a trainer whose memory moves"
SLICED, DROPPED = "values of sliced parameters", "values with dropout"
CALLER = "with a caller"
RANKS_1, RANKS_2, RANKS_3 = (f"ranks of stage {stage}" for stage in (1, 2, 3))
RANKS_DEFERRED, RANKS_RESERVED = "ranks of fsdp1", "ranks with reserved memory"
RANKS_ALONE = "ranks that nobody watches"
FLYING = "ranks by hand"
STAGES, STAGES_4 = "stages of a pipeline", "four stages of a pipeline"
SHARED, TENSOR = "ranks that share sequences", "ranks of a tensor axis"


@dataclass(slots=True)
class Reached:
    """A count of visits to what is changed, by the host or a thread; `tell` is called at first."""

    count: int = 0
    tell: Callable[[], object] | None = None

    def __call__(self) -> None:
        """Count one more."""
        self.count += 1
        if self.count == 1 and self.tell is not None:
            self.tell()


@dataclass(frozen=True, slots=True)
class Mutant:
    """A function of `owner` in which `old` is `new`."""

    name: str
    hint: str
    owner: Any
    function: str
    old: str
    new: str
    same: str = ""

    @contextmanager
    def planted(self, *, unchanged: bool = False) -> Generator[Reached]:
        """Let the executor be wrong inside; `unchanged` it is made anew from its own text."""
        right = inspect.getattr_static(self.owner, self.function)
        text = textwrap.dedent(inspect.getsource(_function(right)))
        assert text.count(self.old) == 1, f"{self.name}: the change applies {text.count(self.old)}"
        assert self.new != self.old, f"{self.name}: nothing is changed"
        same = next((at for at, one in enumerate(self.old) if one != self.new[at : at + 1]), -1)
        line = text.count("\n", 0, text.index(self.old) + same % (len(self.old) + 1)) + 1
        changed = text if unchanged else text.replace(self.old, self.new)
        reached = Reached()
        made = _made(right, changed, line, reached)
        with patch.object(self.owner, self.function, made):
            yield reached


def _function(found: object) -> FunctionType:
    """Return the function behind a method of a class, a property or a wrapper."""
    if isinstance(found, classmethod | staticmethod):
        found = found.__func__
    elif isinstance(found, property):
        found = found.fget
    assert callable(found)
    inner = inspect.unwrap(found)
    assert isinstance(inner, FunctionType)
    return inner


def _made(right: object, text: str, line: int, reached: Callable[[], None]) -> Any:  # noqa: ANN401
    """Compile a function that calls `reached` ahead of the statement on `line`."""
    function = _function(right)
    tree = ast.parse(text)
    _call_ahead(tree, line)
    ast.increment_lineno(tree, function.__code__.co_firstlineno - 1)
    outer = ast.parse("def outer(reached_by_a_mutant): pass")
    (body,) = outer.body
    assert isinstance(body, ast.FunctionDef)
    returned = ast.Return(ast.Name(function.__name__, ast.Load()))
    body.body = [*tree.body, returned]
    made: dict[str, Any] = {}
    code = compile(ast.fix_missing_locations(outer), inspect.getfile(function), "exec")
    exec(code, function.__globals__, made)
    return made["outer"](reached)


def _call_ahead(tree: ast.Module, line: int) -> None:
    """Insert a call ahead of the innermost statement that `line` is of."""
    (function,) = tree.body
    assert isinstance(function, ast.FunctionDef)
    body, place = function.body, 0
    for parent in ast.walk(function):
        for name in ("body", "orelse", "finalbody", "handlers"):
            statements = getattr(parent, name, None)
            if not isinstance(statements, list):
                continue
            for at, each in enumerate(statements):
                if isinstance(each, ast.stmt) and each.lineno <= line <= (each.end_lineno or 0):
                    body, place = statements, at  # `walk` comes to what is inside later
    call = ast.parse("reached_by_a_mutant()").body[0]
    ast.copy_location(call, body[place])
    body.insert(place, call)
