"""Figures as values, independent of the width at which they are drawn."""

from dataclasses import dataclass
from enum import Enum

from zsim.report.svg.lane import Bar, Sort

MEMORY, TIME, NETWORK = "memory", "time", "network"
RUN_FIGURES = (MEMORY, TIME, NETWORK)
"""Figures of the page of a run that can be drawn alone."""


class NoFigureError(ValueError):
    """The requested figure does not exist for this result."""


class SeriesMark(Enum):
    """Symbol of a series in the legend."""

    BOX = "box"
    LINE = "line"
    DOTTED = "dotted"


@dataclass(frozen=True, slots=True)
class Series:
    """A series of a figure: its name, its colour, and its symbol in the legend."""

    name: str
    colour: str
    mark: SeriesMark = SeriesMark.BOX


@dataclass(frozen=True, slots=True, kw_only=True)
class RowBar:
    """A bar of a row, from `start` to `end` on the axis.

    Attributes:
        series: index of its series in the figure.
        title: tooltip.
        text: label in the bar, or next to it.
        pale: True if its run does not meet the goal.
    """

    start: float
    end: float
    series: int
    title: str
    text: str = ""
    pale: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class BarRows:
    """Rows of horizontal bars: parts of a whole, or changes to both sides of zero.

    Attributes:
        rows: name and bars of each row.
        axis: title of the axis, with the unit of the bars.
        is_beside: True if labels are next to the bars rather than in them.
    """

    series: tuple[Series, ...]
    rows: tuple[tuple[str, tuple[RowBar, ...]], ...]
    axis: str
    is_beside: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StackedCurves:
    """Stacked layers over a sequence of places, and lines outside the stack.

    Attributes:
        series: series of the layers, then those of the lines.
        layers: values of each layer at each place.
        lines: values of each line at each place; None if unknown.
        titles: tooltip of each place.
        ticks: places with a label, and the labels.
        axis: title of the horizontal axis.
        unit: unit of the values.
    """

    series: tuple[Series, ...]
    layers: tuple[tuple[float, ...], ...]
    lines: tuple[tuple[float | None, ...], ...]
    titles: tuple[str, ...]
    ticks: tuple[tuple[int, str], ...]
    axis: str
    unit: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoicePoint:
    """A run over one of the choices on the axis.

    Attributes:
        choice: index of the choice on the axis.
        band: error of the value to each side; 0 if unknown.
        meets: False if the run does not meet the goal.
        title: tooltip.
    """

    choice: int
    value: float
    band: float
    meets: bool
    title: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceChart:
    """Values over choices: bars or dots for categories, lines for amounts.

    Attributes:
        series: one per line; `points` has the points of each.
        axis: title of the horizontal axis.
        values: title of the axis of values.
        is_bars: True if each point is a bar.
        is_joined: True if the choices are amounts, so that lines connect them.
        is_seconds: True if the values are seconds.
    """

    series: tuple[Series, ...]
    points: tuple[tuple[ChoicePoint, ...], ...]
    choices: tuple[str, ...]
    axis: str
    values: str
    is_bars: bool
    is_joined: bool
    is_logarithmic: bool
    is_seconds: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PlottedPoint:
    """A point at `x`, `y` of the series with index `series`; `title` is its tooltip."""

    x: float
    y: float
    series: int
    title: str
    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PointChart:
    """Points in a plane; the points of the first series form a front and are connected."""

    series: tuple[Series, ...]
    points: tuple[PlottedPoint, ...]
    x_axis: str
    y_axis: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneBars:
    """A lane for every stream and a bar for every operation, from `begin_ps` to `end_ps`."""

    lanes: dict[str, list[Bar]]
    begin_ps: int
    end_ps: int

    @property
    def series(self) -> tuple[Series, ...]:
        """One series for each sort of operation in the lanes, in the order of `Sort`."""
        found = {bar.sort for bars in self.lanes.values() for bar in bars}
        return tuple(Series(*sort.value) for sort in Sort if sort in found)


Figure = BarRows | StackedCurves | ChoiceChart | PointChart | LaneBars
