"""`zsim explain` says where the time of a recorded step goes."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from profiles import Recorder, busy, written

import zsim
from zsim.mistake import MistakeError
from zsim_explain.answer.explanation import Explanation, explain
from zsim_explain.ledger.step_ledger import LedgerPart, ledger
from zsim_explain.trace.recorded_rank import recorded_ranks

Plant = Callable[[Recorder], object]


def nothing(_: Recorder) -> None:
    """Plant nothing."""


def trained(
    plant: Plant = nothing,
    *,
    steps: int = 4,
    rank: int = 0,
    gemm: float = 300.0,
    gather: float = 200.0,
    waits: bool = True,
) -> dict[str, Any]:
    """Return a trace of steps of 6 layers; in each step after the first `plant` is done once."""
    recorder = Recorder(rank, 2)
    for step in range(steps):
        recorder.step(step)
        for layer in range(6):
            recorder.gather(gather)
            recorder.launch("ampere_bf16_gemm_128x128", gemm)
            recorder.launch("flash_fwd_kernel", 100.0)
            if layer == 2 and step:
                plant(recorder)
        recorder.launch("multi_tensor_apply_kernel<Adam>", 250.0)
        if waits:
            recorder.wait()
    recorder.end()
    return recorder.profile()


def answer(
    tmp_path: Path, *profiles: dict[str, Any], against: dict[str, Any] | None = None
) -> Explanation:
    files = [written(each, tmp_path / f"{index}.json") for index, each in enumerate(profiles)]
    before = [] if against is None else [written(against, tmp_path / "before.json")]
    return explain(files, against=before)


def seconds(found: Explanation, part: str, what: str | None = None) -> float:
    parts: list[dict[str, Any]] = found.to_dict()["parts"]  # type: ignore[assignment]
    return sum(
        float(each["s"]) for each in parts if each["part"] == part and what in (None, each["what"])
    )


def loaded(recorder: Recorder) -> None:
    recorder.wait()
    recorder.call("enumerate(DataLoader)#X", 5000, kind="user_annotation")


def allocated(recorder: Recorder) -> None:
    recorder.wait()
    recorder.call("cudaMalloc", 5000)


def drained(recorder: Recorder) -> None:
    recorder.wait()
    recorder.host += 5000.0


PLANTS: dict[str, tuple[Plant, str, float]] = {
    "a data loader": (
        loaded,
        "data loading",
        5000,
    ),
    "an allocation": (
        allocated,
        "memory allocation",
        5000,
    ),
    "a synchronisation": (
        lambda each: each.call("cudaStreamSynchronize", 9000),
        "synchronisation",
        9000,
    ),
    "a stalled host": (drained, "late launches", 5000),
    "a slow optimizer": (
        lambda each: each.launch("multi_tensor_apply_kernel<Adam>", 3000.0),
        "optimizer",
        3000,
    ),
    "a slow product": (
        lambda each: each.launch("cutlass_80_gemm", 3000.0),
        "matrix products",
        3000,
    ),
    "a slow collective": (lambda each: each.gather(3000.0), "slower all-gather", 3000),
    "a copy": (lambda each: each.launch("Memcpy HtoD (Pinned)", 3000.0), "copy to GPU", 3000),
}


@pytest.mark.parametrize("name", PLANTS)
def test_a_planted_slowdown_is_the_first_cause(name: str, tmp_path: Path) -> None:
    plant, cause, took = PLANTS[name]
    found = answer(tmp_path, trained(plant), against=trained())
    assert found.difference is not None
    first, us = found.difference.causes[0]
    assert first == cause
    assert us == pytest.approx(found.difference.measured - found.difference.expected, rel=0.35)
    assert us == pytest.approx(took, rel=0.5)


def test_the_causes_of_a_difference_add_up_to_it(tmp_path: Path) -> None:
    for plant, _, _ in PLANTS.values():
        found = answer(tmp_path, trained(plant), against=trained()).difference
        assert found is not None
        total = sum(us for _, us in found.causes)
        assert total == pytest.approx(found.measured - found.expected)


def test_a_trace_against_itself_has_no_causes(tmp_path: Path) -> None:
    found = answer(tmp_path, trained(), against=trained()).difference
    assert found is not None
    assert not found.causes


@given(st.data())
def test_every_moment_of_a_step_has_one_cause(data: st.DataObject) -> None:
    recorder = Recorder()
    times = st.floats(0, 1000)
    actions: list[Callable[[], object]] = [
        lambda: recorder.launch("gemm", data.draw(times)),
        lambda: recorder.launch("elementwise", data.draw(times), stream=9),
        lambda: recorder.gather(data.draw(times)),
        lambda: recorder.launch("Memcpy DtoH", data.draw(times), stream=8),
        lambda: recorder.call("cudaMalloc", data.draw(times)),
        lambda: recorder.call("cudaStreamSynchronize", data.draw(times)),
        recorder.wait,
    ]
    for number in range(3):
        recorder.step(number)
        recorder.launch("first", 1.0)
        for action in data.draw(st.lists(st.sampled_from(actions), max_size=12)):
            action()
    recorder.end()
    (rank,) = recorded_ranks(Path("made"), recorder.profile())
    for before, after in zip(rank.steps, rank.steps[1:], strict=False):
        assert before.end == after.start
    for step in rank.steps:
        found = ledger(rank, step)
        assert found.total == pytest.approx(step.end - step.start)
        assert all(us >= 0 for us in found.spent.values())


def test_waits_for_a_late_rank_are_not_its_collectives(tmp_path: Path) -> None:
    """Both ranks end each gather at once; rank 1 computes 200 us longer before each."""
    ranks = [together(rank, late_us=200.0) for rank in range(2)]
    found = answer(tmp_path, *ranks)
    assert found.rank.rank == 1
    assert found.pairing.waited == {1: pytest.approx(3 * 4 * 200.0)}
    assert "100% for rank 1; 12 of 12 collectives" in found.text()
    shifted = ranks[0]
    for event in shifted["traceEvents"]:
        event["ts"] += 5000.0
    assert answer(tmp_path, shifted, ranks[1]).pairing.waited == found.pairing.waited
    alone = answer(tmp_path, ranks[0])
    assert seconds(alone, "exposed communication") == pytest.approx(4 * 300e-6)


def together(rank: int, *, late_us: float) -> dict[str, Any]:
    recorder = Recorder(rank, 2)
    for step in range(4):
        recorder.step(step)
        for _ in range(4):
            recorder.launch("gemm", 500.0 + rank * late_us)
            recorder.wait()
            recorder.gather(100.0 + (1 - rank) * late_us)
            recorder.wait()
    recorder.end()
    return recorder.profile()


def test_ranks_of_different_steps_are_not_paired(tmp_path: Path) -> None:
    other = together(1, late_us=200.0)
    for index, event in enumerate(busy(other, ["kernel"])):
        event["ts"] += 400.0 * (index % 3)
    found = answer(tmp_path, together(0, late_us=200.0), other)
    assert found.pairing.refused.endswith("apart; records are missing, or steps differ")
    assert not found.pairing.waited


def test_missing_records_are_named(tmp_path: Path) -> None:
    profile = trained()
    kernels = [each for each in busy(profile, ["kernel"]) if "gemm" in each["name"]]
    profile["traceEvents"] = [each for each in profile["traceEvents"] if each not in kernels]
    found = answer(tmp_path, profile)
    assert found.explained < 0.95
    assert "records of kernels or events are missing" in found.text()
    assert seconds(found, str(LedgerPart.UNKNOWN)) > 0.0005


def test_ends_of_the_optimizer_mark_steps_where_nothing_else_does(tmp_path: Path) -> None:
    profile = trained()
    for event in busy(profile, ["user_annotation"]):
        event |= {
            "name": "Optimizer.step#AdamW.step",
            "ts": event["ts"] + event["dur"] - 1,
            "dur": 1,
        }
    assert "by ends of Optimizer.step" in answer(tmp_path, profile).text()


def test_a_compressed_trace_is_read_like_its_text(tmp_path: Path) -> None:
    plain = written(trained(), tmp_path / "plain.json")
    packed = tmp_path / "packed.json.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    one, other = explain([plain]).to_dict(), explain([packed]).to_dict()
    assert {**one, "title": ""} == {**other, "title": ""}


def test_what_the_profiler_writes_wrongly_is_read(tmp_path: Path) -> None:
    profile = trained()
    profile["traceEvents"] += [{"ph": "X", "ts": float("nan"), "dur": 1}, None, 7, {"ph": "X"}]
    for event in profile["traceEvents"][:5]:
        event["ts"] = str(event["ts"])
    text = json.dumps(profile).replace("flash_fwd", "flash\x01fwd")
    path = tmp_path / "odd.json"
    path.write_bytes(text.encode().replace(b"Adam", b"Ad\xffam"))
    found = explain([path])
    assert "2 events without a time were skipped" in found.text()
    assert seconds(found, "compute", "attention") > 0


def test_a_faulty_gpu_of_a_simulation_is_found(tmp_path: Path) -> None:
    fault = 'fault=[{kind="gpu", rank=5, factor=1.5}]'
    zsim.run("llama2_7b", [fault]).trace(f"{tmp_path}/")
    found = explain(sorted(tmp_path.glob("*.json")), scenario="llama2_7b")
    assert found.difference is not None
    cause, us = found.difference.causes[0]
    assert cause == "late rank: 5"
    assert us > 0.7 * (found.difference.measured - found.difference.expected)


def test_a_scenario_of_another_number_of_ranks_is_refused(tmp_path: Path) -> None:
    path = written(trained(), tmp_path / "a.json")  # of 2 ranks
    with pytest.raises(MistakeError, match=r"^--scenario: tiny has 4 ranks, and the trace is of "):
        explain([path], scenario="tiny")


def test_a_rank_is_compared_with_one_of_its_pipeline_stage(tmp_path: Path) -> None:
    stages = {"parallel.pipeline": 2, "zero.emulate": "fsdp2", "zero.bucket_elements": None}
    zsim.run("tiny_llama", stages).trace(f"{tmp_path}/")
    for path in tmp_path.glob("*.json"):
        found = explain([path], scenario="tiny_llama", changes=stages).difference
        assert found is not None
        assert not found.causes, path.name


WRONG: dict[str, tuple[bytes, str]] = {
    "no events": (b"{}", "no traceEvents; record one with"),
    "of Chakra": (b'{"nodes": []}', "a Chakra trace has no times"),
    "no kernels": (b'{"traceEvents": []}', "no kernels of a GPU"),
    "no steps": (
        json.dumps({"traceEvents": [{"ph": "X", "cat": "kernel", "ts": 1, "dur": 1}]}).encode(),
        "no marks of steps: call step\\(\\) of the profiler",
    ),
    "empty steps": (
        json.dumps(
            {
                "traceEvents": [
                    {"ph": "X", "cat": "kernel", "ts": 1, "dur": 1},
                    {
                        "ph": "X",
                        "cat": "user_annotation",
                        "name": "ProfilerStep#1",
                        "ts": 9,
                        "dur": 0,
                    },
                ]
            }
        ).encode(),
        "all marked steps are empty",
    ),
    "cut": (json.dumps({"traceEvents": [{"name": "x" * 90}]}).encode()[:50], "line 1, column"),
    "cut and compressed": (gzip.compress(b'{"traceEvents": []}' * 99)[:30], "cut: the end of"),
    "damaged": (b"\x1f\x8b" + b"\x00" * 20, "damaged"),
    "deep": (b"[" * 100_000, "not a trace"),
    "a huge number": (b'{"traceEvents": [' + b"9" * 6000 + b"]}", "not a trace"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_file_is_refused_in_one_line(name: str, tmp_path: Path) -> None:
    content, message = WRONG[name]
    path = tmp_path / "trace.json"
    path.write_bytes(content)
    with pytest.raises(MistakeError, match=message) as caught:
        explain([path])
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


def test_a_file_that_unpacks_to_more_than_the_limit_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "bomb.json.gz"
    path.write_bytes(gzip.compress(b" " * 3_000_000))
    with zsim.limited(file_bytes=1_000_000), pytest.raises(MistakeError, match="after decompress"):
        explain([path])


def test_two_files_of_one_rank_are_refused(tmp_path: Path) -> None:
    files = [written(trained(), tmp_path / f"{name}.json") for name in "ab"]
    with pytest.raises(MistakeError, match="all of rank 0; give one file a rank"):
        explain(files)


def test_a_scenario_or_a_trace_is_expected_not_both(tmp_path: Path) -> None:
    path = written(trained(), tmp_path / "a.json")
    with pytest.raises(MistakeError, match=r"^--against: cannot be combined with --scenario"):
        explain([path], against=[path], scenario="tiny")
    with pytest.raises(MistakeError, match=r"^--set: changes a scenario; add --scenario"):
        explain([path], changes=["train.precision=bf16"])
