"""Packages of somebody else, as an installer leaves them, and zsim run beside them."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

EXAMPLES = Path(__file__).parents[2] / "examples" / "packages"
METADATA = "Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n"
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


def install(site: Path, name: str, entry_points: str, folder: Path = EXAMPLES) -> Path:
    """Install the package of one module `NAME.py` of `folder` in the folder `site`."""
    shutil.copy(folder / f"{name}.py", site)
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
