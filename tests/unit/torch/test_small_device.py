"""The demonstration that ships: a GPT is trained on a device that holds a fraction of its states.

The test trains a narrow one; `zsim run gpt_370m` says how to train the real one.
"""

import gzip
import json
import re
from base64 import b64decode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import zsim
from zsim.cli.main import answer
from zsim.schedule.schedule import Place
from zsim_torch.capability import ledger_peak_bytes

BUDGET = 256_000_000
NARROW = {
    "model.layers": "3",
    "model.hidden_size": "128",
    "model.attention_heads": "4",
    "model.vocab_size": "1024",
    "model.sequence_length": "64",
    "offload.sub_group_elements": "100e3",
    "train.steps": "2",
}
NARROW_BUDGET = 3_000_000
"""Bytes; the narrow model has 14 MB of states."""


@pytest.mark.one_commit_in(6)
def test_the_model_that_ships_is_large_and_its_device_is_small() -> None:
    scenario = zsim.load("gpt_370m")
    job = scenario.job
    assert scenario.model.parameter_count > 300e6
    assert ledger_peak_bytes(job.schedule, Place.DEVICE) < BUDGET


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder with the trace and the page of a run of the command that is promised."""
    folder = tmp_path_factory.mktemp("small")
    files = folder / "files"
    files.mkdir()
    words = ["run", "gpt_370m", "--backend", "torch", "--offload-path", str(files)]
    words += ["--device-budget", f"{NARROW_BUDGET}B", "--trace", str(folder / "trace.json")]
    words += ["--report", str(folder / "page.html")]
    for key, value in NARROW.items():
        words += ["--set", f"{key}={value}"]
    assert answer(words) == 0
    assert not list(files.iterdir())
    return folder


def spans(trace: dict[str, Any], stream: str) -> list[tuple[float, float]]:
    """Return when the operations of `stream` ran."""
    tid = next(
        each["tid"]
        for each in trace["traceEvents"]
        if each["name"] == "thread_name" and each["args"]["name"] == stream
    )
    return [
        (each["ts"], each["ts"] + each["dur"])
        for each in trace["traceEvents"]
        if each["ph"] == "X" and each["tid"] == tid
    ]


def both(
    left: list[tuple[float, float]], right: list[tuple[float, float]]
) -> Iterator[tuple[float, float]]:
    """Yield the intervals in which one of each goes on."""
    for start, end in left:
        for other_start, other_end in right:
            if max(start, other_start) < min(end, other_end):
                yield max(start, other_start), min(end, other_end)


@pytest.mark.one_commit_in(9)
def test_reads_updates_and_writes_overlap_in_its_trace(trained: Path) -> None:
    trace = json.loads((trained / "trace.json").read_text("utf-8"))
    reads, writes = spans(trace, "nvme_read"), spans(trace, "nvme_write")
    assert list(both(reads, writes))
    assert list(both(spans(trace, "cpu"), reads + writes))


@pytest.mark.one_commit_in(4)
def test_its_page_is_written(trained: Path) -> None:
    page = (trained / "page.html").read_text("utf-8")
    packed = re.search(r'<script type="text/plain">(.*?)</script>', page)
    assert packed is not None
    assert "nvme_read" in gzip.decompress(b64decode(packed[1])).decode()
    assert "seen on the device" in page
