"""A figure of a run in a file is that of its page, with what the page says of it."""

from pathlib import Path
from xml.etree import ElementTree as Xml

import pytest
from command_answers import Ask

import zsim
from zsim.analysis.summary import last_step
from zsim.api.run_result import RunResult
from zsim.cli.option import Code
from zsim.mistake import MistakeError
from zsim.report.drawing import drawn
from zsim.report.memory_section import memory
from zsim.report.network_section import network
from zsim.report.svg.figure import RUN_FIGURES
from zsim.report.time_section import split


@pytest.fixture(scope="module")
def ran() -> RunResult:
    return zsim.run("tiny", {"zero.stage": 3})


def words(svg: str) -> list[str]:
    return [
        text.text or "" for text in Xml.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")
    ]


@pytest.mark.parametrize("figure", ["memory", "time"])
def test_a_file_has_the_figure_of_the_page_its_sentence_and_names_of_all_series(
    ran: RunResult, figure: str
) -> None:
    section = {"memory": memory, "time": split}[figure](ran.job, ran.recorded)
    assert section.figure is not None
    said = words(ran.picture(figure=figure))
    assert said[0] == ran.title
    assert " ".join(section.sentences) in " ".join(said)
    assert {series.name for series in section.figure.series} <= set(said)
    of_page = words(drawn(section.figure, 976.0))
    assert said[-len(of_page) :] == of_page


def test_the_picture_of_the_network_is_that_of_the_page_under_the_title_of_the_run(
    ran: RunResult,
) -> None:
    of_page = network(ran.job, ran.recorded, ran.summary).picture
    assert of_page is not None
    cluster, counts, *shown = words(of_page)
    assert f"{ran.job.cluster.ranks:,} GPUs" in counts
    assert words(ran.picture(figure="network")) == [ran.title, f"{cluster}: {counts}", *shown]
    assert "share of the step that a link is busy" in shown


@pytest.mark.matrix(6)
@pytest.mark.parametrize("figure", RUN_FIGURES)
def test_the_command_line_writes_what_python_writes(
    ask: Ask, ran: RunResult, figure: str, tmp_path: Path
) -> None:
    mine, theirs = tmp_path / "mine.svg", tmp_path / "theirs.svg"
    svg = ran.picture(mine, figure=figure)
    named = () if figure == "memory" else ("--figure", figure)
    code, _, _ = ask("run", "tiny", "--set", "zero.stage=3", "--picture", theirs, *named)
    assert code == Code.DONE
    assert svg == mine.read_text("utf-8") == theirs.read_text("utf-8")


def test_a_figure_that_there_is_not_is_a_mistake_before_anything_runs(
    ask: Ask, ran: RunResult
) -> None:
    known = "must be one of memory, time, network"
    with pytest.raises(MistakeError, match=f"^figure: 'flops' {known}$"):
        ran.picture(figure="flops")
    told = ask("run", "tiny", "--picture", "x.svg", "--figure", "flops")
    assert told == (Code.MISTAKE, "", f"zsim: --figure: 'flops' {known}\n")
    told = ask("run", "tiny", "--figure", "time")
    assert told == (Code.MISTAKE, "", "zsim: --figure: needs --picture, the file to draw it in\n")
    told = ask("run", "tiny", "--picture", "x.gif")
    why = "zsim: --picture: x.gif: must end in .svg, .png or .pdf\n"
    assert told == (Code.MISTAKE, "", why)


def test_a_run_without_a_clock_has_a_figure_of_memory_alone(ask: Ask, tmp_path: Path) -> None:
    still = zsim.run("tiny", backend="null")
    begin_ps, end_ps = last_step(still.recorded)
    assert begin_ps == end_ps
    assert "reserved" in words(still.picture())
    why = "backend null has no clock: there is no time to draw"
    with pytest.raises(MistakeError, match=f"^picture: {why}$"):
        still.picture(figure="time")
    path = tmp_path / "never.svg"
    code, out, error = ask(
        "run", "tiny", "--backend", "null", "--picture", path, "--figure", "network"
    )
    assert code == Code.UNWRITTEN
    assert out
    assert error == f"zsim: done, but {path} could not be written: {why}\n"
    assert not path.exists()
