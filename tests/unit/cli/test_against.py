"""`zsim check --against`: a run that was written down is held against its schedule."""

import json
from pathlib import Path
from typing import Any

import pytest

from zsim.cli.main import answer


@pytest.fixture
def trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    path = tmp_path / "run.json"
    assert answer(["run", "tiny", "--ranks", "2", "--no-check", "--trace", str(path)]) == 0
    capsys.readouterr()
    return path


def ask(trace: Path | str, *words: str) -> int:
    return answer(["check", "tiny", "--ranks", "2", "--against", str(trace), *words])


@pytest.mark.one_commit_in(9)
def test_a_run_is_one_of_its_scenario_and_of_no_other(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ask(trace) == 0
    assert capsys.readouterr().out.splitlines()[0].endswith(": no findings")
    assert ask(trace, "--set", "zero.stage=1", "--json") == 1
    findings = json.loads(capsys.readouterr().out)["findings"]
    assert {each["invariant"] for each in findings} == {"refinement"}
    assert ask(trace, "--set", "zero.stage=1", "--explain", "1") == 1
    assert capsys.readouterr().out.startswith("1. refinement\nwhere: all rank 0: ")
    assert answer(["check", "tiny", "--against", str(trace)]) == 1  # of the ranks of the cluster
    assert "trace/ranks: role all has 4 ranks, the trace speaks of 2" in capsys.readouterr().out


@pytest.mark.one_commit_in(6)
def test_a_real_run_with_witnesses_is_proved_by_them_and_without_is_said_not_to_be(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ask(trace) == 0
    assert "no witnesses in the trace" in capsys.readouterr().out.splitlines()[-1]
    real = str(tmp_path / "real.json")
    words = ["run", "tiny", "--ranks", "2", "--steps", "1", "--no-check", "--backend", "torch"]
    assert answer([*words, "--trace", real, "--witness"]) == 0
    capsys.readouterr()
    assert ask(real) == 0
    _, proved = capsys.readouterr().out.splitlines()
    assert proved.endswith(", run (2 ranks, by witnesses)")


REFUSED = {
    "--witness": "--witness: needs --trace, the file to write witnesses into",
    "--witness --trace x.json --backend sim": "--witness: backend sim runs nothing that could be",
    "--witness --trace x.json --poison": "witness: must be off with poison, whose copies it would",
}


@pytest.mark.parametrize("words", REFUSED)
def test_witnesses_that_cannot_be_had_are_refused_in_one_line(
    words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert answer(["run", "tiny", "--backend", "torch", *words.split()]) == 2
    assert capsys.readouterr().err.startswith(f"zsim: {REFUSED[words]}")


def broken(document: dict[str, Any]) -> dict[str, tuple[str, str]]:
    """Texts that are no trace, and what is said of each."""
    whole = json.dumps(document)
    lacking = json.dumps({**document, "trace": {**document["trace"], "steps": "two"}})
    return {
        "": ("", "not JSON: Expecting value (line 1, column 1)"),
        "cut": (whole[: len(whole) // 2], "not JSON: "),
        "job": (whole.replace('"zsim": "trace"', '"zsim": "job"'), 'zsim: "job" must be "trace"'),
        "steps": (lacking, "trace.steps: "),
    }


@pytest.mark.one_commit_in(6)
def test_what_is_no_trace_is_refused_in_one_line(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "broken.json"
    for text, line in broken(json.loads(trace.read_text("utf-8"))).values():
        path.write_text(text, "utf-8")
        assert ask(path) == 2
        captured = capsys.readouterr()
        assert captured.err.startswith(f"zsim: --against: {path}: {line}")
        assert (captured.out, captured.err.count("\n")) == ("", 1)
    path.write_bytes(b"\xff\xfe")
    for name, line in ((path, "not text"), (tmp_path, "is a directory"), ("/no", "no such file")):
        assert ask(name) == 2
        assert capsys.readouterr().err.startswith(f"zsim: --against: {name}: {line}")
