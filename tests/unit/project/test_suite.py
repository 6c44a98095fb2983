"""The suite's own tools: samples of matrices, costs of files, tests that a change can reach."""

import subprocess
import sys
from collections import Counter
from os import getpid
from pathlib import Path

import pytest
from changed_tests import changed_files
from faults.rotation import Cases, by_group, collect, commits, lines
from faults.table import every_fault, rows
from file_costs import ALLOWED, MARGIN, excesses, limits_of
from hypothesis import given
from hypothesis import strategies as st
from import_graph import ROOT, ImportGraph, affected
from processor_time import tree_seconds
from rotation import commit_hash, replay, sample

CASES = [f"test_x.py::test_y[{number}]" for number in range(40)]
COMMITS = [f"{number:040x}" for number in range(200)]


@given(st.integers(1, 10), st.text(max_size=8))
def test_a_sample_is_repeatable_and_has_one_of_n_cases(one_of: int, seed: str) -> None:
    drawn = sample(CASES, one_of, seed)
    assert drawn == sample(CASES[::-1], one_of, seed) <= set(CASES)
    assert len(drawn) == -(-len(CASES) // one_of)


def test_every_case_is_run_within_ten_commits_on_average() -> None:
    # One of 10 cases a commit: 10 commits on average. Over 200 commits, 20 runs of each of 40
    # cases, with a standard deviation of 4.2; the rarest of 40 is 3 deviations below, and 7 in ten
    # thousand are 4 below.
    ran = Counter(case for commit in COMMITS for case in sample(CASES, 10, commit))
    assert min(ran[case] for case in CASES) >= 4
    assert sum(ran.values()) == 4 * len(COMMITS)


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
    while time.process_time() - began < 0.5: pass
    assert case is None

def test_always():
    pass
"""


def test_a_session_runs_a_sample_and_says_how_to_replay_what_failed(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST, "utf-8")
    (tmp_path / "test_matrix.py").write_text(MATRIX, "utf-8")
    ran = _pytest(tmp_path)
    assert "2 failed, 1 passed, 6 deselected" in ran
    failed = sample([f"test_matrix.py::test_each[{case}]" for case in range(8)], 4, "some-commit")
    assert all(replay(nodeid) in ran for nodeid in failed)
    assert "test_matrix.py: 1 s of processor time, at most 0 s" in ran
    assert "1 failed" in _pytest(tmp_path, "test_matrix.py::test_each[7]")


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
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")
    graph = ImportGraph(tmp_path)
    tests = [path.relative_to(tmp_path) for path in (tmp_path / "tests").rglob("test_*.py")]
    reached = {test: graph.reached(test) for test in tests}
    found = affected(reached, frozenset({Path(changed)}))
    assert found == {Path("tests", name) for name in REACHED[changed]}
    assert affected(reached, frozenset({Path("topologies/a.toml")})) == set(tests)


def test_a_commit_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="--changed: no-such-commit: "):
        changed_files("no-such-commit")


def test_the_seed_of_a_checkout_is_its_commit(tmp_path: Path) -> None:
    assert commit_hash(tmp_path) == "no-commit"
