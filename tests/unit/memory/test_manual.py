"""What docs/memory.md shows is what happens."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

MANUAL = Path(__file__).parents[3] / "docs" / "memory.md"


@pytest.mark.one_commit_in(6)
def test_the_example_prints_what_stands_beside_it() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", MANUAL.read_text("utf-8"), re.DOTALL)
    shown = re.findall(r"# (\d+), then (\d+)", code)
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert [tuple(ran.stdout.split())] == shown
