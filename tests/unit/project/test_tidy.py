"""Style that no linter knows: module names, lengths, and the direction of the arrows.

Every rule reads syntax only, so it also holds for what a run never reaches. Each has a planted
violation below that proves that it bites.
"""

import ast
import re
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path, PurePosixPath

import pytest
from statements import statements

ROOT = Path(__file__).parents[3]
CODE_FOLDERS = ("zsim", "runtimes", "backends", "apps", "topologies", "scenarios")
TEST_FOLDERS = ("tests", "benchmarks", "examples")
NAMELESS = {"util", "utils", "helpers", "common", "misc", "manager", "base"}
FUNCTION_LINES_MAX = 60
FILE_LINES_MAX = 600
INDEX = PurePosixPath("zsim/__init__.py")
"""Names functions of apps, for `zsim.best`; it imports them when they are used."""
TORCH = {"zsim_torch", "zsim_record"}
CORE_MAY_NOT_CALL = {"open", "print", "input"}
EFFECT = re.compile(r"\b(?:open|print|input)\(")
CORE_MAY_NOT_IMPORT = {"time", "typer", "rich"}
EDGES = {"files", "workers", "api", "cli"}
"""Where effects live, beside the backends."""

Sources = Mapping[PurePosixPath, str]
Trees = Mapping[PurePosixPath, ast.Module]


def sources_of_the_checkout() -> dict[PurePosixPath, str]:
    paths = chain.from_iterable((ROOT / folder).rglob("*.py") for folder in CODE_FOLDERS)
    return {PurePosixPath(path.relative_to(ROOT)): path.read_text("utf-8") for path in paths}


def package_of(path: PurePosixPath) -> str:
    """Name of the top-level package that holds ``path``: ``zsim``, ``zsim_torch``, ..."""
    return path.parts[0] if path.parts[0] == "zsim" else path.parts[1]


def module_of(path: PurePosixPath) -> str:
    names = path.with_suffix("").parts
    return ".".join(names[:-1] if names[-1] == "__init__" else names)


def in_core(path: PurePosixPath) -> bool:
    return path.parts[0] == "zsim" and path.parts[1] not in {*EDGES, "__init__.py"}


def imported(tree: ast.Module) -> Iterator[tuple[int, str, str | None]]:
    """Each import anywhere in ``tree``: its line, the module, and the name taken out of it."""
    for node in statements(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from ((node.lineno, node.module, alias.name) for alias in node.names)


def nameless_modules(path: PurePosixPath) -> Iterator[str]:
    for part in path.with_suffix("").parts:
        if part in NAMELESS:
            yield f"{path}: {part!r} says nothing; which noun is missing?"


def long_files(path: PurePosixPath, source: str) -> Iterator[str]:
    line_count = len(source.splitlines())
    if line_count > FILE_LINES_MAX:
        yield f"{path}: {line_count} lines, at most {FILE_LINES_MAX}"


def long_functions(path: PurePosixPath, tree: ast.Module) -> Iterator[str]:
    for node in statements(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            line_count = (node.end_lineno or node.lineno) - node.lineno + 1
            if line_count > FUNCTION_LINES_MAX:
                yield (
                    f"{path}:{node.lineno}: {node.name} has {line_count} lines, "
                    f"at most {FUNCTION_LINES_MAX}"
                )


def wrong_imports(path: PurePosixPath, tree: ast.Module) -> Iterator[str]:
    for line, module, name in imported(tree):
        top = module.partition(".")[0]
        if path != INDEX and package_of(path) == "zsim" and top.startswith("zsim_"):
            yield f"{path}:{line}: zsim finds {top} through entry points, never by import"
        if package_of(path) not in TORCH and top == "torch":
            yield f"{path}:{line}: only zsim_torch and zsim_record import torch"
        if in_core(path) and top in CORE_MAY_NOT_IMPORT:
            yield f"{path}:{line}: {top} belongs to the edge, the core is pure"
        if in_core(path) and f"{module}.{name}.".startswith("zsim.cli."):
            yield f"{path}:{line}: the shell imports the core, never the reverse"


def effects_in_the_core(path: PurePosixPath, tree: ast.Module) -> Iterator[str]:
    if not in_core(path):
        return
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Name(id=name)) if name in CORE_MAY_NOT_CALL:
                yield f"{path}:{node.lineno}: {name}() belongs to the edge, the core is pure"
            case ast.Call(func=ast.Attribute(attr="open")):
                yield f"{path}:{node.lineno}: .open() belongs to the edge, the core is pure"
            case _:
                pass


def reached_from(start: str, trees: Trees) -> dict[str, str]:
    """Each module that ``start`` names in an import, directly or not, and the one that names it.

    ``from zsim import name`` takes ``zsim/name.py`` where there is one, and otherwise what
    ``zsim/__init__.py`` gives it.
    """
    modules = {module_of(path): tree for path, tree in trees.items()}
    reached: dict[str, str] = {}
    waiting = [start]
    while waiting:
        importer = waiting.pop()
        for _, module, name in imported(modules[importer]):
            target = f"{module}.{name}" if f"{module}.{name}" in modules else module
            if target in modules and target not in reached:
                reached[target] = importer
                waiting.append(target)
    return reached


def closed_forms_from_the_scheduler(trees: Trees) -> Iterator[str]:
    """The closed forms judge the scheduler: what they rest on must not be the scheduler."""
    if PurePosixPath("zsim/closed_form/__init__.py") not in trees:
        return
    for module, importer in reached_from("zsim.closed_form", trees).items():
        if module == "zsim.zero" or module.startswith("zsim.zero."):
            yield f"zsim/closed_form reaches {module}, imported by {importer}"


def findings(sources: Sources) -> list[str]:
    trees = {path: ast.parse(source) for path, source in sources.items()}
    found: list[str] = []
    for path, tree in trees.items():
        found += nameless_modules(path)
        found += long_files(path, sources[path])
        found += long_functions(path, tree)
        found += wrong_imports(path, tree)
        if EFFECT.search(sources[path]):  # of few files all nodes are looked at
            found += effects_in_the_core(path, tree)
    found += closed_forms_from_the_scheduler(trees)
    return sorted(found)


def test_the_checkout_is_tidy() -> None:
    sources = sources_of_the_checkout()
    assert {package_of(path) for path in sources} >= {"zsim", "zsim_null", "zsim_des", "zsim_torch"}
    assert "\n".join(findings(sources)) == ""


def test_no_test_is_in_a_long_file() -> None:
    paths = [path for each in TEST_FOLDERS for path in (ROOT / each).rglob("*.py")]
    assert paths
    found = [
        line
        for path in paths
        for line in long_files(PurePosixPath(path.relative_to(ROOT)), path.read_text("utf-8"))
    ]
    assert "\n".join(found) == ""


def function_of(line_count: int) -> str:
    return "def long() -> None:\n" + "    pass\n" * (line_count - 1)


PLANTED = {
    "module named utils": ("zsim/utils.py", "", "'utils' says nothing"),
    "package named common": ("backends/zsim_des/common/link.py", "", "'common' says nothing"),
    "file of 601 lines": ("zsim/trace/trace.py", "\n" * 601, "601 lines"),
    "function of 61 lines": ("backends/zsim_des/x.py", function_of(61), "long has 61 lines"),
    "a backend in the core": (
        "zsim/backend/backend.py",
        "import zsim_des.engine.rank",
        "zsim finds zsim_des",
    ),
    "a backend at the edge": (
        "zsim/cli/main.py",
        "def f() -> None:\n    from zsim_torch import TorchBackend",
        "zsim/cli/main.py:2: zsim finds zsim_torch",
    ),
    "torch in the core": ("zsim/model/model.py", "import torch", "only zsim_torch and zsim_record"),
    "torch in another backend": (
        "backends/zsim_des/values.py",
        "from torch.distributed import all_reduce",
        "only zsim_torch and zsim_record",
    ),
    "torch in a topology": (
        "topologies/zsim_topologies/x.py",
        "import torch",
        "only zsim_torch and zsim_record",
    ),
    "a clock in the core": ("zsim/trace/trace.py", "from time import perf_counter", "time belongs"),
    "typer in the core": ("zsim/scenario/tables.py", "import typer", "typer belongs"),
    "rich in the core": ("zsim/study.py", "from rich.table import Table", "rich belongs"),
    "the edge in the core": ("zsim/study.py", "from zsim import cli", "never the reverse"),
    "a file in the core": ("zsim/scenario/tables.py", "x = open('a')", "open() belongs"),
    "a path opened in the core": ("zsim/scenario/tables.py", "x = path.open()", ".open() belongs"),
    "printing in the core": ("zsim/proof/races.py", "print(1)", "print() belongs"),
    "the scheduler in closed forms": (
        "zsim/closed_form/__init__.py",
        "from zsim.zero.gather import prefetch",
        "reaches zsim.zero",
    ),
}


@pytest.mark.parametrize(("path", "source", "why"), PLANTED.values(), ids=PLANTED.keys())
def test_a_planted_violation_is_found(path: str, source: str, why: str) -> None:
    zero = {
        PurePosixPath("zsim/zero/__init__.py"): "",
        PurePosixPath("zsim/zero/gather.py"): "",
    }
    found = findings({**zero, PurePosixPath(path): source})
    assert len(found) == 1
    assert why in found[0]


def test_closed_forms_that_reach_the_scheduler_by_a_detour_are_found() -> None:
    detour = {
        "zsim/__init__.py": "from zsim.zero import own as schedule",
        "zsim/zero/__init__.py": "",
        "zsim/closed_form/__init__.py": "from zsim import schedule",
    }
    assert findings({PurePosixPath(path): source for path, source in detour.items()}) == [
        "zsim/closed_form reaches zsim.zero, imported by zsim"
    ]


ALLOWED = {
    "a function of 60 lines": ("zsim/trace/trace.py", function_of(60)),
    "a file of 600 lines": ("zsim/trace/trace.py", "\n" * 600),
    "torch in its backend": ("backends/zsim_torch/supervise/ranks.py", "import torch.distributed"),
    "effects at the edge": (
        "zsim/cli/main.py",
        "import time, typer, rich\nprint(open('a'))",
    ),
    "a module whose name contains a banned one": ("zsim/database.py", ""),
}


@pytest.mark.parametrize(("path", "source"), ALLOWED.values(), ids=ALLOWED.keys())
def test_what_the_rules_allow_is_not_found(path: str, source: str) -> None:
    assert findings({PurePosixPath(path): source}) == []
