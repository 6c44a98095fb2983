import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[3] / "examples" / "own_module.py"


@pytest.mark.one_commit_in(24)
def test_the_example_trains_a_module_and_data_of_its_own() -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLE)], capture_output=True, text=True, check=False, timeout=120
    )
    assert (done.returncode, done.stderr) == (0, "")
    found = re.fullmatch(r"loss ([0-9.]+) in the first step, ([0-9.]+) in step 60\n", done.stdout)
    assert found is not None, done.stdout
    assert float(found[2]) < float(found[1]) / 4
