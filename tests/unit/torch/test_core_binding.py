"""Ranks that share the cores of a machine have each a part of them for itself."""

import os
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rank_jobs import cores_of_threads

from zsim_torch.supervise.core_binding import bind, cores_of
from zsim_torch.supervise.ranks import run_ranks

if sys.platform != "linux":
    pytest.skip("no binding to cores", allow_module_level=True)

CORES = st.sets(st.integers(0, 255), min_size=1, max_size=64)


@given(usable=CORES, ranks=st.integers(1, 64))
def test_parts_are_equal_and_nobody_elses_where_there_are_enough_cores(
    usable: set[int], ranks: int
) -> None:
    parts = [cores_of(place, ranks, usable) for place in range(ranks)]
    taken = [core for part in parts for core in part]
    assert set(taken) <= usable
    assert len({len(part) for part in parts}) == 1
    if ranks <= len(usable):
        assert len(set(taken)) == len(taken) == len(usable) // ranks * ranks
    else:
        assert all(set(part) == usable for part in parts)


def test_every_thread_of_a_rank_that_a_program_starts_is_on_its_cores_gloos_too() -> None:
    usable = os.sched_getaffinity(0)
    found = run_ranks(cores_of_threads, ranks=2)
    for place, threads in enumerate(found):
        assert any("gloo" in name for name, _ in threads)
        late = [cores for name, cores in threads if "gloo" in name or name == "main"]
        assert {*late} == {cores_of(place, 2, usable)}


def test_a_system_that_refuses_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    before = os.sched_getaffinity(0)

    def refuse(_: int, __: object) -> None:
        raise PermissionError("seccomp")

    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    bind(0, 2)
    assert os.sched_getaffinity(0) == before
