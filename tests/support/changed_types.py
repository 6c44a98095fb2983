"""Run pyright on the files whose types may differ from those of its last run without errors.

Pyright has no cache on disk: the 1,400 files take it more than a minute. After a run without errors
the digests of all Python files are written to `build/pyright.json`; the next run checks the files
that differ and all that import them, directly or not. It checks everything if a file is gone, or if
settings, locked packages or Python are others.
"""

import json
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Mapping
from hashlib import sha256
from pathlib import Path

from import_graph import ROOT, ImportGraph

STATE = Path("build/pyright.json")
CHECKED = "0 errors, 0 warnings, 0 informations"
"""What pyright prints when it has found nothing."""

Digests = Mapping[str, str]


def digests(root: Path) -> dict[str, str]:
    """Return the digest of each Python file that pyright checks, and that of its surroundings."""
    project = tomllib.loads((root / "pyproject.toml").read_text("utf-8"))
    folders = project["tool"]["pyright"]["include"]
    files = sorted(path for folder in folders for path in (root / folder).rglob("*.py"))
    found = {str(path.relative_to(root)): _digest(path.read_bytes()) for path in files}
    around = [root / "pyproject.toml", *sorted((root / "lock").glob("*.txt"))]
    text = b"".join(path.read_bytes() for path in around)
    return {"": _digest(text + sys.version.encode()), **found}


def _digest(content: bytes) -> str:
    return sha256(content).hexdigest()


def due(before: Digests, now: Digests, graph: ImportGraph) -> list[str]:
    """Return the files to check; before, `before` had no errors."""
    if before.get("") != now[""] or before.keys() - now.keys():
        return sorted(now.keys() - {""})
    changed = {Path(name) for name in now if before.get(name) != now[name]}
    return sorted(name for name in now if name and changed and graph.reached(Path(name)) & changed)


def check(files: Iterable[str], root: Path) -> int:
    """Return the exit status of pyright for some files, or for all if none is named."""
    command = [str(Path(sys.executable).with_name("pyright")), *files]
    return subprocess.run(command, cwd=root, check=False).returncode


def main(root: Path = ROOT) -> int:
    """Check what is due; return pyright's exit status."""
    state = root / STATE
    now = digests(root)
    before = json.loads(state.read_text("utf-8")) if state.is_file() else {}
    files = due(before, now, ImportGraph(root))
    if not files:
        print(f"{CHECKED} (nothing has changed)")  # noqa: T201  # as pyright does
        return 0
    status = check(files if len(files) < len(now) - 1 else (), root)
    if not status:
        state.parent.mkdir(exist_ok=True)
        state.write_text(json.dumps(now, indent=0), "utf-8")
    return status


if __name__ == "__main__":
    sys.exit(main())
