"""The change log is for users, subjects of commits are imperative, and a released wheel runs."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from commit_subject import LENGTH_MAX, problems

ROOT = Path(__file__).parents[3]
CHANGELOG = (ROOT / "CHANGELOG.md").read_text("utf-8")
RELEASE_LINES_MAX = 60
KINDS = ["Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"]
"""Kinds of changes in the order of Keep a Changelog."""


def test_the_change_log_is_short_and_for_users() -> None:
    first, *releases = re.split(r"^## ", CHANGELOG, flags=re.M)
    assert first.startswith("# Changelog\n")
    names = [each.partition("\n")[0] for each in releases]
    assert all(re.fullmatch(r"\[[\d.]+\] - \d{4}-\d\d-\d\d", name) for name in names[1:])
    assert names[0] == "[Unreleased]" or re.fullmatch(r"\[[\d.]+\] - \d{4}-\d\d-\d\d", names[0])
    for release in releases:
        lines = release.splitlines()[1:]
        assert len(lines) < RELEASE_LINES_MAX
        kinds = [line.removeprefix("### ") for line in lines if line.startswith("#")]
        assert kinds == sorted(set(kinds), key=KINDS.index)
        changes = [line for line in lines if line and not line.startswith("### ")]
        assert [line for line in changes if not re.fullmatch(r"- [A-Z`].{,116}\.", line)] == []
        assert [line for line in changes if re.search(r"\d %.*(?:before|was)|->", line)] == []


@pytest.mark.parametrize(
    "subject",
    [
        "Size owner-only copies by the owner's shard",
        "Pass keys around a ring",
        "Embed the picture in the page",
        "Merge branch 'docs'",
        "Let a file have up to 600 lines",
    ],
)
def test_a_subject_in_the_imperative_is_accepted(subject: str) -> None:
    assert problems(f"{subject}\n\nThe body says why.\n") == []


@pytest.mark.parametrize(
    ("message", "line"),
    [
        ("Added a test", "Added: must be an imperative, as in 'Add a test' or 'Fix a race'"),
        ("Fixes a race", "Fixes: must be an imperative, as in 'Add a test' or 'Fix a race'"),
        ("Adding a test", "Adding: must be an imperative, as in 'Add a test' or 'Fix a race'"),
        ("The test passes", "The: must be an imperative, as in 'Add a test' or 'Fix a race'"),
        ("add a test", "add: must begin with a capital letter"),
        ("Add a test.", "ends with a period; remove it"),
        ("Add " + "t" * LENGTH_MAX, f"{LENGTH_MAX + 4} characters must be at most {LENGTH_MAX}"),
        ("Add a test\nof a race", "the second line must be empty"),
        ("600 lines", "must begin with a verb"),
        ("", "must begin with a verb"),
    ],
)
def test_a_subject_that_breaks_a_rule_is_refused_in_a_line(message: str, line: str) -> None:
    assert problems(message) == [line]


def git(*words: str, cwd: Path) -> str:
    """Return the output of git, without the configuration of this machine."""
    nobody = {"GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "a@b", "GIT_CONFIG_GLOBAL": "/dev/null"}
    nobody |= {"GIT_COMMITTER_NAME": "a", "GIT_COMMITTER_EMAIL": "a@b"}
    kept = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    done = subprocess.run(
        ["git", *words], cwd=cwd, env=kept | nobody, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_hook_of_git_refuses_a_subject(tmp_path: Path) -> None:
    for name in (".githooks/commit-msg", "tests/support/commit_subject.py"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes((ROOT / name).read_bytes())
        path.chmod((ROOT / name).stat().st_mode)
    git("init", "--quiet", cwd=tmp_path)
    git("config", "core.hooksPath", ".githooks", cwd=tmp_path)
    git("add", ".", cwd=tmp_path)
    with pytest.raises(AssertionError, match="commit subject: Hooks: must be an imperative"):
        git("commit", "--quiet", "-m", "Hooks were added", cwd=tmp_path)
    git("commit", "--quiet", "-m", "Add hooks", cwd=tmp_path)
    assert git("log", "--format=%s", cwd=tmp_path) == "Add hooks\n"


PROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"
[project]
name = "zsim"
version = "0.2.0"
requires-python = ">=3.11"
[project.scripts]
zsim = "zsim:main"
"""
PROGRAM = """
import sys
def main():
    print("zsim 0.2.0" if sys.argv[1] == "--version" else "tiny: yes")
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A repository that is ready for release, with a package that prints as zsim does."""
    files = {
        ".gitignore": "dist/\n",
        "pyproject.toml": PROJECT,
        "zsim/__init__.py": PROGRAM,
        "CHANGELOG.md": "# Changelog\n\n## [0.2.0] - 2026-12-01\n",
        "lock/run.txt": "",
        "scenarios/zsim_scenarios/tiny.out": "tiny: yes\n",
        ".ci/release": (ROOT / ".ci" / "release").read_text("utf-8"),
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")
    git("init", "--quiet", cwd=tmp_path)
    commit(tmp_path)
    return tmp_path


def commit(folder: Path) -> None:
    git("add", ".", cwd=folder)
    git("commit", "--quiet", "--allow-empty", "-m", "Prepare", cwd=folder)


def release(folder: Path) -> tuple[int, str]:
    """Return the exit code and the output of a release."""
    done = subprocess.run(
        ["bash", ".ci/release"],
        cwd=folder,
        env=os.environ
        | {"PYTHON": sys.executable, "GIT_COMMITTER_NAME": "a", "GIT_COMMITTER_EMAIL": "a@b"},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def test_a_release_is_refused_unless_tree_change_log_and_tags_are_ready(project: Path) -> None:
    (project / "new.txt").touch()
    why = "the tree has changes; commit or remove them"
    assert release(project) == (2, f"release: {why}\n")
    (project / "CHANGELOG.md").write_text("# Changelog\n\n## [Unreleased]\n", "utf-8")
    commit(project)
    why = "no heading '## [0.2.0] - YYYY-MM-DD'; date the unreleased changes"
    assert release(project) == (2, f"release: CHANGELOG.md: {why}\n")
    (project / "CHANGELOG.md").write_text("## [0.2.0] - 2026-12-01\n", "utf-8")
    commit(project)
    git("tag", "v0.2.0", cwd=project)
    why = "the tag exists; set another version in pyproject.toml"
    assert release(project) == (2, f"release: v0.2.0: {why}\n")


@pytest.mark.one_commit_in(24)
def test_a_release_tries_the_wheel_and_writes_the_tag(project: Path) -> None:
    (project / "scenarios/zsim_scenarios/tiny.out").write_text("tiny: no\n", "utf-8")
    commit(project)
    code, printed = release(project)
    assert (code, git("tag", cwd=project)) == (2, "")
    assert "release: zsim run tiny: the wheel prints something else than " in printed
    (project / "scenarios/zsim_scenarios/tiny.out").write_text("tiny: yes\n", "utf-8")
    commit(project)
    code, printed = release(project)
    assert code == 0, printed
    assert git("tag", cwd=project) == "v0.2.0\n"
    built = {each.name for each in (project / "dist").iterdir()}
    assert built == {"zsim-0.2.0.tar.gz", "zsim-0.2.0-py3-none-any.whl"}
