"""What an installed zsim holds: six uniquely named packages, their data, and nothing generic."""

import configparser
import os
import subprocess
import sys
import tomllib
import zipfile
from dataclasses import dataclass
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
IMPORT_ROOTS = ("runtimes", "backends", "apps", "topologies", "scenarios")
PACKAGES = {
    "zsim",
    "zsim_runtimes",
    "zsim_null",
    "zsim_des",
    "zsim_torch",
    "zsim_explain",
    "zsim_record",
    "zsim_lab",
    "zsim_plan",
    "zsim_study",
    "zsim_topologies",
    "zsim_scenarios",
}


def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))


def package_folders() -> list[Path]:
    """Every folder of the checkout that holds a top-level package."""
    found = [path.parent for root in IMPORT_ROOTS for path in (ROOT / root).glob("*/__init__.py")]
    return [ROOT / "zsim", *found]


def run(*command: str | Path, cwd: Path, path: Path | None = None) -> str:
    """Run ``command`` and return what it printed, with ``path`` before every other import root."""
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(path)} if path else None,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@dataclass(frozen=True)
class Wheel:
    file: Path
    names: frozenset[str]

    def read(self, name: str) -> str:
        with zipfile.ZipFile(self.file) as archive:
            return archive.read(name).decode()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Wheel:
    """The wheel, built from the sdist, as a release is: what the sdist lacks is missing in it."""
    out = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, ROOT, cwd=out)
    (file,) = out.glob("*.whl")
    with zipfile.ZipFile(file) as archive:
        return Wheel(file, frozenset(archive.namelist()))


@pytest.fixture(scope="module")
def installed(wheel: Wheel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("site")
    options = ["--quiet", "--disable-pip-version-check", "--no-index", "--no-deps"]
    run(
        sys.executable, "-m", "pip", "install", *options, "--target", target, wheel.file, cwd=target
    )
    return target


def test_the_package_list_names_every_package_folder() -> None:
    listed = project()["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    folders = [path.relative_to(ROOT).as_posix() for path in package_folders()]
    assert sorted(listed) == sorted(folders)
    assert {PurePosixPath(name).name for name in listed} == PACKAGES


def test_every_tool_knows_the_same_import_roots() -> None:
    tool = project()["tool"]
    here = "$MYPY_CONFIG_FILE_DIR"
    of_tests = ("tests/support", "tests/plants/runtime")
    assert tool["hatch"]["build"]["dev-mode-dirs"] == [".", *IMPORT_ROOTS]
    assert tool["mypy"]["mypy_path"] == [
        here,
        *(f"{here}/{root}" for root in (*IMPORT_ROOTS, *of_tests)),
    ]
    assert tool["pyright"]["extraPaths"] == [*IMPORT_ROOTS, *of_tests]
    assert tool["pytest"]["ini_options"]["pythonpath"] == ["tests/support"]
    assert tool["ruff"]["src"] == [".", *IMPORT_ROOTS]


def test_the_constraints_pin_every_requirement_exactly() -> None:
    lines = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    pins = [line for line in lines if not line.startswith("#")]
    assert all(pin.count("==") == 1 and not set(pin) & set(" @/+;") for pin in pins)
    table = project()["project"]
    wanted = chain(table["dependencies"], *table["optional-dependencies"].values())
    names = {requirement.partition(">=")[0].partition("[")[0] for requirement in wanted}
    assert names <= {pin.partition("==")[0] for pin in pins}


@pytest.mark.one_commit_in(4)
def test_the_wheel_puts_only_our_own_names_into_site_packages(wheel: Wheel) -> None:
    top = {PurePosixPath(name).parts[0] for name in wheel.names}
    assert {name for name in top if not name.endswith(".dist-info")} == PACKAGES


def test_the_wheel_holds_every_file_of_every_package(wheel: Wheel) -> None:
    """Data and py.typed markers included; what git ignores is not part of a package."""
    expected = {
        path.relative_to(folder.parent).as_posix()
        for folder in package_folders()
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert {f"{package}/py.typed" for package in PACKAGES} <= expected
    assert {name for name in wheel.names if ".dist-info/" not in name} == expected


def test_every_entry_point_names_a_module_of_the_wheel(wheel: Wheel) -> None:
    (metadata,) = (name for name in wheel.names if name.endswith(".dist-info/entry_points.txt"))
    points = configparser.ConfigParser()
    points.read_string(wheel.read(metadata))
    assert set(points["zsim.backends"]) == {"sim", "torch", "null"}
    assert points["console_scripts"]["zsim"] == "zsim.cli.main:main"
    for group in points.sections():
        for target in points[group].values():
            path = target.partition(":")[0].replace(".", "/")
            assert {f"{path}.py", f"{path}/__init__.py"} & wheel.names, target


@pytest.mark.one_commit_in(4)
def test_the_installed_packages_import_without_torch(installed: Path, tmp_path: Path) -> None:
    program = """
import sys, zsim, zsim_des, zsim_null, zsim_scenarios, zsim_topologies
for module in zsim, zsim_des, zsim_null, zsim_scenarios, zsim_topologies:
    print(module.__file__)
print("torch" in sys.modules)
"""
    *files, torch_is_loaded = run(
        sys.executable, "-c", program, cwd=tmp_path, path=installed
    ).splitlines()
    assert all(Path(file).is_relative_to(installed) for file in files)
    assert torch_is_loaded == "False"
