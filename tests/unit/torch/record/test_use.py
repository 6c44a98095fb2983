"""Recordings as users meet them: in their tests, and at the size of their models."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import zsim_record
import zsim_torch

SCRIPTS = Path(__file__).parents[3] / "support" / "scripts"
TEST = """
import pytest

import zsim_record
import zsim_torch
import torch


@pytest.mark.parametrize("mended", [False, True])
def test_training(stream_recording, mended):
    device = torch.get_device_module("zsim")
    side = device.Stream()
    value = torch.ones(4, device="zsim")
    if mended:
        side.wait_stream(device.current_stream())
    with device.stream(side):
        value.sum()
"""


@pytest.mark.one_commit_in(6)
def test_a_test_that_takes_the_fixture_fails_with_its_races(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "test_training.py"
    file.write_text(TEST, "utf-8")
    apart = ["-c", os.devnull, "--rootdir", str(tmp_path), "-p", "no:cacheprovider"]
    code = pytest.main(["-q", "-p", "zsim_record.record.pytest_fixture", *apart, str(file)])
    told = capsys.readouterr().out
    assert code == pytest.ExitCode.TESTS_FAILED
    assert "race: side must wait for aten::ones on default stream before aten::sum" in told
    assert "2 passed, 1 error" in told  # what is mended passes; the other fails at its end


@pytest.mark.long
def test_eighty_layers_on_a_thousand_ranks_are_recorded_in_a_minute() -> None:
    command = [sys.executable, str(SCRIPTS / "large_model_recording.py")]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    took = json.loads(done.stdout.splitlines()[-1])
    assert took["findings"] == 0
    assert took["operations"] > 30_000
    assert took["cpu_s"] < 60
    assert took["resident_bytes"] < 10**9


def test_the_former_name_of_the_recorder_warns_and_works() -> None:
    with pytest.warns(DeprecationWarning, match=r"zsim_record\.recording"):
        former = zsim_torch.recording
    assert former is zsim_record.recording
