"""What a study answers: the best run that meets every limit, and why the others do not."""

from dataclasses import replace
from typing import Any

import pytest
from step_errors import step_error
from study_summary import SUMMARY

from zsim.analysis.drive_life import DriveLife
from zsim_study.study.error_lines import error_lines
from zsim_study.study.file import GoalTable, StudyError
from zsim_study.study.goal import goal_of, ranked
from zsim_study.study.outcome import Status, StudyOutcome, decoded, encoded
from zsim_study.study.result import StudyResult, difference
from zsim_study.study.row import StudyRow


def row(name: str, seconds: float, gpus: int = 8, **fields: Any) -> StudyRow:  # noqa: ANN401  (of any field)
    """A run that is done; `fields` replace those of the row."""
    summary = replace(SUMMARY, step_time_s=seconds, tokens_per_s=1e6 / seconds)
    outcome = StudyOutcome(status=Status.DONE, summary=summary, error_text="unvalidated")
    made = StudyRow(
        name=name,
        labels=(name,),
        values={"cluster.nics_per_node": gpus // 8},
        gpus=gpus,
        micro_batch_size=1,
        accumulation_steps=1,
        outcome=outcome,
        cost_per_million_tokens=gpus * seconds,
    )
    return replace(made, **fields)


def ended(name: str, status: Status, reason: str = "why") -> StudyRow:
    return row(name, 1.0, outcome=StudyOutcome(status=status, reason=reason))


SLOW, FAST = row("slow", 2.0, 8), row("fast", 1.0, 32)
FULL = row("full", 0.5, outcome=StudyOutcome(status=Status.FULL, reason="at x", summary=SUMMARY))


def result(goal: GoalTable, *rows: StudyRow) -> StudyResult:
    made = goal_of(goal)
    return StudyResult(
        question="?",
        axes=("run",),
        fields=(("zero.stage",),),
        goal=made,
        held="",
        dropped=0,
        rows=rows,
        ranking=ranked(made, rows),
    )


TWICE = "100.0% longer than the fastest, fast, whose error is unknown"

BEST = {
    "fastest: fast: 1 s a step; next: slow, +100.0%, whose error is unknown": GoalTable(),
    f"fewest GPUs: slow: 8, 2 s a step, {TWICE}": GoalTable(minimize="gpus"),
    f"cheapest: slow: 16 for a million tokens, 2 s a step, {TWICE}": (
        GoalTable(minimize="cost_per_token", price_per_gpu_hour=1.0)
    ),
    f"least cluster.nics_per_node: slow: 1, 2 s a step, {TWICE}": (
        GoalTable(minimize="cluster.nics_per_node")
    ),
    "fastest: slow: 2 s a step, the only one that meets the goal": GoalTable(max_gpus=8),
    "none of 3 runs meets the goal: does not fit: at x (1 of 3)": GoalTable(
        max_gpus=16, min_tokens_per_s=6e5
    ),
}


@pytest.mark.parametrize("answer", BEST)
def test_the_answer_names_the_best_run_that_meets_every_limit(answer: str) -> None:
    assert result(BEST[answer], FULL, SLOW, FAST).answer == answer


def test_drives_have_to_bear_what_is_written_for_as_long_as_the_goal_says() -> None:
    lasting, worn, unrated = (
        row(
            name,
            1.0,
            outcome=StudyOutcome(
                status=Status.DONE,
                summary=replace(
                    SUMMARY,
                    drive_life=DriveLife(drives=8, bytes_per_day=1e12, days=days),
                ),
            ),
        )
        for name, days in (("lasting", 731.0), ("worn", 729.0), ("unrated", None))
    )
    found = ranked(goal_of(GoalTable(min_drive_years=2)), [worn, unrated, lasting, FAST])
    assert {each.name for each in found.accepted} == {"lasting", "fast"}  # the last writes nothing
    assert {each.name: why for each, why in found.refused} == {
        "worn": "drives last less than 2 years",
        "unrated": "no rating of its drives",
    }
    assert decoded(encoded(worn.outcome)) == worn.outcome


LIMITS: dict[str, dict[str, Any]] = {
    "32 GPUs, more than 8": {"max_gpus": 8},
    "slower than 500 ms": {"max_step_time": 500 * 10**9},
    "fewer than 2,000,000 tokens/s": {"min_tokens_per_s": 2e6},
    "dearer than 20 for a million tokens": {
        "max_cost_per_million_tokens": 20.0,
        "price_per_gpu_hour": 1.0,
    },
}


@pytest.mark.parametrize("why", LIMITS)
def test_a_run_that_breaks_a_limit_says_which(why: str) -> None:
    goal = goal_of(GoalTable.model_construct(**{**GoalTable().model_dump(), **LIMITS[why]}))
    assert {each.name: text for each, text in ranked(goal, [FAST]).refused} == {"fast": why}


def test_what_did_not_fit_or_run_is_refused_with_its_reason_and_is_never_fastest() -> None:
    rows = [FULL, SLOW, *(ended(status, status) for status in Status if status is not Status.DONE)]
    found = ranked(goal_of(GoalTable(max_slowdown=1.0)), rows)
    assert [each.name for each in found.accepted] == ["slow"]
    assert found.fastest == {"": SLOW}
    assert all("why" in text or "at x" in text for _, text in found.refused)
    loose = ranked(goal_of(GoalTable(fits=False)), rows)
    assert [each.name for each in loose.accepted] == ["full", "slow"]


def test_there_is_a_best_run_for_each_choice_on_an_axis() -> None:
    rows = [
        replace(row, labels=(group, row.name))
        for group, row in [("a", SLOW), ("a", FAST), ("b", SLOW), ("c", FULL)]
    ]
    goal = goal_of(GoalTable(for_each="group", max_slowdown=1.5), ["group", "run"])
    made = replace(
        result(GoalTable()),
        axes=("group", "run"),
        goal=goal,
        rows=tuple(rows),
        ranking=ranked(goal, rows),
    )
    # In group a the slow run takes twice the fastest; in group b it is the fastest.
    assert made.answer == (
        "fastest for each choice of group: a: run=fast (1 s a step); b: run=slow (2 s a step); "
        "c: none meets the goal"
    )
    assert [each.labels for each, _ in made.ranking.refused] == [("a", "slow"), ("c", "full")]
    with pytest.raises(StudyError, match="'size' must be an axis: group, run"):
        goal_of(GoalTable(for_each="size"), ["group", "run"])


def test_a_lead_of_a_choice_says_where_it_is_below_the_error_or_not_judged() -> None:
    def judged(name: str, seconds: float, error: float | None) -> StudyRow:
        known = None if error is None else step_error(error, name)
        outcome = replace(row("", seconds).outcome, error=known)
        return row(name, seconds, outcome=outcome)

    near, far = judged("near", 1.04, 0.05), judged("far", 1.2, 0.05)
    best, unknown = judged("best", 1.0, 0.05), judged("unknown", 1.5, None)
    goal = goal_of(GoalTable(for_each="group"), ["group", "run"])
    seen: dict[tuple[str, ...], str] = {}
    for others in ((near,), (far,), (unknown,), (near, far, unknown), (far, far), (near, near)):
        pairs = [(str(at), each) for at, other in enumerate(others) for each in (best, other)]
        rows = tuple(replace(each, labels=(group, each.name)) for group, each in pairs)
        made = replace(result(GoalTable()), axes=("group", "run"), goal=goal, rows=rows)
        answer = replace(made, ranking=ranked(goal, rows)).answer
        seen[tuple(each.name for each in others)] = answer.rpartition("(1 s a step)")[2]
    below = "; the lead over the next{} is within the error of the ratio"
    nobody = "; the error of the lead over the next{} is unknown"
    assert seen == {
        ("near",): below.format(""),
        ("far",): "",
        ("unknown",): nobody.format(""),
        ("near", "far", "unknown"): below.format(" at 0") + nobody.format(" at 2"),
        ("far", "far"): "",
        ("near", "near"): below.format(""),
    }


def outcome_of(text: str, half_width: float | None = None) -> StudyOutcome:
    error = None if half_width is None else step_error(half_width)
    return StudyOutcome(status=Status.DONE, summary=SUMMARY, error_text=text, error=error)


def test_errors_of_runs_are_listed_once() -> None:
    here, there = outcome_of("here"), outcome_of("there")
    assert error_lines([here, here]) == ("here",)
    assert error_lines([here, there, here]) == ("2 of 3 runs: here", "1 of 3 runs: there")
    assert error_lines([]) == ()


def test_of_several_errors_the_range_and_the_widest_are_listed() -> None:
    near, far, unknown = outcome_of("near", 0.05), outcome_of("far", 0.4), outcome_of("none")
    assert error_lines([near, near]) == ("near",)
    assert error_lines([near, far, near, unknown]) == (
        "3 of 4 runs: ±5% to ±40%; where most: far",
        "1 of 4 runs: none",
    )
    assert error_lines([near, unknown]) == ("1 of 2 runs: near", "1 of 2 runs: none")


def test_of_equally_good_runs_the_faster_one_is_best() -> None:
    goal = GoalTable(minimize="gpus")
    assert result(goal, SLOW, replace(FAST, gpus=8)).answer.startswith("fewest GPUs: fast: 8")


def test_a_difference_below_the_error_says_so() -> None:
    near = replace(
        FAST, name="near", outcome=replace(row("", 1.04).outcome, error=step_error(0.05, "a100"))
    )
    known = replace(FAST, outcome=replace(FAST.outcome, error=step_error(0.02)))
    assert result(GoalTable(), known, near).answer.endswith(
        "next: near, +4.0%, which is within the error of the ratio"
    )
    assert difference(
        known, replace(SLOW, outcome=replace(SLOW.outcome, error=step_error(0.05, "a100")))
    ) == (1, True)
    assert difference(FAST, SLOW) == (1, None)
    assert near.band_s == pytest.approx((1.04 * 0.95, 1.04 * 1.05))
    assert FAST.band_s is None


def test_a_goal_over_what_has_no_number_is_a_mistake() -> None:
    with pytest.raises(StudyError, match=r"zero\.stage is null in fast, not a number"):
        result(GoalTable(minimize="zero.stage"), FAST)


def test_a_price_by_gpu_is_that_of_the_gpu() -> None:
    goal = goal_of(GoalTable(price_per_gpu_hour={"A100": 2.0, "H100": 3.0}))
    assert [goal.price(gpu) for gpu in ("A100", "H100", "V100")] == [2.0, 3.0, None]


@pytest.mark.parametrize("each", [FAST, FULL, ended("x", Status.CUT_OFF)], ids=lambda row: row.name)
def test_an_outcome_is_kept_without_loss(each: StudyRow) -> None:
    assert decoded(encoded(each.outcome)) == each.outcome
