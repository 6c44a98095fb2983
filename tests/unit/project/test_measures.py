"""The size of the core and the load of a run do not grow.

A measure that becomes smaller lowers its ceiling here, so that the gain is kept.
"""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
RUNTIMES = ROOT / "runtimes" / "zsim_runtimes"
FOLDERS = (ROOT / "zsim", RUNTIMES, *sorted((ROOT / "backends").glob("zsim_*")))
PACKAGES = (*(folder.name for folder in FOLDERS), "zsim_scenarios", "zsim_topologies")

LINES_MAX = 76_780
"""Lines of zsim."""

RUN_MODULES_MAX, RUN_LINES_MAX = 355, 57_450
"""Modules that a run of llama2_7b and its proof load, and their lines."""


def files(*folders: Path) -> list[Path]:
    return [path for folder in folders for path in sorted(folder.rglob("*.py"))]


def line_count(path: Path) -> int:
    return path.read_text("utf-8").count("\n")


def need_at_most(what: str, found: int, most: int) -> None:
    assert found <= most, f"{what}: {found:,}, at most {most:,}"


def test_the_core_has_no_more_lines() -> None:
    need_at_most("lines of zsim", sum(map(line_count, files(ROOT / "zsim"))), LINES_MAX)


LOADED = f"""
import sys
import zsim
zsim.run(zsim.load("llama2_7b"))
for name, module in sorted(sys.modules.items()):
    if name.partition(".")[0] in {PACKAGES!r} and getattr(module, "__file__", None):
        print(module.__file__)
"""


def test_a_run_loads_no_more_modules_and_lines() -> None:
    run = subprocess.run(
        [sys.executable, "-c", LOADED], check=True, capture_output=True, text=True, cwd=ROOT
    )
    loaded = [Path(line) for line in run.stdout.splitlines()]
    need_at_most("modules that a run loads", len(loaded), RUN_MODULES_MAX)
    need_at_most("lines that a run loads", sum(map(line_count, loaded)), RUN_LINES_MAX)
