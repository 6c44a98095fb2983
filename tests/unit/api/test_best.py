"""`zsim.best` finds what an exhaustive sweep finds, and says why others lost."""

from dataclasses import replace
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import zsim
from zsim.api.best_question import BestOptions, Question, question_of
from zsim.api.best_result import SURE, BestResult
from zsim.api.best_search import best_of
from zsim.api.setting_trial import tried
from zsim.mistake import MistakeError, UnwrittenError
from zsim.planner.space import SettingGroup

SMALL = ("model.layers=3", "model.sequence_length=256", "model.vocab_size=1000")
"""A model of the right width with few layers: it is simulated in little time."""

GPUS = ("8xh100", "4xa100", "4x4090", "16xv100", "16xh100")
RUNTIMES = ("fsdp1", "fsdp2", "megatron", "nanotron")


def small_question(seed: int) -> Question:
    """Draw a question with few settings, some of which do not fit."""
    draw = np.random.default_rng(seed)
    runtime, gpus = str(draw.choice(RUNTIMES)), str(draw.choice(GPUS))
    tensor, checkpoints = draw.choice((1, 2)), draw.choice(("none", "full"))
    return question_of(
        "llama3.2-1b",
        gpus,
        (
            *SMALL,
            f"cluster.gpu_memory={draw.choice((4, 6, 8))} GB",
            f"activations.checkpointing={checkpoints}",
            f"parallel.tensor={tensor}",
        ),
        among=[runtime],
        batch_tokens=256 * int(gpus.partition("x")[0]) * int(draw.choice((1, 2))),
    )


def exhaustive(question: Question) -> float | None:
    """Return the least step time that is expected of settings that fit; None if none does.

    Those at the edge of memory count where no others are, and those with offload where none fits
    without.
    """
    found: list[tuple[bool, bool, float]] = []
    for group in question.space().groups():
        if not isinstance(group, SettingGroup):
            continue
        if group.moves_states and any(not is_tight for is_tight, *_ in found):
            continue
        for number in range(len(group.knobs)):
            outcome = tried(question.scenario(group.setting(number)))
            if outcome.fits:
                value = outcome.step_time_s * outcome.slower
                found.append((outcome.is_tight, group.moves_states, value))
    without = [each for each in found if each[:2] == (False, False)]
    return min(without or found, key=lambda each: (each[0], each[2]))[2] if found else None


def need_optimum(question: Question) -> None:
    found, least = best_of(question, workers=1), exhaustive(question)
    assert found.open_settings == 0
    if least is None:
        assert found.best is None
    else:
        assert found.best is not None
        assert found.best.value is not None
        assert found.best.value <= 1.01 * least


@pytest.mark.matrix(24)
@pytest.mark.parametrize("seed", [2, 6, 12])
def test_a_search_finds_the_optimum_of_an_exhaustive_sweep(seed: int) -> None:
    need_optimum(small_question(seed))


@pytest.mark.long
@pytest.mark.parametrize("seed", range(14, 34))
def test_searches_find_the_optima_of_many_exhaustive_sweeps(seed: int) -> None:
    need_optimum(small_question(seed))


TINY = (*SMALL, "activations.checkpointing=none", "parallel.tensor=1")


@pytest.fixture(scope="module")
def found() -> BestResult:
    """The best FSDP2 setting of a small model on 4 H100."""
    return zsim.best(
        "meta-llama/Llama-3.2-1B",
        "4xh100",
        TINY,
        tokens=10**9,
        batch_tokens=256 * 8,
        price=2.0,
        among=["fsdp2", "nanotron"],
        workers=1,
    )


@pytest.mark.one_commit_in(15)
def test_every_setting_is_accounted_for(found: BestResult) -> None:
    better = [each for each in found.answers if each.value == found.answers[0].value]
    lost = sum(each.count for each in found.losses)
    assert lost + len(better) == found.settings


@pytest.mark.one_commit_in(24)
def test_the_gap_is_closed_where_nothing_is_left(found: BestResult) -> None:
    assert found.open_settings == 0
    assert found.gap <= 0.01
    told = {
        gap: dict(replace(found, gap=gap).facts())["optimality"] for gap in (0.0, 0.0004, 0.007)
    }
    assert told[0.0] == told[0.0004] == "nothing among these settings is better"
    assert told[0.007] == "nothing among these settings is more than 0.7% better"


@pytest.mark.one_commit_in(4)
def test_a_utilization_above_the_peak_has_the_causal_one_with_it(found: BestResult) -> None:
    best = found.best
    assert best is not None
    text = dict(found.facts())["step time"]
    assert text.endswith(f"MFU {found.mfu(best):.1%}")
    seconds = best.outcome.step_time_s * found.mfu(best) / 1.01
    fast = replace(best, outcome=replace(best.outcome, step_time_s=seconds))
    text = dict(replace(found, tried=(fast,)).facts())["step time"]
    causal = found.mfu(fast, causal=True)
    assert 0 < causal < found.mfu(fast)
    assert text.endswith(f"MFU 101.0% (causal {causal:.1%})")


@pytest.mark.one_commit_in(6)
def test_the_page_says_what_the_answer_says(found: BestResult, tmp_path: Path) -> None:
    page, picture = tmp_path / "best.html", tmp_path / "best.svg"
    found.report(page, command="zsim best <model>")
    found.picture(picture)
    text = unescape(page.read_text("utf-8"))
    assert len(text) < 1_500_000
    for told in found.facts():
        assert f"<dt>{told[0]}</dt><dd>{told[1]}</dd>" in text
    assert found.best is not None
    for setting in found.ten:
        assert f">{setting.name()}</td>" in text
    assert found.config_text(found.best).strip() in text
    assert "zsim best <model>" in text
    assert text.count(", a tie</td>") >= sum(found.is_tie(each) or False for each in found.ten[1:])
    assert all(f">{each.why}</td>" in text for each in found.losses)
    assert picture.read_text("utf-8").count("<circle") == len(found.answers)


def test_a_figure_of_cost_is_of_fleets_that_differ(found: BestResult, tmp_path: Path) -> None:
    with pytest.raises(UnwrittenError, match=r"all settings have as many GPUs"):
        found.picture(tmp_path / "cost.svg", figure="cost")
    with pytest.raises(MistakeError, match=r"^figure: 'days' must be one of memory, cost$"):
        found.picture(figure="days")
    fewer = replace(found.tried[0], gpus=2)
    both = replace(found, tried=[fewer, *found.tried])
    drawn = both.picture(figure="cost")
    assert drawn.count("<circle") == len(both.answers)
    assert "cost of a step over that of the best" in drawn


def test_a_best_that_leaves_no_memory_has_no_gap_in_per_cent(found: BestResult) -> None:
    first = found.answers[0]
    usable = first.outcome.usable_bytes
    edge = replace(first, outcome=replace(first.outcome, memory_bytes=usable))
    told = dict(replace(found, tried=[edge], gap=1.0, open_settings=3).facts())["optimality"]
    assert told.startswith("3 settings were not reached")
    assert "%" not in told


def test_a_faster_setting_that_leaves_no_memory_is_no_better_one(found: BestResult) -> None:
    first = found.answers[0]
    assert first.value is not None
    full = replace(first.outcome, memory_bytes=first.outcome.usable_bytes)
    for value, among in ((0.9, "these settings that leaves memory free"), (1.1, "these settings")):
        edge = replace(first, outcome=full, value=first.value * value)
        facts = dict(replace(found, tried=[first, edge], gap=0.0).facts())
        assert facts["optimality"] == f"nothing among {among} is better"


def test_the_saved_scenario_takes_as_long_as_was_said(found: BestResult, tmp_path: Path) -> None:
    assert found.best is not None
    path = tmp_path / "best.toml"
    found.save(path)
    again = zsim.run(path)
    assert again.fits
    assert again.step_time_s == pytest.approx(found.best.outcome.step_time_s, rel=1e-9)
    assert again.peak_reserved_bytes == found.best.outcome.memory_bytes


def test_a_headline_that_may_not_fit_says_so_and_names_the_best_that_does(
    found: BestResult,
) -> None:
    assert found.best is not None
    for full in (0.9, 0.995, 1.05):
        outcome = replace(
            found.best.outcome, usable_bytes=round(found.best.outcome.memory_bytes / full)
        )
        best = replace(found.best, outcome=outcome)
        others = [each for each in found.tried if each is not found.best]
        line = dict(replace(found, tried=(best, *others)).facts())["best"]
        assert ("may not fit" in line) is (outcome.fit_probability < SURE)
        if outcome.fit_probability < SURE:
            sure = [each for each in found.answers[1:] if each.outcome.fit_probability >= SURE]
            assert not sure or sure[0].name() in line


def test_the_training_is_told_in_days_money_and_energy(found: BestResult) -> None:
    assert found.best is not None
    budget = found.budget(found.best)
    assert budget is not None
    seconds = 10**9 / (256 * 8) * found.best.outcome.step_time_s
    assert budget.days == pytest.approx(seconds / 86_400)
    assert budget.cost == pytest.approx(2.0 * 4 * seconds / 3600)
    assert budget.energy_kwh == pytest.approx(0.7 * 4 * seconds / 3600)


def test_the_front_trades_time_for_memory(found: BestResult) -> None:
    times = [each.outcome.step_time_s for each in found.front]
    memory = [each.outcome.memory_bytes for each in found.front]
    assert found.front[0] is found.best
    assert times == sorted(times)
    assert memory == sorted(memory, reverse=True)


@pytest.mark.one_commit_in(6)
def test_fewer_gpus_are_taken_where_they_are_what_is_sought() -> None:
    answer = zsim.best(
        "llama3.2-1b",
        "8xh100",
        TINY,
        tokens=10**6,
        within_s=3600,
        batch_tokens=256 * 8,
        objective="gpus",
        among=["megatron"],
        workers=1,
    )
    assert answer.best is not None
    assert answer.best.gpus == 1


@pytest.mark.one_commit_in(18)
def test_the_best_of_several_fabrics_is_that_of_the_best_one() -> None:
    fabrics = ("rail_optimized", "fat_tree_3")
    settings = (
        *TINY,
        "zero.stage=3",
        "parallel.replicate=1",
        "train.micro_batch_size=1",
        "zero.fsdp2.forward_prefetch=0",
    )

    def best(changes: tuple[str, ...], *names: str) -> BestResult:
        options: BestOptions = {"batch_tokens": 256 * 16, "among": ["fsdp2"], "fabrics": names}
        question = question_of("llama3.2-1b", "16xh100", changes, **options)
        return best_of(question, workers=1)

    both = best(settings, *fabrics)
    alone = [best((*settings, f"cluster.fabric={each}")) for each in fabrics]
    assert both.settings == sum(each.settings for each in alone)
    assert both.best is not None
    assert both.best.value is not None
    assert all(each.name().startswith(fabrics) for each in both.answers)
    assert both.best.value <= 1.01 * min(
        each.best.value for each in alone if each.best is not None and each.best.value is not None
    )
    assert set(both.by_fabric) == set(fabrics)
    chosen = str(both.best.changes["cluster.fabric"])
    assert both.by_fabric[chosen] == both.best.outcome.step_time_s
    assert both.scenario(both.best)["cluster"]["fabric"] == chosen


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "model": ({"model": "llama9"}, "model.name: 'llama9' is no model that ships"),
    "gpu": ({"gpus": "8xh900"}, "--gpus: 'h900' must be a file, a node or GPU that ships"),
    "count": ({"gpus": "eight h100"}, "--gpus: 'eight h100' must be a number and a name"),
    "nodes": ({"gpus": "12xh100"}, "--gpus: 12 must be at most 8, or a multiple of it"),
    "batch": (
        {"batch_tokens": 1000},
        "--batch: 1,000 tokens must be a multiple of 8,192",
    ),
    "fabric": ({"gpus": "16xh100", "fabrics": ["ring"]}, "--fabric: 'ring' must be one of"),
    "node": ({"fabrics": ["fat_tree_2"]}, "--fabric: 8 H100 are on one node"),
    "fabric set": (
        {
            "gpus": "16xh100",
            "fabrics": ["fat_tree_2"],
            "changes": ["cluster.fabric=single_switch"],
        },
        "--set: cluster.fabric is what --fabric compares",
    ),
    "runtime": ({"among": ["horovod"]}, "--runtime: 'horovod' must be one of"),
    "objective": ({"objective": "speed"}, "--objective: 'speed' must be one of"),
    "cost": ({"objective": "cost"}, "--objective: cost needs --price or --prices"),
    "within": ({"within_s": 60.0}, "--within: needs --tokens"),
    "key": ({"changes": ["cluster.nodes=2"]}, "--set: cluster.nodes is not for best: say --gpus"),
    "value": ({"changes": ["zero.stage=7"]}, "zero.stage: 7 must be 0, 1, 2 or 3"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_asked_is_told_in_one_line(case: str) -> None:
    given, line = REFUSED[case]
    asked: dict[str, Any] = {"model": "llama3.1-8b", "gpus": "8xh100", **given}
    with pytest.raises(MistakeError) as told:
        question_of(**asked)
    assert line in str(told.value)
    assert "\n" not in str(told.value)
