"""Memory that is freed stays with the process, to be taken again; who has set malloc keeps that."""

import ctypes
import os
import subprocess
import sys

import pytest

from zsim_torch.execute.freed_memory import keep_freed

BLOCKS_BYTES = 12 * (4 << 20)

FREED_BLOCKS = """
import ctypes

import torch

from zsim_torch.execute.freed_memory import keep_freed


class Information(ctypes.Structure):
    # struct mallinfo2 of glibc's malloc.h (2.33)
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd",
            "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
        )
    ]


library = ctypes.CDLL(None)
library.mallinfo2.restype = Information
assert keep_freed()
before = library.mallinfo2().fordblks
for step in range(8):
    made = [torch.ones(1 << 20) for _ in range(12)]
    del made
print(library.mallinfo2().fordblks - before)
"""


@pytest.mark.one_commit_in(24)
@pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="glibc 2.33 says what it holds free"
)
def test_blocks_that_are_freed_together_stay_to_be_taken_again() -> None:
    # By itself glibc gives back what is more than twice the largest, here most of the twelve.
    variables = {key: value for key, value in os.environ.items() if "MALLOC" not in key}
    variables.pop("GLIBC_TUNABLES", None)
    done = subprocess.run(
        [sys.executable, "-c", FREED_BLOCKS],
        capture_output=True,
        text=True,
        check=True,
        env=variables,
    )
    # The first block may come from what was free before, by as much as that was.
    assert int(done.stdout) > BLOCKS_BYTES * 3 // 4


@pytest.mark.parametrize(
    "name", ["MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES"]
)
def test_what_the_user_has_set_stays(name: str) -> None:
    assert not keep_freed({name: "1"})
