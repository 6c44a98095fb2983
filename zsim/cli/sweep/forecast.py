"""`zsim sweep --dry-run`: how many runs there are, and about how long they take."""

from collections.abc import Mapping
from dataclasses import dataclass
from time import perf_counter  # noqa: TID251  (how long a run takes is what is asked)

from zsim.cli.answer import print_json, print_lines
from zsim.scenario.outline import Outline
from zsim.study.outcome import StudyOutcome
from zsim.study.study_plan import StudyPlan
from zsim.units import format_seconds
from zsim.workers.worker import simulated


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """How much work a study is. `seconds` is about how long the rest takes, by one run of it."""

    plan: StudyPlan
    left: int
    schedules: int
    impossible: int
    workers: int
    seconds: float


def forecast(plan: StudyPlan, left: Mapping[str, Outline], workers: int) -> Forecast:
    """How long `left`, the rest of `plan`, takes: its middle run is tried here, twice."""
    outlines = list(left.values())
    recipes = {outline.recipe for outline in outlines}
    seconds = 0.0
    if outlines:
        first_s, again_s = _timed(outlines[len(outlines) // 2])
        total_s = len(recipes) * first_s + (len(outlines) - len(recipes)) * again_s
        seconds = total_s / min(workers, len(outlines))
    return Forecast(
        plan=plan,
        left=len(outlines),
        schedules=len(recipes),
        impossible=sum(run.outline is None for run in plan.runs),
        workers=workers,
        seconds=seconds,
    )


def _timed(outline: Outline) -> tuple[float, float]:
    """Seconds of a first run, its schedule made and checked, and of another with the same."""
    begin = perf_counter()
    made = simulated(outline.recipe)
    if isinstance(made, StudyOutcome):
        return perf_counter() - begin, 0.0
    made.tried(outline)
    between = perf_counter()
    made.tried(outline)
    return between - begin, perf_counter() - between


def print_forecast(found: Forecast, *, as_json: bool) -> None:
    """The answer of a dry run."""
    plan = found.plan
    runs, combinations = len(plan.runs), len(plan.runs) + plan.dropped
    if as_json:
        print_json(
            {
                "question": plan.question,
                "combinations": combinations,
                "runs": runs,
                "impossible": found.impossible,
                "left": found.left,
                "schedules": found.schedules,
                "estimated_s": found.seconds,
                "workers": found.workers,
                "held_fixed": plan.held,
            }
        )
        return
    dropped = f", of {combinations:,} combinations" if plan.dropped else ""
    impossible = f", {found.impossible:,} of them impossible" if found.impossible else ""
    schedules = f"{found.schedules:,} schedule{'s' if found.schedules != 1 else ''}"
    cores = f"{found.workers} core{'s' if found.workers > 1 else ''}"
    print(plan.question)
    print_lines(
        [
            ("runs", f"{runs:,}{dropped}{impossible}; {found.left:,} are left, with {schedules}"),
            ("takes about", f"{format_seconds(found.seconds)} on {cores}" if found.left else "0 s"),
            ("held fixed", plan.held),
        ]
    )
