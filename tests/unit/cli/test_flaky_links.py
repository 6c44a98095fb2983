"""Links that are slow in some steps: the expected step time, and the days that follow from it."""

from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import zsim
import zsim_scenarios
from zsim.cluster.fault import Flaky
from zsim.mistake import MistakeError

TINY = (files(zsim_scenarios) / "tiny.toml").read_text("utf-8").replace("data = 4", "data = 16")
FAULT = '[[fault]]\nkind = "nic"\nnode = 1\nnic = 3\nfactor = 50\n'


def scenario(folder: Path, *tables: str) -> str:
    path = folder / "flaky.toml"
    path.write_text("\n\n".join([TINY, *tables]), encoding="utf-8")
    return str(path)


def test_the_expected_step_is_between_the_healthy_and_the_faulty_one(tmp_path: Path) -> None:
    asked = scenario(tmp_path, f"{FAULT}probability = 0.1\nlinks = 2\n")
    sometimes = zsim.run(asked, check=False)
    always = replace(sometimes, scenario=None)
    healthy_s = sometimes.healthy_step_time_s
    assert healthy_s is not None
    assert sometimes.step_time_s == always.expected_step_time_s > 1.1 * healthy_s
    share = 1 - 0.9**2
    expected = (1 - share) * healthy_s + share * sometimes.step_time_s
    assert sometimes.expected_step_time_s == pytest.approx(expected)
    assert "at least 1 of 2 links has the fault in 19.00%" in dict(sometimes.facts())["expected"]
    assert "expected" not in dict(always.facts())
    assert sometimes.to_dict()["expected_step_time_s"] == pytest.approx(expected)
    trained = [each.of_tokens(10**9).training for each in (always, sometimes)]
    assert trained[0] is not None
    assert trained[1] is not None
    assert trained[1].seconds / trained[0].seconds == pytest.approx(expected / always.step_time_s)


@given(st.floats(1e-9, 1), st.integers(1, 10_000))
def test_more_links_are_slow_more_often(probability: float, links: int) -> None:
    one, more = (Flaky(probability=probability, links=each) for each in (links, links + 1))
    assert 0 < one.chance <= more.chance <= 1
    assert Flaky(probability=probability).chance == pytest.approx(probability)


@pytest.mark.parametrize(
    ("tables", "why"),
    [
        ([f"{FAULT}probability = 1.5"], "fault.0.probability: 1.5 must be at most 1"),
        ([f"{FAULT}links = 3"], "fault.0.links: 3 needs probability"),
        (
            [FAULT, f"{FAULT.replace('nic = 3', 'nic = 2')}probability = 0.5"],
            "fault.1.probability: 0.5 must be of the only fault; remove the other faults",
        ),
    ],
)
def test_a_probability_that_cannot_be_followed_is_refused(
    tables: list[str], why: str, tmp_path: Path
) -> None:
    with pytest.raises(MistakeError) as refused:
        _ = zsim.load(scenario(tmp_path, *tables)).job
    assert why in str(refused.value)
