"""Plug points: what installed packages register is read once in a process."""

from importlib.metadata import Distribution

import pytest

import zsim


def test_a_second_run_reads_no_metadata_of_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """To read that of all packages takes 5 ms; nine times a run it was as long as the run."""
    first = zsim.run("tiny")

    def refuse(*_: object, **__: object) -> None:
        pytest.fail("metadata of packages is read again")

    monkeypatch.setattr(Distribution, "discover", refuse)
    assert zsim.run("tiny").step_time_s == first.step_time_s
