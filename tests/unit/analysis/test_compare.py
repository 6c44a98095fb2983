"""Two runs side by side: what differs, by how much, the largest first."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from step_errors import step_error

from zsim.analysis.run_comparison import Comparison, Measure, compare, sort_of
from zsim.backend.document import encode_trace
from zsim.cli.main import answer
from zsim.files.source import Changes, read
from zsim.memory import peak
from zsim.schedule.replace import replace
from zsim.trace.trace import Trace
from zsim_des import SimBackend


def traced(*changes: str) -> Trace:
    return SimBackend().run(read("tiny", Changes(settings=changes)).job(), seed=0)


@pytest.fixture(scope="module")
def trace() -> Trace:
    return traced()


@pytest.fixture(scope="module")
def other() -> Trace:
    return traced("zero.stage=1")


def every(found: Comparison) -> list[tuple[str, float, float]]:
    rows = (found.step, *found.figures, *found.sorts, *found.operations)
    return [(each.name, each.first, each.second) for each in rows]


def test_a_run_differs_from_itself_in_nothing(trace: Trace) -> None:
    found = compare(trace, trace)
    assert all(first == second for _, first, second in every(found))
    assert (found.only_first, found.only_second) == (0, 0)
    ran = {event.operation for event in trace.ranks[0].events if event.step == trace.steps - 1}
    assert {each.name for each in found.operations} == ran


def test_the_other_way_round_every_number_changes_sides(trace: Trace, other: Trace) -> None:
    there, back = compare(trace, other), compare(other, trace)
    assert sorted(every(there)) == sorted((name, one, two) for name, two, one in every(back))
    assert (there.only_first, there.only_second) == (back.only_second, back.only_first)


def test_figures_are_parts_of_what_the_traces_hold(trace: Trace, other: Trace) -> None:
    found = compare(trace, other)
    memory = [each for each in found.figures if " memory at its peak" in each.name]
    for side, each in (("first", trace), ("second", other)):
        booked = max(peak(rank.book, "device").bytes for rank in each.ranks)
        assert sum(getattr(row, side) for row in memory) == booked
        lasting = sum(
            event.end_ps - event.start_ps
            for event in each.ranks[0].events
            if event.step == each.steps - 1
        )
        assert sum(getattr(row, side) for row in found.sorts) == pytest.approx(lasting / 1e12)


@settings(max_examples=30)
@given(data=st.data())
def test_the_operation_that_takes_longer_comes_first(trace: Trace, data: st.DataObject) -> None:
    (first, *rest) = trace.ranks
    at = data.draw(
        st.sampled_from(
            [at for at, event in enumerate(first.events) if event.step == trace.steps - 1]
        )
    )
    more = data.draw(st.integers(min_value=1, max_value=10**12))
    event = first.events[at]
    longer = replace(event, end_ps=event.end_ps + more)
    events = (*first.events[:at], longer, *first.events[at + 1 :])
    found = compare(trace, replace(trace, ranks=(replace(first, events=events), *rest)))
    assert found.operations[0].name == event.operation
    assert found.operations[0].change == pytest.approx(more / 1e12)
    assert found.sorts[0].name == sort_of(event.operation)
    assert not any(each.change for each in found.operations[1:])


@pytest.mark.parametrize(
    ("path", "sort"),
    [
        ("step/backward/mb1/unit7/reduce3", "backward reduce"),
        ("step/update/bucket12/adam", "update adam"),
        ("setup/fill", "fill"),
    ],
)
def test_operations_are_of_one_sort_by_phase_and_kind(path: str, sort: str) -> None:
    assert sort_of(path) == sort


def ask(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = answer(["compare", *words])
    said = capsys.readouterr()
    return code, said.out, said.err


@pytest.mark.one_commit_in(9)
def test_a_trace_a_schedule_and_a_scenario_compare(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace, schedule = tmp_path / "trace.json", tmp_path / "schedule.json"
    assert answer(["run", "tiny", "--trace", str(trace)]) == 0
    assert answer(["plan", "tiny", "--schedule", str(schedule)]) == 0
    capsys.readouterr()
    for one, two in ((trace, schedule), (schedule, "tiny"), ("tiny", trace)):
        code, out, err = ask(capsys, str(one), str(two), "--json")
        assert (code, err) == (0, "")
        found = json.loads(out)
        assert found["step_time_s"]["first_s"] == found["step_time_s"]["second_s"] > 0
        assert found["operations_only_in_first"] == found["operations_only_in_second"] == 0


def test_one_change_is_seen_in_few_lines(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = ask(capsys, "tiny", "--but", "zero.stage=1")
    assert (code, err) == (0, "")
    assert out.splitlines()[:2] == ["A: tiny (sim)", "B: tiny with zero.stage=1 (sim)"]
    assert len(out.splitlines()) <= 40
    assert "B - A" in out
    assert "in A alone" in out


@pytest.mark.matrix(6)
@pytest.mark.parametrize(
    ("errors", "backend", "line", "differs"),
    [
        ((0.001, 0.002), "sim", "by more than the error of their ratio, ±0.2% (", True),
        ((0.001, 0.9), "sim", "by no more than the error of their ratio, ±335.9% (", False),
        ((0.001, None), "sim", "The error of the ratio of the steps is unknown.", None),
        ((None, None), "torch", "alone.", None),  # the last line of the table is the last
    ],
)
def test_a_comparison_says_how_sure_it_is(
    errors: tuple[float | None, float | None],
    backend: str,
    line: str,
    differs: bool | None,
    trace: Trace,
    other: Trace,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    names: list[str] = []
    for each, width in zip((trace, other), errors, strict=True):
        error = None if width is None else step_error(width, gpu=f"gpu{len(names)}")
        text = encode_trace(replace(each, error=error, backend=backend))
        names.append(str(tmp_path / f"{len(names)}.json"))
        Path(names[-1]).write_text(text, "utf-8")
    assert line in ask(capsys, *names)[1].splitlines()[-1]
    assert json.loads(ask(capsys, *names, "--json")[1])["step_time_differs_by_more_than_error"] is (
        differs
    )


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("tiny",), "zsim: B: missing; give a second run, or with --but what changes in the first"),
        (("tiny", "none.json"), "zsim: none.json: no such file or directory"),
        (("tiny", "--but", "zero.stge=1"), "zsim: tiny: zero.stge: unknown key"),
    ],
)
def test_what_cannot_be_compared_is_one_line(
    words: tuple[str, ...], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = ask(capsys, *words)
    assert (code, out) == (2, "")
    assert err.startswith(line)
    assert err.count("\n") == 1


def test_settings_are_not_for_traces(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.json"
    assert answer(["run", "tiny", "--backend", "null", "--trace", str(trace)]) == 0
    code, _, err = ask(capsys, str(trace), "--but", "zero.stage=1")
    assert code == 2
    assert err == f"zsim: zero.stage=1: {trace} is a trace; settings are for scenarios\n"


def test_bytes_and_seconds_are_told_apart(trace: Trace, other: Trace) -> None:
    found = compare(trace, other)
    assert {each.measure for each in found.figures} == {Measure.SECONDS, Measure.BYTES}
    assert {each.measure for each in found.operations} == {Measure.SECONDS}
