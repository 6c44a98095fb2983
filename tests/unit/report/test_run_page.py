"""The page of a run says what the run says, in one file that asks for nothing."""

import gzip
import re
from base64 import b64decode
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree as Xml

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zsim.analysis.summary import summary
from zsim.backend.backend import Job
from zsim.cli.main import answer
from zsim.cluster.links import link_classes
from zsim.files.html_page import render
from zsim.files.source import Changes, read
from zsim.report.drawing import NARROW, WIDE, drawn
from zsim.report.memory_section import PLACES, MemoryLine, highest, memory
from zsim.report.network_section import network
from zsim.report.page import Page, PageTable, Section, TableCell
from zsim.report.run_page import run_page
from zsim.report.streams_section import streams
from zsim.report.svg.figure import BarRows, Figure, LaneBars, RowBar, Series, StackedCurves
from zsim.report.time_section import split
from zsim.schedule.schedule import Kind
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


def the_figure(section: Section) -> Figure:
    assert section.figure is not None
    return section.figure


def test_the_parts_of_every_bar_sum_up_to_the_step(hundred: tuple[Job, Trace]) -> None:
    job, trace = hundred
    found = the_figure(split(job, trace))
    assert isinstance(found, BarRows)
    assert len(found.rows) == len(trace.ranks)
    for _, bars in found.rows:
        seconds = sum(bar.end - bar.start for bar in bars)
        assert seconds == pytest.approx(summary(job, trace).step_time_s)


@pytest.mark.one_commit_in(6)
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
    assert isinstance(found, StackedCurves)
    course = [sum(each) for each in zip(*found.layers, strict=True)]
    assert max(course) == pytest.approx(summary(job, trace).peak_allocated_bytes / 1e9)
    assert len(course) == len(found.titles) <= PLACES


def test_a_step_of_many_operations_is_drawn_with_few_bars_that_last_as_long(
    hundred: tuple[Job, Trace], monkeypatch: pytest.MonkeyPatch
) -> None:
    def bars() -> dict[str, list[int]]:
        found = the_figure(streams(*hundred))
        assert isinstance(found, LaneBars)
        lengths: dict[str, list[int]] = {}
        for bar in (bar for lane in found.lanes.values() for bar in lane):
            lengths.setdefault(bar.sort.value[0], []).append(bar.end_ps - bar.start_ps)
        return lengths

    every = bars()
    monkeypatch.setattr("zsim.report.streams_section.MOST_BARS", 100)
    few = bars()
    assert sum(map(len, few.values())) <= 200 < sum(map(len, every.values()))
    assert {name: sum(each) for name, each in every.items()} == {
        name: sum(each) for name, each in few.items()
    }
    assert "too many to show" in streams(*hundred).sentences[0]


def test_bars_of_a_zoomable_timeline_say_when_they_are(hundred: tuple[Job, Trace]) -> None:
    found = the_figure(streams(*hundred))
    assert isinstance(found, LaneBars)
    svg = Xml.fromstring(drawn(found, WIDE))
    assert svg.get("data-unit") == "s"
    long = float(svg.attrib["data-long"])
    assert long == pytest.approx((found.end_ps - found.begin_ps) / 1e12)
    told = [each.attrib["data-at"].split(" ") for each in svg.iter() if "data-at" in each.attrib]
    every = [bar for lane in found.lanes.values() for bar in lane]
    assert len(told) == len(every)
    seconds = sum(bar.end_ps - bar.start_ps for bar in every) / 1e12
    assert sum(float(each) for _, each in told) == pytest.approx(seconds, rel=1e-4)
    assert all(float(start) + float(each) <= long * 1.0001 for start, each in told)


def test_links_are_listed_with_the_share_that_they_carry(hundred: tuple[Job, Trace]) -> None:
    job, trace = hundred
    found = summary(job, trace)
    section = network(job, trace, found)
    assert section.table is not None
    shares = [float(row[-1].value) for row in section.table.rows]
    assert shares == sorted(shares, reverse=True)
    names = [str(row[0].text) for row in section.table.rows]
    of_class = {
        end
        for each in link_classes(job.cluster)
        for end in (f"{each.source} to {each.target}", f"{each.target} to {each.source}")
    }
    assert len(set(names)) == len(names)
    assert {"NIC to switch", "switch to NIC"} <= set(names) <= of_class
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
                figure=BarRows(
                    series=(Series(evil, "#123456"), Series("other", "#654321")),
                    rows=((evil, (RowBar(start=0, end=1, series=0, title=evil, text=evil),)),),
                    axis=evil,
                ),
                table=PageTable(
                    columns=(evil,), numeric=(False,), rows=((TableCell(text=evil, value=evil),),)
                ),
            ),
        ),
    )
    text = render(page)
    assert evil not in text
    assert text.count("&lt;/script&gt;") > 6


def test_a_timeline_is_packed_and_holds_names_that_end_no_script(
    hundred: tuple[Job, Trace],
) -> None:
    section = streams(*hundred)
    text = render(Page(title="", answer="", facts=(), sections=(section,)))
    packed = re.search(r'<script type="text/plain">(.*?)</script>', text)
    assert packed is not None
    svg = gzip.decompress(b64decode(packed.group(1))).decode()
    assert svg == drawn(the_figure(section), WIDE)


def test_a_page_without_a_figure_is_small() -> None:
    text = render(Page(title="", answer="", facts=(), sections=()))
    assert len(text) < 25_000


def test_a_page_of_a_large_step_is_small(hundred: tuple[Job, Trace]) -> None:
    job, trace = hundred
    page = run_page(job, trace, summary(job, trace), title="", facts=())
    figures = [section.figure for section in page.sections if section.figure is not None]
    assert len(figures) == 3
    # Bars and places are bounded, so that a page of more layers is not larger than this one by far.
    assert len(render(page)) < 250_000


LINES = st.lists(
    st.builds(
        MemoryLine,
        st.just("step/forward/mb0/x"),
        st.lists(st.integers(0, 10**9), min_size=len(Kind), max_size=len(Kind)).map(tuple),
        st.none() | st.integers(0, 10**9),
    ),
    max_size=30,
)


@given(LINES, st.integers(1, 40))
def test_few_lines_of_memory_reach_as_high_as_all(lines: list[MemoryLine], times: int) -> None:
    every = lines * times
    found = highest(every)
    assert len(found) <= PLACES
    alive = [sum(line.alive) for line in found]
    assert max(alive, default=0) == max((sum(line.alive) for line in lines), default=0)
    reserved = [line.reserved for line in found if line.reserved is not None]
    assert max(reserved, default=0) == max((line.reserved or 0 for line in lines), default=0)
    if len(every) <= PLACES:
        assert found == every


@pytest.mark.parametrize("width", [WIDE, NARROW])
def test_what_is_drawn_stays_in_the_drawing(hundred: tuple[Job, Trace], width: float) -> None:
    job, trace = hundred
    for section in (split(job, trace), memory(job, trace)):
        svg = Xml.fromstring(drawn(the_figure(section), width))
        assert float(svg.attrib["width"]) == width
        for each in svg.iter():
            x, wide = float(each.get("x", 0)), each.get("width", "0")
            assert x >= 0
            assert wide.endswith("%") or x + float(wide) <= width + 0.1


@pytest.mark.one_commit_in(6)
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


@pytest.mark.matrix(6)
@pytest.mark.parametrize("name", ["page.pdf", "page"])
def test_a_page_of_another_form_is_refused_before_anything_runs(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert answer(["run", "zero_100b", "--report", name]) == 2
    assert capsys.readouterr().err == f"zsim: --report: {name}: must end in .html\n"


@pytest.mark.one_commit_in(9)
def test_a_run_that_does_not_fit_says_what_it_needs(tmp_path: Path) -> None:
    path = tmp_path / "run.html"
    words = ["run", "tiny", "--set", "cluster.gpu_memory=2 MB", "--report", str(path)]
    assert answer(words) == 1
    found = re.search(r'<p class="answer">(.*?)</p>', path.read_text("utf-8"))
    assert found is not None
    needs = r"It does not fit: it needs [\d.]+ [MG]B of the [\d.]+ [MG]B that a GPU has\. "
    assert re.fullmatch(f"{needs}A step would take .* if there were more memory\\.", found.group(1))
