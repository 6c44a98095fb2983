"""Packages of somebody else, as an installer leaves them, and zsim run beside them."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PLANTS = ROOT / "tests" / "plants"
METADATA = "Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n"
SOURCES = ("zsim", "runtimes", "backends", "apps", "topologies", "scenarios")
KINDS = (".py", ".toml", ".json")
ASKED = """
import io, json, sys
from contextlib import redirect_stderr, redirect_stdout
from zsim.cli.main import answer

found = []
for words in json.loads(sys.argv[1]):
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as error:
        code = int(answer(words))
    found.append((code, out.getvalue(), error.getvalue()))
print(json.dumps(found))
"""


class Answer(NamedTuple):
    """Output of a command: in the end, and by the way."""

    returncode: int
    stdout: str
    stderr: str


def install_plant(site: Path, kind: str) -> Path:
    """Install the package in the folder `tests/plants/KIND` in the folder `site`."""
    folder = PLANTS / kind
    skipped = shutil.ignore_patterns("__pycache__", "entry_points.txt", "test_*.py")
    shutil.copytree(folder, site, ignore=skipped, dirs_exist_ok=True)
    return _registered(site, kind, (folder / "entry_points.txt").read_text("utf-8"))


def plant_files(kind: str) -> set[str]:
    """Return the files of a plant, without its tests and those that only its tests run."""
    files = (path for path in (PLANTS / kind).rglob("*") if path.is_file())
    names = {path.relative_to(PLANTS / kind).as_posix() for path in files}
    return {name for name in names if "__pycache__" not in name and not name.startswith("test_")}


def sources_that_name(word: str) -> list[str]:
    """Return the source files of zsim that name a plant, in any case."""
    named = re.compile(rf"\b{word}\b", re.IGNORECASE)
    sources = [path for top in SOURCES for path in (ROOT / top).rglob("*") if path.suffix in KINDS]
    assert len(sources) > 500
    return [str(path) for path in sources if named.search(path.read_text("utf-8"))]


def _registered(site: Path, name: str, entry_points: str) -> Path:
    """Register the entry points of an installed package."""
    info = site / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(METADATA.format(name=name), "utf-8")
    (info / "entry_points.txt").write_text(entry_points, "utf-8")
    return site


def python(site: Path, *words: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run the interpreter with the packages in `site` beside those that are installed."""
    path = os.pathsep.join([str(site), *sys.path])
    return subprocess.run(
        [sys.executable, *words],
        env={**os.environ, "PYTHONPATH": path},
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def zsim(site: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a command of zsim with the packages in `site`."""
    return python(site, "-c", "from zsim.cli.main import main; main()", *words)


def answers(site: Path, *commands: Sequence[str]) -> list[Answer]:
    """Run commands of zsim with the packages in `site`, one after the other in one process."""
    ran = python(site, "-c", ASKED, json.dumps(commands))
    assert ran.returncode == 0, ran.stderr
    return [Answer(*each) for each in json.loads(ran.stdout)]
