"""Locks with hashes for each environment of the Makefile, by pip-compile: `make lock`.

`lock/run.txt` has what `make run` needs; the others have what their environments need on top.
Versions are those of constraints.txt. Hashes are of every file that the package index has of them,
so they hold for each Python and machine for which there is one. torch stands alone: of the CPU
build, and of that of PyPI with its CUDA libraries, a machine takes the one that it can have.
"""

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "lock"
TEST = ("report", "serve", "torch", "dev", "draw", "calibrate", "yaml", "chakra")
EXTRAS = {
    "run": ("report", "serve"),
    "test": TEST,
    "studies": (*TEST, "studies"),
    "docs": (*TEST, "docs"),
    "torch_cuda": ("report", "torch"),
    "sbom": ("sbom",),
}
ON_TOP_OF = {
    "run": (),
    "test": ("run",),
    "studies": ("run", "test"),
    "docs": ("run", "test"),
    "torch_cuda": ("run", "test"),
    "sbom": (),
}
TORCH = ("torch", "triton", "nvidia-", "cuda-")
"""How torch, and the libraries that come with one of its builds, are called or begin."""

BUILD = ("hatchling", "packaging", "pathspec", "pluggy", "trove-classifiers")
"""What builds zsim: it is installed without the isolation in which pip would look for them."""

QUIET = "--quiet --no-emit-index-url --no-emit-find-links --no-emit-trusted-host --no-header"
OPTIONS = f"{QUIET} --generate-hashes --no-annotate --allow-unsafe --strip-extras"
HEAD = "# By `make lock`, from pyproject.toml and constraints.txt: change those.\n"


def compiled(name: str) -> str:
    """What pip-compile says of an environment."""
    extras = [word for extra in EXTRAS[name] for word in ("--extra", extra)]
    path = ROOT / "build" / f"{name}.txt"
    path.parent.mkdir(exist_ok=True)
    words = [*OPTIONS.split(), "-c", "constraints.txt", *extras, "-o", str(path), "pyproject.toml"]
    environment = dict(os.environ)
    if name == "torch_cuda":  # from the index, not what lies beside it on this machine
        environment |= {"PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": ""}
    program = [sys.executable, "-m", "piptools", "compile", *words]
    subprocess.run(program, cwd=ROOT, check=True, env=environment)
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


def write(name: str, made: Iterable[str]) -> None:
    """Put entries into a lock."""
    (FOLDER / f"{name}.txt").write_text(HEAD + "\n".join(made) + "\n", "utf-8")


def is_torch(name: str) -> bool:
    """Whether a package is torch, or comes with one of its builds."""
    return name.startswith(TORCH)


def layered(texts: dict[str, str]) -> None:
    """Write the locks of the environments that pip-compile said `texts` of."""
    FOLDER.mkdir(exist_ok=True)
    all_of = {name: entries(text) for name, text in texts.items()}
    all_of["run"] |= {name: all_of["test"][name] for name in BUILD}
    for name, below in ON_TOP_OF.items():
        have = {known for lower in below for known in locked(lower)}
        keeps_torch = name == "torch_cuda"
        write(
            name,
            (
                entry
                for key, entry in sorted(all_of[name].items())
                if key not in have and is_torch(key) == keeps_torch
            ),
        )
    write("torch_cpu", [all_of["test"]["torch"]])


if __name__ == "__main__":
    layered({name: compiled(name) for name in EXTRAS})
