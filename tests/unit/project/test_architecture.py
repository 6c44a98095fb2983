"""The direction of the arrows between rooms, as docs/architecture.md draws them."""

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from graphlib import CycleError, TopologicalSorter
from itertools import groupby, pairwise
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import pytest
from statements import statements, statements_in

import zsim_scenarios
from zsim.api.scenario import LoadedScenario
from zsim.backend.backend import Job
from zsim.backend.document import Document
from zsim.cli.main import answer
from zsim.files.source import Source
from zsim.scenario.resolved_scenario import ResolvedScenario
from zsim.scenario.tables import Scenario

ROOT = Path(__file__).parents[3]
FOLDERS = {
    "zsim": ROOT / "zsim",
    "zsim_runtimes": ROOT / "runtimes" / "zsim_runtimes",
    "zsim_des": ROOT / "backends" / "zsim_des",
    "zsim_torch": ROOT / "backends" / "zsim_torch",
    "zsim_null": ROOT / "backends" / "zsim_null",
    "zsim_explain": ROOT / "apps" / "zsim_explain",
    "zsim_lab": ROOT / "apps" / "zsim_lab",
    "zsim_plan": ROOT / "apps" / "zsim_plan",
    "zsim_record": ROOT / "apps" / "zsim_record",
    "zsim_study": ROOT / "apps" / "zsim_study",
}
APPS = {path.name for path in (ROOT / "apps").iterdir() if path.is_dir()}
GROUND = "ground"
RUNTIMES = "zsim_runtimes"
LEVELS = (
    {GROUND},
    {"strategy"},
    {"model"},
    {"schedule"},
    {"trace", "cluster", "closed_form", "specification"},
    {"zero", "network", "compute", "memory"},
    {"runtimes", "backend"},
    {"scenario"},
    {"proof", "prediction"},
    {"analysis", "backends"},
    {"report"},
    {"files"},
    {"workers", "conformance"},
    {"api"},
    {"cli"},
    {RUNTIMES},  # found by entry points: nothing of ours imports them
    APPS - {"zsim_lab"},
    {"zsim_lab"},  # it judges the others
)
"""Rooms, the lowest first: one imports lower ones, and none of its own level."""


def module(path: Path, package: str, folder: Path) -> str:
    parts = [package, *path.relative_to(folder).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {
    module(path, package, folder): path
    for package, folder in FOLDERS.items()
    for path in folder.rglob("*.py")
}


class Said(NamedTuple):
    """The parts of a file that are looked at here: imports, those of functions too, and classes."""

    outside: list[ast.ImportFrom]
    carried_out: list[ast.ImportFrom]
    anywhere: list[ast.ImportFrom]
    classes: list[str]


@cache
def said_by(path: Path) -> Said:
    """Read a file once; its tree is not kept."""
    tree = ast.parse(path.read_text("utf-8"))
    nodes = list(statements(tree))
    return Said(
        outside=[node for node in tree.body if isinstance(node, ast.ImportFrom)],
        carried_out=list(while_it_runs(tree)),
        anywhere=[node for node in nodes if isinstance(node, ast.ImportFrom)],
        classes=[node.name for node in nodes if isinstance(node, ast.ClassDef)],
    )


def while_it_runs(node: ast.AST) -> Iterator[ast.ImportFrom]:
    """Imports of a file that are carried out at any time: also those inside functions."""
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        return
    if isinstance(node, ast.ImportFrom):
        yield node
    for child in statements_in(node):
        yield from while_it_runs(child)


def imported(path: Path) -> set[str]:
    """Modules that a file imports when it is imported itself."""
    return {name for node in said_by(path).outside for name in taken_from(node)}


def taken_from(node: ast.ImportFrom) -> set[str]:
    """Modules of ours that `from ... import ...` imports."""
    inside = {f"{node.module}.{each.name}" for each in node.names} & FILES.keys()
    return inside or {node.module or ""} & FILES.keys()


@cache
def arrows() -> dict[str, set[str]]:
    return {name: imported(path) for name, path in FILES.items()}


def room(name: str) -> str:
    package, *rest = name.split(".")
    if package in {*APPS, RUNTIMES}:
        return package
    if package != "zsim":
        return "backends"
    return rest[0] if rest and FILES[f"zsim.{rest[0]}"].name == "__init__.py" else GROUND


def between_rooms() -> set[tuple[str, str]]:
    return {
        (room(name), room(other))
        for name, others in arrows().items()
        for other in others
        if room(name) != room(other) and name != "zsim"
    }


def test_no_files_import_each_other_in_a_circle() -> None:
    try:
        TopologicalSorter(arrows()).prepare()
    except CycleError as error:
        raise AssertionError(" -> ".join(error.args[1])) from None


def folder(name: str) -> Path:
    return FILES[name].parent


@pytest.mark.parametrize("typed", [False, True], ids=["imported", "for type checkers too"])
def test_no_folders_import_each_other_in_a_circle(typed: bool) -> None:
    """Packages themselves aside: `__init__.py` says what a folder offers."""
    between: defaultdict[Path, set[Path]] = defaultdict(set)
    for name, path in FILES.items():
        nodes = said_by(path).anywhere if typed else said_by(path).carried_out
        for other in (found for node in nodes for found in taken_from(node)):
            inits = {path.name, FILES[other].name} & {"__init__.py"}
            if folder(name) != folder(other) and not inits:
                between[folder(name)].add(folder(other))
    try:
        TopologicalSorter(between).prepare()
    except CycleError as error:
        raise AssertionError(" -> ".join(map(str, error.args[1]))) from None


def test_rooms_import_lower_rooms_alone() -> None:
    level = {name: number for number, names in enumerate(LEVELS) for name in names}
    upward = {(one, other) for one, other in between_rooms() if level[one] <= level[other]}
    assert upward == set()


FRONT_DOOR = ("zsim.api.", "zsim.cli.", "zsim.mistake", "zsim.units", "zsim.entry_point")


def behind_the_front_door(path: Path) -> set[str]:
    """Modules of ours that a file imports anywhere, and that are no part of the front door."""
    found = {node.module for node in said_by(path).anywhere if node.module}
    own = path.parents[1].name  # an app may import its own modules
    return {
        name
        for name in found
        if name.startswith("zsim") and not name.startswith((*FRONT_DOOR, f"{own}."))
    }


def test_the_command_line_uses_the_front_door_for_python_and_nothing_else() -> None:
    core = [path for name, path in FILES.items() if name.startswith("zsim.cli.")]
    apps = [path for name, path in FILES.items() if ".commands." in name]
    assert len(core) > 8
    assert len(apps) > 2
    assert {str(path) for path in core if behind_the_front_door(path) - {"zsim"}} == set()
    assert {str(path) for path in apps if behind_the_front_door(path)} == set()


def test_there_are_few_rooms_and_few_arrows() -> None:
    between = between_rooms()
    assert {each for arrow in between for each in arrow} == {
        name for names in LEVELS for name in names
    }
    assert len([each for each in between if APPS.isdisjoint(each)]) <= 154


def homes(names_in: Callable[[Path], Iterable[str]]) -> dict[str, list[str]]:
    """Names that stand for something in more than one module, and those modules."""
    found: defaultdict[str, list[str]] = defaultdict(list)
    for module_name, path in FILES.items():
        for name in names_in(path):
            found[name].append(module_name)
    return {name: modules for name, modules in found.items() if len(modules) > 1}


def test_a_class_name_stands_for_one_thing() -> None:
    assert homes(lambda path: said_by(path).classes) == {}


def test_a_module_name_stands_for_one_thing_but_for_a_few() -> None:
    """Folders of runtimes aside: each has its options, schedule and volume."""
    twice = homes(lambda path: [path.stem] if path.name != "__init__.py" else [])
    outside = {
        stem: [
            name for name in modules if not name.startswith(("zsim.runtimes.", "zsim_runtimes."))
        ]
        for stem, modules in twice.items()
    }
    assert len([stem for stem, modules in outside.items() if len(modules) > 1]) <= 8


def test_the_page_has_a_line_for_every_room() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    rooms = defaultdict(str, re.findall(r"^\| `([\w/]+)` \| (.+) \|$", page, re.MULTILINE))
    names = {name for names in LEVELS for name in names} - {GROUND, RUNTIMES, "backends", *APPS}
    assert {name for name in names if not rooms[f"zsim/{name}"]} == set()
    assert {name for name in (RUNTIMES, *APPS) if not rooms[name]} == set()


@cache
def floor(name: str) -> int:
    """How many files stand on each other below a file: it stands above all that it imports."""
    nodes = said_by(FILES[name]).carried_out
    below = {found for node in nodes for found in taken_from(node)} - {name}
    return 1 + max(map(floor, below), default=0)


FORMS = (LoadedScenario, Scenario, ResolvedScenario, Source, Document)
"""What a scenario is on its way, beside its name and its tables."""


def ways_to_a_job(commands: Iterable[Sequence[str]]) -> list[list[str]]:
    """Files that a scenario enters from each command to its first job, in order.

    It enters a file when a function there is called with it, in any of its forms. All commands run
    in one go: CPython 3.11 may hang where a process is profiled for the second time.
    """
    modules = {str(path): name for name, path in FILES.items()}
    entered: list[str] = []
    named, there = "", True

    def is_the_scenario(value: object) -> bool:
        if isinstance(value, Mapping):
            return {"model", "cluster", "train"} <= value.keys()
        return isinstance(value, FORMS) or (isinstance(value, str) and value == named)

    def follow(frame: FrameType, event: str, _: object) -> None:
        nonlocal there
        code = frame.f_code
        if there or event != "call" or code.co_filename not in modules or "<" in code.co_name:
            return
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        there = code is Job.__post_init__.__code__
        if there or any(is_the_scenario(frame.f_locals.get(name)) for name in names):
            entered.append(modules[code.co_filename])

    ways: list[list[str]] = []
    before = sys.getprofile()
    sys.setprofile(follow)
    try:
        for command in commands:
            entered.clear()
            named, there = command[1], False
            assert answer(command) == 0
            assert there
            ways.append([name for name, _ in groupby(entered)])
    finally:
        sys.setprofile(before)
    return ways


def test_a_scenario_climbs_back_three_times_at_most_on_its_way_to_a_job(tmp_path: Path) -> None:
    (tmp_path / "ds_config.json").write_text('{"zero_optimization": {"stage": 2}}', "utf-8")
    text = zsim_scenarios.text("tiny").replace("stage = 3", 'deepspeed_config = "ds_config.json"')
    (tmp_path / "mine.toml").write_text(text, "utf-8")
    own = "zero.bucket_elements=none"  # a knob of zsim's own stages
    commands = [
        ["run", "tiny", "--no-check"],
        ["run", "tiny", "--no-check", "--ranks", "2", "--set", "zero.stage=3"],
        ["check", "tiny"],
        ["plan", "llama2_7b"],
        ["plan", "llama2_7b", "--set", "zero.emulate=fsdp2"],
        ["plan", str(tmp_path / "mine.toml"), "--set", own],
    ]
    for way in ways_to_a_job(commands):
        need_few_climbs(way)


def need_few_climbs(way: Sequence[str]) -> None:
    """A climb: the next file that a scenario enters stands above the one that it was in."""
    assert len(way) > 10
    climbs = [f"{one} to {other}" for one, other in pairwise(way) if floor(one) < floor(other)]
    assert len(climbs) <= 3, climbs
