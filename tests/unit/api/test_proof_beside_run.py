"""A schedule that is proved in a fork while it is simulated has the answers that it has without."""

import json
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from forks import are_gone, noted_forks

import zsim
import zsim.proof
from zsim.api import launch
from zsim.api.launch import NoRouteError, RefutedError, RunFailedError
from zsim.cli.main import answer
from zsim.limits import TimeLimitError
from zsim.model.model import Model
from zsim.proof import Finding, check
from zsim.schedule.schedule import Schedule

pytestmark = [
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only forks on Linux"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of a fork where threads are
]

STAGES = (
    "parallel.pipeline=2",
    "zero.emulate=nanotron",
    "zero.stage=0",
    "zero.bucket_elements=500000000",
)

Steps = list[dict[str, Any]]


@pytest.fixture(autouse=True)
def proofs_are_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every schedule be large, on two cores, and no other thread run."""
    monkeypatch.setattr(launch, "FORKED_MIN", 0)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(threading, "enumerate", lambda: [threading.main_thread()])


@pytest.fixture
def proved_in(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[], list[int]]:
    """Return what returns the processes in which schedules were proved."""
    noted = tmp_path / "proved"

    def proved(schedule: Schedule, model: Model, *, compares: bool) -> tuple[Finding, ...]:
        with noted.open("a", encoding="utf-8") as file:
            print(os.getpid(), file=file)
        return check(schedule, model, compares=compares)

    monkeypatch.setattr(zsim.proof, "check", proved)
    return lambda: [int(line) for line in noted.read_text("utf-8").split()]


def waits_for_nothing(step: Steps) -> None:
    for operation in step:
        operation.pop("after", None)


def waits_for_ever(step: Steps) -> None:
    """Send nothing of what the next stage receives."""
    step[:] = [each for each in step if each["type"] != "Send"]


@pytest.fixture
def edited(tmp_path: Path) -> Callable[[Callable[[Steps], None]], Path]:
    """Return what writes a schedule whose first role has an edited step."""

    def write(edit: Callable[[Steps], None]) -> Path:
        path = tmp_path / "schedule.json"
        settings = [part for setting in STAGES for part in ("--set", setting)]
        assert answer(["plan", "tiny", *settings, "--schedule", str(path)]) == 0
        document = json.loads(path.read_text("utf-8"))
        edit(document["schedule"]["programs"][0]["step"])
        path.write_text(json.dumps(document), "utf-8")
        return path

    return write


def test_a_fork_proves_and_figures_are_those_without_it(
    proved_in: Callable[[], list[int]],
) -> None:
    beside, before = zsim.run("tiny", forks=True), zsim.run("tiny")
    assert beside.recorded == before.recorded
    first, second = proved_in()
    assert (first == os.getpid(), second == os.getpid()) == (False, True)


def test_the_command_forks_and_prints_the_same(
    proved_in: Callable[[], list[int]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    printed: list[dict[str, object]] = []
    for least in (0, 10**9):
        monkeypatch.setattr(launch, "FORKED_MIN", least)
        assert answer(["run", "tiny", "--json"]) == 0
        printed.append(json.loads(capsys.readouterr().out))
        printed[-1].pop("wall_time_s")
    first, second = proved_in()
    assert (first == os.getpid(), second == os.getpid()) == (False, True)
    assert printed[0] == printed[1]


@pytest.mark.matrix(6)
@pytest.mark.parametrize("edit", [waits_for_nothing, waits_for_ever])
def test_findings_count_and_not_what_was_simulated_or_failed_meanwhile(
    edit: Callable[[Steps], None], edited: Callable[[Callable[[Steps], None]], Path]
) -> None:
    path = edited(edit)
    if edit is waits_for_ever:
        with pytest.raises(RunFailedError):
            zsim.run(path, check=False)
    with pytest.raises(RefutedError) as before:
        zsim.run(path)
    with pytest.raises(RefutedError) as beside:
        zsim.run(path, forks=True)
    assert beside.value.proof.findings == before.value.proof.findings
    assert str(beside.value) == str(before.value)


def test_what_fails_of_a_schedule_that_is_proved_fails_as_it_does_afterwards() -> None:
    cut = [{"kind": "nic", "node": 0, "nic": each, "dead": True} for each in range(8)]
    with pytest.raises(NoRouteError):
        zsim.run("llama2_7b", {"fault": cut}, forks=True)
    with zsim.limited(operations=10), pytest.raises(zsim.MistakeError, match="operations"):
        zsim.run("tiny", forks=True)


@pytest.mark.parametrize("error", [KeyboardInterrupt, TimeLimitError])
def test_who_ends_a_run_need_not_wait_for_its_proof(
    error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    here = os.getpid()

    def stopped(*_: object, **__: object) -> tuple[Finding, ...]:
        assert os.getpid() != here
        threading.Event().wait()
        return ()

    def ends(*_: object, **__: object) -> None:
        raise error

    forks = noted_forks(monkeypatch)
    monkeypatch.setattr(zsim.proof, "check", stopped)
    monkeypatch.setattr("zsim_des.SimBackend.run", ends)
    with pytest.raises(error):
        zsim.run("tiny", forks=True)
    assert are_gone(forks)
