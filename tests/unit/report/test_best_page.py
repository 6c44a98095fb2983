"""The page of the best setting: a front that nothing beats, and every loss."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zsim.files.html_page import render
from zsim.report.drawing import WIDE, drawn
from zsim_plan.answer.best_page import BestFindings, RankedSetting, best_page, memory_chart
from zsim_plan.search.front import front

SETTINGS = st.lists(
    st.tuples(st.floats(0.1, 100), st.integers(1, 80 * 10**9), st.sampled_from((8, 16))),
    min_size=1,
    max_size=12,
    unique=True,
)


def findings(figures: list[tuple[float, int, int]]) -> BestFindings:
    every = tuple(
        RankedSetting(
            name=f"setting {number}",
            gpus=gpus,
            step_time_s=seconds,
            memory_bytes=size,
            standing="best" if not number else "+1.0%, a tie",
            more=0.01 * bool(number),
            error="unknown; fits with probability 99%",
            cost=12.0,
        )
        for number, (seconds, size, gpus) in enumerate(figures)
    )
    of_memory = front([(each.step_time_s, each.memory_bytes) for each in every])
    of_cost = front([(each.step_time_s, each.gpu_seconds) for each in every])
    several = len({each.gpus for each in every}) > 1
    return BestFindings(
        title="a <model>",
        command="zsim best a",
        answer="One.",
        facts=(("best", "one"),),
        found=None,
        fitting=every,
        ten=every[:10],
        ties="One ties.",
        memory_front=tuple(every[place] for place in of_memory),
        cost_front=tuple(every[place] for place in of_cost) if several else (),
        losses=((3, "cannot win", "their bound"),),
        searched="All.",
    )


@given(SETTINGS)
def test_every_setting_is_a_point_and_those_of_the_front_are_beaten_by_none(
    figures: list[tuple[float, int, int]],
) -> None:
    chart = memory_chart(findings(figures))
    assert len(chart.points) == len(figures)
    for point in chart.points:
        beaten = any(
            other.x <= point.x and other.y <= point.y and (other.x, other.y) != (point.x, point.y)
            for other in chart.points
        )
        assert not (beaten and point.series == 0)
    svg = drawn(chart, WIDE)
    assert svg.count("<circle") == len(figures)
    assert svg.count(">best</text>") == 1


@pytest.mark.one_commit_in(6)
@given(SETTINGS)
def test_a_page_has_the_best_their_costs_and_why_others_lost(
    figures: list[tuple[float, int, int]],
) -> None:
    found = findings(figures)
    page = best_page(found)
    titles = [section.title for section in page.sections]
    assert ("Time against cost" in titles) == (len({gpus for _, _, gpus in figures}) > 1)
    ten = page.sections[0]
    assert ten.table is not None
    assert [row[0].text for row in ten.table.rows] == [each.name for each in found.ten]
    assert ten.table.columns == (
        *("setting", "GPUs", "step time", "memory", "beside the best", "cost", "error"),
    )
    lost = next(section for section in page.sections if section.title == "Why the others lost")
    assert lost.table is not None
    assert [cell.text for cell in lost.table.rows[0]] == ["3", "cannot win", "their bound"]
    assert "a &lt;model&gt;" in render(page)


def test_where_nothing_fits_a_page_says_what_was_searched() -> None:
    page = best_page(findings([(1.0, 1, 8)]))
    assert page.sections
    none = BestFindings(
        title="a",
        command="",
        answer="No setting fits.",
        facts=(),
        found=None,
        fitting=(),
        ten=(),
        ties="",
        memory_front=(),
        cost_front=(),
        losses=(),
        searched="All.",
    )
    assert [section.title for section in best_page(none).sections] == ["Why the others lost"]
