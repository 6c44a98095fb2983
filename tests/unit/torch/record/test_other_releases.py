"""Other releases and runtimes, where they are at hand: each is recorded in a process of its own.

`ZSIM_TORCH_2_11` names a folder with the Python files of torch 2.11.0 (`unzip` its wheel),
`ZSIM_MEGATRON_FSDP` one with megatron-fsdp 0.5.0 (`pip install --no-deps --target`).
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from zsim_record.record.finding_report import Document
from zsim_record.record.script_process import record_script

SCRIPTS = Path(__file__).parents[3] / "support" / "scripts"


def folder(variable: str) -> str:
    found = os.environ.get(variable)
    if not found:
        pytest.skip(f"{variable} is not set")
    return found


def findings(script: str, *arguments: str, cuda: bool = False) -> list[Document]:
    command = ["python", str(SCRIPTS / script), *arguments]
    recorded = record_script(command, world=4, ranks=[0], cuda=cuda)
    assert recorded.failures == []
    return recorded.findings


def printed(script: str, *arguments: str) -> list[Document]:
    command = [sys.executable, str(SCRIPTS / script), *arguments]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found: list[Document] = json.loads(done.stdout.splitlines()[-1])
    return found


def lines(stack: list[Document]) -> set[str]:
    return {f"{Path(frame['file']).name}:{frame['line']}" for frame in stack}


def overwrites_a_bucket(finding: Document) -> bool:
    return (
        finding["kind"] == "race"
        and finding["earlier"]["operation"].startswith("reduce_scatter")
        and "megatron_fsdp.py:619" in lines(finding["later"]["stack"])
    )


def test_a_hook_in_fsdp2_of_torch_2_11_reads_a_gradient_too_early() -> None:
    place = folder("ZSIM_TORCH_2_11")
    (found,) = printed("fsdp2_of_torch_2_11.py", place, "hook")
    assert found["kind"] == "host race"
    assert "_fsdp_collectives.py:626" in lines(found["earlier"]["stack"])
    assert "_fsdp_collectives.py:649" in lines(found["later"]["stack"])
    assert printed("fsdp2_of_torch_2_11.py", place) == []


def test_megatron_fsdp_overwrites_a_double_buffer_that_is_still_read() -> None:
    place = folder("ZSIM_MEGATRON_FSDP")
    found = findings("megatron_fsdp_training.py", place, "double", cuda=True)
    assert any(overwrites_a_bucket(each) for each in found)
    mended = findings("megatron_fsdp_training.py", place, "double", "mended", cuda=True)
    assert not any(overwrites_a_bucket(each) for each in mended)
    assert findings("megatron_fsdp_training.py", place, cuda=True) == []
