"""Profiles of Hypothesis, by no clock (machines are shared), and modules that forks have loaded.

`make test` takes the profile `ci`, which draws the same each time, and fewer; all else draws anew.

A process has one fork server, which loads what its first user names. Ranks that come from a server
which was started for a sweep import torch, 3 s of CPU each, at every start of a pool; so the server
of a test process loads what ranks run, with what torch imports when a module is described and when
FSDP shards it, and what modules of tests import.

The collector of cycles waits while tests are collected, and leaves alone what was made then: all
lasts to the end, and each look at it takes a third of a second, 3 of 9 s while it is made.

torch has one thread here, as ranks have: two test processes have two cores, on which threads that
share a product of 8 by 8 wait for each other (50 times as long for a plain loop of four ranks).

A shell starts what is to run behind it, or under nohup, with interrupts ignored, and children
inherit that; tests that interrupt theirs take it back first.
"""

import gc
import signal
import sys
from multiprocessing import forkserver

import pytest
from hypothesis import HealthCheck, settings

RANKS_LOAD = (
    "zsim_torch.supervise.rank_process",
    "torch.fx.experimental.symbolic_shapes",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "hypothesis.strategies",
    "pytest",
    "zsim_torch.supervise.frozen_imports",
)

gc.disable()

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    """Let the collector go on, without what the session keeps; let torch have one thread."""
    gc.collect()
    gc.freeze()
    gc.enable()
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(1)


settings.register_profile(
    "zsim", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("ci", settings.get_profile("zsim"), derandomize=True, max_examples=30)
settings.load_profile("zsim")


_preload = forkserver.set_forkserver_preload


def _with_what_ranks_load(modules: list[str]) -> None:
    _preload([*RANKS_LOAD, *modules])  # the last of the first freezes what was imported


pytest.MonkeyPatch().setattr(forkserver, "set_forkserver_preload", _with_what_ranks_load)
