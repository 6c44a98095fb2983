"""Sweeps that are disturbed at drawn moments end unaided, and equal one that nobody disturbed."""

import json
import os
import resource
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ZSIM = Path(sys.executable).parent / "zsim"
STUDY = """
question = "Which bucket?"
[base]
scenario = "tiny"
[[axis]]
field = "zero.stage"
values = [1, 2, 3]
[[axis]]
field = "zero.bucket_elements"
values = [1000, 2000, 3000, 4000, 5000, 6000, 7000, 8000]
[goal]
minimize = "step_time"
"""
STORE = "buckets.sqlite"
TRIALS = int(os.environ.get("ZSIM_TRIALS", "40"))
"""Of each kind."""

Json = dict[str, Any]
Disturb = Callable[["subprocess.Popen[str]", np.random.Generator], None]


@contextmanager
def begun(folder: Path) -> "Generator[subprocess.Popen[str]]":
    process = subprocess.Popen(
        [ZSIM, "sweep", "buckets.toml", "--workers", "2", "--json"],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "ZSIM_TEST_MARK": str(folder)},
    )
    with process:
        try:
            yield process
        finally:
            process.kill()  # one that hangs fails the test, and does not hang it


def answered(folder: Path) -> Json:
    """The answer of a sweep that nobody disturbs."""
    with begun(folder) as process:
        out, error = process.communicate(timeout=250)
    assert process.returncode == 0, error
    found: Json = json.loads(out)
    return found


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Json]:
    """A folder with the store of a sweep that nobody disturbed, and its answer."""
    folder = tmp_path_factory.mktemp("clean")
    (folder / "buckets.toml").write_text(STUDY, "utf-8")
    return folder, answered(folder)


def workers_of(process: "subprocess.Popen[str]", folder: Path) -> list[int]:
    """Processes of the sweep that run batches: children of the server that forks them."""
    found: list[int] = []
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if f"ZSIM_TEST_MARK={folder}".encode() not in (path / "environ").read_bytes():
                continue
            parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            line = (Path("/proc") / str(parent) / "cmdline").read_bytes()
            if b"forkserver" in line and parent != process.pid:
                found.append(int(path.name))
    return sorted(found)


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def stop(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)


def starve(pid: int) -> None:
    """No more memory than it has."""
    resource.prlimit(pid, resource.RLIMIT_AS, (2**20, 2**20))


@pytest.mark.long
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("how", [kill, stop, starve])
def test_a_worker_that_is_struck_changes_nothing(
    how: Callable[[int], None], clean: tuple[Path, Json], tmp_path: Path
) -> None:
    random, struck = np.random.default_rng(21), 0
    for trial in range(TRIALS):
        folder = tmp_path / str(trial)
        folder.mkdir()
        (folder / "buckets.toml").write_text(STUDY, "utf-8")
        with begun(folder) as process:
            for _ in range(3000):
                if workers_of(process, folder) or process.poll() is not None:
                    break
                time.sleep(0.01)
            time.sleep(float(random.uniform(0, 2)))
            for pid in workers_of(process, folder)[: int(random.integers(1, 3))]:
                with suppress(ProcessLookupError):
                    how(pid)
                    struck += 1
            out, error = process.communicate(timeout=250)
        assert process.returncode == 0, (trial, error)
        # A run that finds no memory has failed; the next sweep runs it again.
        assert how is starve or json.loads(out) == clean[1], (trial, error)
        assert answered(folder) == clean[1]
        shutil.rmtree(folder)
    assert struck > TRIALS // 2


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_a_sweep_that_is_killed_goes_on(clean: tuple[Path, Json], tmp_path: Path) -> None:
    random = np.random.default_rng(22)
    for trial in range(TRIALS):
        folder = tmp_path / str(trial)
        folder.mkdir()
        (folder / "buckets.toml").write_text(STUDY, "utf-8")
        with begun(folder) as process:
            time.sleep(float(random.uniform(0.5, 5)))
            process.kill()
            process.communicate(timeout=250)
        assert answered(folder) == clean[1], trial
        shutil.rmtree(folder)


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_a_store_that_rots_is_not_believed(clean: tuple[Path, Json], tmp_path: Path) -> None:
    random = np.random.default_rng(23)
    for trial in range(TRIALS):
        folder = tmp_path / str(trial)
        shutil.copytree(clean[0], folder)
        content = bytearray((folder / STORE).read_bytes())
        first = int(random.integers(100, len(content)))  # behind the head, which says what it is
        for at in range(first, min(first + int(random.integers(1, 3000)), len(content))):
            content[at] = int(random.integers(256))
        (folder / STORE).write_bytes(content)
        assert answered(folder) == clean[1], trial
        shutil.rmtree(folder)


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_a_store_that_is_tampered_with_is_not_believed(
    clean: tuple[Path, Json], tmp_path: Path
) -> None:
    random = np.random.default_rng(24)
    values = ("0", "9e999", "'nan'", "x'ff'", "replace(outcome, '1', '2')", "'{}'", "'[['", "-1")
    for trial in range(TRIALS):
        folder = tmp_path / str(trial)
        shutil.copytree(clean[0], folder)
        with closing(sqlite3.connect(folder / STORE)) as connection, connection:
            column = ("outcome", "seconds", "name", "checksum")[int(random.integers(4))]
            value = values[int(random.integers(len(values)))]
            connection.execute(
                f"UPDATE zsim_runs SET {column} = {value} WHERE rowid % {random.integers(1, 9)} = 0"
            )
        assert answered(folder) == clean[1], trial
        shutil.rmtree(folder)
