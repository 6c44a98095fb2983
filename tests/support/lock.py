"""Locks with hashes for each environment of the Makefile, by pip-compile: `make lock`.

`lock/run.txt` has what `make run` needs; the others have what their environments need on top of
it. Versions are those of constraints.txt; hashes are of every file that the package index has of
them, so that they hold for each Python and machine that there is a file for.
"""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "lock"
TEST = ("report", "torch", "dev", "draw", "calibrate")
EXTRAS = {
    "run": ("report",),
    "test": TEST,
    "studies": (*TEST, "studies"),
    "docs": (*TEST, "docs"),
}
ON_TOP_OF = {"run": (), "test": ("run",), "studies": ("run", "test"), "docs": ("run", "test")}
QUIET = "--quiet --no-emit-index-url --no-emit-find-links --no-emit-trusted-host --no-header"
OPTIONS = f"{QUIET} --generate-hashes --no-annotate --allow-unsafe --strip-extras"
HEAD = "# By `make lock`, from pyproject.toml and constraints.txt: change those.\n"


def compiled(name: str) -> str:
    """What pip-compile says of an environment, with what builds zsim."""
    extras = [word for extra in EXTRAS[name] for word in ("--extra", extra)]
    words = [*OPTIONS.split(), "--build-deps-for", "editable", "-c", "constraints.txt", *extras]
    path = ROOT / "build" / f"{name}.txt"
    path.parent.mkdir(exist_ok=True)
    program = [sys.executable, "-m", "piptools", "compile", *words, "-o", str(path)]
    subprocess.run([*program, "pyproject.toml"], cwd=ROOT, check=True)
    return path.read_text("utf-8")


def entries(text: str) -> dict[str, str]:
    """Pins with their hashes, by name, without the label of a local build: torch has one."""
    found: dict[str, str] = {}
    for entry in text.replace(" \\\n    --hash", " --hash").splitlines():
        if entry and not entry.startswith("#"):
            pin, *hashes = entry.split(" --hash=")
            name, _, version = pin.partition("==")
            found[name] = " \\\n    --hash=".join([f"{name}=={version.partition('+')[0]}", *hashes])
    return found


def locked(name: str) -> dict[str, str]:
    """Entries of a lock that is there."""
    return entries((FOLDER / f"{name}.txt").read_text("utf-8"))


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, below in ON_TOP_OF.items():
        have = {known for lower in below for known in locked(lower)}
        made = {key: entry for key, entry in entries(compiled(name)).items() if key not in have}
        text = HEAD + "\n".join(made.values()) + "\n"
        (FOLDER / f"{name}.txt").write_text(text, "utf-8")
