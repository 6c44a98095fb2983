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


def test_simulating_imports_no_torch() -> None:
    done = process("run", "tiny", "--json", then="print('torch' in sys.modules, file=sys.stderr)")
    assert done.stderr == "False\n"
    assert json.loads(done.stdout)["fits"] is True


def test_help_imports_nothing_heavy() -> None:
    heavy = "print({'numpy', 'networkx', 'simpy', 'pydantic', 'torch'} & set(sys.modules))"
    done = process("--help", then=heavy)
    assert done.stdout.endswith("set()\n")


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
