"""The parts of a step do not overlap: what a run prints of them never adds up to more than it."""

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import zsim
from zsim.analysis.exclusive_time import (
    COMMUNICATION,
    COMPUTE,
    COPY,
    ON_HOST,
    RANKING,
    WORK,
    Span,
    exclusive_ps,
)

NAMES = {COMPUTE: [""], COMMUNICATION: ["data", "tensor"], ON_HOST: list(WORK), COPY: [""]}


@st.composite
def spans(draw: st.DrawFn) -> Span:
    kind = draw(st.sampled_from(RANKING))
    start = draw(st.integers(0, 20))
    return start, start + draw(st.integers(0, 8)), kind, draw(st.sampled_from(NAMES[kind]))


@given(st.lists(spans(), max_size=12))
def test_every_moment_is_what_ranks_first_of_all_that_goes_on(drawn: list[Span]) -> None:
    expected: dict[tuple[str, str], int] = {}
    for moment in range(40):
        on = [each for each in drawn if each[0] <= moment < each[1]]
        if on:
            *_, kind, name = min(
                on,
                key=lambda each: (
                    RANKING.index(each[2]),
                    WORK[each[3]] if each[2] == ON_HOST else each[0],
                    each[3],
                ),
            )
            expected[kind, name] = expected.get((kind, name), 0) + 1
    assert exclusive_ps(drawn) == expected


LINES = ("step time", "communication", "offload", "waiting for the host")
PERCENT = re.compile(r"([\d.]+)%")


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"zero.stage": 1, "parallel.tensor": 2},
        {"zero.emulate": "deepspeed", "zero.bucket_elements": None},
        {"offload.optimizer": "host"},
        {"offload.optimizer": "nvme", "offload.gradients": "nvme", "offload.parameters": "nvme"},
    ],
)
def test_shares_that_a_run_prints_are_of_one_step_and_the_largest_bounds_it(
    changes: dict[str, object],
) -> None:
    result = zsim.run("tiny", {"cluster.topology": "dgx_a100_infiniband", **changes}, check=False)
    facts = {name: text for name, text in result.facts() if name in LINES}
    parts = result.summary.parts_s
    assert sum(parts.values()) <= result.step_time_s * (1 + 1e-9)
    assert parts[result.bound_by] == max(parts.values())
    bound = f"bound by {result.bound_by} ({parts[result.bound_by] / result.step_time_s:.1%} of it)"
    assert facts["step time"].endswith(bound)
    waits = [float(each) for name in LINES[1:] for each in PERCENT.findall(facts.get(name, ""))]
    compute = 100 * parts["compute"] / result.step_time_s
    assert sum(waits) + compute <= 100.3
    of_groups = sum(result.exposed_communication_s_by_axis.values())
    assert of_groups == pytest.approx(result.exposed_communication_s)


def test_a_share_of_half_a_thousandth_is_printed_and_a_smaller_one_is_not() -> None:
    result = zsim.run("tiny", {"offload.optimizer": "host"}, check=False)
    waits = (("kernels", 0.001), ("copies", 0.000_999))  # of 2 s 0.0005, printed as 0.1%
    vars(result)["summary"] = replace(result.summary, step_time_s=2.0, exposed_on_host=waits)
    assert dict(result.facts())["offload"] == "exposed: kernels 1 ms (0.1%)"


def test_a_run_on_one_gpu_says_nothing_of_communication() -> None:
    alone = {"parallel.data": 1, "cluster.nodes": None}
    names = [name for name, _ in zsim.run("tiny", alone, check=False).facts()]
    assert "communication" not in names
