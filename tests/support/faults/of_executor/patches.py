"""The back end of the executor: a function of it is another one while a run lasts.

A change of a function's text that does not apply any more, or applies twice, fails; so does one
that changes nothing. A plant counts how often its change is reached: one that no run reaches is no
fault. Plants patch the executor, never those who watch it.
"""

import ast
import inspect
import textwrap
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from importlib import import_module
from pathlib import Path
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
FOLDER = Path(__file__).parent / "changes"
WITNESSED = "witnessed: "
"""Prefix of the names of runs that are judged by witnesses alone."""


@dataclass(slots=True)
class Reached:
    """A count of visits to a change, by the host or a thread; `tell` is called at the first."""

    count: int = 0
    tell: Callable[[], object] | None = None

    def __call__(self) -> None:
        """Count one more."""
        self.count += 1
        if self.count == 1 and self.tell is not None:
            self.tell()


Function = Callable[..., Any]
Make = Callable[[Any, Reached], Any]
"""Makes a wrong attribute of the right one, which counts visits."""


@dataclass(frozen=True, slots=True)
class Plant:
    """A function of `owner` that is another one, on all ranks or one, in a run that shows it.

    Attributes:
        why: words that a finding has to have.
        same: the reason why no judge can tell the changed executor from the right one.
        unchanged: the same function from its own text, if it is changed as text.
    """

    name: str
    run: str
    owner: Any
    function: str
    wrong: Make
    rank: int | None = None
    why: str = ""
    same: str = ""
    unchanged: Make | None = None
    group: str = ""

    @property
    def id(self) -> str:
        """The name in the table."""
        return f"{self.group}: {self.name}"

    @contextmanager
    def inside(self, *, unchanged: bool = False) -> Generator[Reached]:
        """Plant it; `unchanged`, the right function is compiled anew."""
        find = getattr if self.unchanged is None else inspect.getattr_static
        right = find(self.owner, self.function)
        make = self.unchanged if unchanged else self.wrong
        assert make is not None
        reached = Reached()
        with patch.object(self.owner, self.function, make(right, reached)):
            yield reached


def plant(
    run: str, owner: object, function: str, *, rank: int | None = None, why: str = ""
) -> Callable[[Callable[[Function], Function]], Plant]:
    """Return a decorator of functions that take the right function and return a wrong one."""

    def register(make: Callable[[Function], Function]) -> Plant:
        def wrong(right: Function, _: Reached) -> Function:
            return make(right)

        name = make.__name__.replace("_", " ")
        return Plant(name, run, owner, function, wrong, rank, why)

    return register


def altered(change: Callable[..., Any]) -> Callable[[Function], Function]:
    """Return a maker of functions that give `change` the right function before their arguments."""

    def make(right: Function) -> Function:
        return lambda *given, **named: change(right, *given, **named)

    make.__name__ = change.__name__
    return make


@dataclass(frozen=True, slots=True)
class Change:
    """A change of the text of a function."""

    name: str
    old: str
    new: str


def read_changes(group: str) -> tuple[Plant, ...]:
    """Return the plants of a file in `changes`.

    Below a line "@ module:owner.function" each has a line with its name and the run that shows it,
    perhaps one with "= " and the reason why no judge can, and lines of text with "- " and "+ ".
    """
    found: list[Plant] = []
    owner: Any = None
    function = ""
    for block in (FOLDER / f"{group}.diff").read_text("utf-8").split("\n\n"):
        lines = block.strip("\n").split("\n")
        if lines[0].startswith("@ "):
            module, _, path = lines[0].removeprefix("@ ").partition(":")
            *owners, function = path.split(".")
            owner = reduce(getattr, owners, import_module(module))
        elif not lines[0].startswith("#"):
            found.append(plant_of(owner, function, lines))
    return tuple(found)


def plant_of(owner: object, function: str, lines: list[str]) -> Plant:
    """Return the plant of a paragraph of such a file."""
    name, _, run = lines[0].partition(" | ")
    texts = {sign: [line[2:] for line in lines[1:] if line[0] == sign] for sign in "-+="}
    change = Change(name, *("\n".join(texts[sign]) for sign in "-+"))

    def wrong(right: object, reached: Reached) -> Any:  # noqa: ANN401  # as the right one
        return _made(right, change, change.new, reached)

    def unchanged(right: object, reached: Reached) -> Any:  # noqa: ANN401  # as the right one
        return _made(right, change, change.old, reached)

    same = " ".join(texts["="])
    return Plant(name, run, owner, function, wrong, same=same, unchanged=unchanged)


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


def _made(right: object, change: Change, new: str, reached: Callable[[], None]) -> Any:  # noqa: ANN401
    """Compile a function with a change, which calls `reached` before the changed statement."""
    function = _function(right)
    text = textwrap.dedent(inspect.getsource(function))
    assert text.count(change.old) == 1, f"{change.name}: applies {text.count(change.old)} times"
    assert change.new != change.old, f"{change.name}: nothing is changed"
    same = next((at for at, one in enumerate(change.old) if one != change.new[at : at + 1]), -1)
    line = text.count("\n", 0, text.index(change.old) + same % (len(change.old) + 1)) + 1
    tree = ast.parse(text.replace(change.old, new))
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
    """Insert a call before the innermost statement that `line` is of."""
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


def by_checker(found: str) -> dict[str, list[str]]:
    """Return a finding in words by the checker that it begins with."""
    checker, _, text = found.partition(": ")
    return {checker: [text]} if found else {}


def check_reached(plants: Sequence[Plant], reached: set[str]) -> None:
    """Raise AssertionError unless every change of a text was reached."""
    texts = {each.id for each in plants if each.unchanged is not None}
    assert reached >= texts, f"no operation comes to what is changed: {texts - reached}"
