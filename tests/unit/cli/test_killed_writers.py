"""Every output, killed and on full disks at drawn moments: the file that was there, or the new."""

import os
import resource
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest

import zsim
from zsim.api.topology_result import read_topology
from zsim.files import output_file
from zsim.files.installed import fitted_kernels, network_profiles
from zsim.mistake import UnwrittenError
from zsim_lab.answer.calibration import CalibrationResult

STUDY = {
    "question": "Which?",
    "base": {"scenario": "tiny"},
    "axis": [{"field": "zero.stage", "values": [1, 2, 3]}],
    "goal": {"minimize": "step_time"},
}
OLD = b"what was there"
WHOLE, LOST = 0, 3

Write = Callable[[Path], object]


def profiles(path: Path) -> None:
    """What `zsim calibrate` writes."""
    (network, *_), (kernels, *_) = network_profiles().values(), fitted_kernels().values()
    made = CalibrationResult(networks={path: network}, kernels={path.with_name("k"): kernels})
    for write in made.writers():
        write()


@pytest.fixture(scope="module")
def outputs() -> Mapping[str, Write]:
    """What writes each file that a command can be asked for, by the name of a file."""
    ran, loaded = zsim.run("tiny"), zsim.load("tiny")
    swept, topology = zsim.sweep(STUDY), read_topology("dgx_h100")
    return {
        "trace.json": ran.trace,
        "step.svg": ran.timeline,
        "step.png": ran.timeline,
        "memory.svg": ran.picture,
        "run.html": ran.report,
        "schedule.json": loaded.write_schedule,
        "runs.csv": swept.csv,
        "study.html": swept.report,
        "study.svg": swept.picture,
        "study.png": swept.picture,
        "node.svg": topology.picture,
        "h100.toml": profiles,
        "traces/rank0.json": lambda path: ran.trace(path.parent),
    }


def in_a_child(action: Callable[[], None]) -> int:
    """The number of a process that does `action` and ends."""
    child = os.fork()
    if not child:
        code = LOST
        try:
            action()
            code = WHOLE
        except UnwrittenError:
            pass
        finally:
            os._exit(code)
    return child


def strike(outputs: Mapping[str, Write], folder: Path, kills: int, full: int) -> None:
    """Kill so many writers, and give so many others a full disk."""
    random = np.random.default_rng(21)
    whole: dict[str, tuple[bytes, float]] = {}
    for name, write in outputs.items():
        path = folder / "whole" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        begin = time.perf_counter()  # noqa: TID251  (moments are drawn from the time it takes)
        write(path)
        taken = time.perf_counter() - begin  # noqa: TID251
        whole[name] = path.read_bytes(), taken
    names, ends = [*outputs], {"old": 0, "new": 0}
    for number in range(kills + full):
        name = names[number % len(names)]
        path = folder / str(number) / name
        path.parent.mkdir(parents=True)
        path.write_bytes(OLD)
        new, taken = whole[name]

        def action(path: Path = path, name: str = name, size: int = len(new)) -> None:
            if number >= kills:  # noqa: B023  (it runs at once)
                most = int(random.integers(1, size))
                signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
                resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
            outputs[name](path)

        child = in_a_child(action)
        if number < kills:
            time.sleep(float(random.uniform(0, 1.5 * taken)))
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        found = path.read_bytes()
        assert found in (OLD, new), (name, number)
        if number >= kills:
            assert (os.waitstatus_to_exitcode(status), found) == (LOST, OLD), (name, number)
        # Only a writer killed between the hidden name and the last leaves one: a whole new file.
        for left in path.parent.glob(".zsim-*"):
            assert number < kills, (name, number)
            assert (found, left.read_bytes()) == (OLD, new), (name, number)
        ends["new" if found == new else "old"] += 1
    assert min(ends.values()) > 0, ends


@pytest.mark.one_commit_in(21)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of a fork where threads are
def test_a_writer_that_is_killed_leaves_a_whole_file(
    outputs: Mapping[str, Write], tmp_path: Path
) -> None:
    strike(outputs, tmp_path, kills=24, full=12)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of a fork where threads are
@pytest.mark.parametrize(("call", "left"), [("fsync", []), ("link", []), ("replace", [b"new"])])
def test_a_writer_killed_before_a_call_leaves_at_most_a_whole_file_beside(
    call: str, left: list[bytes], tmp_path: Path
) -> None:
    path = tmp_path / "run.html"
    path.write_bytes(OLD)

    def killed(*_: object, **__: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def action() -> None:
        setattr(Path if call == "replace" else os, call, killed)
        output_file.write(path, b"new")

    _, status = os.waitpid(in_a_child(action), 0)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL
    assert path.read_bytes() == OLD
    assert [each.read_bytes() for each in tmp_path.glob(".zsim-*")] == left


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_200_killed_writers_and_50_full_disks_leave_whole_files(
    outputs: Mapping[str, Write], tmp_path: Path
) -> None:
    strike(outputs, tmp_path, kills=200, full=50)
