"""The page of a study: the answer first, every run, and what one change does."""

import json
import re
from dataclasses import replace
from html import unescape
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree as Xml

import pytest
from drawn_study import drawn_study
from hypothesis import given, settings
from hypothesis import strategies as st

from zsim.analysis.run_comparison import ratio_error
from zsim.cli.main import answer
from zsim.files.html_page import render
from zsim.report.drawing import NARROW, WIDE, drawn
from zsim.report.page import Page, Section
from zsim.report.svg.choice_drawing import BELOW, HEIGHT, TOP
from zsim.report.svg.figure import BarRows, ChoiceChart, ChoicePoint, NoFigureError, RowBar, Series
from zsim_study.page.chart import CHANGES, chart
from zsim_study.page.choice_chart import LINES_MAX
from zsim_study.page.study_page import PAIRS_MAX, ROWS_MAX, changes, study_page
from zsim_study.study.file import GoalTable
from zsim_study.study.goal import goal_of, ranked
from zsim_study.study.result import StudyResult

RESULTS = st.builds(
    drawn_study,
    st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple),
    st.integers(0, 2**16),
    full=st.floats(0, 1),
    error=st.none() | st.floats(0.01, 0.5),
)


def points(found: Section | None) -> list[ChoicePoint]:
    """All points of the chart of a section."""
    assert found is not None
    assert isinstance(found.figure, ChoiceChart)
    return [point for line in found.figure.points for point in line]


def section(page: Page, title: str) -> Section | None:
    return next((each for each in page.sections if each.title == title), None)


@pytest.mark.one_commit_in(4)
@settings(max_examples=60)
@given(RESULTS)
def test_every_run_is_a_row_best_first_and_one_that_failed_has_its_reason(
    result: StudyResult,
) -> None:
    page = study_page(result)
    assert result.answer.lower() in page.answer.lower()
    runs = section(page, "Runs")
    assert runs is not None
    assert runs.table is not None
    shown = [tuple(cell.text for cell in row[: len(result.axes)]) for row in runs.table.rows]
    assert sorted(shown) == sorted(row.labels for row in result.rows)
    accepted = len(result.ranking.accepted)
    times = [float(row[len(result.axes) + 1].value) for row in runs.table.rows[:accepted]]
    assert times == sorted(times)
    if accepted < len(result.rows):
        assert all(row[-1].text for row in runs.table.rows[accepted:])
        assert not any(row[-1].text for row in runs.table.rows[:accepted])


@pytest.mark.one_commit_in(6)
@settings(max_examples=60)
@given(RESULTS)
def test_a_single_change_is_one_axis_away_from_the_best_run(result: StudyResult) -> None:
    found = changes(result)
    if not result.ranking.accepted:
        assert found == ()
        return
    best = result.ranking.accepted[0]
    for each in found:
        apart = [one != other for one, other in zip(best.labels, each.row.labels, strict=True)]
        assert sum(apart) == 1
        assert each.row.step_time_s == pytest.approx(best.step_time_s * (1 + each.relative))
        ratio = ratio_error(best.outcome.error, each.row.outcome.error)
        size = max(1 + each.relative, 1 / (1 + each.relative))
        assert each.counts == (None if ratio is None else size > 1 + ratio)
    sizes = [abs(each.relative) for each in found]
    assert sizes == sorted(sizes, reverse=True)


@pytest.mark.one_commit_in(6)
@settings(max_examples=40)
@given(RESULTS)
def test_charts_show_every_run_that_has_a_time_or_the_extremes(result: StudyResult) -> None:
    done = [row for row in result.rows if row.outcome.summary is not None]
    page = study_page(result)
    for at, axis in enumerate(result.axes):
        found = section(page, f"Along {axis}")
        if len({row.labels[at] for row in done}) < 2:
            assert found is None
            continue
        titles = [point.title for point in points(found)]
        named = [row.name for row in done for title in titles if title.startswith(f"{row.name}: ")]
        others = {tuple(row.labels[:at] + row.labels[at + 1 :]) for row in done}
        if len(others) <= LINES_MAX:
            assert sorted(named) == sorted(row.name for row in done)
            continue
        for label in {row.labels[at] for row in done}:
            times = {row.name: row.step_time_s for row in done if row.labels[at] == label}
            shown = [times[name] for name in named if name in times]
            assert [min(times.values()), max(times.values())] == [min(shown), max(shown)]
            assert len(shown) == 3


@pytest.mark.one_commit_in(6)
def test_ten_thousand_runs_make_a_page_of_few_rows() -> None:
    result = drawn_study((10, 10, 10, 10), 0)
    text = render(study_page(result))
    assert text.count("<tr>") < ROWS_MAX + 10
    assert "9,000 more are in the CSV" in text
    assert len(text) < 1_000_000
    pairs = re.search(r"^const pairs = (.*);$", text, re.MULTILINE)
    assert pairs is not None
    (found,) = json.loads(pairs.group(1)).values()
    assert len(found["runs"]) == PAIRS_MAX
    assert f"The best {PAIRS_MAX} runs can be chosen" in text


@pytest.mark.one_commit_in(6)
def test_a_sweep_writes_its_page_and_its_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study, page = tmp_path / "study.toml", tmp_path / "page.html"
    picture = tmp_path / "study.svg"
    study.write_text(
        'question = "Which <stage>?"\n[base]\nscenario = "tiny"\n'
        '[[axis]]\nname = "stage"\nfield = "zero.stage"\nvalues = [1, 2]\n'
        '[goal]\nminimize = "step_time"\n',
        "utf-8",
    )
    words = ["sweep", str(study), "--store", str(tmp_path / "s.sqlite"), "--workers", "1"]
    assert answer([*words, "--report", str(page), "--picture", str(picture)]) == 0
    said = capsys.readouterr().out.splitlines()
    text = page.read_text("utf-8")
    assert "Which &lt;stage&gt;?" in text
    assert said[1][1:] in text
    assert "Which &lt;stage&gt;?" in picture.read_text("utf-8")


@pytest.mark.one_commit_in(6)
@settings(max_examples=40)
@given(RESULTS)
def test_a_picture_has_a_dot_for_every_run_shown_higher_the_longer_it_takes(
    result: StudyResult,
) -> None:
    svg = chart(result)
    Xml.fromstring(svg)
    dots = [float(y) for y in re.findall(r'<circle cx="[\d.]+" cy="([\d.]+)"', svg)]
    done = [row for row in result.rows if row.outcome.summary is not None]
    if not done:
        assert dots == []
        return
    longest = max(row.step_time_s for row in done)
    shortest = min(row.step_time_s for row in done)
    bottom = HEIGHT - BELOW
    assert all(TOP - 0.1 <= y < bottom for y in dots)
    assert min(dots) == pytest.approx(bottom - (bottom - max(dots)) * longest / shortest, abs=1)


@pytest.mark.one_commit_in(6)
@settings(max_examples=25)
@given(RESULTS)
def test_every_figure_of_the_page_has_a_picture(result: StudyResult) -> None:
    if all(row.outcome.summary is None for row in result.rows):
        return
    figures = {f"Along {name}": name for name in result.axes} | {"What one change does": CHANGES}
    assert chart(result) in [chart(result, name) for name in result.axes]
    shown = {section.title: section.figure for section in study_page(result).sections}
    for title in figures.keys() & shown.keys():
        figure = shown[title]
        assert figure is not None
        written = re.findall(r">([^<]+)</text>", drawn(figure, 976.0))
        assert set(written) <= set(re.findall(r">([^<]+)</text>", chart(result, figures[title]))), (
            title
        )
    if "What one change does" not in shown:
        with pytest.raises(NoFigureError):
            chart(result, CHANGES)


@pytest.mark.parametrize("width", [NARROW, WIDE])
@given(st.lists(st.floats(-100, 400).map(lambda share: round(share, 1)), min_size=1, max_size=8))
def test_what_takes_more_has_a_bar_to_the_right_of_what_takes_less_however_narrow(
    width: float, changes: list[float]
) -> None:
    texts = [f"{each:+.1f}%, a tie: below the error" for each in changes]
    bars = (
        RowBar(start=0.0, end=end, series=0, title=text, text=text)
        for end, text in zip(changes, texts, strict=True)
    )
    figure = BarRows(
        series=(Series("any", "#123456"),),
        rows=tuple((f"row {at}", (bar,)) for at, bar in enumerate(bars)),
        axis="change, %",
        is_beside=True,
    )
    svg = drawn(figure, width)
    boxes = re.findall(r'<rect x="([-\d.]+)" y="[-\d.]+" width="([-\d.]+)"[^>]*fill="#123456"', svg)
    spans = [(float(x), float(x) + float(wide)) for x, wide in boxes]
    assert len(spans) == len(changes)
    assert all(0 <= begin <= end <= width for begin, end in spans)
    ends = sorted(
        (change, end if change > 0 else begin)
        for change, (begin, end) in zip(changes, spans, strict=True)
    )
    places = [place for _, place in ends]
    assert all(one <= other + 1 for one, other in pairwise(places))
    assert all(text in unescape(svg) for text in texts)


def test_a_picture_of_a_study_says_what_its_marks_are() -> None:
    said = " ".join(re.findall(r">([^<]+)</text>", chart(drawn_study((3,), 0, full=0.0))))
    assert "Hollow dots and pale bars do not meet the goal." in said


def test_a_picture_of_another_form_is_refused_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = tmp_path / "s.sqlite"
    assert answer(["sweep", "nics", "--store", str(store), "--picture", "nics.jpg"]) == 2
    assert capsys.readouterr().err == "zsim: --picture: nics.jpg: must end in .svg, .png or .pdf\n"
    assert not store.exists()


def test_tags_in_names_are_letters_in_figures() -> None:
    result = replace(drawn_study((2, 2), 1, full=0), axes=("<i>stage</i>", "NICs & more"))
    page = study_page(result)
    figures = [each.figure for each in page.sections if each.figure is not None]
    told = "".join(drawn(figure, WIDE) for figure in figures)
    assert "<i>" not in told
    assert "&lt;i&gt;stage&lt;/i&gt;" in told
    assert "NICs &amp; more" in told


def test_where_cost_is_sought_changes_are_of_cost() -> None:
    drawn = drawn_study((3,), 5, full=0)
    costs = (2.0, 1.0, 4.0)
    rows = tuple(
        replace(row, cost_per_million_tokens=cost)
        for row, cost in zip(drawn.rows, costs, strict=True)
    )
    goal = goal_of(GoalTable(minimize="cost_per_token", price_per_gpu_hour=1.0), ["axis0"])
    result = replace(drawn, rows=rows, goal=goal, ranking=ranked(goal, rows))
    assert [each.relative for each in changes(result)] == [3.0, 1.0]
    tornado = section(study_page(result), "What one change does")
    assert tornado is not None
    assert (
        "No single change that meets the goal lessens the cost of a token" in tornado.sentences[0]
    )


def test_with_a_best_run_for_each_choice_changes_are_beside_the_best_of_the_same_choice() -> None:
    drawn = drawn_study((2, 3), 5, full=0, error=0.9)
    goal = goal_of(GoalTable(for_each="axis0"), drawn.axes)
    result = replace(drawn, goal=goal, ranking=ranked(goal, drawn.rows))
    found = changes(result)
    assert sorted((each.group, each.axis) for each in found) == [
        *[("0", "axis1")] * 2,
        *[("1", "axis1")] * 2,
    ]
    for each in found:
        best = result.ranking.best[each.group]
        assert each.row.step_time_s == pytest.approx(best.step_time_s * (1 + each.relative))
    tornado = section(study_page(result), "What one change does")
    assert tornado is not None
    assert tornado.sentences[0].startswith("From the best run for each axis0, one other axis")
    most = found[0]
    error = ratio_error(result.ranking.best[most.group].outcome.error, most.row.outcome.error)
    assert error is not None
    assert most.counts is (most.relative > error)
    how = "" if most.counts else ", a tie: below the error"
    assert f"most is {most.group}: axis1={most.label}: {most.relative:+.1%}{how}." in str(tornado)


def test_with_a_best_run_for_each_choice_times_are_over_the_fastest_of_the_same_choice() -> None:
    drawn = drawn_study((3, 4), 8, full=0)
    goal = goal_of(GoalTable(for_each="axis0"), drawn.axes)
    result = replace(drawn, goal=goal, ranking=ranked(goal, drawn.rows))
    fastest = {
        label: min(row.step_time_s for row in drawn.rows if row.labels[0] == label)
        for label in {row.labels[0] for row in drawn.rows}
    }
    over = {row.name: row.step_time_s / fastest[row.labels[0]] for row in drawn.rows}
    for title in ("Along axis0", "Along axis1"):
        for point in points(section(study_page(result), title)):
            assert point.value == pytest.approx(over[point.title.partition(": ")[0]])
    assert "over that of the fastest that fits with the same axis0" in chart(result)


def test_choices_that_are_names_have_bars_and_amounts_have_lines() -> None:
    result = drawn_study((3, 2), 8, full=0)
    labels = {"0": "ring", "1": "tree", "2": "nvls"}
    rows = tuple(
        replace(row, labels=(labels[row.labels[0]], row.labels[1]), name=row.name)
        for row in result.rows
    )
    page = study_page(replace(result, rows=rows, ranking=ranked(result.goal, rows)))
    for title, bars in (("Along axis0", True), ("Along axis1", False)):
        along = section(page, title)
        assert along is not None
        assert isinstance(along.figure, ChoiceChart)
        assert (along.figure.is_bars, along.figure.is_joined) == (bars, not bars)
        svg = drawn(along.figure, WIDE)
        assert (svg.count("<circle") == 0) is bars


def test_axes_that_change_nothing_are_named() -> None:
    drawn = drawn_study((2, 2), 1, full=0)
    rows = tuple(replace(row, outcome=drawn.rows[0].outcome) for row in drawn.rows)
    page = study_page(replace(drawn, rows=rows, ranking=ranked(drawn.goal, rows)))
    tornado = section(page, "What one change does")
    assert tornado is not None
    assert "The error of such runs is unknown" in str(page)  # of the charts
    assert "The error of these differences is unknown" in str(tornado)
    assert "The time of a step is the same whatever is chosen on axis0, axis1." in str(tornado)


def test_a_csv_that_cannot_be_written_is_told_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store, table = tmp_path / "s.sqlite", tmp_path / "none" / "runs.csv"
    assert answer(["sweep", "nics", "--store", str(store), "--csv", str(table)]) == 2
    assert capsys.readouterr().err == f"zsim: --csv: {table}: {table.parent} is no folder\n"
    assert not store.exists()
