"""Results from Python are those of the command line: the same figures, files and words."""

import csv
import json
import sys
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from command_answers import Json
from notebook import shown_as

import zsim
from zsim.api.launch import RefutedError
from zsim.api.shipped import installed
from zsim.api.topology_result import read_topology
from zsim.backend.backend import Job, NoRouteError
from zsim.backend.document import decode_trace
from zsim.cli.main import answer
from zsim.mistake import UnwrittenError

STUDY: dict[str, Any] = {
    "question": "Which stage?",
    "base": {"scenario": "tiny"},
    "axis": [{"field": "zero.stage", "values": [1, 2]}],
    "goal": {"minimize": "step_time"},
}
PROPERTIES = (
    "fits",
    "step_time_s",
    "exposed_communication_s",
    "exposed_communication_s_by_axis",
    "host_bound_s",
    "tokens_per_s",
    "model_tflops_per_gpu",
    "hardware_tflops_per_gpu",
    "mfu",
    "hfu",
    "peak_allocated_bytes",
    "peak_reserved_bytes",
    "usable_memory_bytes",
    "memory_bytes",
    "healthy_step_time_s",
    "backend",
    "title",
)
"""Figures that a result has under the name that `--json` gives them."""


def asked(capsys: pytest.CaptureFixture[str], *words: str | Path) -> Json:
    answer([*map(str, words), "--json"])
    return json.loads(capsys.readouterr().out)


def as_json(found: object) -> Json:
    return json.loads(json.dumps(found))


@pytest.mark.matrix(24)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"zero.stage": 2},
        {"cluster.gpu_memory": "3 MB"},
        {"fault": [{"kind": "gpu", "rank": 1, "factor": 2}]},
    ],
    ids=str,
)
def test_a_run_has_the_figures_of_the_command_line(
    changes: dict[str, Any], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "mine.toml"
    loaded = zsim.load("tiny", changes)
    result = zsim.run(loaded)
    settings = [f"--set={each}" for each in loaded.changes.settings]
    said = asked(capsys, "run", "tiny", *settings)
    assert as_json(result.to_dict()) | {"wall_time_s": 0} == said | {"wall_time_s": 0}
    for name in PROPERTIES:
        assert as_json(getattr(result, name)) == said[name], name
    assert not path.exists()


@pytest.mark.one_commit_in(9)
def test_a_run_that_does_not_fit_says_where_and_what_would_help() -> None:
    result = zsim.run("tiny", {"cluster.gpu_memory": "5 MB"})
    assert not result.fits
    assert result.out_of_memory is not None
    assert result.out_of_memory.operation
    assert result.remedies
    again = {
        key: int(value) if value.isdecimal() else value
        for key, _, value in (each.partition("=") for each in result.remedies[0].settings)
    }
    assert zsim.run("tiny", {"cluster.gpu_memory": "5 MB", **again}).fits
    assert zsim.run("tiny").remedies is None


@pytest.mark.one_commit_in(6)
def test_files_of_a_run_are_those_of_the_command_line(tmp_path: Path) -> None:
    result = zsim.run("tiny")
    names = ("page.html", "step.svg", "trace.json")
    mine, theirs = ([tmp_path / f"{who}_{name}" for name in names] for who in ("mine", "theirs"))
    result.report(mine[0])
    picture = result.timeline(mine[1])
    result.trace(mine[2])
    options = zip(("--report", "--timeline", "--trace"), map(str, theirs), strict=True)
    assert answer(["run", "tiny", *(word for pair in options for word in pair)]) == 0
    for one, other in zip(mine, theirs, strict=True):
        assert one.read_bytes() == other.read_bytes()
    assert picture == shown_as(picture, "svg") == mine[1].read_text("utf-8")
    assert decode_trace(mine[2].read_text("utf-8")) == result.recorded


def test_a_file_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    result = zsim.run("tiny")
    full = tmp_path / "page.html"
    full.symlink_to("/dev/full")
    with pytest.raises(UnwrittenError, match=r"page.html could not be written: no space left"):
        result.report(full)
    with pytest.raises(zsim.MistakeError, match=r"^report: .*: must end in .html"):
        result.report(tmp_path / "page.txt")
    with pytest.raises(zsim.MistakeError, match=r"^trace: .* is no folder"):
        result.trace(tmp_path / "none" / "trace.json")
    with pytest.raises(zsim.MistakeError, match=r"^timeline: backend null has no clock"):
        zsim.run("tiny", backend="null").timeline()


@pytest.mark.one_commit_in(6)
def test_rows_of_a_run_add_up_to_its_step() -> None:
    result = zsim.run("tiny")
    rows = result.rows()
    frame = result.to_pandas()
    assert list(frame.columns) == list(rows[0])
    assert len(frame) == len(rows)
    begin_s, end_s = (each / 1e12 for each in result.recorded.step_end_ps[-2:])
    assert max(frame["start_s"] + frame["duration_s"]) <= end_s + 1e-12
    assert end_s - begin_s == pytest.approx(result.step_time_s)


@pytest.mark.parametrize("missing", [True, False])
def test_without_pandas_a_table_says_what_to_install(
    missing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = zsim.sweep(STUDY)
    if not missing:
        assert list(result.to_pandas()["stage"]) == ["1", "2"]
        return
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(zsim.MistakeError, match=r"to_pandas: needs pandas \(pip install"):
        result.to_pandas()


@pytest.mark.one_commit_in(6)
def test_a_comparison_is_that_of_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    said = asked(capsys, "compare", "tiny", "--but", "zero.stage=2")
    found = zsim.compare("tiny", changes={"zero.stage": 2})
    assert as_json(found.to_dict()) == said
    one, other = zsim.run("tiny"), zsim.run("tiny", {"zero.stage": 2})
    assert zsim.compare(one, other).found == found.found
    assert found.step_times_s == (one.step_time_s, other.step_time_s)
    assert len(found.to_pandas()) == 1 + sum(
        len(said[level]) for level in ("figures", "sorts", "operations")
    )
    with pytest.raises(zsim.MistakeError, match=r"^second: missing"):
        zsim.compare("tiny")
    with pytest.raises(zsim.MistakeError, match=r"^zero.stage=2: .* is a trace"):
        zsim.compare(one, one, {"zero.stage": 2})


@pytest.mark.one_commit_in(6)
def test_a_trace_in_a_file_is_compared_with_a_scenario(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    zsim.run("tiny").trace(path)
    found = zsim.compare(path, "tiny")
    assert found.step_times_s[0] == found.step_times_s[1] > 0
    assert not found.found.only_first


@pytest.mark.matrix(6)
@pytest.mark.parametrize("name", ["tiny", "zero_table1"])
def test_the_largest_model_is_that_of_the_command_line(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = {"cluster.gpu_memory": "8 MB"} if name == "tiny" else {}
    words = [f"--set={key}={value}" for key, value in changes.items()]
    found = zsim.largest(name, changes)
    said = asked(capsys, "largest", name, *words)
    assert as_json(found.to_dict()) == said
    assert found.fits
    assert found.parameters == (said if name == "tiny" else said["with_buffers"])["parameters"]
    assert found.layers == (said["layers"] if name == "tiny" else None)


@pytest.mark.one_commit_in(9)
def test_a_proof_is_that_of_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    proof = zsim.check("tiny")
    assert proof.is_right
    assert as_json(proof.to_dict()) == asked(capsys, "check", "tiny")
    run = zsim.run("tiny", {"zero.stage": 1})
    assert {each.invariant for each in zsim.check("tiny", against=run).findings} == {"refinement"}
    assert zsim.check("tiny", {"zero.stage": 1}, against=run).is_right


def test_a_study_is_that_of_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, store = tmp_path / "study.toml", tmp_path / "study.sqlite"
    path.write_text(
        'question = "Which stage?"\n[base]\nscenario = "tiny"\n'
        '[[axis]]\nfield = "zero.stage"\nvalues = [1, 2]\n[goal]\nminimize = "step_time"\n'
    )
    told: list[tuple[float, float]] = []
    found = zsim.sweep(path, store=store, progress=lambda done, total: told.append((done, total)))
    said = asked(capsys, "sweep", path, "--store", store)
    assert as_json(found.to_dict()) == said
    assert as_json(zsim.sweep(STUDY).to_dict()) == said
    assert told[0] == (0, 2)
    assert told[-1] == (2, 2)
    found.csv(tmp_path / "runs.csv")
    rows = list(csv.DictReader(StringIO((tmp_path / "runs.csv").read_text("utf-8"))))
    assert [row["stage"] for row in rows] == [str(each["stage"]) for each in found.rows()]
    assert found.picture(tmp_path / "runs.svg") == (tmp_path / "runs.svg").read_text("utf-8")
    found.report(tmp_path / "runs.html")
    assert (tmp_path / "runs.html").read_text("utf-8").endswith("</html>")


def test_a_sweep_that_is_interrupted_says_what_is_kept(tmp_path: Path) -> None:
    def stop(done: float, _: float) -> None:
        if done:
            raise KeyboardInterrupt

    store = tmp_path / "runs.sqlite"
    with pytest.raises(KeyboardInterrupt, match=r"of 2 runs are in .*runs.sqlite"):
        zsim.sweep(STUDY, store=store, progress=stop)
    assert zsim.sweep(STUDY, store=store).best == zsim.sweep(STUDY).best


def test_a_schedule_made_by_hand_is_run_as_a_job() -> None:
    loaded = zsim.load("tiny")
    assert loaded.job.schedule.contract.strategy is not None
    made = zsim.make_schedule(loaded.model, loaded.job.schedule.contract.strategy)
    job = Job(schedule=made, model=loaded.model, cluster=loaded.cluster, steps=2)
    assert zsim.run(job).step_time_s == zsim.run(loaded).step_time_s
    assert zsim.check(made, model=loaded.model).is_right
    with pytest.raises(zsim.MistakeError, match=r"^changes: are for scenarios"):
        zsim.run(job, {"zero.stage": 1})


def test_a_wrong_schedule_is_refuted_and_not_run(tmp_path: Path) -> None:
    path = tmp_path / "schedule.json"
    assert answer(["plan", "tiny", "--schedule", str(path)]) == 0
    document = json.loads(path.read_text("utf-8"))
    for operation in document["schedule"]["programs"][0]["step"]:
        operation.pop("after", None)
    path.write_text(json.dumps(document), "utf-8")
    with pytest.raises(RefutedError) as refuted:
        zsim.run(path)
    assert refuted.value.proof.findings
    assert zsim.run(path, check=False).step_time_s > 0


def test_ranks_without_a_way_to_each_other_raise() -> None:
    cut = [{"kind": "nic", "node": 0, "nic": each, "dead": True} for each in range(8)]
    with pytest.raises(NoRouteError):
        zsim.run("llama2_7b", {"fault": cut}, check=False)


def test_every_result_says_its_error_under_one_name() -> None:
    run = zsim.run("tiny", check=False)
    largest = zsim.largest("tiny", {"cluster.gpu_memory": "8 MB"})
    for result in (run, largest):
        assert not hasattr(result, "trust")
        assert dict(result.facts())["error"] == result.error
        assert result.error
    said: Any = run.to_dict()
    assert said["error"]["text"] == run.error
    assert largest.to_dict()["error"] == largest.error


@pytest.mark.one_commit_in(9)
def test_a_notebook_shows_what_every_result_says() -> None:
    run = zsim.run("tiny", {"title": "<x>"})
    largest = zsim.largest("zero_table1")
    for result in (run, zsim.compare(run, "tiny"), zsim.check("tiny"), zsim.sweep(STUDY), largest):
        shown = shown_as(result, "html")
        assert shown.startswith("<div><b>")
        assert "<x>" not in shown
        assert len(repr(result)) < 1000
    assert "&lt;x&gt;" in shown_as(run, "html")
    assert f"step_time_s={run.step_time_s}" in repr(run)


STAGED = [
    "zero.emulate=nanotron",
    "zero.stage=1",
    "zero.bucket_elements=500000000",
    "parallel.pipeline=2",
]
PRINTED: dict[str, Callable[[], object]] = {
    "plan tiny --set zero.stage=1": lambda: zsim.load("tiny", ["zero.stage=1"]).plan(),
    "plan tiny --set " + " --set ".join(STAGED): lambda: zsim.load("tiny", STAGED).plan(),
    "check tiny": lambda: zsim.check("tiny"),
    "compare tiny --but zero.stage=1": lambda: zsim.compare("tiny", changes="zero.stage=1"),
    "largest zero_table1": lambda: zsim.largest("zero_table1"),
    "topology dgx_h100 --nodes 4 --fabric fat_tree_2": lambda: read_topology(
        "dgx_h100", nodes=4, fabric="fat_tree_2"
    ),
    "list": installed,
}


@pytest.mark.matrix(6)
@pytest.mark.parametrize("words", PRINTED)
def test_a_result_prints_what_its_command_prints(
    words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert answer(words.split()) == 0
    said = capsys.readouterr().out
    assert f"{PRINTED[words]()}\n" == said


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"data": "text.txt"}, "--data: text.txt: backend sim reads no data"),
        ({"timeout_s": 3}, "--timeout: 3: backend sim waits for nobody"),
        ({"poison": True}, "--poison: backend sim has no memory to poison"),
        ({"witness": True}, "--witness: backend sim runs nothing that could be watched"),
    ],
)
def test_an_option_that_a_backend_does_not_take_is_refused(
    options: dict[str, Json], why: str
) -> None:
    with pytest.raises(zsim.MistakeError) as mistake:
        zsim.run("tiny", **options)
    assert str(mistake.value) == why
    zsim.run("tiny", data=None, timeout_s=None, poison=False, witness=False)


def test_an_option_that_no_backend_takes_is_a_type_error() -> None:
    wrong: dict[str, Json] = {"stepz": 3}
    with pytest.raises(TypeError, match="unexpected keyword argument 'stepz'"):
        zsim.run("tiny", **wrong)


def share(told: list[tuple[float, float]]) -> list[float]:
    """What was told of progress, as shares."""
    assert len({total for _, total in told}) == 1
    return [done / total for done, total in told]


def test_a_run_tells_how_many_of_its_steps_are_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zsim_des.simulation.EVENTS_AT_ONCE", 10)
    told: list[tuple[float, float]] = []
    steps = {"model.layers": 4, "train.steps": 6}
    quiet = zsim.run("zero_c1", steps)
    loud = zsim.run("zero_c1", steps, progress=lambda *each: told.append(each))
    assert loud.recorded == quiet.recorded
    shares = share(told)
    assert shares == sorted(shares)
    assert shares[-1] == 1
    assert len(set(shares)) == 8  # the schedule, its proof, and each step


@pytest.mark.one_commit_in(9)
def test_a_run_on_real_ranks_tells_how_many_of_its_steps_are_done() -> None:
    told: list[tuple[float, float]] = []
    zsim.run("tiny", {"train.steps": 3}, backend="torch", progress=lambda *each: told.append(each))
    shares = share(told)
    assert shares == sorted(shares)
    assert shares[-1] == 1


def test_a_run_with_faults_tells_of_the_run_without_them_too() -> None:
    told: list[tuple[float, float]] = []
    fault = {"fault": [{"kind": "gpu", "rank": 1, "factor": 2}], "train.steps": 5}
    zsim.run("tiny", fault, progress=lambda *each: told.append(each))
    shares = share(told)
    assert shares == sorted(shares)
    assert shares[-1] == 1


@pytest.mark.matrix(6)
@pytest.mark.parametrize(
    ("name", "changes"), [("tiny", {"cluster.gpu_memory": "20 MB"}), ("zero_table1", {})]
)
def test_the_search_for_the_largest_model_tells_how_far_it_is(
    name: str, changes: dict[str, object]
) -> None:
    told: list[tuple[float, float]] = []
    found = zsim.largest(name, changes, progress=lambda *each: told.append(each))
    assert found.fits
    shares = share(told)
    ends = [at for at, each in enumerate(shares) if each == 1]
    assert ends[-1] == len(shares) - 1
    first = shares[: ends[0] + 1]
    assert first == sorted(first)
    assert 0 < first[0] < 1
