"""The size of the core, the load of a run and the names in it do not grow.

A measure that becomes smaller lowers its ceiling here, so that the gain is kept.
"""

import ast
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
FOLDERS = (ROOT / "zsim", *sorted((ROOT / "backends").glob("zsim_*")))
PACKAGES = (*(folder.name for folder in FOLDERS), "zsim_scenarios", "zsim_topologies")

LINES_MAX = 90_190
"""Lines of zsim."""

RUN_MODULES_MAX, RUN_LINES_MAX = 429, 67_300
"""Modules that a run of llama2_7b loads, and their lines."""

RUNTIME_NAMES_MAX = 128
"""String constants with the name of a runtime, outside the runtimes."""

PROFILE_NAMES_MAX = 36
"""String constants that name a GPU profile, outside the calibration."""

FOLDER_CYCLES_MAX = 1
"""Groups of folders that import each other, also with imports for annotations alone."""


def files(*folders: Path) -> list[Path]:
    return [path for folder in folders for path in sorted(folder.rglob("*.py"))]


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text("utf-8"))


def line_count(path: Path) -> int:
    return path.read_text("utf-8").count("\n")


def constants(path: Path) -> Iterator[str]:
    """Yield the string constants of a file, without docstrings."""
    said = {
        id(node.value)
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in said:
            yield node.value


def naming(names: re.Pattern[str], *apart: str) -> dict[str, int]:
    """Return by file of zsim how many constants match `names`, without the rooms in `apart`."""
    found = {
        str(path.relative_to(ROOT)): sum(bool(names.search(each)) for each in constants(path))
        for path in files(ROOT / "zsim")
        if path.relative_to(ROOT).parts[1] not in apart
    }
    return {path: count for path, count in found.items() if count}


def imports(path: Path, *, for_types: bool) -> Iterator[str]:
    """Yield the modules that a file imports; `for_types`: also those of annotations alone."""
    waiting: list[ast.AST] = [tree_of(path)]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING" and not for_types:
            waiting.extend(node.orelse)
            continue
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{each.name}" for each in node.names)
        waiting.extend(ast.iter_child_nodes(node))


def folder_cycles(*, for_types: bool) -> list[list[str]]:
    """Return the groups of folders of which each imports all others, directly or not."""
    homes: dict[str, str] = {}
    for top in FOLDERS:
        for path in files(top):
            parts = path.relative_to(top.parent).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            homes[name] = ".".join(path.relative_to(top.parent).parts[:-1])
    arrows: dict[str, set[str]] = defaultdict(set)
    for top in FOLDERS:
        for path in files(top):
            own = ".".join(path.relative_to(top.parent).parts[:-1])
            found = {homes[each] for each in imports(path, for_types=for_types) if each in homes}
            # A folder and those inside it are one: a package may gather names of its modules.
            arrows[own] |= {
                each
                for each in found
                if not f"{each}.".startswith(f"{own}.") and not f"{own}.".startswith(f"{each}.")
            }
    reached = {each: _reached(each, arrows) for each in arrows}
    groups = {
        tuple(sorted(other for other in reached[each] if each in reached.get(other, ())))
        for each in arrows
    }
    return [list(group) for group in sorted(groups) if group]


def _reached(start: str, arrows: Mapping[str, set[str]]) -> set[str]:
    found: set[str] = set()
    waiting = [start]
    while waiting:
        new = arrows.get(waiting.pop(), set()) - found
        found |= new
        waiting.extend(new)
    return found


def need_at_most(what: str, found: int, most: int, where: object = "") -> None:
    assert found <= most, f"{what}: {found:,}, at most {most:,}. {where}"


def test_the_core_has_no_more_lines() -> None:
    need_at_most("lines of zsim", sum(map(line_count, files(ROOT / "zsim"))), LINES_MAX)


LOADED = f"""
import sys
import zsim
zsim.run(zsim.load("llama2_7b"), check=False)
for name, module in sorted(sys.modules.items()):
    if name.partition(".")[0] in {PACKAGES!r} and getattr(module, "__file__", None):
        print(module.__file__)
"""


def test_a_run_loads_no_more_modules_and_lines() -> None:
    run = subprocess.run(
        [sys.executable, "-c", LOADED], check=True, capture_output=True, text=True, cwd=ROOT
    )
    loaded = [Path(line) for line in run.stdout.splitlines()]
    need_at_most("modules that a run loads", len(loaded), RUN_MODULES_MAX)
    need_at_most("lines that a run loads", sum(map(line_count, loaded)), RUN_LINES_MAX)


def test_no_more_constants_name_a_runtime() -> None:
    names = [path.parent.name for path in (ROOT / "zsim" / "runtimes").glob("*/__init__.py")]
    words = re.compile(rf"\b({'|'.join(names)})\b")
    found = naming(words, "runtimes")
    need_at_most("constants that name a runtime", sum(found.values()), RUNTIME_NAMES_MAX, found)


def test_no_more_constants_name_a_gpu_profile() -> None:
    data = ROOT / "topologies" / "zsim_topologies"
    names = {path.stem for room in ("profiles", "kernels") for path in (data / room).glob("*.toml")}
    found = naming(re.compile(rf"^({'|'.join(sorted(names))})$"), "calibration")
    need_at_most("constants that name a profile", sum(found.values()), PROFILE_NAMES_MAX, found)


@pytest.mark.parametrize("for_types", [False, True])
def test_no_more_folders_import_each_other_in_a_circle(*, for_types: bool) -> None:
    found = folder_cycles(for_types=for_types)
    need_at_most("circles of folders", len(found), FOLDER_CYCLES_MAX, found)
