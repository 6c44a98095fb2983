"""Files of the checkout that a test file can reach, read from syntax alone.

An edge goes from a file to each module that it imports or names in a string, and from the name
of a group of entry points to all modules registered under it. A test that starts the command
`zsim` reaches `zsim.cli.main`. `import zsim` alone reaches nothing: its index loads a name when it
is used.
"""

import ast
import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
IMPORT_ROOTS = (".", "runtimes", "backends", "apps", "topologies", "scenarios", "tests/support")
PACKAGES = (
    "zsim",
    "runtimes",
    "backends",
    "apps",
    "topologies",
    "scenarios",
    "tests/support",
    "benchmarks",
    "examples",
)
INDEX = Path("zsim/__init__.py")
COMMAND = "zsim.cli.main"
CONFTEST = "conftest.py"


def module_name(path: Path) -> str:
    """Return the name by which the file at `path` (relative to the checkout) is imported."""
    for folder in sorted(IMPORT_ROOTS, key=len, reverse=True):
        if path.is_relative_to(folder):
            parts = path.relative_to(folder).with_suffix("").parts
            return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
    raise AssertionError(path)


class ImportGraph:
    """The Python files of a checkout and the files that each names."""

    def __init__(self, root: Path = ROOT) -> None:
        self.root = root
        folders = [root / folder for folder in PACKAGES if (root / folder).is_dir()]
        self.modules = {
            module_name(path.relative_to(root)): path.relative_to(root)
            for folder in folders
            for path in sorted(folder.rglob("*.py"))
        }
        self.groups = _entry_points(root / "pyproject.toml")
        self.index = _index(root / INDEX)
        self._edges: dict[Path, frozenset[Path]] = {}

    def reached(self, path: Path) -> frozenset[Path]:
        """Return `path` and all files that it reaches; paths are relative to the checkout."""
        found, waiting = {path}, [path, *self._conftests(path)]
        while waiting:
            here = waiting.pop()
            found.add(here)
            waiting += self.edges(here) - found
            found |= self.edges(here)
        return frozenset(found)

    def edges(self, path: Path) -> frozenset[Path]:
        """Return the files that the file at `path` names."""
        if path == INDEX:
            return frozenset()
        if path not in self._edges:
            tree = ast.parse((self.root / path).read_text("utf-8"))
            # What a conftest names in strings is what ranks load, not what tests use.
            names = set(_imported(tree) if path.name == CONFTEST else _named(tree, self.groups))
            if path.parts[0] == "tests" and path.name != CONFTEST and _starts_the_command(tree):
                names.add(COMMAND)
            self._edges[path] = frozenset(
                file for name in names for file in self._files(name) if file != path
            )
        return self._edges[path]

    def _files(self, name: str) -> Iterator[Path]:
        """Yield the file of a dotted name, and those of the packages around it."""
        package, _, rest = name.partition(".")
        if package == "zsim" and rest in self.index:
            name = self.index[rest]
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            file = self.modules.get(".".join(parts[:end]))
            if file is not None:
                yield file

    def _conftests(self, path: Path) -> Iterator[Path]:
        for folder in path.parents:
            if (self.root / folder / CONFTEST).is_file():
                yield folder / CONFTEST


def affected(tests: Mapping[Path, frozenset[Path]], changed: frozenset[Path]) -> set[Path]:
    """Return the test files that reach a changed Python file, or all if another file changed.

    What reads data, pages and settings is not seen in imports.
    """
    python = {path for path in changed if path.suffix == ".py"}
    if any(path.suffix not in {".py", ".md"} for path in changed):
        return set(tests)
    pages = {path for path in changed if path.suffix == ".md"}
    return {
        test
        for test, reached in tests.items()
        if python & reached or (pages and "project" in test.parts)
    }


def _imported(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=aliases):
                yield from (alias.name for alias in aliases)
            case ast.ImportFrom(module=str(module), names=aliases):
                yield from (f"{module}.{alias.name}" for alias in aliases)
            case _:
                pass


def _named(tree: ast.Module, groups: Mapping[str, tuple[str, ...]]) -> Iterator[str]:
    yield from _imported(tree)
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id="zsim"), attr=name):
                yield f"zsim.{name}"
            case ast.Constant(value=str(text)) if text in groups:
                yield from groups[text]
            case ast.Constant(value=str(text)) if "." in text and len(text) < 200:
                yield text.partition(":")[0]
            case _:
                pass


def _starts_the_command(tree: ast.Module) -> bool:
    return any(
        isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value == "zsim"
        for node in ast.walk(tree)
    )


@cache
def _index(path: Path) -> dict[str, str]:
    """Return the module of each name that the index of the package loads when it is used."""
    if not path.is_file():
        return {}
    tree = ast.parse(path.read_text("utf-8"))
    pairs = [
        (key.value, value.value.partition(":")[0])
        for node in ast.walk(tree)
        if isinstance(node, ast.Dict)
        for key, value in zip(node.keys, node.values, strict=True)
        if isinstance(key, ast.Constant)
        and isinstance(value, ast.Constant)
        and isinstance(key.value, str)
        and isinstance(value.value, str)
    ]
    return dict(pairs)


@cache
def _entry_points(settings: Path) -> dict[str, tuple[str, ...]]:
    """Return the modules that pyproject.toml registers, by group."""
    if not settings.is_file():
        return {}
    project = tomllib.loads(settings.read_text("utf-8")).get("project", {})
    groups: dict[str, dict[str, str]] = project.get("entry-points", {})
    return {
        group: tuple(target.partition(":")[0] for target in entries.values())
        for group, entries in groups.items()
    }
