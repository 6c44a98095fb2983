"""The page of a run says what the run says, in one file that asks for nothing."""

import gzip
import json
import re
from base64 import b64decode
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zsim.analysis.summary import summary
from zsim.backend.backend import Job
from zsim.cli.main import answer
from zsim.files.html_page import render
from zsim.files.source import Changes, read
from zsim.report.memory_section import MOST_POINTS, WINDOWS, memory, upper
from zsim.report.network_section import network
from zsim.report.page import Page, PageFigure, PageTable, Section, TableCell
from zsim.report.run_page import run_page
from zsim.report.streams_section import streams
from zsim.report.time_section import split
from zsim.trace.trace import Trace
from zsim_des import SimBackend


def ran(name: str, *settings: str) -> tuple[Job, Trace]:
    document = read(name, Changes(settings=settings)).document
    assert document.model is not None
    assert document.cluster is not None
    job = Job(
        schedule=document.schedule,
        model=document.model,
        cluster=document.cluster,
        steps=document.steps,
    )
    return job, SimBackend().run(job, seed=0)


@pytest.fixture(scope="module")
def hundred() -> tuple[Job, Trace]:
    return ran("zero_100b", "model.layers=20")


def the_figure(section: Section) -> PageFigure:
    assert section.figure is not None
    return section.figure


def numbers(found: PageFigure, key: str) -> list[list[float]]:
    """What stands under `key` in the traces that have it."""
    return [cast("list[float]", each[key]) for each in found.traces if key in each]


def test_the_parts_of_every_bar_sum_up_to_the_step(hundred: tuple[Job, Trace]) -> None:
    job, trace = hundred
    seconds = [sum(each) for each in numbers(the_figure(split(job, trace)), "x")]
    assert sum(seconds) == pytest.approx(summary(job, trace).step_time_s)


def test_a_page_says_what_ran_and_what_was_changed(tmp_path: Path) -> None:
    path = tmp_path / "run.html"
    assert answer(["run", "tiny", "--set", "zero.stage=2", "--report", str(path)]) == 0
    text = path.read_text("utf-8")
    assert "<code>zsim run tiny --set zero.stage=2</code>" in text
    assert "Changed: zero.stage." in text
    told = re.findall(r"<tr><td[^>]*>([a-z_.]+)</td><td[^>]*>([^<]*)</td><td[^>]*>(\w+)</td>", text)
    assert ("zero.stage", "2", "changed") in told
    assert ("train.micro_batch_size", "2", "scenario") in told
    assert ("zero.prefetch_units", "1", "default") in told


def test_the_curve_of_memory_reaches_the_peak(hundred: tuple[Job, Trace]) -> None:
    job, trace = hundred
    found = the_figure(memory(job, trace))
    alive = [cast("list[float]", each["y"]) for each in found.traces if "stackgroup" in each]
    course = [sum(each) for each in zip(*alive, strict=True)]
    assert max(course) == pytest.approx(summary(job, trace).peak_allocated_bytes / 1e9)
    assert len(course) <= MOST_POINTS


def test_a_step_of_many_operations_is_drawn_with_few_bars_that_last_as_long(
    hundred: tuple[Job, Trace], monkeypatch: pytest.MonkeyPatch
) -> None:
    def bars() -> dict[str, list[float]]:
        found = the_figure(streams(*hundred))
        return {str(each["name"]): cast("list[float]", each["x"]) for each in found.traces}

    every = bars()
    monkeypatch.setattr("zsim.report.streams_section.MOST_BARS", 100)
    few = bars()
    assert sum(map(len, few.values())) <= 200 < sum(map(len, every.values()))
    assert {name: pytest.approx(sum(each)) for name, each in every.items()} == {
        name: sum(each) for name, each in few.items()
    }
    assert "too many to show" in streams(*hundred).sentences[0]


def test_links_are_listed_with_the_share_that_they_carry(hundred: tuple[Job, Trace]) -> None:
    job, trace = hundred
    found = summary(job, trace)
    section = network(job, trace, found)
    assert section.table is not None
    shares = [float(row[-1].value) for row in section.table.rows]
    assert shares == sorted(shares, reverse=True)
    assert len(shares) == len([link for link in trace.links if link.bytes])
    assert 0 < shares[0] <= 1
    assert f"bound by {found.bound_by}" in section.sentences[0]
    assert section.picture is not None
    assert "busy" in section.picture


class Links(HTMLParser):
    """What a page would fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in {"script", "link", "img", "iframe", "style"}:
            self.found += [value or "" for name, value in attrs if name in {"src", "href"}]


def test_a_page_fetches_nothing_and_says_what_the_terminal_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.html"
    assert answer(["run", "tiny", "--report", str(path)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    text = path.read_text("utf-8")
    links = Links()
    links.feed(text)
    assert [each for each in links.found if not each.startswith("data:")] == []
    for fact in re.findall(r"<dd>(.*?)</dd>", text):
        assert " ".join(fact.split()) in said


def test_text_is_escaped_wherever_it_stands() -> None:
    evil = '</script><script>alert("x")</script>'
    page = Page(
        title=evil,
        answer=evil,
        facts=((evil, evil),),
        sections=(
            Section(
                title=evil,
                sentences=(evil,),
                figure=PageFigure(traces=({"name": evil},), layout={}),
                table=PageTable(
                    columns=(evil,), numeric=(False,), rows=((TableCell(text=evil, value=evil),),)
                ),
            ),
        ),
    )
    text = render(page)
    assert evil not in text
    assert json.loads(unpacked(text, "figures"))["figure0"]["traces"] == [{"name": evil}]


def unpacked(page: str, what: str) -> bytes:
    """What a page has packed."""
    found = re.search(rf'<script type="text/plain" id="{what}">(.*?)</script>', page)
    assert found is not None
    return gzip.decompress(b64decode(found.group(1)))


def test_a_page_without_a_figure_brings_nothing_that_draws_one() -> None:
    text = render(Page(title="", answer="", facts=(), sections=()))
    assert len(text) < 20_000


def test_a_page_of_a_large_step_takes_little_beside_what_draws_it(
    hundred: tuple[Job, Trace],
) -> None:
    job, trace = hundred
    page = run_page(job, trace, summary(job, trace), title="", facts=())
    figures = [section.figure for section in page.sections if section.figure is not None]
    assert len(figures) == 3
    # Bars and points are bounded, so that a page of more layers is not larger than this one by far.
    text = render(page)
    drawn_by = re.search(r'<script type="text/plain" id="plotly">(.*?)</script>', text)
    assert drawn_by is not None
    assert len(text) - len(drawn_by.group(1)) < 500_000


@given(st.lists(st.none() | st.floats(0, 100), min_size=1, max_size=2 * WINDOWS + 7))
def test_the_line_of_what_is_reserved_is_above_all_that_is_and_reaches_its_peak(
    reserved: list[float | None],
) -> None:
    found = upper(reserved)
    assert [each is None for each in found] == [each is None for each in reserved]
    pairs = [
        (a, b) for a, b in zip(found, reserved, strict=True) if a is not None and b is not None
    ]
    assert all(high >= low for high, low in pairs)
    assert not pairs or max(high for high, _ in pairs) == max(low for _, low in pairs)
    heights = [high for high, low in pairwise(found) if high != low]
    assert len(heights) <= 3 * WINDOWS


def test_a_run_without_a_clock_has_a_page_of_memory() -> None:
    job, trace = ran("tiny")
    still = run_page(
        job,
        Trace(
            backend="null",
            schedule=trace.schedule,
            seed=0,
            steps=trace.steps,
            ranks=trace.ranks,
            step_end_ps=(0,) * trace.steps,
        ),
        summary(job, trace),
        title="tiny",
        facts=(),
    )
    assert [section.title for section in still.sections] == ["Memory"]


@pytest.mark.parametrize("name", ["page.pdf", "page"])
def test_a_page_of_another_form_is_refused_before_anything_runs(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert answer(["run", "zero_100b", "--report", name]) == 2
    assert capsys.readouterr().err == f"zsim: --report: {name}: must end in .html\n"
