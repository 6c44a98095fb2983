"""A pytest plugin that runs a sample of each matrix of tests, chosen by the commit.

A test marked `matrix(n)` runs one of `n` of its cases; which, follows from a seed (the commit's
hash unless `--rotation SEED` names another). `--all-cases` runs them all, and so does an argument
that names a case (`tests/test_x.py::test_y[case]`). Cases that are marked `long` run all where they
are asked for. With `--one-of N`, as in `make check`, every
test runs one of N of its cases.

Tests of a file that are marked `matrix(n, together=True)` draw by the names of cases alone: those
with the same cases, of a parametrized fixture, run the same sample, which is made once.
"""

import subprocess
from collections import defaultdict
from collections.abc import Generator, Iterable, Sequence
from hashlib import sha256
from math import ceil
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def commit_hash(root: Path = ROOT) -> str:
    """Return the hash of the commit that is checked out, or "no-commit" outside a repository."""
    asked = ["git", "-C", str(root), "rev-parse", "HEAD"]
    try:
        ran = subprocess.run(asked, capture_output=True, text=True, check=False)
    except OSError:  # no git
        return "no-commit"
    return ran.stdout.strip() if ran.returncode == 0 else "no-commit"


def sample(cases: Sequence[str], one_of: int, seed: str, *, together: bool = False) -> set[str]:
    """Return one of `one_of` cases, at least one; every case has the same chance with each seed.

    With `together`, tests of a file that have cases of the same names draw the same ones.
    """
    if one_of < 1:
        raise ValueError(f"matrix: {one_of} must be at least 1")

    def place(case: str) -> bytes:
        file, _, rest = case.partition("::")
        named = f"{file}[{rest.partition('[')[2]}" if together else case
        return sha256(f"{seed} {named}".encode()).digest()

    drawn = sorted(cases, key=place)
    return set(drawn[: ceil(len(cases) / one_of)])


def replay(nodeid: str) -> str:
    """Return the command that runs one case again, whatever the seed."""
    return f".venv/bin/pytest '{nodeid}'"


class Rotation:
    """Deselects the cases of matrices that this commit does not run."""

    def __init__(self, seed: str, *, everything: bool = False, one_of: int = 1) -> None:
        self.seed = seed
        self.everything = everything
        self.one_of = one_of

    def pytest_report_header(self) -> str:
        cases = "all cases" if self.everything else "a sample of each"
        return f"matrices: {cases} (--rotation {self.seed})"

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        if self.everything or any("[" in argument for argument in config.args):
            return
        kept = self._kept(items)
        dropped = [item for item in items if item.nodeid not in kept]
        if dropped:
            config.hook.pytest_deselected(items=dropped)
            items[:] = [item for item in items if item.nodeid in kept]

    def _kept(self, items: Iterable[pytest.Item]) -> set[str]:
        matrices: dict[tuple[str, int, bool], list[str]] = defaultdict(list)
        long: set[str] = set()
        for item in items:
            if item.get_closest_marker("long") is not None:
                long.add(item.nodeid)
                continue
            marker = item.get_closest_marker("matrix")
            one_of = max(self.one_of, 1 if marker is None else int(marker.args[0]))
            together = marker is not None and bool(marker.kwargs.get("together"))
            matrices[item.nodeid.partition("[")[0], one_of, together].append(item.nodeid)
        drawn = (
            sample(cases, one_of, self.seed, together=together)
            for (_, one_of, together), cases in matrices.items()
        )
        return long.union(*drawn)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if report.failed and item.get_closest_marker("matrix") is not None:
            report.sections.append(("replay", f"this case alone: {replay(item.nodeid)}"))
        return report
