"""The command as a process of its own: what it imports, and readers that stop early."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ZSIM = Path(sys.executable).parent / "zsim"


def process(*words: str, then: str = "") -> subprocess.CompletedProcess[str]:
    program = f"import sys; from zsim.cli.main import answer; code = answer({list(words)}); {then}"
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )


@pytest.mark.one_commit_in(12)
def test_simulating_imports_no_torch() -> None:
    done = process("run", "tiny", "--json", then="print('torch' in sys.modules, file=sys.stderr)")
    assert done.stderr == "False\n"
    assert json.loads(done.stdout)["fits"] is True


HEAVY = {"numpy", "networkx", "rich", "scipy", "sqlite3", "torch"}


LIGHT = {"zsim.entry_point", "zsim.mistake", "zsim.units"}
"""What the command line imports beside itself: messages and sizes."""


@pytest.mark.matrix(6)
@pytest.mark.parametrize("words", [(), ("run",), ("sweep",)])
def test_help_imports_the_command_line_and_nothing_heavy(words: tuple[str, ...]) -> None:
    done = process(*words, "--help", then="print(*sys.modules)")
    loaded = done.stdout.splitlines()[-1].split()
    assert HEAVY.isdisjoint(loaded)
    assert words or "pydantic" not in loaded  # typer takes it for the options of a command
    ours = {name for name in loaded if name.startswith("zsim.")}
    assert {name for name in ours if not name.startswith("zsim.cli")} == LIGHT


@pytest.mark.matrix(6)
@pytest.mark.parametrize("end", ["| true", ">&-"])
def test_a_reader_that_stops_early_is_no_error(end: str) -> None:
    """`true` ends at once: the pipe is closed before the output comes, or while it does."""
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {ZSIM} plan tiny {end}"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
