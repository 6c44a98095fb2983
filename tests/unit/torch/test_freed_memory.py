"""Memory that is freed and taken again costs no page faults; who has set malloc keeps that."""

import os
import subprocess
import sys

import pytest

from zsim_torch.execute.freed_memory import keep_freed

TWO_MATRICES = """
import resource
import sys

import torch

from zsim_torch.execute.freed_memory import keep_freed

if sys.argv[1] == "kept":
    assert keep_freed()
for step in range(8):
    if step == 4:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    made = [torch.ones(1 << 20) for _ in range(3)]
    del made
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(how: str) -> int:
    """Return the page faults of four steps, each of which takes and frees three blocks of 4 MiB."""
    variables = {key: value for key, value in os.environ.items() if "MALLOC" not in key}
    done = subprocess.run(
        [sys.executable, "-c", TWO_MATRICES, how],
        capture_output=True,
        text=True,
        check=True,
        env=variables,
    )
    return int(done.stdout)


def test_blocks_that_are_freed_together_are_taken_again_without_faults() -> None:
    # Three blocks are 3,072 pages, and more than twice the largest, so they are given back.
    assert faults("given back") > 4 * 1000
    assert faults("kept") < 100


@pytest.mark.parametrize(
    "name", ["MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES"]
)
def test_what_the_user_has_set_stays(name: str) -> None:
    assert not keep_freed({name: "1"})
