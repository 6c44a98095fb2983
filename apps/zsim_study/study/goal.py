"""Goal of a study: minimize a quantity among the runs that meet every limit."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from zsim.analysis.drive_life import DAYS_PER_YEAR
from zsim.analysis.summary import Summary
from zsim.config_error import shown
from zsim.scenario.tables import ScenarioError, need_field
from zsim.units import PICOSECONDS_PER_SECOND, format_seconds
from zsim_study.study.file import GoalTable, StudyError
from zsim_study.study.outcome import Status
from zsim_study.study.row import StudyRow

STEP_TIME, COST, GPUS = "step_time", "cost_per_token", "gpus"


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """Goal of a study: the quantity to minimize, and the limits.

    Attributes:
        minimize: "step_time", "cost_per_token", "gpus" or a field of a scenario.
        prices: price per GPU hour by name of the GPU; "" stands for any GPU.
        table: the limits.
        axis: index of the axis with a best run for each choice; None for one best run.
    """

    minimize: str
    prices: tuple[tuple[str, float], ...]
    table: GoalTable
    axis: int | None = None

    @property
    def field(self) -> str | None:
        """The scenario field that is minimized, or None."""
        return None if self.minimize in {STEP_TIME, COST, GPUS} else self.minimize

    def group(self, row: StudyRow) -> str:
        """Return the group in which a run competes: its choice on `axis`, or "" without one."""
        return "" if self.axis is None else row.labels[self.axis]

    def price(self, gpu: str) -> float | None:
        """Return the price per hour of a GPU, or None if it has none."""
        known = dict(self.prices)
        return known.get(gpu, known.get(""))


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranking:
    """Runs ranked by a goal.

    Attributes:
        accepted: runs that meet the goal, best first.
        refused: the other runs, each with its reason.
        best: best accepted run of each group of the goal.
        fastest: fastest run that fits, of each group.
    """

    accepted: tuple[StudyRow, ...]
    refused: tuple[tuple[StudyRow, str], ...]
    best: Mapping[str, StudyRow]
    fastest: Mapping[str, StudyRow]


def goal_of(table: GoalTable, axes: Sequence[str] = ()) -> Goal:
    """Return the goal that `[goal]` describes, for a study with `axes`.

    Raises:
        StudyError: the quantity to minimize or the axis is unknown, or a cost needs a price.
    """
    if table.for_each is not None and table.for_each not in axes:
        raise StudyError(
            f"goal.for_each: {table.for_each!r} must be an axis: {', '.join(axes) or 'none'}"
        )
    if table.minimize not in {STEP_TIME, COST, GPUS}:
        try:
            need_field(table.minimize)
        except ScenarioError as error:
            raise StudyError(
                f"goal.minimize: {table.minimize!r} must be {STEP_TIME}, {COST}, {GPUS} or a field "
                f"of the scenario: {error}"
            ) from None
    price = table.price_per_gpu_hour
    if price is None:
        for key, needs in (
            ("minimize", table.minimize == COST),
            ("max_cost_per_million_tokens", table.max_cost_per_million_tokens is not None),
        ):
            if needs:
                raise StudyError(f"goal.{key}: needs price_per_gpu_hour")
    prices = price if isinstance(price, dict) else {} if price is None else {"": price}
    axis = None if table.for_each is None else list(axes).index(table.for_each)
    return Goal(minimize=table.minimize, prices=tuple(prices.items()), table=table, axis=axis)


def ranked(goal: Goal, rows: Sequence[StudyRow]) -> Ranking:
    """Rank `rows`: runs that meet the limits, best first, and the others in their order.

    Ties are resolved by step time, then by order.
    """
    fastest: dict[str, StudyRow] = {}
    for row in rows:
        if row.outcome.status is Status.DONE:
            known = fastest.setdefault(goal.group(row), row)
            fastest[goal.group(row)] = min(known, row, key=lambda each: each.step_time_s)
    accepted: list[StudyRow] = []
    refused: list[tuple[StudyRow, str]] = []
    for row in rows:
        why = _refusal(goal, row, fastest.get(goal.group(row)))
        if why is None:
            accepted.append(row)
        else:
            refused.append((row, why))
    accepted.sort(key=lambda row: (value_of(goal, row), row.step_time_s))
    best: dict[str, StudyRow] = {}
    for row in accepted:
        best.setdefault(goal.group(row), row)
    return Ranking(accepted=tuple(accepted), refused=tuple(refused), best=best, fastest=fastest)


def value_of(goal: Goal, row: StudyRow) -> float:
    """Return the minimized quantity of a run that has results.

    Raises:
        StudyError: the minimized field is not a number.
    """
    match goal.minimize:
        case "step_time":
            return row.step_time_s
        case "gpus":
            return float(row.gpus)
        case "cost_per_token":
            assert row.cost_per_million_tokens is not None  # rows without one are refused
            return row.cost_per_million_tokens
        case name:
            value = row.values.get(name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise StudyError(
                    f"goal.minimize: {name} is {shown(value)} in {row.name}, not a number"
                )
            return float(value)


def _refusal(goal: Goal, row: StudyRow, fastest: StudyRow | None) -> str | None:
    """Return a line on why a run does not meet the goal, or None if it does."""
    outcome = row.outcome
    if outcome.summary is None or (outcome.status is Status.FULL and goal.table.fits):
        return f"{outcome.status}: {outcome.reason}"
    fastest_s = row.step_time_s if fastest is None else fastest.step_time_s
    return next(_breaches(goal, row, outcome.summary, fastest_s), None)


def _breaches(goal: Goal, row: StudyRow, found: Summary, fastest_s: float) -> Iterator[str]:
    """Yield a text for each limit that a run with results exceeds."""
    table = goal.table
    if table.max_gpus is not None and row.gpus > table.max_gpus:
        yield f"{row.gpus:,} GPUs, more than {table.max_gpus:,}"
    if table.max_step_time is not None:
        most_s = table.max_step_time / PICOSECONDS_PER_SECOND
        if row.step_time_s > most_s:
            yield f"slower than {format_seconds(most_s)}"
    if table.max_slowdown is not None and row.step_time_s > table.max_slowdown * fastest_s:
        yield f"more than {table.max_slowdown:g} times the fastest"
    if table.min_tokens_per_s is not None and found.tokens_per_s < table.min_tokens_per_s:
        yield f"fewer than {table.min_tokens_per_s:,.0f} tokens/s"
    life, years = found.drive_life, table.min_drive_years
    if life is not None and years is not None:
        if life.days is None:
            yield "no rating of its drives"
        elif life.days < years * DAYS_PER_YEAR:
            yield f"drives last less than {years:g} years"
    cost, most = row.cost_per_million_tokens, table.max_cost_per_million_tokens
    if cost is None and (most is not None or goal.minimize == COST):
        yield "no price for its GPU"
    if cost is not None and most is not None and cost > most:
        yield f"dearer than {most:g} for a million tokens"
