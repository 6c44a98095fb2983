"""The result of a study: rows, ranked by its goal, and the answer in one sentence."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from zsim.analysis.run_comparison import counts
from zsim.units import format_seconds
from zsim_study.study.error_lines import error_lines
from zsim_study.study.goal import COST, GPUS, STEP_TIME, Goal, Ranking, ranked, value_of
from zsim_study.study.outcome import Status, StudyOutcome
from zsim_study.study.row import StudyRow
from zsim_study.study.study_plan import StudyPlan, StudyRun

SECONDS_PER_HOUR = 3600


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyResult:
    """Content of a report of a study.

    Attributes:
        question: the question in the study file.
        axes: names of the axes, in the order of each row's labels.
        fields: fields that each axis changes.
        goal: the quantity to minimize, and the limits.
        held: one line on the batch that all runs share.
        dropped: number of combinations that were not run.
        rows: every run, in the order of the study.
        ranking: rows that meet the goal, best first, and the others.
    """

    question: str
    axes: tuple[str, ...]
    fields: tuple[tuple[str, ...], ...]
    goal: Goal
    held: str
    dropped: int
    rows: tuple[StudyRow, ...]
    ranking: Ranking

    @property
    def error(self) -> tuple[str, ...]:
        """Lines on the error of the simulation, without repetitions."""
        return error_lines([row.outcome for row in self.rows if row.outcome.error_text])

    @property
    def answer(self) -> str:
        """One sentence with the best run, or why no run meets the goal."""
        return _answer(self)


def result_of(plan: StudyPlan, outcomes: Mapping[str, StudyOutcome]) -> StudyResult:
    """Return the result of `plan`; `outcomes` maps names of runs to their outcomes.

    Raises:
        StudyError: the minimized field is not a number in some run.
    """
    rows = tuple([_row(run, plan.goal, outcomes) for run in plan.runs])
    return StudyResult(
        question=plan.question,
        axes=tuple(axis.name for axis in plan.axes),
        fields=tuple(axis.fields for axis in plan.axes),
        goal=plan.goal,
        held=plan.held,
        dropped=plan.dropped,
        rows=rows,
        ranking=ranked(plan.goal, rows),
    )


def difference(one: StudyRow, other: StudyRow) -> tuple[float, bool | None]:
    """Return the share by which a step of `other` is longer than `one`'s, and if it is significant.

    The second value is True if the difference exceeds the error of the ratio, None if that error is
    unknown.
    """
    found = other.step_time_s / one.step_time_s - 1
    return found, _counts(found, one, other)


def compared(goal: Goal, one: StudyRow, other: StudyRow) -> tuple[float, bool | None] | None:
    """Return the same as `difference`, but for the cost per token if `goal` minimizes cost.

    Return None if a run has no cost.
    """
    if goal.minimize != COST:
        return difference(one, other)
    first, second = one.cost_per_million_tokens, other.cost_per_million_tokens
    if not first or second is None:
        return None
    dearer = second / first - 1
    return dearer, _counts(dearer, one, other)


def _counts(relative: float, one: StudyRow, other: StudyRow) -> bool | None:
    return counts(relative, one.outcome.error, other.outcome.error)


def _row(run: StudyRun, goal: Goal, outcomes: Mapping[str, StudyOutcome]) -> StudyRow:
    resolved = run.resolved
    if resolved is None:
        return StudyRow(
            name=run.name,
            labels=run.labels,
            values=run.values,
            gpus=0,
            micro_batch_size=0,
            accumulation_steps=0,
            outcome=StudyOutcome(status=Status.IMPOSSIBLE, reason=run.impossible),
        )
    outcome, gpus = outcomes[run.name], resolved.strategy.ranks
    cost, price = None, goal.price(resolved.cluster.gpu.name)
    if outcome.summary is not None and price is not None and outcome.summary.tokens_per_s:
        per_s = gpus * price / SECONDS_PER_HOUR
        cost = per_s / outcome.summary.tokens_per_s * 1e6
    return StudyRow(
        name=run.name,
        labels=run.labels,
        values=run.values,
        gpus=gpus,
        micro_batch_size=resolved.micro_batch_size,
        accumulation_steps=resolved.strategy.train.gradient_accumulation_steps,
        outcome=outcome,
        cost_per_million_tokens=cost,
    )


def _answer(result: StudyResult) -> str:
    goal, ranking = result.goal, result.ranking
    if not ranking.accepted:
        why = _commonest([reason for _, reason in ranking.refused])
        return f"none of {len(result.rows):,} runs meets the goal: {why}"
    if goal.axis is None:
        best = ranking.accepted[0]
        facts = ", ".join(_facts(goal, best))
        return f"{_superlative(goal)}: {best.name}: {facts}{_comparison(goal, ranking)}"
    groups = dict.fromkeys(goal.group(row) for row in result.rows)
    parts = [_of_group(result, group) for group in groups]
    what = f"{_superlative(goal)} for each choice of {goal.table.for_each}"
    return f"{what}: {'; '.join(parts)}{_leads(result)}"


def _of_group(result: StudyResult, group: str) -> str:
    """Return a text on the best run of a group, with its choices on the other axes."""
    goal, best = result.goal, result.ranking.best.get(group)
    if best is None:
        return f"{group}: none meets the goal"
    pairs = enumerate(zip(result.axes, best.labels, strict=True))
    others = [f"{name}={label}" for index, (name, label) in pairs if index != goal.axis]
    return f"{group}: {', '.join(others)} ({', '.join(_facts(goal, best))})"


def _leads(result: StudyResult) -> str:
    """Return a text on the groups where the best run's lead is within its error or unknown."""
    goal, ranking = result.goal, result.ranking
    if goal.minimize not in {STEP_TIME, COST}:
        return ""
    of_group: dict[str, list[StudyRow]] = {goal.group(row): [] for row in result.rows}
    for row in ranking.accepted:
        of_group[goal.group(row)].append(row)
    found: dict[str, bool | None] = {}
    for group, rows in of_group.items():
        lead = compared(goal, rows[0], rows[1]) if rows[1:] else None
        if lead is not None:
            found[group] = lead[1]
    below, unjudged = (
        [group for group, counts in found.items() if counts is verdict] for verdict in (False, None)
    )
    text = ""
    if below:
        at = "" if len(below) == len(found) else f" at {', '.join(below)}"
        text += f"; the lead over the next{at} is within the error of the ratio"
    if unjudged:
        at = "" if len(unjudged) == len(found) else f" at {', '.join(unjudged)}"
        text += f"; the error of the lead over the next{at} is unknown"
    return text


def _superlative(goal: Goal) -> str:
    known = {STEP_TIME: "fastest", COST: "cheapest", GPUS: "fewest GPUs"}
    return known.get(goal.minimize, f"least {goal.minimize}")


def _facts(goal: Goal, row: StudyRow) -> list[str]:
    facts = [f"{format_seconds(row.step_time_s)} a step"]
    match goal.minimize:
        case "step_time":
            pass
        case "gpus":
            facts.insert(0, f"{row.gpus:,}")
        case "cost_per_token":
            facts.insert(0, f"{row.cost_per_million_tokens:.4g} for a million tokens")
        case _:
            value = f"{value_of(goal, row):g}"
            if value not in row.labels:  # unless its name contains it
                facts.insert(0, value)
    return facts


def _comparison(goal: Goal, ranking: Ranking) -> str:
    """Return a text that compares the best run with the next one or with the fastest."""
    best, fastest = ranking.accepted[0], ranking.fastest.get("")
    if goal.minimize != STEP_TIME and fastest is not None and fastest is not best:
        slower, counts = difference(fastest, best)
        return f", {slower:.1%} longer than the fastest, {fastest.name}{_error(counts)}"
    if not ranking.accepted[1:]:
        return ", the only one that meets the goal"
    following = ranking.accepted[1]
    lead = compared(goal, best, following) if goal.minimize in {STEP_TIME, COST} else None
    if lead is None:
        return f"; next: {following.name}"
    more, counts = lead
    if not more:
        return f", as {'cheap' if goal.minimize == COST else 'fast'} as {following.name}"
    return f"; next: {following.name}, {more:+.1%}{_error(counts)}"


def _error(counts: bool | None) -> str:  # noqa: FBT001  (yes, no or unknown)
    """Return a remark on a difference that is not significant; empty if it is."""
    if counts is None:
        return ", whose error is unknown"
    return "" if counts else ", which is within the error of the ratio"


def _commonest(reasons: Sequence[str]) -> str:
    """Return the most frequent reason, with its count."""
    most = max(dict.fromkeys(reasons), key=reasons.count)
    count = reasons.count(most)
    return most if count == len(reasons) else f"{most} ({count:,} of {len(reasons):,})"
