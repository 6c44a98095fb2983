"""Forks of the process that tests, and whether they are gone."""

import os

import pytest


def noted_forks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list to which each fork of this process is added from now on."""
    found: list[int] = []
    fork = os.fork

    def noted() -> int:
        process = fork()
        if process:
            found.append(process)
        return process

    monkeypatch.setattr(os, "fork", noted)
    return found


def are_gone(processes: list[int]) -> bool:
    """Return whether there were such children of this process, and each has been waited for."""
    for process in processes:
        try:
            os.waitpid(process, os.WNOHANG)
        except ChildProcessError:
            continue
        return False
    return bool(processes)
