"""Chart of a study: step time along one axis, a line for each combination of the other axes.

Categorical choices are drawn as bars.
"""

from collections.abc import Sequence

from zsim.report.drawing import picture
from zsim.report.svg.figure import NoFigureError
from zsim_study.page.choice_chart import choice_chart
from zsim_study.page.study_page import meaning_of_marks, one_change
from zsim_study.study.result import StudyResult

CHANGES = "changes"
"""Name of the figure that shows the effect of each single change to the best run."""


def study_figures(axes: Sequence[str]) -> tuple[str, ...]:
    """Return the names of the figures of a study with these `axes`."""
    return (*axes, CHANGES)


def chart(result: StudyResult, figure: str | None = None) -> str:
    """Return the SVG of `result`; hollow dots and pale bars are runs that do not meet the goal.

    `figure` is the name of the horizontal axis, or `CHANGES`; the default is the axis with the
    most choices.

    Raises:
        NoFigureError: no run differs from the best by one choice.
    """
    answer = f"{result.answer[:1].upper()}{result.answer[1:]}"
    rows = [row for row in result.rows if row.outcome.summary is not None]
    if figure == CHANGES and CHANGES not in result.axes:
        section = next(one_change(result), None)
        if section is None:
            raise NoFigureError("no run differs from the best by one choice")
        return picture(section.figure, result.question, " ".join(section.sentences))
    if not rows:
        return picture(None, result.question, answer)
    counts = [len({row.labels[at] for row in rows}) for at in range(len(result.axes))]
    axis = counts.index(max(counts)) if figure is None else result.axes.index(figure)
    text = f"{answer}. {meaning_of_marks(rows)}"
    return picture(choice_chart(result, rows, axis), result.question, text)
