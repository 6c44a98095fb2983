"""Files and names that the documentation mentions exist, and its code is accepted."""

import ast
import re
import sys
from importlib import import_module
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType

import pytest

from zsim.backend import backend
from zsim.backend.backend import Backend, BackendTraits, Job, load_backend
from zsim.trace.trace import Trace

ROOT = Path(__file__).parents[3]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
OURS = (
    "zsim",
    "apps",
    "runtimes",
    "backends",
    "benchmarks",
    "docs",
    "examples",
    "scenarios",
    "tests",
    "topologies",
)
FENCED = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
QUOTED = re.compile(r"`([^`\s]+)`")
GROUPS = {
    "zsim.algorithms",
    "zsim.backends",
    "zsim.fabrics",
    "zsim.invariants",
    "zsim.optimizers",
    "zsim.runtimes",
} | {"zsim.commands"}
"""Groups of entry points, whose names look like modules."""

ELSEWHERE = {"examples/mamba/run_multinode.sh"}
"""Paths in repositories of others that begin like ours."""


def paragraphs(page: Path) -> list[str]:
    """Return paragraphs and lines of tables and lists of a page, without code."""
    text = FENCED.sub("", page.read_text("utf-8"))
    return re.split(r"\n\n|\n(?=[|*-] )", text)


def found(path: str) -> Path | None:
    """Return a file or folder of the checkout; packages of backends are import roots."""
    folders = (
        ROOT,
        *(ROOT / each for each in ("runtimes", "backends", "apps", "topologies", "scenarios")),
    )
    return next((each / path for each in folders if (each / path).exists()), None)


def is_record(page: Path) -> bool:
    """Whether a page is about the past: the change log, and decisions, which are never amended."""
    return page.name == "CHANGELOG.md" or page.parent.name == "adr"


def is_ours(path: str) -> bool:
    return path.partition("/")[0].partition("_")[0] in OURS and "/" in path


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_file_that_a_page_names_exists(page: Path) -> None:
    if is_record(page):
        return
    missing: list[str] = []
    for paragraph in paragraphs(page):
        quoted = QUOTED.findall(paragraph)
        paths = [each for each in quoted if is_ours(each) and not set(each) & set("{}*:<(")]
        paths = [each for each in paths if each not in ELSEWHERE]
        missing += [path for path in paths if found(path) is None]
        near = [place for path in paths if (place := found(path)) is not None]
        folders = [place if place.is_dir() else place.parent for place in near]
        for name in quoted:
            if re.fullmatch(r"\w+\.py", name):
                missing += [name] * (not any((folder / name).exists() for folder in folders))
    assert missing == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_module_class_and_function_that_a_page_names_exists(page: Path) -> None:
    if is_record(page):
        return
    names = {
        name
        for paragraph in paragraphs(page)
        for name in QUOTED.findall(paragraph)
        if re.fullmatch(r"zsim(_\w+)?(\.\w+)+", name) and name not in GROUPS
    }
    missing = [name for name in sorted(names) if not is_there(name) and found(name) is None]
    assert [name for name in missing if not re.search(r"\.(toml|out|json)$", name)] == []


def is_there(name: str) -> bool:
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        try:
            place: object = import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        for part in parts[count:]:
            place = getattr(place, part, None)
        return place is not None
    return False


def test_the_backend_of_the_page_is_accepted_by_the_registry(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = (ROOT / "docs" / "plug_points.md").read_text("utf-8")
    codes = re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    (code,) = [each for each in codes if "class MyBackend" in each]
    imported = {
        alias.name
        for node in ast.walk(ast.parse(code))
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert {"BackendTraits", "Job", "Trace"} <= imported
    names: dict[str, object] = {}
    exec(compile(code, "plug_points.md", "exec"), names)
    module = ModuleType("mine")
    vars(module)["MyBackend"] = names["MyBackend"]
    monkeypatch.setitem(sys.modules, "mine", module)
    entry = EntryPoint("mine", "mine:MyBackend", "zsim.backends")
    monkeypatch.setattr(backend, "entries", lambda _: (entry,))
    loaded: type[Backend] = load_backend("mine")
    assert loaded.name == "mine"
    assert isinstance(loaded.traits, BackendTraits)
    assert loaded.run.__annotations__["job"] is Job
    assert loaded.run.__annotations__["return"] is Trace
