"""Sweeps that are killed, interrupted or lose a worker: nothing is lost, nothing is repeated."""

import json
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Generator
from contextlib import closing, contextmanager
from importlib import import_module
from pathlib import Path
from time import sleep
from typing import Any

import numpy as np
import pytest
from command_answers import without_notice

from zsim.cli.main import answer

Json = dict[str, Any]

pytestmark = pytest.mark.studies

ZSIM = Path(sys.executable).parent / "zsim"
ENOUGH = 5
"""Runs that are kept when something is killed."""

TRIALS = int(os.environ.get("ZSIM_TRIALS", "20"))
"""Of each kind, of sweeps on Dask that are struck at drawn moments."""

PATIENCE_S = 60.0
TIMES = 3000
"""How often something is looked at until then."""

RUNS = 150

STUDY = f"""
question = "how fast must a NIC be?"
[base]
scenario = "llama2_7b"
cluster.nodes = 2
model.layers = 8
[[axis]]
name = "neighbour"
zip = {{ neighbour = {
    [[{"nodes": [0, 1], "bandwidth_per_direction": f"{number + 1} MB/s"}] for number in range(RUNS)]
} }}
labels = {[str(number) for number in range(RUNS)]}
""".replace("'nodes': ", "nodes = ").replace(
    "'bandwidth_per_direction': ", "bandwidth_per_direction = "
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "speed.toml").write_text(STUDY, "utf-8")
    return tmp_path


@contextmanager
def sweeping(folder: Path, *words: str) -> Generator["subprocess.Popen[str]"]:
    """A sweep that goes on, in a process of its own with a mark that its workers have too."""
    with subprocess.Popen(
        [ZSIM, "sweep", "speed.toml", *words],
        cwd=folder,
        env={**os.environ, "ZSIM_TEST_MARK": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def kept(folder: Path) -> dict[str, str]:
    """Outcomes in the store, by key."""
    path = folder / "speed.sqlite"
    if not path.exists():
        return {}
    with closing(sqlite3.connect(path, timeout=PATIENCE_S)) as connection:
        try:
            return dict(connection.execute("SELECT key, outcome || seconds FROM zsim_runs"))
        except sqlite3.OperationalError:  # made, and still empty
            return {}


def wait_until_some_are_kept(folder: Path, process: "subprocess.Popen[str]") -> None:
    for _ in range(TIMES):
        if len(kept(folder)) >= ENOUGH:
            return
        assert process.poll() is None, process.communicate()
        sleep(PATIENCE_S / TIMES)
    raise AssertionError("no run was kept")


def with_mark(folder: Path) -> list[int]:
    """Processes that belong to the sweep."""
    found: list[int] = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            marked = f"ZSIM_TEST_MARK={folder}".encode() in (process / "environ").read_bytes()
            alive = (process / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
        except OSError:
            continue
        if marked and alive:
            found.append(int(process.name))
    return found


def wait_until_all_ended(folder: Path) -> None:
    for _ in range(TIMES):
        if not with_mark(folder):
            return
        sleep(PATIENCE_S / TIMES)
    raise AssertionError("workers live on")


def answered(folder: Path, *words: str) -> Json:
    """What a sweep that is left alone says."""
    done = subprocess.run(
        [ZSIM, "sweep", "speed.toml", "--json", *words],
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
        timeout=2 * PATIENCE_S,
    )
    found: Json = json.loads(done.stdout)
    return found


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Json:
    """The answer of the sweep that nothing happens to."""
    folder = tmp_path_factory.mktemp("undisturbed")
    (folder / "speed.toml").write_text(STUDY, "utf-8")
    return answered(folder, "--workers", "1")


def test_a_killed_sweep_goes_on_where_it_stopped_and_repeats_nothing(
    folder: Path, undisturbed: Json
) -> None:
    with sweeping(folder, "--workers", "2") as process:
        wait_until_some_are_kept(folder, process)
        process.send_signal(signal.SIGKILL)
    wait_until_all_ended(folder)
    before = kept(folder)
    assert ENOUGH <= len(before) < RUNS
    assert answered(folder, "--workers", "2") == undisturbed
    after = kept(folder)
    assert len(after) == RUNS
    # A run that is repeated would have another number of seconds.
    assert {key: after[key] for key in before} == before


def test_ctrl_c_ends_a_sweep_and_its_workers_and_says_how_to_go_on(folder: Path) -> None:
    with sweeping(folder, "--workers", "2") as process:
        wait_until_some_are_kept(folder, process)
        for each in with_mark(folder):  # as a terminal does, to all of them
            os.kill(each, signal.SIGINT)
        out, error = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, out) == (130, "")
    count = len(kept(folder))
    assert error.splitlines() == [
        f"zsim: {count} of {RUNS} runs are in speed.sqlite; the same command goes on",
        "zsim: interrupted",
    ]
    wait_until_all_ended(folder)


def test_a_dask_cluster_that_loses_a_worker_finds_the_same(folder: Path, undisturbed: Json) -> None:
    distributed: Any = import_module("distributed")
    with (
        distributed.LocalCluster(
            n_workers=2, threads_per_worker=1, dashboard_address=":0", host="127.0.0.1"
        ) as cluster,
        distributed.Client(cluster, set_as_default=False) as client,
        sweeping(folder, "--scheduler", cluster.scheduler_address, "--json") as process,
    ):
        wait_until_some_are_kept(folder, process)
        workers: dict[str, int] = client.run(os.getpid)
        assert len(workers) == 2
        os.kill(min(workers.values()), signal.SIGKILL)
        assert len(kept(folder)) < RUNS
        out, error = process.communicate(timeout=2 * PATIENCE_S)
    assert (process.returncode, without_notice(error)) == (0, "")
    assert json.loads(out) == undisturbed
    assert len(kept(folder)) == RUNS


@contextmanager
def cluster_of_processes(folder: Path, workers: int) -> Generator[tuple[str, list[int]]]:
    """A Dask cluster whose scheduler and workers are processes; its address, and their numbers.

    The first is the scheduler. A worker that is silent for 20 s is given up.
    """
    environment = {
        **os.environ,
        "DASK_DISTRIBUTED__SCHEDULER__WORKER_TTL": "20s",
        "DASK_DISTRIBUTED__COMM__TIMEOUTS__CONNECT": "5s",
    }
    where = folder / "scheduler.json"
    file = ["--scheduler-file", str(where), "--no-dashboard"]
    scheduler = ["distributed.cli.dask_scheduler", "--port", "0", "--host", "127.0.0.1", *file]
    worker = ["distributed.cli.dask_worker", "--nthreads", "1", "--no-nanny", *file]
    processes = [
        subprocess.Popen([sys.executable, "-m", *words], env=environment, stderr=subprocess.DEVNULL)
        for words in (scheduler, *[worker] * workers)
    ]
    try:
        for _ in range(TIMES):
            if where.exists() and where.read_text("utf-8").endswith("}"):
                break
            sleep(PATIENCE_S / TIMES)
        yield json.loads(where.read_text("utf-8"))["address"], [each.pid for each in processes]
    finally:
        for each in processes:
            each.kill()
            each.wait()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_dask_scheduler_that_is_lost_ends_the_sweep_in_one_line(
    folder: Path, undisturbed: Json, how: signal.Signals
) -> None:
    with (
        cluster_of_processes(folder, 2) as (address, processes),
        sweeping(folder, "--scheduler", address) as process,
    ):
        wait_until_some_are_kept(folder, process)
        os.kill(processes[0], how)
        out, error = process.communicate(timeout=2 * PATIENCE_S)
    error = without_notice(error)
    assert (process.returncode, out, error.count("\n")) == (3, "", 1)
    assert error.startswith("zsim: the scheduler ")
    assert f"{len(kept(folder))} of {RUNS} runs are in speed.sqlite; the same command" in error
    assert answered(folder, "--workers", "2") == undisturbed


def test_a_dask_worker_that_is_stopped_is_done_without(folder: Path, undisturbed: Json) -> None:
    with (
        cluster_of_processes(folder, 2) as (address, processes),
        sweeping(folder, "--scheduler", address, "--json") as process,
    ):
        wait_until_some_are_kept(folder, process)
        os.kill(processes[1], signal.SIGSTOP)
        out, error = process.communicate(timeout=2 * PATIENCE_S)
    assert (process.returncode, without_notice(error)) == (0, "")
    assert json.loads(out) == undisturbed


def strike(processes: list[int], kind: str, random: np.random.Generator) -> None:
    """Kill or stop a worker, or the scheduler, whose number is the first."""
    if kind == "kill the scheduler":
        os.kill(processes[0], signal.SIGKILL)
        return
    worker = processes[int(random.integers(1, len(processes)))]
    os.kill(worker, signal.SIGKILL if kind == "kill a worker" else signal.SIGSTOP)


@pytest.mark.long
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("kind", ["kill a worker", "stop a worker", "kill the scheduler"])
def test_a_sweep_on_dask_that_is_struck_at_any_moment_ends_and_finds_the_same(
    tmp_path: Path, undisturbed: Json, kind: str
) -> None:
    pytest.importorskip("distributed")
    random, ended_early = np.random.default_rng(25), 0
    for trial in range(TRIALS):
        folder = tmp_path / str(trial)
        folder.mkdir()
        (folder / "speed.toml").write_text(STUDY, "utf-8")
        with (
            cluster_of_processes(folder, 2) as (address, processes),
            sweeping(folder, "--scheduler", address, "--json") as process,
        ):
            sleep(float(random.uniform(0, 6)))
            strike(processes, kind, random)
            out, error = process.communicate(timeout=4 * PATIENCE_S)
        error = without_notice(error)
        if process.returncode == 0:
            assert (json.loads(out), error) == (undisturbed, ""), trial
        else:
            assert (kind, out, error.count("\n")) == ("kill the scheduler", "", 1), (trial, error)
            ended_early += 1
        assert answered(folder, "--workers", "2") == undisturbed, trial
    assert kind != "kill the scheduler" or ended_early > TRIALS // 2


WRONG = {
    "nowhere": "'nowhere' must be HOST:PORT, or tcp://HOST:PORT",
    "127.0.0.1:1": "'127.0.0.1:1': [errno 111] connection refused",
}


@pytest.mark.parametrize("address", WRONG)
def test_an_address_where_nobody_answers_is_a_mistake(
    folder: Path, address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    store = str(folder / "speed.sqlite")
    words = ["sweep", str(folder / "speed.toml"), "--store", store, "--scheduler", address]
    assert answer(words) == 2
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", f"zsim: --scheduler: {WRONG[address]}\n")
