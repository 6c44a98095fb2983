"""A pytest plugin that runs a sample of each matrix of tests, chosen by the commit.

Each case of a test marked `matrix(n)` runs in one of `n` commits; a seed says in which (the
commit's hash unless `--rotation SEED` names another). Those of a file that are marked
`matrix(n, together=True)` draw by the names of cases alone: tests with the same cases, of a
parametrized fixture, run the same sample, which is made once. A test marked `one_commit_in(n)`
runs, with all of its cases, in one of `n` commits. `--all-cases` runs everything; a test that an
argument names (`tests/test_x.py::test_y`) runs with all of its cases, and so does one marked `long`
or `studies` where it is asked for. With `--one-of N`, as in `make check`, every test runs one of N
of its cases, at least one; those marked `matrix` or `one_commit_in`, which are expensive, run none.

`--rest-in MINUTES` runs what the sample leaves out, long tests and studies included: file by file,
in an order that follows from the seed, a quarter of the time at most for each. The cases of a test
begin at one that the seed chooses, so that the last get their turn too. What runs when the time is
up is skipped. Tests that may take longer than the time of a file, by their own mark `timeout`, are
left to `make test-all`.
"""

import signal
import subprocess
from collections import defaultdict
from collections.abc import Generator, Iterable, Iterator, Sequence
from hashlib import sha256
from math import inf
from pathlib import Path
from time import monotonic  # noqa: TID251  (when to stop; no result depends on it)

import pytest

ROOT = Path(__file__).parents[2]
SHARE = 4
"""A file gets one of so many parts of the minutes of `--rest-in`."""


def commit_hash(root: Path = ROOT) -> str:
    """Return the hash of the commit that is checked out, or "no-commit" outside a repository."""
    asked = ["git", "-C", str(root), "rev-parse", "HEAD"]
    try:
        ran = subprocess.run(asked, capture_output=True, text=True, check=False)
    except OSError:  # no git
        return "no-commit"
    return ran.stdout.strip() if ran.returncode == 0 else "no-commit"


def sample(
    cases: Sequence[str], one_of: int, seed: str, *, together: bool = False, least: int = 0
) -> set[str]:
    """Return one of `one_of` cases, at least `least`; every case has the same chance.

    A case is drawn by one of `one_of` seeds: of fewer cases some seeds draw none. With `together`,
    tests of a file that have cases of the same names draw the same ones.
    """
    if one_of < 1:
        raise ValueError(f"matrix: {one_of} must be at least 1")

    def named(case: str) -> str:
        file, _, rest = case.partition("::")
        return f"{file}[{rest.partition('[')[2]}" if together else case

    drawn = sorted(cases, key=lambda case: sha256(f"{seed} {named(case)}".encode()).digest())
    count, over = divmod(len(cases), one_of)
    count += _number(f"{seed} {' '.join(sorted(map(named, cases)))}") % one_of < over
    return set(drawn[: max(count, least)])


def _number(text: str) -> int:
    """Return a number that is as good as drawn, the same for the same text."""
    return int.from_bytes(sha256(text.encode()).digest()[:8])


def is_drawn(nodeid: str, one_in: int, seed: str) -> bool:
    """Return whether a test is among those of a seed; each is in one of `one_in` seeds."""
    if one_in < 1:
        raise ValueError(f"one_commit_in: {one_in} must be at least 1")
    return _number(f"{seed} {nodeid}") % one_in == 0


def shuffled(files: Iterable[Path], seed: str) -> list[Path]:
    """Return files in an order that a seed chooses; each seed gives each file the same chance."""

    def place(file: Path) -> tuple[bytes, str]:  # files of one name in one order in each process
        return sha256(f"{seed} {file.name}".encode()).digest(), str(file)

    return sorted(files, key=place)


def first_case(test: str, count: int, seed: str) -> int:
    """Return the place of the case, of `count`, that a test begins with."""
    return _number(f"{seed} {test}") % count


def begun_elsewhere(cases: Sequence[pytest.Item], seed: str) -> Iterator[pytest.Item]:
    """Yield the cases of each test in their order, from one on that a seed chooses."""
    tests: dict[str, list[pytest.Item]] = {}
    for case in cases:
        tests.setdefault(_test_of(case.nodeid), []).append(case)
    for test, some in tests.items():
        begin = first_case(test, len(some), seed)
        yield from (*some[begin:], *some[:begin])


def replay(nodeid: str) -> str:
    """Return the command that runs one case again, whatever the seed."""
    return f".venv/bin/pytest '{nodeid}'"


def _test_of(nodeid: str) -> str:
    """Return the identifier of a test without that of its case."""
    return nodeid.partition("[")[0]


def _is_long(item: pytest.Item) -> bool:
    """Return whether the sample of a commit never runs a case."""
    return any(item.get_closest_marker(name) is not None for name in ("long", "studies"))


LEFT = "left for the rotation of another commit"


def _time_is_up(_number: int, _frame: object) -> None:
    pytest.skip(LEFT)


def _timeout_s(item: pytest.Item) -> float:
    """Return the seconds that a test may take by its own mark; 0 without one."""
    marker = item.get_closest_marker("timeout")
    return float(marker.args[0]) if marker is not None and marker.args else 0.0


class Rotation:
    """Deselects the cases of matrices that this commit does not run, or those that it has run."""

    def __init__(
        self,
        seed: str,
        *,
        everything: bool = False,
        one_of: int = 1,
        rest_in: float | None = None,
    ) -> None:
        self.seed = seed
        self.everything = everything
        self.one_of = one_of
        self.rest_in = rest_in
        self.ends = inf
        self.file_ends: dict[Path, float] = {}

    def pytest_report_header(self) -> str:
        cases = "all cases" if self.everything else "a sample of each"
        if self.rest_in is not None:
            cases = f"what the sample leaves out, for {self.rest_in:g} minutes"
        return f"matrices: {cases} (--rotation {self.seed})"

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        if self.everything:
            return
        named = {argument for argument in config.args if "::" in argument}
        kept = self._kept(items) | {
            item.nodeid for item in items if {item.nodeid, _test_of(item.nodeid)} & named
        }
        if self.rest_in is not None:
            share_s = 60 * self.rest_in / SHARE
            kept = {
                item.nodeid
                for item in items
                if (item.nodeid not in kept or _is_long(item)) and _timeout_s(item) <= share_s
            }
            files = shuffled({item.path for item in items}, self.seed)
            places = {path: place for place, path in enumerate(files)}
            items[:] = sorted(begun_elsewhere(items, self.seed), key=lambda item: places[item.path])
            self.ends = monotonic() + 60 * self.rest_in
        dropped = [item for item in items if item.nodeid not in kept]
        if dropped:
            config.hook.pytest_deselected(items=dropped)
            items[:] = [item for item in items if item.nodeid in kept]

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """Count the time of a file from its first test on."""
        if self.rest_in is not None:
            share = 60 * self.rest_in / SHARE
            self.file_ends.setdefault(item.path, min(self.ends, monotonic() + share))
        return (yield)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        if self._left_s(item) <= 0:
            pytest.skip(LEFT)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, None, None]:
        """Skip a test that runs when the time of its file is up."""
        left_s = self._left_s(item)
        guard_s, _ = signal.getitimer(signal.ITIMER_REAL)  # of pytest-timeout
        if left_s == inf or 0 < guard_s < left_s:
            return (yield)
        before = signal.signal(signal.SIGALRM, _time_is_up)
        signal.setitimer(signal.ITIMER_REAL, max(left_s, 1e-3))
        try:
            return (yield)
        finally:
            signal.setitimer(signal.ITIMER_REAL, guard_s)
            signal.signal(signal.SIGALRM, before)

    def _left_s(self, item: pytest.Item) -> float:
        """Return the seconds that the file of a test still has."""
        return self.file_ends.get(item.path, inf) - monotonic()

    def _kept(self, items: Iterable[pytest.Item]) -> set[str]:
        matrices: dict[tuple[str, int, bool], list[str]] = defaultdict(list)
        long: set[str] = set()
        unmarked: set[str] = set()
        for item in items:
            if _is_long(item):
                long.add(item.nodeid)
                continue
            test = _test_of(item.nodeid)
            seldom = item.get_closest_marker("one_commit_in")
            marker = item.get_closest_marker("matrix")
            if self.one_of > 1 and (seldom or marker):
                continue
            if seldom is not None and not is_drawn(test, int(seldom.args[0]), self.seed):
                continue
            one_of = max(self.one_of, 1 if marker is None else int(marker.args[0]))
            together = marker is not None and bool(marker.kwargs.get("together"))
            if marker is None:
                unmarked.add(test)
            matrices[test, one_of, together].append(item.nodeid)
        drawn = (
            sample(cases, one_of, self.seed, together=together, least=int(test in unmarked))
            for (test, one_of, together), cases in matrices.items()
        )
        return long.union(*drawn)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        is_sampled = any(item.get_closest_marker(name) for name in ("matrix", "one_commit_in"))
        if report.failed and is_sampled:
            report.sections.append(("replay", f"this case alone: {replay(item.nodeid)}"))
        return report
