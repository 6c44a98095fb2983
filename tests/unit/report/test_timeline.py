"""A timeline says what a trace says: which stream did what, from when to when."""

import re
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree as Xml

import pytest

from zsim.analysis.exposed_time import step_parts
from zsim.analysis.summary import last_step, step_of
from zsim.backend.backend import Job
from zsim.cli.main import answer
from zsim.files.source import Changes, read
from zsim.report.svg.lane import Sort
from zsim.report.svg.lane import lanes as lanes_of
from zsim.report.timeline import (
    LANE,
    LEFT,
    RIGHT,
    TOP,
    TimelineError,
    close_up_picture,
    close_ups,
    timeline,
)
from zsim.trace.trace import Trace
from zsim_des import SimBackend
from zsim_null import NullBackend

SVG = "{http://www.w3.org/2000/svg}"

Bars = list[tuple[float, float]]
"""Left and right edges."""


def run(*settings: str) -> tuple[Job, Trace]:
    document = read("tiny", Changes(settings=settings)).document
    assert document.model is not None
    assert document.cluster is not None
    job = Job(
        schedule=document.schedule,
        model=document.model,
        cluster=document.cluster,
        steps=document.steps,
    )
    return job, SimBackend().run(job, seed=0)


def lanes(svg: str) -> dict[int, dict[str, Bars]]:
    """The bars of each lane by colour."""
    found: dict[int, dict[str, Bars]] = {}
    for bar in Xml.fromstring(svg).iter(f"{SVG}rect"):
        if "rx" in bar.attrib or float(bar.get("y", 0)) < TOP:
            continue  # the background and the legend
        lane = int((float(bar.attrib["y"]) - TOP) // LANE)
        left, width = float(bar.attrib["x"]), float(bar.attrib["width"])
        colours = found.setdefault(lane, {})
        colours.setdefault(bar.attrib["fill"], []).append((left, left + width))
    return found


def words(svg: str) -> list[str]:
    return [each.text or "" for each in Xml.fromstring(svg).iter(f"{SVG}text")]


@pytest.mark.matrix(9)
@pytest.mark.parametrize(
    "settings",
    [(), ("zero.emulate=fsdp2",), ("zero.emulate=fsdp1",), ("train.precision=fp16",)],
)
def test_bars_are_as_long_as_the_operations(settings: tuple[str, ...]) -> None:
    bare = ("zero.bucket_elements=500_000_000",)  # an emulated runtime takes no knob of ours
    job, trace = run(*bare, *settings)
    (program,) = job.schedule.programs
    begin_ps, end_ps = last_step(trace)
    scale = (RIGHT - LEFT) / (end_ps - begin_ps)
    drawn = lanes(timeline(job.schedule, job.model, trace))
    used = [
        stream
        for stream in job.schedule.streams
        if any(
            event.stream == stream and event.end_ps > begin_ps for event in trace.ranks[0].events
        )
    ]
    assert list(drawn) == list(range(len(used)))
    gathers = [
        event
        for event in trace.ranks[0].events
        if type(program.by_id[event.operation]).__name__ == "AllGather" and event.end_ps > begin_ps
    ]
    colour = Sort.GATHER.value[1]
    bars = sorted(bar for lane in drawn.values() for bar in lane.get(colour, []))
    assert len(bars) == len(gathers) > 0
    for bar, event in zip(bars, sorted(gathers, key=lambda each: each.start_ps), strict=True):
        assert bar[0] == pytest.approx(LEFT + scale * (event.start_ps - begin_ps), abs=0.5)
        assert bar[1] == pytest.approx(LEFT + scale * (event.end_ps - begin_ps), abs=0.8)


@pytest.mark.parametrize("runtime", ["fsdp1", "fsdp2"])
def test_bars_of_a_lane_do_not_overlap_and_stay_in_the_picture(runtime: str) -> None:
    job, trace = run("zero.bucket_elements=500_000_000", f"zero.emulate={runtime}")
    svg = timeline(job.schedule, job.model, trace)
    for colours in lanes(svg).values():
        bars = sorted(bar for each in colours.values() for bar in each)
        assert bars[0][0] >= LEFT
        assert bars[-1][1] <= RIGHT + 0.6
        for (_, end), (start, _) in pairwise(bars):
            assert end <= start + 0.6  # the shortest bar that is drawn


def test_what_is_exposed_can_be_seen() -> None:
    """Communication beside which the compute lane is empty, as the summary counts it."""
    job, trace = run()
    begin_ps, end_ps = last_step(trace)
    drawn = lanes(timeline(job.schedule, job.model, trace))
    copies = Sort.COPY.value[1]  # they hide nothing
    busy = [bar for colour, bars in drawn[0].items() if colour != copies for bar in bars]
    communication = [bar for bars in drawn[1].values() for bar in bars]
    points = [LEFT + 0.05 * number for number in range(int(20 * (RIGHT - LEFT)))]
    exposed = sum(
        any(start <= x < end for start, end in communication)
        and not any(start <= x < end for start, end in busy)
        for x in points
    )
    expected = step_parts(step_of(job, trace)).exposed_ps / (end_ps - begin_ps)
    # The shortest bars are drawn too wide, and an edge is left between two bars.
    assert exposed / len(points) == pytest.approx(expected, abs=0.02)


@pytest.mark.matrix(6)
@pytest.mark.parametrize("layers", [3, 80])
def test_units_whose_names_do_not_fit_are_drawn_again_close_up(layers: int) -> None:
    job, trace = run(f"model.layers={layers}")
    found = lanes_of(job.schedule, job.model, trace, trace.ranks[0]).bars
    panels = close_ups(found)
    svg = timeline(job.schedule, job.model, trace)
    assert [each.title.split(" of ")[0] for each in panels] == (
        ["Close up: forward", "Close up: backward"] if layers == 80 else []
    )
    for each in panels:
        first, last = each.title.split(" of ")[1].split(" to ")
        assert each.title in words(svg)
        for stream, bars in each.bars.items():
            every = [(bar.start_ps, bar.end_ps) for bar in found[stream]]
            for bar in bars:
                assert each.begin_ps <= bar.start_ps < bar.end_ps <= each.end_ps
                assert any(start <= bar.start_ps and bar.end_ps <= end for start, end in every)
        named = {bar.names[0] for bars in each.bars.values() for bar in bars if bar.names}
        assert {first, last} <= named
    if panels:
        alone = close_up_picture(panels)
        assert all(each.title in words(alone) for each in panels)


def test_title_axis_and_names_say_what_it_is() -> None:
    job, trace = run()
    found = words(timeline(job.schedule, job.model, trace))
    assert found[0] == "gpt-3x64, ZeRO stage 3: one step of 747 us on rank 0 and 3 like it"
    assert "time since the step began, us" in found
    assert {"0", "100", "700"} <= set(found)
    assert "e: embedding, b0: block0, h: head" in found
    assert {word for word in found if re.fullmatch(r"b\d", word)} == {"b0", "b1", "b2"}
    legend = {sort.value[0] for sort in Sort} & set(found)
    assert legend == {"forward", "backward", "update", "gather", "reduce-scatter", "copy, fill"}


@pytest.mark.one_commit_in(6)
def test_a_trace_without_times_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    job, trace = run()
    still = NullBackend().run(job, seed=0)
    with pytest.raises(TimelineError, match="backend null has no clock"):
        timeline(job.schedule, job.model, still)
    assert timeline(job.schedule, job.model, trace)
    assert answer(["run", "tiny", "--backend", "null", "--timeline", "never.svg"]) == 4
    assert capsys.readouterr().err == (
        "zsim: done, but never.svg could not be written: "
        "backend null has no clock: there is no time to draw\n"
    )


@pytest.mark.one_commit_in(6)
def test_a_run_draws_its_last_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [tmp_path / "one.svg", tmp_path / "two.svg"]
    for path in paths:
        assert answer(["run", "tiny", "--timeline", str(path)]) == 0
    job, trace = run()
    assert {path.read_text("utf-8") for path in paths} == {timeline(job.schedule, job.model, trace)}
    assert answer(["run", "tiny", "--timeline", "tiny.gif"]) == 2
    assert capsys.readouterr().err == "zsim: --timeline: tiny.gif: must end in .svg, .png or .pdf\n"
