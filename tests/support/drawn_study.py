"""Results of studies that never ran: any number of rows, of any outcome, on a grid."""

from itertools import product

import numpy as np
from step_errors import step_error

from zsim.analysis.summary import Rates, Summary
from zsim_study.study.file import GoalTable
from zsim_study.study.goal import goal_of, ranked
from zsim_study.study.outcome import Status, StudyOutcome
from zsim_study.study.result import StudyResult
from zsim_study.study.row import StudyRow


def drawn_study(
    extents: tuple[int, ...], seed: int, *, full: float = 0.2, error: float | None = None
) -> StudyResult:
    """A grid of so many choices on each axis; a share `full` of the runs does not fit.

    The step time of every run is predicted within `error`, if that is given; no two share any.
    """
    random = np.random.default_rng(seed)
    axes = tuple(f"axis{at}" for at in range(len(extents)))
    rows = tuple(
        _row(axes, labels, random, full=full, error=error)
        for labels in product(*([str(each) for each in range(extent)] for extent in extents))
    )
    goal = goal_of(GoalTable())
    return StudyResult(
        question="What is <best> & why?",
        axes=axes,
        fields=tuple((f"zero.{axis}",) for axis in axes),
        goal=goal,
        held="the global batch",
        dropped=0,
        rows=rows,
        ranking=ranked(goal, rows),
    )


def _row(
    axes: tuple[str, ...],
    labels: tuple[str, ...],
    random: np.random.Generator,
    *,
    full: float,
    error: float | None,
) -> StudyRow:
    seconds = float(random.uniform(0.5, 2.0))
    rates = Rates(model_tflops_per_gpu=1.0, hardware_tflops_per_gpu=1.0, mfu=0.1, hfu=0.1)
    summary = Summary(
        step_time_s=seconds,
        model_tflops_per_gpu=100.0,
        hardware_tflops_per_gpu=120.0,
        mfu=0.4,
        hfu=0.5,
        causal=rates,
        tokens_per_s=1e6 / seconds,
        peak_allocated_bytes=10**9,
        memory_by_kind=(),
        peak_reserved_bytes=2 * 10**9,
        usable_bytes=3 * 10**9,
        exposed_communication_s=seconds / 4,
        exposed_by_group=(("data", seconds / 4),),
        host_bound_s=0.0,
        fits=True,
    )
    status = Status.FULL if random.random() < full else Status.DONE
    reason = "at <forward>" if status is Status.FULL else ""
    if random.random() < full / 4:
        status, reason, summary_or_none = Status.IMPOSSIBLE, "two fields contradict", None
    else:
        summary_or_none = summary
    name = ", ".join(f"{axis}={label}" for axis, label in zip(axes, labels, strict=True))
    known = None if error is None else step_error(error, name)
    return StudyRow(
        name=name,
        labels=labels,
        values={},
        gpus=8,
        micro_batch_size=1,
        accumulation_steps=1,
        outcome=StudyOutcome(
            status=status, reason=reason, summary=summary_or_none, error_text="drawn", error=known
        ),
    )
