"""`zsim run` folds micro-batches of a pipeline, or writes out all of them."""

from pathlib import Path
from typing import Any

import pytest
from pipeline_tables import pipeline_tables

import zsim
from zsim.analysis.schedule_plan import lengthened
from zsim.api.pipeline_fold import MicroBatchFold, folds_of
from zsim.api.plan_result import plan_of
from zsim.files.source import Source
from zsim.mistake import MistakeError
from zsim.schedule import schedule_writer


def _tables(**changes: Any) -> dict[str, Any]:  # noqa: ANN401  (values of tables)
    given: dict[str, Any] = {"stages": 2, "micro_batches": 16, "layers": 2, **changes}
    return pipeline_tables(given.pop("runtime", "megatron"), **given)


def _folds(tables: dict[str, Any]) -> list[MicroBatchFold]:
    return list(folds_of(zsim.load(tables).resolved))


def test_the_answer_tells_which_micro_batches_were_simulated() -> None:
    result = zsim.run(_tables())
    assert result.folded is not None
    assert ("micro-batches", result.folded.text()) in result.facts()
    assert result.folded.text().startswith("6 of 16 simulated; each further one takes ")
    told = result.to_dict()["folded"]
    assert isinstance(told, dict)
    assert (told["simulated"], told["micro_batches"], told["turn"]) == (6, 16, 1)


def test_a_step_that_is_written_out_has_no_such_line() -> None:
    result = zsim.run(_tables(), folds=False)
    assert result.folded is None
    assert "micro-batches" not in dict(result.facts())
    assert "folded" not in result.to_dict()


def test_rows_of_a_folded_run_have_every_micro_batch() -> None:
    result = zsim.run(_tables())
    rows = {str(row["operation"]) for row in result.rows()}
    assert {f"step/forward/mb{number}/block0/forward0" for number in range(16)} <= rows
    assert result.whole.step_time_s == result.step_time_s


def test_a_folded_trace_has_every_micro_batch(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    zsim.run(_tables()).trace(path)
    assert "step/forward/mb15/block0/forward0" in path.read_text()


def test_short_steps_are_written_out() -> None:
    assert not _folds(_tables(micro_batches=7))
    assert _folds(_tables(micro_batches=8))


def test_stages_with_several_chunks_are_folded_by_as_many_micro_batches_as_stages() -> None:
    options: dict[str, object] = {"num_virtual_stages_per_pipeline_rank": 2}
    folds = _folds(_tables(layers=4, micro_batches=20, options=options))
    assert {each.turn for each in folds} == {2}
    assert [each.simulated + 2 * each.times for each in folds] == [20] * len(folds)


@pytest.mark.parametrize(
    "more",
    [
        {"fault": [{"kind": "gpu", "rank": 0, "factor": 2}]},
        {"neighbour": [{"nodes": [0, 1], "bandwidth_per_direction": "10 GB/s"}]},
    ],
    ids=["fault", "other job"],
)
def test_what_happens_at_certain_times_is_written_out(more: dict[str, Any]) -> None:
    tables = _tables(data=8)
    assert _folds(tables)
    assert not _folds({**tables, **more})


def test_separately_received_micro_batches_are_written_out() -> None:
    tables = _tables(runtime="fsdp2", stage=3, micro_batches=32)
    assert zsim.run(tables, check=False).folded is None


def test_without_a_pipeline_nothing_is_folded() -> None:
    assert not _folds(_tables(stages=1, micro_batches=64))


def test_a_step_that_runs_out_of_memory_is_folded_too() -> None:
    tables = _tables()
    tables["cluster"]["gpu_memory"] = "250 MB"
    folded, whole = zsim.run(tables), zsim.run(tables, folds=False)
    assert not whole.fits
    assert not folded.fits
    assert folded.needed_bytes == whole.needed_bytes


def limit_to(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let schedules have the operations of `source` at most."""
    most = max(len(each.setup) + len(each.step) for each in source.document.schedule.programs)
    monkeypatch.setattr(schedule_writer, "OPERATIONS_MAX", most + 1)


def _mixture(**changes: Any) -> dict[str, Any]:  # noqa: ANN401  (values of tables)
    tables = _tables(micro_batches=10, data=4, **changes)
    tables["model"] = {"name": "qwen3-30b-a3b", "layers": 4}
    tables["parallel"] |= {"expert": 2, "expert_tensor": 1}
    return tables


@pytest.mark.parametrize(
    "tables",
    [
        _tables(),
        _tables(layers=4, options={"num_virtual_stages_per_pipeline_rank": 2}),
        _mixture(),
    ],
    ids=["one chunk", "two chunks", "experts"],
)
def test_a_plan_of_a_step_too_large_to_write_has_the_figures_of_the_step(
    tables: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = zsim.load(tables)
    whole = loaded.plan()
    assert whole.folded is None
    folded = next(loaded.folds())
    limit_to(loaded.of_micro_batches(folded.simulated), monkeypatch)
    found = zsim.load(tables).plan()
    assert found.folded == folded
    assert found.to_dict() == whole.to_dict()
    written = f"{folded.simulated} of {folded.micro_batches} written"
    assert ("micro-batches", written) in found.facts()


def test_a_step_too_large_to_write_is_proved_by_fewer_micro_batches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loaded = zsim.load(_tables())
    whole = zsim.check(loaded)
    assert whole.folded is None
    assert "micro-batches" not in str(whole)
    limit_to(loaded.of_micro_batches(6), monkeypatch)
    found = zsim.check(_tables())
    assert found.is_right
    assert "micro-batches: 6 of 16 proved; the others repeat the last 1 in order" in str(found)
    assert found.not_shown[-1] == "values and totals of the micro-batches that are left out"
    assert found.to_dict()["folded"] == {"micro_batches": 16, "simulated": 6, "turn": 1}


def test_a_short_step_too_large_to_write_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule_writer, "OPERATIONS_MAX", 100)
    for verb in (zsim.check, lambda tables: zsim.load(tables).plan()):
        with pytest.raises(MistakeError, match="a step of more than 100 operations"):
            verb(_tables())


def test_memory_that_grows_with_micro_batches_is_not_lengthened() -> None:
    loaded = zsim.load(_tables())
    one, more = (plan_of("", loaded.of_micro_batches(count).document) for count in (1, 2))
    assert lengthened(more, one, 3) is None
