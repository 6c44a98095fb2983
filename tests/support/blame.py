"""A pytest plugin for `--blame`: run what failed on the parent commit, and say which is to blame.

Samples and examples change with commits and days, so that a test may fail for the first time on a
commit that did not break it.
"""

import os
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic  # noqa: TID251  (when to stop; no verdict depends on it)

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = (".", "runtimes", "backends", "apps", "scenarios", "topologies")
"""Folders of the checkout that Python imports from."""
MOST = 5
PATIENCE_S = 600.0
"""Seconds for all cases together."""

VERDICTS = {
    0: "passes there: what changed since is to blame",
    1: "fails there too: an earlier commit is to blame",
    4: "does not exist there: what changed since is to blame",
}


def parent_of(root: Path) -> str | None:
    """Return the commit to compare with: HEAD if files differ from it, else its first parent.

    None without git, outside a repository and on a first or shallow commit.
    """
    asked = ["git", "-C", str(root)]
    try:
        status = subprocess.run(
            [*asked, "status", "--porcelain", "--untracked-files=no"],
            capture_output=True,
            text=True,
            check=True,
        )
        name = "HEAD" if status.stdout.strip() else "HEAD^"
        ran = subprocess.run(
            [*asked, "rev-parse", "--verify", "--quiet", f"{name}^{{commit}}"],
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return ran.stdout.strip()


def unpack(root: Path, commit: str, into: Path) -> None:
    """Write the files of a commit into a folder."""
    asked = ["git", "-C", str(root), "archive", "--format=tar", commit]
    archive = subprocess.run(asked, capture_output=True, check=True).stdout
    with tarfile.open(fileobj=BytesIO(archive)) as files:
        files.extractall(into, filter="data")


def replayed(checkout: Path, nodeid: str, options: Sequence[str], patience_s: float) -> str:
    """Return what becomes of a test case in another checkout, run by this Python."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "", *options, nodeid]
    paths = [*(str(checkout / package) for package in PACKAGES), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    environment.pop("PYTEST_XDIST_WORKER", None)
    try:
        ran = subprocess.run(
            command,
            cwd=checkout,
            env=environment,
            capture_output=True,
            timeout=patience_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"does not end there within {patience_s:.0f} s"
    return VERDICTS.get(ran.returncode, f"cannot be run there (pytest exits with {ran.returncode})")


class Blame:
    """Replays the first failed cases on the parent commit at the end of a session."""

    def __init__(self, root: Path = ROOT) -> None:
        self.root = root
        self.failed: dict[str, None] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note each failed case once."""
        if report.failed:
            self.failed[report.nodeid] = None

    def pytest_terminal_summary(
        self, terminalreporter: pytest.TerminalReporter, config: pytest.Config
    ) -> None:
        """Print a line for each of the first failed cases."""
        if not self.failed:
            return
        terminalreporter.section("failed cases on the parent commit")
        parent = parent_of(self.root)
        if parent is None:
            terminalreporter.write_line("no parent commit here: nothing to compare with")
            return
        options = ["--rotation", config.option.rotation]
        if config.option.hypothesis_seed is not None:
            options += ["--hypothesis-seed", str(config.option.hypothesis_seed)]
        if config.option.hypothesis_profile:
            options += ["--hypothesis-profile", config.option.hypothesis_profile]
        with TemporaryDirectory() as folder:
            unpack(self.root, parent, Path(folder))
            ends = monotonic() + PATIENCE_S
            for nodeid in list(self.failed)[:MOST]:
                left_s = max(ends - monotonic(), 1.0)
                verdict = replayed(Path(folder), nodeid, options, left_s)
                terminalreporter.write_line(f"{nodeid}: on {parent[:10]} it {verdict}")
        left = len(self.failed) - MOST
        if left > 0:
            terminalreporter.write_line(f"{left} more failed cases were not replayed")
