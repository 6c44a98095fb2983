"""Memory that runs out under a bound is a `MemoryError` that there is memory to handle."""

import subprocess
import sys

import pytest

FILLS = """
import resource
from zsim.workers.memory_bound import bounded_memory, unbounded_memory

def filled():
    kept = []
    with bounded_memory(250 * 2**20):
        while True:
            {grow}

for _ in range(3):
    try:
        filled()
    except MemoryError:
        print("told")
print(resource.getrlimit(resource.RLIMIT_DATA)[0] == resource.RLIM_INFINITY)
"""


@pytest.mark.matrix(9)
@pytest.mark.parametrize(
    "grow",
    ["kept.append({len(kept): object()})", "kept = [kept]", "kept.append(bytearray(2**28))"],
)
def test_memory_that_is_filled_is_told_each_time_and_the_process_lives(grow: str) -> None:
    """Without a reserve, CPython 3.11 aborts in some of these, or unwinds for ever."""
    done = subprocess.run(
        [sys.executable, "-c", FILLS.format(grow=grow)],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert (done.returncode, done.stdout.split()) == (0, ["told", "told", "told", "True"])


def test_a_bound_that_an_outer_one_undercuts_changes_nothing() -> None:
    program = """
import resource
from zsim.workers.memory_bound import bounded_memory, unbounded_memory
bound = lambda: resource.getrlimit(resource.RLIMIT_DATA)[0] // 2**20
with bounded_memory(600 * 2**20):
    with bounded_memory(900 * 2**20):
        print(bound())
    with unbounded_memory():
        print(resource.getrlimit(resource.RLIMIT_DATA)[0] == resource.RLIM_INFINITY)
    print(bound())
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["600", "True", "600"]


@pytest.mark.one_commit_in(6)
def test_memory_that_is_gone_before_a_bound_holds_is_told_then_and_never_later() -> None:
    """A thread that is not ended raises in whatever the process does next."""
    program = """
import resource, threading, time
from zsim.workers.memory_bound import bounded_memory
real = resource.setrlimit

def busy():
    end = time.monotonic() + 0.3
    while time.monotonic() < end:
        pass

def slow(*words):
    busy()
    real(*words)

resource.setrlimit = slow
try:
    with bounded_memory(2**20):
        print("not told")
except MemoryError:
    print("told")
resource.setrlimit = real
busy()
print([each.name for each in threading.enumerate()])
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=100
    )
    assert (done.returncode, done.stdout.split()) == (0, ["told", "['MainThread']"]), done.stderr
