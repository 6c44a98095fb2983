"""Executors on other processes."""

import time
from multiprocessing import active_children

import pytest

from zsim.workers.processes import processes


def interrupt() -> None:
    """Interrupt a block of which one process would work for an hour."""
    with processes(2) as executor:
        executor.submit(time.sleep, 0).result()
        executor.submit(time.sleep, 3600)
        raise KeyboardInterrupt


def test_an_interrupted_block_ends_its_processes_without_waiting_for_them() -> None:
    others = {*active_children()}
    with pytest.raises(KeyboardInterrupt):
        interrupt()
    # The pool's own thread may collect a process, so one look can find it ended and not collected.
    while {*active_children()} - others:
        time.sleep(0.01)
