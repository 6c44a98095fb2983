"""Profiles of Hypothesis, by no clock (machines are shared), and modules that forks have loaded.

`make test` takes the profile `ci`, which draws fewer examples, the same all day (`day_seed.py`).

A process has one fork server, which loads what its first user names. Ranks that come from a server
which was started for a sweep import torch, 3 s of CPU each, at every start of a pool; so the server
of a test process loads what ranks run, with what torch imports when a module is described and when
FSDP shards it, and what modules of tests import (`zsim_des.values`: 0.3 s in each rank).

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
from collections.abc import Iterator
from importlib import import_module
from multiprocessing import forkserver

import pytest
from blame import Blame
from changed_tests import ChangedTests
from day_seed import PROFILE, choose_seed, seed_line
from file_costs import FileCosts
from hypothesis import HealthCheck, settings
from rotation import Rotation, commit_hash

RANKS_LOAD = (
    "zsim_torch.supervise.rank_process",
    "torch.fx.experimental.symbolic_shapes",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "hypothesis.strategies",
    "pytest",
    "zsim_des.values",
    "zsim_torch.supervise.frozen_imports",
)

gc.disable()

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--file-seconds",
        type=float,
        metavar="SECONDS",
        help="fail if a test file takes more processor time; print the ten most expensive files",
    )
    parser.addoption(
        "--rotation",
        metavar="SEED",
        help="seed that chooses the cases of matrices (default: the commit's hash)",
    )
    parser.addoption("--all-cases", action="store_true", help="run every case of matrices")
    parser.addoption(
        "--one-of", type=int, default=1, metavar="N", help="run one of N cases of every test"
    )
    parser.addoption(
        "--rest-in",
        type=float,
        metavar="MINUTES",
        help="run what the sample of this commit leaves out, until the time is up",
    )
    parser.addoption(
        "--blame", action="store_true", help="replay the first failed cases on the parent commit"
    )
    parser.addoption(
        "--changed",
        metavar="COMMIT",
        help="run the test files that can reach what differs from COMMIT",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    option, plugins = config.option, config.pluginmanager
    choose_seed(option)  # before Hypothesis reads it; xdist's workers are given it
    plugins.register(FileCosts(option.file_seconds), "file-costs")
    option.rotation = option.rotation or commit_hash()  # xdist's workers get it
    rotation = Rotation(
        option.rotation,
        everything=option.all_cases,
        one_of=option.one_of,
        rest_in=option.rest_in,
    )
    plugins.register(rotation, "rotation")
    if option.blame and not hasattr(config, "workerinput"):
        plugins.register(Blame(), "blame")
    if option.changed:
        plugins.register(ChangedTests(option.changed), "changed-tests")


def pytest_report_header(config: pytest.Config) -> str | None:
    return seed_line(config.option)


def pytest_collection_finish() -> None:
    """Let the collector go on, without what the session keeps; let torch have one thread."""
    gc.collect()
    gc.freeze()
    gc.enable()
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(1)


@pytest.fixture(scope="session")
def pool_of() -> Iterator[object]:
    """Return pools of ranks by their number, which all tests of this process share."""
    pools = import_module("shared_ranks").SharedPools()  # only tests of ranks import torch
    yield pools
    pools.end()


settings.register_profile(
    "zsim", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile(PROFILE, settings.get_profile("zsim"), database=None, max_examples=15)
settings.load_profile("zsim")


_preload = forkserver.set_forkserver_preload


def _with_what_ranks_load(modules: list[str]) -> None:
    _preload([*RANKS_LOAD, *modules])  # the last of the first freezes what was imported


pytest.MonkeyPatch().setattr(forkserver, "set_forkserver_preload", _with_what_ranks_load)
