"""Packages of somebody else, as an installer leaves them, and zsim run beside them."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples" / "packages"
METADATA = "Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n"


def install(site: Path, name: str, entry_points: str) -> Path:
    """Install the package of one module `examples/packages/NAME.py` in the folder `site`."""
    shutil.copy(EXAMPLES / f"{name}.py", site)
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
