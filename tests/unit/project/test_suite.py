"""The suite's own tools: samples of matrices, costs of files, tests that a change can reach."""

import subprocess
import sys
from argparse import Namespace
from collections import Counter
from datetime import date
from os import getpid
from pathlib import Path

import pytest
from blame import parent_of
from changed_tests import changed_files
from changed_types import digests, due
from day_seed import choose_seed, day_seed, seed_line
from faults.rotation import Cases, by_group, collect, commits, lines
from faults.table import every_fault, rows
from file_costs import ALLOWED, MARGIN, excesses, limits_of
from hypothesis import given
from hypothesis import strategies as st
from import_graph import ROOT, ImportGraph, affected
from processor_time import tree_seconds
from rotation import commit_hash, first_case, is_drawn, replay, sample, shuffled

CASES = [f"test_x.py::test_y[{number}]" for number in range(40)]
COMMITS = [f"{number:040x}" for number in range(200)]


@given(st.integers(1, 10), st.text(max_size=8))
def test_a_sample_is_repeatable_and_has_one_of_n_cases(one_of: int, seed: str) -> None:
    drawn = sample(CASES, one_of, seed)
    assert drawn == sample(CASES[::-1], one_of, seed) <= set(CASES)
    assert len(drawn) in {len(CASES) // one_of, -(-len(CASES) // one_of)}


def test_a_few_cases_are_drawn_by_as_many_seeds_as_each_of_many() -> None:
    # Of 200 commits each case is drawn by 20 on average, with a standard deviation of 4.2.
    for together in (False, True):
        ran = Counter(
            case for commit in COMMITS for case in sample(CASES[:3], 10, commit, together=together)
        )
        assert all(4 <= ran[case] <= 36 for case in CASES[:3])
    for commit in COMMITS[:20]:
        assert len(sample(CASES[:3], 10, commit, least=1)) == 1


def test_tests_of_a_file_that_draw_together_draw_the_same_cases() -> None:
    others = [case.replace("test_y", "test_z") for case in CASES]
    for commit in COMMITS[:20]:
        drawn = sample(CASES, 10, commit, together=True)
        also = sample(others, 10, commit, together=True)
        assert {case.replace("test_y", "test_z") for case in drawn} == also
        assert len(drawn) == 4
    elsewhere = [case.replace("test_x.py", "test_w.py") for case in CASES]
    assert any(
        {
            case.replace("test_x.py", "test_w.py")
            for case in sample(CASES, 10, commit, together=True)
        }
        != sample(elsewhere, 10, commit, together=True)
        for commit in COMMITS[:20]
    )


def test_every_case_is_run_within_ten_commits_on_average() -> None:
    # One of 10 cases a commit: 10 commits on average. Over 200 commits, 20 runs of each of 40
    # cases, with a standard deviation of 4.2; the rarest of 40 is 3 deviations below, and 7 in ten
    # thousand are 4 below.
    ran = Counter(case for commit in COMMITS for case in sample(CASES, 10, commit))
    assert min(ran[case] for case in CASES) >= 4
    assert sum(ran.values()) == 4 * len(COMMITS)


def test_a_test_of_one_commit_in_n_runs_in_about_so_many() -> None:
    # Of 200 commits 40, with a standard deviation of 5.7: within five of them.
    for test in ("test_x.py::test_y", "test_x.py::test_z"):
        assert 12 <= sum(is_drawn(test, 5, commit) for commit in COMMITS) <= 68
    assert all(is_drawn("test_x.py::test_y", 1, commit) for commit in COMMITS)


@pytest.fixture(scope="module")
def cases() -> Cases:
    return collect()


def test_each_fault_of_the_table_is_planted_by_a_test_and_somebody_has_to_find_it(
    cases: Cases,
) -> None:
    table = every_fault()
    assert {each.fault for each in cases.found} == {each.id for each in table}
    assert len({each.id for each in table}) == len(table)
    assert all(each.found_by for each in table)
    assert list(rows(table))[-1] == f"{len(table)} faults"


def test_the_rotation_plants_each_fault_within_ten_commits_on_average(cases: Cases) -> None:
    found = commits(cases)
    assert [each for each, number in found.items() if number is None or number > 10] == []
    assert len(list(lines(found))) == 1 + len(by_group(found))


def test_a_file_over_its_limit_is_named_with_the_dearest_first() -> None:
    costs = {"cheap.py": 29.0, "dear.py": 31.0, "dearest.py": 64.0, "allowed.py": 80.0}
    limits = {"allowed.py": 60.0}
    found = excesses(costs, limits, most=20.0, slowdown=1.0)
    assert [line.partition(":")[0] for line in found] == ["dearest.py", "dear.py"]
    assert excesses(costs, limits, most=20.0, slowdown=64 / 20 / MARGIN) == []


def test_an_allowed_file_needs_a_reason_and_exists() -> None:
    with pytest.raises(ValueError, match=r"tests/x\.py: reason: missing"):
        limits_of('["tests/x.py"]\nseconds = 30\n')
    assert all((ROOT / file).is_file() for file in limits_of(ALLOWED.read_text("utf-8")))


def test_processor_time_counts_children_that_have_ended_and_that_live() -> None:
    spin = "import time\nwhile time.process_time() < 0.5: pass\nprint(flush=True)\ninput()"
    own = tree_seconds(getpid())
    with subprocess.Popen(
        [sys.executable, "-c", spin], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert tree_seconds(getpid()) - own >= 0.45
        child.communicate(b"\n")
    assert tree_seconds(getpid()) - own >= 0.45


CONFTEST = """
import pytest
from file_costs import FileCosts
from rotation import Rotation

def pytest_configure(config):
    config.addinivalue_line("markers", "matrix(n): one of n cases")
    config.addinivalue_line("markers", "long: all or none")
    config.pluginmanager.register(FileCosts(0.05))
    config.pluginmanager.register(Rotation("some-commit", everything=False))
"""
MATRIX = """
import time
import pytest

@pytest.mark.matrix(4)
@pytest.mark.parametrize("case", range(8))
def test_each(case):
    began = time.process_time()
    while time.process_time() - began < 0.3: pass
    assert case is None

@pytest.mark.matrix(1)
@pytest.mark.parametrize(
    "case", [0, *(pytest.param(case, marks=pytest.mark.long) for case in "ab")]
)
def test_some_are_long(case):
    pass

def test_always():
    pass
"""


@pytest.mark.one_commit_in(4)
def test_a_session_runs_a_sample_and_says_how_to_replay_what_failed(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST, "utf-8")
    (tmp_path / "test_matrix.py").write_text(MATRIX, "utf-8")
    ran = _pytest(tmp_path)
    assert "2 failed, 4 passed, 6 deselected" in ran
    failed = sample([f"test_matrix.py::test_each[{case}]" for case in range(8)], 4, "some-commit")
    assert all(replay(nodeid) in ran for nodeid in failed)
    assert "test_matrix.py: 1 s of processor time, at most 0 s" in ran
    assert "1 failed" in _pytest(tmp_path, "test_matrix.py::test_each[7]")
    assert "8 failed" in _pytest(tmp_path, "test_matrix.py::test_each")
    assert "2 passed, 10 deselected" in _pytest(tmp_path, "-m", "long")


REST = """
import pytest
from rotation import Rotation

def pytest_configure(config):
    for marker in ("matrix(n)", "one_commit_in(n)", "long", "studies"):
        config.addinivalue_line("markers", marker)
    config.pluginmanager.register(Rotation("some-commit", rest_in=%s))
"""
LONG = """
import pytest

@pytest.mark.one_commit_in(10**15)
def test_in_another_commit():
    pass

@pytest.mark.matrix(4)
@pytest.mark.parametrize("case", range(8))
def test_each(case):
    pass

def test_always():
    pass

@pytest.mark.long
def test_rarely():
    pass

@pytest.mark.long
@pytest.mark.timeout(76)
def test_for_hours():
    pass
"""


@pytest.mark.one_commit_in(4)
def test_the_rest_is_what_the_sample_leaves_out_until_the_time_is_up(tmp_path: Path) -> None:
    (tmp_path / "test_long.py").write_text(LONG, "utf-8")
    (tmp_path / "conftest.py").write_text(REST % 5, "utf-8")
    assert "8 passed, 4 deselected" in _pytest(tmp_path)  # of 8 cases 2, and two
    (tmp_path / "conftest.py").write_text(REST % 0, "utf-8")
    ran = _pytest(tmp_path, "-rs")
    assert "8 skipped, 4 deselected" in ran
    assert "left for the rotation of another commit" in ran


ENDLESS = """
import time
import pytest

@pytest.mark.long
@pytest.mark.parametrize("case", range(3))
def test_endless(case):
    while True:
        time.sleep(0.01)
"""


@pytest.mark.one_commit_in(4)
def test_what_runs_when_the_time_is_up_is_skipped_and_other_files_get_theirs(
    tmp_path: Path,
) -> None:
    (tmp_path / "conftest.py").write_text(REST % (4 / 60), "utf-8")  # a second for each file
    for name in "ab":
        (tmp_path / f"test_{name}.py").write_text(ENDLESS, "utf-8")
    (tmp_path / "test_c.py").write_text(LONG, "utf-8")
    assert "8 passed, 6 skipped, 4 deselected" in _pytest(tmp_path, "-p", "timeout")


def test_each_case_is_the_first_of_its_test_for_some_commit() -> None:
    assert {first_case("test_x.py::test_y", 7, commit) for commit in COMMITS} == set(range(7))


def test_each_file_is_the_first_of_the_rest_for_some_commit() -> None:
    files = [Path(f"test_{number}.py") for number in range(5)]
    assert {shuffled(files, commit)[0] for commit in COMMITS} == set(files)
    same = [Path(f"{folder}/test_x.py") for folder in "abcdefgh"]
    assert shuffled(same, "some-commit") == shuffled(reversed(same), "some-commit")


def test_the_seed_of_examples_is_that_of_the_day_in_ci_alone() -> None:
    assert day_seed(date(2026, 1, 31)) == "20260131"
    for profile, given_seed in (("zsim", None), ("ci", "7"), ("ci", None)):
        option = Namespace(hypothesis_profile=profile, hypothesis_seed=given_seed)
        choose_seed(option)
        drawn = option.hypothesis_seed
        assert (drawn is None) is (profile == "zsim")
        assert drawn == given_seed or (profile == "ci" and len(drawn) == 8)
        assert seed_line(option) == (drawn and f"examples: --hypothesis-seed {drawn}")


BLAMING = """
import pytest
from pathlib import Path
from blame import Blame

def pytest_addoption(parser):
    parser.addoption("--rotation", default="some-commit")

def pytest_configure(config):
    if config.option.rotation == "some-commit":
        config.pluginmanager.register(Blame(Path(__file__).parent))
"""
BEFORE = "def test_old(): assert False\ndef test_broken(): pass\n"
AFTER = (
    "def test_old(): assert False\ndef test_broken(): assert False\ndef test_new(): assert False\n"
)


@pytest.mark.one_commit_in(4)
def test_failed_cases_are_replayed_on_the_parent_commit(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        named = ["-c", "user.name=a", "-c", "user.email=a@b.example"]
        command = ["git", "-C", str(tmp_path), *named, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    git("init")
    assert parent_of(tmp_path) is None
    (tmp_path / "conftest.py").write_text(BLAMING, "utf-8")
    (tmp_path / "test_it.py").write_text(BEFORE, "utf-8")
    git("add", ".")
    git("commit", "-m", "before")
    assert parent_of(tmp_path) is None
    (tmp_path / "test_it.py").write_text(AFTER, "utf-8")
    parent = git("rev-parse", "HEAD")
    assert parent_of(tmp_path) == parent  # of changes that are not committed
    git("commit", "-am", "after")
    assert parent_of(tmp_path) == parent
    ran = _pytest(tmp_path)
    lines = [line for line in ran.splitlines() if line.startswith("test_it.py::")]
    assert [line.partition(f": on {parent[:10]} ")[0] for line in lines] == [
        f"test_it.py::{name}" for name in ("test_old", "test_broken", "test_new")
    ]
    ends = ("fails there too: ", "passes there: ", "does not exist there: ")
    assert all(end in line for end, line in zip(ends, lines, strict=True))


def _pytest(folder: Path, *arguments: str) -> str:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments]
    support = str(ROOT / "tests" / "support")
    ran = subprocess.run(
        command,
        cwd=folder,
        env={"PYTHONPATH": support},
        capture_output=True,
        text=True,
        check=False,
    )
    return ran.stdout


FILES = {
    "pyproject.toml": '[project.entry-points."zsim.backends"]\nnull = "zsim_null:Null"\n',
    "zsim/__init__.py": '_INDEX = {"run": "zsim.launch:run"}\n',
    "zsim/launch.py": 'GROUP = "zsim.backends"\n',
    "zsim/lone.py": "",
    "zsim/late.py": "",
    "zsim/named.py": 'import importlib\nimportlib.import_module("zsim.late")\n',
    "zsim/cli/__init__.py": "",
    "zsim/cli/main.py": "import zsim.lone\n",
    "backends/zsim_null/__init__.py": "",
    "tests/support/drawn.py": "import zsim.lone\n",
    "tests/unit/conftest.py": "import drawn\n",
    "tests/unit/test_lone.py": "",
    "tests/test_run.py": "import zsim\nzsim.run()\n",
    "tests/test_named.py": "from zsim import named\n",
    "tests/test_command.py": 'import subprocess\nsubprocess.run(["zsim", "run"])\n',
    "tests/test_nothing.py": "import zsim\n",
}
REACHED = {
    "zsim/lone.py": {"unit/test_lone.py", "test_command.py"},
    "zsim/late.py": {"test_named.py"},
    "backends/zsim_null/__init__.py": {"test_run.py"},
    "tests/test_nothing.py": {"test_nothing.py"},
    "README.md": set[str](),
}


@pytest.mark.parametrize("changed", REACHED)
def test_a_change_chooses_the_tests_that_can_reach_it(changed: str, tmp_path: Path) -> None:
    _write_files(tmp_path)
    graph = ImportGraph(tmp_path)
    tests = [path.relative_to(tmp_path) for path in (tmp_path / "tests").rglob("test_*.py")]
    reached = {test: graph.reached(test) for test in tests}
    found = affected(reached, frozenset({Path(changed)}))
    assert found == {Path("tests", name) for name in REACHED[changed]}
    assert affected(reached, frozenset({Path("topologies/a.toml")})) == set(tests)


def test_types_are_checked_again_where_a_change_can_reach(tmp_path: Path) -> None:
    _write_files(tmp_path)
    (tmp_path / "pyproject.toml").write_text('[tool.pyright]\ninclude = ["zsim", "tests"]\n')
    graph, before = ImportGraph(tmp_path), digests(tmp_path)
    every = sorted(name for name in FILES if name.startswith(("zsim/", "tests/")))
    assert due({}, before, graph) == every
    assert due(before, before, graph) == []
    (tmp_path / "zsim/late.py").write_text("LATE = 1\n", "utf-8")
    now = digests(tmp_path)
    assert due(before, now, graph) == ["tests/test_named.py", "zsim/late.py", "zsim/named.py"]
    (tmp_path / "zsim/lone.py").unlink()
    assert due(before, digests(tmp_path), graph) == [
        each for each in every if "lone.py" not in each or "test" in each
    ]
    (tmp_path / "lock").mkdir()
    (tmp_path / "lock/test.txt").write_text("pyright==2\n", "utf-8")
    assert due(now, digests(tmp_path) | {"zsim/lone.py": ""}, graph) == every


def _write_files(folder: Path) -> None:
    for name, text in FILES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")


def test_a_commit_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="--changed: no-such-commit: "):
        changed_files("no-such-commit")


def test_the_seed_of_a_checkout_is_its_commit(tmp_path: Path) -> None:
    assert commit_hash(tmp_path) == "no-commit"
