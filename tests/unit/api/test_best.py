"""`zsim.best` finds what an exhaustive sweep finds, and says why others lost."""

from dataclasses import replace
from html import unescape
from pathlib import Path
from typing import Any

import pytest

import zsim
from benchmarks.best_quality import SMALL, excess, exhaustive, small_question
from zsim.api.error_text import probability_text
from zsim.mistake import MistakeError, UnwrittenError
from zsim.prediction.error_rule import SURE
from zsim.units import format_seconds
from zsim_plan.answer.best_question import BestOptions, Question, question_of
from zsim_plan.answer.best_result import BestResult
from zsim_plan.answer.best_search import best_of
from zsim_plan.answer.tried_setting import TriedSetting


def need_optimum(question: Question) -> None:
    found = best_of(question, workers=1)
    assert found.open_settings == 0
    assert excess(found, exhaustive(question)) <= 0.01


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
    assert told == "3 settings were not reached; those tried may not fit"


def filled(each: TriedSetting, share: float, faster: float = 1.0) -> TriedSetting:
    """Return a setting that fills a share of the memory, in a time that is shorter by a factor."""
    assert each.value is not None
    usable = round(each.outcome.memory_bytes / share)
    step = each.outcome.step_time_s / faster
    outcome = replace(each.outcome, usable_bytes=usable, step_time_s=step)
    return replace(each, outcome=outcome, value=each.value / faster)


def test_a_faster_setting_that_may_not_fit_is_said_second_and_is_not_the_answer(
    found: BestResult, tmp_path: Path
) -> None:
    first = filled(found.answers[0], 0.4)
    edge = filled(found.answers[1], 0.995, faster=1.25 * first.outcome.step_time_s)
    edge = replace(edge, value=0.8 * (first.value or 0), group=first.group + 1)
    for settings in ([first, edge], [edge, first]):
        ranked = sorted(settings, key=lambda each: each.order)
        both = replace(found, tried=ranked, gap=0.0)
        assert both.best is first
        assert both.unsure is edge
        facts = both.facts()
        risk = probability_text(edge.outcome.fit_probability)
        seconds = format_seconds(first.outcome.step_time_s)
        assert facts[0] == ("best", f"{first.description()}: {seconds} a step")
        faster = dict(facts)["faster"]
        assert faster.startswith(f"{edge.name()}: 20.0% faster but may not fit: ")
        assert f"probability {risk}, " in faster
        assert f"-20.0%, fits with probability {risk}" in both.text().replace("\n", " ")
        sure = f"nothing among these settings that fits with at least {SURE:.0%} is better"
        assert dict(facts)["optimality"] == sure
        answer: Any = both.to_dict()
        assert answer["best"]["settings"] == dict(first.changes)
        assert answer["unsure"]["settings"] == dict(edge.changes)
    both.report(tmp_path / "both.html")
    assert faster in unescape((tmp_path / "both.html").read_text("utf-8"))
    both.save(tmp_path / "both.toml")
    assert zsim.load(tmp_path / "both.toml").title.endswith(first.name())


def test_a_slower_setting_that_may_not_fit_is_no_line(found: BestResult) -> None:
    first, slow = filled(found.answers[0], 0.4), filled(found.answers[0], 0.995, faster=0.9)
    both = replace(found, tried=[first, slow], gap=0.0)
    assert both.unsure is None
    assert "but may not fit" not in both.text()
    assert both.to_dict()["unsure"] is None
    assert dict(both.facts())["optimality"] == "nothing among these settings is better"


@pytest.mark.parametrize("objective", ["cost", "energy", "gpus"])
def test_a_better_setting_that_may_not_fit_is_better_in_what_is_minimized(
    found: BestResult, objective: str
) -> None:
    first = filled(found.answers[0], 0.4)
    edge = replace(filled(found.answers[0], 0.995, faster=1.25), gpus=2)
    both = replace(found, tried=[first, edge], objective=objective)
    words = {"cost": "20.0% cheaper", "energy": "20.0% less energy"}
    assert words.get(objective, "2 GPUs instead of 4") in dict(both.facts())["better"]


def test_the_saved_scenario_takes_as_long_as_was_said(found: BestResult, tmp_path: Path) -> None:
    assert found.best is not None
    path = tmp_path / "best.toml"
    found.save(path)
    again = zsim.run(path)
    assert again.fits
    assert again.step_time_s == pytest.approx(found.best.outcome.step_time_s, rel=1e-9)
    assert again.peak_reserved_bytes == found.best.outcome.memory_bytes


def test_a_headline_says_first_that_no_setting_surely_fits(found: BestResult) -> None:
    for share in (0.4, 0.9, 0.995, 1.05):
        best = filled(found.answers[0], share)
        alone = replace(found, tried=[best])
        risk = best.outcome.fit_probability
        line = dict(alone.facts())["best"]
        answer = f"{best.description()}: {format_seconds(best.outcome.step_time_s)} a step"
        assert line.endswith(answer)
        assert line.startswith("may not fit: probability ") is (risk < SURE)
        assert (line == answer) is (risk >= SURE)
        assert (f"{probability_text(risk)}, and no setting tried reaches 95%" in line) is (
            risk < SURE
        )


def test_the_training_is_told_in_days_money_and_energy(found: BestResult) -> None:
    assert found.best is not None
    budget = found.budget(found.best)
    assert budget is not None
    assert budget.goodput is not None
    steps = 10**9 / (256 * 8) * found.best.outcome.step_time_s
    seconds = steps / budget.goodput.goodput
    assert seconds > steps
    assert budget.days == pytest.approx(seconds / 86_400)
    assert budget.cost == pytest.approx(2.0 * 4 * seconds / 3600)
    assert budget.energy_kwh == pytest.approx(0.7 * 4 * seconds / 3600)


def test_the_front_trades_time_for_memory(found: BestResult) -> None:
    times = [each.outcome.step_time_s for each in found.front]
    memory = [each.outcome.memory_bytes for each in found.front]
    assert found.front[0] is found.best
    assert times == sorted(times)
    assert memory == sorted(memory, reverse=True)


@pytest.mark.one_commit_in(9)
def test_fewer_gpus_are_taken_where_they_are_what_is_sought_unless_they_are_late() -> None:
    tokens, batch = 10**6, 256 * 32

    def best(within_s: float) -> TriedSetting:
        answer = zsim.best(
            "llama3.2-1b",
            "8xh100",
            TINY,
            tokens=tokens,
            within_s=within_s,
            batch_tokens=batch,
            objective="gpus",
            among=["megatron"],
            workers=1,
        )
        assert answer.best is not None
        return answer.best

    fewest = best(3600)
    assert fewest.gpus == 1
    late_s = 0.6 * fewest.outcome.step_time_s * tokens / batch
    more = best(late_s)
    assert more.gpus == 2
    assert more.outcome.step_time_s * tokens / batch <= late_s


def test_of_as_many_gpus_the_faster_setting_wins_where_the_fewest_are_sought(
    found: BestResult,
) -> None:
    asked = question_of("llama3.2-1b", "8xh100", TINY, objective="gpus")
    assert asked.value(1e5, 1) < asked.value(0.0, 2) < asked.value(1e-3, 2)
    assert asked.value(1.1, 64) / asked.value(1.0, 64) == pytest.approx(1.1)
    first = filled(found.answers[0], 0.4)
    slower = replace(filled(found.answers[0], 0.5, faster=0.8), gpus=4)
    larger = replace(filled(found.answers[0], 0.3, faster=2.0), gpus=8)
    every = [replace(first, gpus=4), slower, larger]
    every = [
        replace(each, value=asked.value(each.outcome.step_time_s, each.gpus)) for each in every
    ]
    result = replace(found, tried=sorted(every, key=lambda each: each.order), objective="gpus")
    assert result.answers == tuple(every)
    assert [result.more(each) for each in every] == pytest.approx([0.0, 0.25, 1.0])
    assert result.is_tie(larger) is False


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
    "model": ({"model": "llama9"}, "model.name: 'llama9' is not the name of a model"),
    "gpu": ({"gpus": "8xh900"}, "--gpus: 'h900': did you mean h800? It must be a file, a name "),
    "count": ({"gpus": "eight h100"}, "--gpus: 'eight h100' must be a number and a name"),
    "nodes": ({"gpus": "12xh100"}, "--gpus: 12 must be at most 8, or a multiple of it"),
    "batch": (
        {"batch_tokens": 1000},
        "--batch: 1,000 tokens must be a multiple of 8,192",
    ),
    "fabric": ({"gpus": "16xh100", "fabrics": ["ring"]}, "--fabric: 'ring' must be one of"),
    "node": ({"fabrics": ["fat_tree_2"]}, "--fabric: 8 H100 are on one node; remove --fabric"),
    "other table": (
        {"changes": ["train.sequence_length=64"]},
        "train.sequence_length: unknown key; did you mean model.sequence_length?",
    ),
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


def test_settings_that_fill_the_memory_stand_apart_below_the_others(found: BestResult) -> None:
    first = filled(found.answers[0], 0.4)
    edges = [
        filled(replace(each, group=each.group + 100), 0.98, faster=0.9)
        for each in found.answers[1:]
        if each.choice != first.choice
    ]
    both = replace(found, tried=sorted([first, *edges], key=lambda each: each.order))
    assert both.ten == (first,)
    assert 0 < len(both.tight) == min(5, len({each.choice for each in edges}))
    above, below = both.text().split("\nUnder 3% of the memory left")
    assert first.description().split(", micro")[0] in above.replace("\n", " ")
    assert "to the best" in below
    alone = replace(found, tried=edges)
    assert alone.ten
    assert not {id(each) for each in alone.ten} & {id(each) for each in alone.tight}


def test_rows_differ_in_more_than_batches_and_options_of_a_runtime(found: BestResult) -> None:
    choices = [each.choice for each in found.ten]
    assert len(choices) == len({*choices})
    assert {each.runtime for each in found.ten} == {each.runtime for each in found.answers}
    best = found.answers[0]
    option = {**best.changes, "zero.fsdp2.forward_prefetch": 7, "train.micro_batch_size": 9}
    assert replace(best, changes=option).choice == best.choice
    other = {**best.changes, "activations.checkpointing": "full"}
    assert replace(best, changes=other).choice != best.choice
