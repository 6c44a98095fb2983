"""A pytest plugin for `--changed COMMIT`: run the test files that a change can reach."""

import subprocess
from functools import cached_property
from pathlib import Path

import pytest
from import_graph import ROOT, ImportGraph, affected


def changed_files(commit: str, root: Path = ROOT) -> frozenset[Path]:
    """Return the files that differ from `commit`, and those that git does not know yet.

    Raises:
        ValueError: git cannot compare, e.g. since there is no such commit.
    """
    found: set[Path] = set()
    for asked in (
        ["diff", "--name-only", "-z", commit, "--"],
        ["ls-files", "--others", "--exclude-standard", "-z"],
    ):
        ran = subprocess.run(
            ["git", "-C", str(root), *asked], capture_output=True, text=True, check=False
        )
        if ran.returncode:
            raise ValueError(f"--changed: {commit}: {ran.stderr.strip().splitlines()[0]}")
        found |= {Path(name) for name in ran.stdout.split("\0") if name}
    return frozenset(found)


class ChangedTests:
    """Leaves out the test files that no changed file can reach."""

    def __init__(self, commit: str) -> None:
        self.commit = commit

    @cached_property
    def chosen(self) -> set[Path]:
        """The test files to run, relative to the checkout."""
        graph = ImportGraph()
        tests = list((ROOT / "tests").rglob("test_*.py"))
        tests += (ROOT / "zsim" / "conformance").glob("test_*.py")
        relative = [path.relative_to(ROOT) for path in sorted(tests)]
        reached = {path: graph.reached(path) for path in relative}
        try:
            return affected(reached, changed_files(self.commit))
        except ValueError as error:
            raise pytest.UsageError(str(error)) from None

    def pytest_report_header(self) -> str:
        return f"changed since {self.commit}: {len(self.chosen)} test files"

    def pytest_ignore_collect(self, collection_path: Path) -> bool | None:
        if collection_path.suffix != ".py" or not collection_path.name.startswith("test_"):
            return None
        return collection_path.relative_to(ROOT) not in self.chosen or None
