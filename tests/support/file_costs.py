"""A pytest plugin that counts the processor time of each test file, its ranks included.

`--file-seconds N` fails the session if a file takes more than N seconds of processor time, scaled
by the speed of this machine, unless `file_costs_allowed.toml` has a higher limit for it.
"""

import os
import tomllib
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

import pytest
from processor_time import LOOP_SECONDS, loop_seconds, tree_seconds

MARGIN = 1.5
"""Processor time varies so much between runs on a shared machine."""
SHOWN = 10
ALLOWED = Path(__file__).with_name("file_costs_allowed.toml")


def limits_of(text: str) -> dict[str, float]:
    """Return the seconds allowed by file; raise ValueError for an entry without a reason."""
    limits = {}
    for file, entry in tomllib.loads(text).items():
        if not entry.get("reason"):
            raise ValueError(f"{file}: reason: missing; say why no cheaper test finds as much")
        limits[file] = float(entry["seconds"])
    return limits


def excesses(
    costs: Mapping[str, float], limits: Mapping[str, float], *, most: float, slowdown: float
) -> list[str]:
    """Return a line for each file that takes more than its limit, the most expensive first."""
    lines = []
    for file, seconds in sorted(costs.items(), key=lambda cost: -cost[1]):
        limit = limits.get(file, most)
        if seconds > limit * slowdown * MARGIN:
            lines.append(
                f"{file}: {seconds:.0f} s of processor time, at most {limit:.0f} s x {slowdown:.2f}"
                f" (speed of this machine) x {MARGIN}; make it cheaper or allow it in"
                f" {ALLOWED.name} with a reason"
            )
    return lines


class FileCosts:
    """Counts processor seconds by test file in each process that runs tests; adds them up."""

    def __init__(self, most: float | None) -> None:
        self.most = most
        self.seconds: dict[str, float] = {}
        self.slowdown = 1.0
        self.lines: list[str] = []
        self._since = 0.0

    def pytest_collection_finish(self) -> None:
        self.slowdown = max(1.0, loop_seconds() / LOOP_SECONDS)
        self._since = tree_seconds(os.getpid())

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(
        self, item: pytest.Item, nextitem: pytest.Item | None
    ) -> Generator[None, object, object]:
        answer = yield
        if nextitem is None or nextitem.path != item.path:
            file, now = item.location[0], tree_seconds(os.getpid())
            self._add(file, now - self._since)
            self._since = now
        return answer

    def pytest_testnodedown(self, node: object) -> None:
        """Add the costs that an xdist worker counted."""
        found: Mapping[str, Any] = getattr(node, "workeroutput", {})  # of xdist
        for file, seconds in found.get("file_seconds", {}).items():
            self._add(file, seconds)
        self.slowdown = max(self.slowdown, found.get("slowdown", 1.0))

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        output = getattr(session.config, "workeroutput", None)
        if output is not None:
            output |= {"file_seconds": self.seconds, "slowdown": self.slowdown}
        elif self.most is not None:
            limits = limits_of(ALLOWED.read_text("utf-8"))
            self.lines = excesses(self.seconds, limits, most=self.most, slowdown=self.slowdown)
            if self.lines and session.exitstatus == pytest.ExitCode.OK:
                session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.most is None or not self.seconds:
            return
        dearest = sorted(self.seconds.items(), key=lambda cost: -cost[1])[:SHOWN]
        terminalreporter.section("processor time of test files")
        total = sum(self.seconds.values())
        terminalreporter.write_line(f"{total:8.1f} s  {len(self.seconds)} files")
        for file, seconds in dearest:
            terminalreporter.write_line(f"{seconds:8.1f} s  {file}")
        for line in self.lines:
            terminalreporter.write_line(line, red=True)

    def _add(self, file: str, seconds: float) -> None:
        self.seconds[file] = self.seconds.get(file, 0.0) + seconds
