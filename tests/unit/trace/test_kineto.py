"""What is written for Perfetto says what the trace says; where time goes is counted twice."""

import json
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zsim.analysis.time_breakdown import breakdown
from zsim.backend.backend import Job
from zsim.backend.document import decode_trace, encode_trace
from zsim.cli.main import answer
from zsim.files.source import Changes, read
from zsim.trace.kineto import KEYS, kineto
from zsim.trace.trace import Trace
from zsim_des import SimBackend

SMALL = ("model.layers=4", "parallel.tensor=2", "train.steps=2")


@pytest.fixture(scope="module")
def job() -> Job:
    document = read("zero_100b", Changes(settings=SMALL)).document
    assert document.model is not None
    assert document.cluster is not None
    return Job(
        schedule=document.schedule,
        model=document.model,
        cluster=document.cluster,
        steps=document.steps,
    )


@pytest.fixture(scope="module")
def trace(job: Job) -> Trace:
    return SimBackend().run(job, seed=0)


def spans(text: str) -> list[tuple[str, float, float]]:
    """Name, start and end, in microseconds, of what the file says that ran on a stream."""
    return [
        (each["name"], each["ts"], each["ts"] + each["dur"])
        for each in json.loads(text)["traceEvents"]
        if "stream" in each["args"]
    ]


def covered(found: list[tuple[str, float, float]]) -> float:
    """Microseconds in which at least one of the spans runs."""
    total, reached = 0.0, 0.0
    for _, start, end in sorted(found, key=lambda each: each[1:]):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def test_a_file_for_perfetto_is_still_the_trace(job: Job, trace: Trace) -> None:
    profile = kineto(job.schedule, trace, trace.ranks[0])
    assert set(profile) == set(KEYS)
    assert decode_trace(encode_trace(trace, profile)) == trace


def test_every_event_is_there_with_its_times_and_its_launch(job: Job, trace: Trace) -> None:
    (rank, *_) = trace.ranks
    events = json.loads(json.dumps(kineto(job.schedule, trace, rank)))["traceEvents"]
    launches = {
        each["args"]["correlation"]: each for each in events if each.get("cat") == "cuda_runtime"
    }
    ran = [each for each in events if "stream" in each["args"]]
    assert [(each["args"]["operation"], each["args"]["step"]) for each in ran] == [
        (event.operation, event.step) for event in rank.events
    ]
    for found, event in zip(ran, rank.events, strict=True):
        assert found["ts"] == pytest.approx(event.start_ps / 1e6)
        assert found["ts"] + found["dur"] == pytest.approx(event.end_ps / 1e6)
        assert launches[found["args"]["correlation"]]["ts"] <= found["ts"]


def test_names_tell_computing_communication_and_memory_apart(job: Job, trace: Trace) -> None:
    """As Holistic Trace Analysis reads them, and the parts come to those of the breakdown."""
    (rank, *_) = trace.ranks
    text = encode_trace(trace, kineto(job.schedule, trace, rank))
    found = breakdown(
        job.schedule.program_of(rank.rank), rank, 0, max(event.end_ps for event in rank.events)
    )
    computing = [
        each for each in spans(text) if not re.match(r"nccl.*Kernel|Memcpy|Memset", each[0])
    ]
    travelling = [each for each in spans(text) if each[0].startswith("nccl")]
    assert covered(computing) == pytest.approx(found.compute_ps / 1e6)
    assert covered(computing + travelling) == pytest.approx(
        (found.compute_ps + found.communication_ps) / 1e6
    )
    assert covered(spans(text)) == pytest.approx((found.span_ps - found.idle_ps) / 1e6)
    assert {name for name, _ in found.exposed_ps} == {"data", "tensor", "world"}


@settings(max_examples=50)
@given(cut=st.tuples(st.floats(0, 1), st.floats(0, 1)))
def test_the_parts_of_any_time_sum_up_to_it(
    job: Job, trace: Trace, cut: tuple[float, float]
) -> None:
    (rank, *_) = trace.ranks
    begin, end = sorted(int(share * trace.step_end_ps[-1]) for share in cut)
    program = job.schedule.program_of(rank.rank)
    found = breakdown(program, rank, begin, end)
    parts = [found.compute_ps, found.communication_ps, found.copy_ps, found.idle_ps]
    assert sum(parts) == found.span_ps == end - begin
    assert min(parts) >= 0
    halves = [
        breakdown(program, rank, *each)
        for each in ((begin, (begin + end) // 2), ((begin + end) // 2, end))
    ]
    assert found.compute_ps == sum(each.compute_ps for each in halves)
    assert found.idle_ps == sum(each.idle_ps for each in halves)


@pytest.mark.matrix(6)
@pytest.mark.parametrize("where", [".", "made/by/it/"])
def test_in_a_folder_every_rank_has_its_file(tmp_path: Path, where: str) -> None:
    folder = tmp_path / where
    assert answer(["run", "tiny", "--backend", "null", "--trace", f"{tmp_path}/{where}"]) == 0
    files = sorted(folder.iterdir())
    assert files
    for path in files:
        rank = json.loads(path.read_text("utf-8"))["distributedInfo"]["rank"]
        assert path.name == f"rank{rank}.json"
        assert decode_trace(path.read_text("utf-8")).backend == "null"


def test_a_trace_that_cannot_be_written_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = tmp_path / "none" / "trace.json"
    assert answer(["run", "tiny", "--backend", "null", "--trace", str(where)]) == 2
    assert capsys.readouterr().err == f"zsim: --trace: {where}: {where.parent} is no folder\n"
    file = tmp_path / "file"
    file.write_text("", "utf-8")
    assert answer(["run", "tiny", "--backend", "null", "--trace", f"{file}/"]) == 2
    assert capsys.readouterr().err == f"zsim: --trace: {file}/: file exists\n"
